"""Sub-instructions: the same texts at each decision of recordings, rollouts, updates and evaluations."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli import eval_vla, train_ppo_vla
from rlvla.checkpoints.policy_folder import ENVIRONMENT_FILE
from rlvla.commands.demos.record import demonstration_writer, step_instructions
from rlvla.commands.setup import instructions_of
from rlvla.data.lerobot import read_lerobot
from rlvla.data.lerobot_writing import write_lerobot
from rlvla.data.options import ReadOptions
from rlvla.data.reading import read_demonstrations, read_several
from rlvla.data.rows import observations_of
from rlvla.envs import make_env
from rlvla.envs.base import Observation
from rlvla.envs.config import EnvConfig
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import ExpertEpisode, play_expert_episode
from rlvla.models.actor import Actor
from rlvla.rewards import RewardPlan
from rlvla.rewards.instructions import MachineInstructions, PlannerInstructions, instruction_of
from rlvla.rewards.machines import formula_graph, goal_graph, machine_graph
from rlvla.rollout.episode import Episode, EpisodeRequest
from rlvla.utils.errors import ConfigError, TrainingHalted
from tests.support.judge_server import JudgeServer, completion, images_of, judge_server, prompt_of
from tests.support.libero_requirements import require_libero
from tests.support.policies import ScriptedPolicy

ENV = EnvConfig(task_suite_name="toy_push", image_size=32, use_proprio=True, instruction_source="machine")
TASK = ENV.tasks()[0]
STATE, SEED = 3, 0


@pytest.fixture(scope="module")
def recorded() -> ExpertEpisode:
    """An episode of the scripted expert."""
    with_env = make_env(TASK.suite, TASK.task_id, **ENV.env_kwargs())
    return play_expert_episode(with_env, make_expert(TASK.suite, TASK, ExpertConfig()), STATE, SEED)


@pytest.fixture(scope="module")
def demos_file(recorded: ExpertEpisode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "demos.hdf5"
    writer = demonstration_writer(path, ENV, [TASK], "expert", MachineInstructions())
    writer.add(recorded, TASK.task_id)
    writer.close()
    return path


def texts_of(episode: ExpertEpisode) -> list[str]:
    return step_instructions(MachineInstructions(), TASK, episode)


def played(actions: np.ndarray, chunk: int, instructions: MachineInstructions | None, **request):
    """The same episode as a rollout with chunks of this length."""
    env = make_env(TASK.suite, TASK.task_id, **ENV.env_kwargs())
    asked = EpisodeRequest(TASK.suite, TASK.task_id, STATE, SEED, "u", **request)
    policy = ScriptedPolicy(chunk, 2)
    episode = Episode(asked, TASK, RewardPlan({"success": 1.0}), policy, instructions=instructions)
    episode.on_observation(env.reset(STATE, SEED))
    for start in range(0, len(actions), chunk):
        part = actions[start : start + chunk]
        padded = np.concatenate([part, np.repeat(part[-1:], chunk - len(part), axis=0)])
        trace = {"tokens": np.zeros(2 * chunk, np.int64)}
        episode.on_decision(padded, np.zeros(2 * chunk, np.float32), trace)
        episode.on_chunk(env.step_chunk(padded))
    return episode.to_sample()


# ------------------------------------------------------------------------------------------------------------ texts
@pytest.mark.parametrize(
    ("proposition", "text"),
    [
        ("in_alphabet_soup_1_basket_1_contain_region", "put the alphabet soup in the basket"),
        ("on_bowl_1_plate_1", "put the bowl on the plate"),
        ("grasped_black_bowl_1", "grasp the black bowl"),
        ("turnon_flat_stove_1", "turn on the flat stove"),
        ("near_zone", "{task}: push the object close to its zone"),
        ("tea_ready", "{task}: tea ready"),
    ],
)
def test_texts_of_propositions(proposition: str, text: str) -> None:
    assert instruction_of(proposition) == text


def test_next_propositions_of_machines() -> None:
    def listed(graph) -> dict[str, tuple[str, ...]]:
        return {state: graph.next_propositions(state) for state in graph.states}

    assert listed(formula_graph("F(near & F reached)")) == {"u0": ("near",), "u1": ("reached",), "u2": ()}
    assert listed(formula_graph("G(!near) & F reached")) == {"u0": ("reached",), "reject": (), "u1": ()}
    assert listed(goal_graph([("a", "b"), "c"], ordered=True)) == {
        "u0": ("a",),
        "u1": ("b",),
        "u2": ("b", "c"),  # all goals at once
        "u3": (),
    }
    assert machine_graph("cleanup").next_propositions("u1") == ("in_bin",)


def test_the_goal_that_does_not_hold_is_next() -> None:
    """The last edge of a conjunction needs all goals: the text is that of the first one missing."""
    task = replace(TASK, machine="goals", propositions=("on_a_1_b_1", "close_c_1"), goals=())
    episode = MachineInstructions().begin(task)
    observation = make_env(TASK.suite, 0, **ENV.env_kwargs()).reset(STATE, SEED)
    seen = [episode.decide(observation)]
    for events in ({"on_a_1_b_1"}, set(), {"on_a_1_b_1"}, {"on_a_1_b_1", "close_c_1"}):
        episode.step(frozenset(events), False)
        seen.append(episode.decide(observation))
    put, close = "put the a on the b", "close the c"
    assert seen == [put, close, put, close, observation.instruction]


# ---------------------------------------------------------------------------------------------------- same at each step
def test_the_text_changes_at_the_decision_after_the_proposition(recorded: ExpertEpisode) -> None:
    texts, events = texts_of(recorded), recorded["events"]
    stages = [text.removeprefix(f"{recorded['instruction']}: ") for text in dict.fromkeys(texts)]
    assert stages[0].startswith("move behind") and stages[1:4] == [
        "touch the object",
        "push the object close to its zone",
        "push the object into its zone",
    ]
    assert texts[-1] == recorded["instruction"], "no proposition is left"
    changed = texts.index(next(text for text in texts if text != texts[0]))
    assert "behind" in events[changed - 1] and all("behind" not in names for names in events[: changed - 1])


@pytest.mark.parametrize("chunk", [1, 4])
def test_rollouts_have_the_texts_of_the_recording(recorded: ExpertEpisode, chunk: int) -> None:
    sample = played(recorded["actions"], chunk, MachineInstructions())
    assert sample.decision_instructions == texts_of(recorded)[::chunk]
    assert sample.instruction == recorded["instruction"], "rewards and dumps read the task's"
    plain = played(recorded["actions"], chunk, None)
    assert plain.prompted_instructions is None and plain.decision_instructions == [recorded["instruction"]] * len(
        sample.decision_instructions
    )


def test_other_instructions_of_an_evaluation_take_precedence(recorded: ExpertEpisode) -> None:
    sample = played(recorded["actions"], 1, MachineInstructions(), other_instructions=("sing",))
    assert set(sample.decision_instructions) == {"sing"}


def test_the_texts_of_a_scripted_episode_of_libero_10() -> None:
    require_libero()
    (task,) = EnvConfig(task_suite_name="libero_10", task_ids=(0,)).tasks()
    env = make_env(task.suite, 0, cameras=(), use_proprio=True)
    episode = play_expert_episode(env, make_expert(task.suite, task, ExpertConfig()), 0, seed=0)
    env.close()
    texts = step_instructions(MachineInstructions(), task, episode)
    soup, tomato = "put the alphabet soup in the basket", "put the tomato sauce in the basket"
    assert list(dict.fromkeys(texts)) == [soup, tomato]
    first = next(step for step, names in enumerate(episode["events"]) if "in_alphabet" in " ".join(names))
    assert texts.index(tomato) == first + 1
    stages = list(dict.fromkeys(step_instructions(MachineInstructions(stages="manipulation"), task, episode)))
    skill = ("move to the {0}", "grasp the {0}", "lift the {0}", "put the {0} in the basket")
    assert stages == [text.format(name) for name in ("alphabet soup", "tomato sauce") for text in skill]


# ------------------------------------------------------------------------------------------------------------- data
def test_rows_of_demonstrations_have_them(recorded: ExpertEpisode, demos_file: Path) -> None:
    demos = read_demonstrations(demos_file)
    assert demos.env_args["instruction_source"] == "machine" and demos.instructions == [recorded["instruction"]]
    rows = observations_of(demos, [0], ScriptedPolicy(1, 2))
    assert rows.instructions == texts_of(recorded)


def test_lerobot_has_them_row_by_row(recorded: ExpertEpisode, demos_file: Path, tmp_path: Path) -> None:
    demos = read_demonstrations(demos_file)
    write_lerobot(tmp_path / "l", demos, TASK.control_freq)
    back = read_lerobot(tmp_path / "l")
    assert back.step_instructions == demos.step_instructions == [texts_of(recorded)]
    assert back.instructions == demos.instructions and back.env_args["instruction_source"] == "machine"


def test_a_dataset_of_others_with_several_tasks_in_an_episode_is_refused(demos_file: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_lerobot(tmp_path / "l", read_demonstrations(demos_file), TASK.control_freq)
    path = next((tmp_path / "l" / "meta" / "episodes").rglob("*.parquet"))
    pq.write_table(pq.read_table(path).drop_columns(["task_instruction"]), path)
    with pytest.raises(ConfigError, match="task_index changes within the episode"):
        read_lerobot(tmp_path / "l")


def test_the_source_of_demonstrations_must_be_the_one_asked_for(
    recorded: ExpertEpisode, demos_file: Path, tmp_path: Path
) -> None:
    task = read_demonstrations(demos_file, options=ReadOptions(instruction_source="task"))
    assert task.step_instructions is None and task.env_args["instruction_source"] == "task"
    plain = tmp_path / "demos.hdf5"
    writer = demonstration_writer(plain, replace(ENV, instruction_source=None), [TASK], "expert")
    writer.add(recorded, TASK.task_id)
    writer.close()
    with pytest.raises(ConfigError, match="was recorded with the instructions of --instruction_source task, not mach"):
        read_demonstrations(plain, options=ReadOptions(instruction_source="machine"))
    with pytest.raises(
        ConfigError, match=r"instruction_source \(--instruction_source task makes them equal\) is 'task'"
    ):
        read_several([str(demos_file), str(plain)])
    both = read_several([str(demos_file), str(plain)], options=ReadOptions(instruction_source="task"))
    assert both.instructions == [recorded["instruction"]] * 2 and both.step_instructions is None


def test_damaged_texts_are_refused(demos_file: Path, tmp_path: Path) -> None:
    import h5py

    damaged = tmp_path / "demos.hdf5"
    damaged.write_bytes(demos_file.read_bytes())
    with h5py.File(damaged, "r+") as file:
        file["data/demo_0"].attrs["instructions"] = json.dumps({"changes": [[0, "a"], [9999, "b"]]})
    with pytest.raises(ConfigError, match="expected .step, text. of increasing steps from 0 on"):
        read_demonstrations(damaged)


# ------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("settings", "task", "complaint"),
    [
        ({"instruction_source": "machine"}, {"machine": None}, "task red_to_left has no reward machine; give a goal"),
        ({"instruction_source": "machine", "instruction_formula": "F flown"}, {}, "unknown proposition flown"),
        ({"instruction_source": "machine", "instruction_formula": "F ("}, {}, "--instruction_formula"),
        ({"instruction_source": "machine", "instruction_texts": ("fly=fly up",)}, {}, "no machine has fly"),
        ({"instruction_formula": "F behind"}, {}, "it belongs to --instruction_source machine"),
        ({"instruction_source": "machine", "instruction_interval": 3}, {}, "it belongs to --instruction_source vlm"),
        ({"instruction_source": "vlm", "instruction_model": "m"}, {}, "vlm needs --instruction_url"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict, task: dict, complaint: str) -> None:
    source, problems = instructions_of(EnvConfig("toy_push", **settings), [replace(TASK, name="red_to_left", **task)])
    assert len(problems) == 1 and complaint in str(problems[0])


def test_a_formula_gives_a_suite_without_machine_its_texts() -> None:
    settings = {
        "instruction_formula": "F(behind & F touching)",
        "instruction_texts": ("touching={task}, now touch it",),
    }
    task = replace(TASK, machine=None)
    source, problems = instructions_of(replace(ENV, **settings), [task])
    assert source is not None and problems == []
    episode = source.begin(task)
    episode.step(frozenset({"behind"}), False)
    observation = make_env(TASK.suite, 0, **ENV.env_kwargs()).reset(STATE, SEED)
    assert episode.decide(observation) == f"{observation.instruction}, now touch it"


# --------------------------------------------------------------------------------------------------------- planner
@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """Numbers its answers."""
    with judge_server() as running:
        number = itertools.count(1)
        running.answer = lambda request: (200, completion(json.dumps({"instruction": f"step {next(number)}"})))
        yield running


def test_a_planner_is_asked_at_intervals(recorded: ExpertEpisode, server: JudgeServer) -> None:
    planner, steps = PlannerInstructions(f"{server.url}/v1", "judge", 5), len(recorded["actions"])
    texts = step_instructions(planner, TASK, recorded)
    assert texts == [f"step {1 + step // 5}" for step in range(steps)]
    assert planner.metrics()["instruction/requests"] == len(server.requests) == -(-steps // 5)
    prompts = [prompt_of(request) for request in server.requests]
    assert all(f"Task: {recorded['instruction']}\n" in prompt for prompt in prompts)
    assert "Instruction so far: step 1\n" in prompts[1]
    np.testing.assert_array_equal(images_of(server.requests[1])[0], recorded["images"][5, 0])
    planner.close()


def test_without_an_answer_the_instruction_before_holds(recorded: ExpertEpisode, server: JudgeServer) -> None:
    useless = completion("go on", finish_reason="length")  # cut off, and so not tried again
    replies = [useless, completion('{"instruction": "push"}'), useless, completion('{"instruction": ""}')]
    server.answer = lambda request: (200, replies[min(len(server.requests), 3) - 1])
    planner = PlannerInstructions(f"{server.url}/v1", "judge", 5)
    short = {**recorded, "successes": recorded["successes"][:15]}
    texts = step_instructions(planner, TASK, short)
    assert texts == [recorded["instruction"]] * 5 + ["push"] * 10
    counts = planner.metrics()
    assert (counts["instruction/requests"], counts["instruction/failures"]) == (3, 2)
    planner.check(counts)
    with pytest.raises(TrainingHalted, match="3 of 3 questions to --instruction_url"):
        planner.check({"instruction/requests": 3.0, "instruction/failures": 3.0})
    planner.close()


def test_a_rollout_does_not_wait_for_the_planner(recorded: ExpertEpisode, server: JudgeServer) -> None:
    reply, arrived = server.answer, threading.Event()
    server.answer = lambda request: (arrived.wait(10), reply(request))[1]
    planner = PlannerInstructions(f"{server.url}/v1", "judge", 1)
    episode = planner.begin(TASK)
    observation = Observation(recorded["images"][0], None, "push it")
    assert [episode.decide(observation) for _ in range(3)] == ["push it"] * 3
    arrived.set()
    planner.ask(TASK, observation, "push it").result(10)  # the same question shares its answer
    assert episode.decide(observation) == "step 1" and len(server.requests) == 1
    planner.close()


def test_evaluations_ask_the_planner(
    policy_folder: Path, server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = PlannerInstructions.begin
    monkeypatch.setattr(PlannerInstructions, "begin", lambda self, task: begin(self, task, wait=True))
    heard = heard_instructions(monkeypatch)
    argv = ["--pretrain", str(policy_folder), "--eval_episodes", "2", "--num_envs", "1"]
    argv += ["--instruction_source", "vlm", "--instruction_url", f"{server.url}/v1", "--instruction_model", "judge"]
    eval_vla.main([*argv, "--output", str(tmp_path / "eval.json")])
    assert heard and all(text.startswith("step ") for text in heard)


# -------------------------------------------------------------------------------------------------------- commands
def heard_instructions(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The instructions of all decisions of token policies from now on."""
    heard: set[str] = set()
    act = Actor.act

    def listen(self, images, proprio, instructions, **kw):
        heard.update(instructions)
        return act(self, images, proprio, instructions, **kw)

    monkeypatch.setattr(Actor, "act", listen)
    return heard


def test_policies_record_the_source_and_evaluations_follow_it(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = heard_instructions(monkeypatch)
    argv = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "ppo"), "--num_episodes", "4"]
    argv += ["--num_envs", "1", "--rollout_batch_size", "4", "--train_batch_size", "4", "--eval_episodes", "2"]
    argv += ["--no-use_tensorboard", "--no-val_before_train", "--instruction_source", "machine"]
    train_ppo_vla.main(argv)
    lines = [json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    rollout = next(line for line in lines if "rollout/success_at_end" in line)
    assert rollout["rollout_corr/probs_diff_max"] < 1e-7, "rows of the update have the instructions of the rollout"
    assert any(text.endswith(": move close to the target") for text in heard)
    policy = tmp_path / "ppo" / "policy"
    assert json.loads((policy / ENVIRONMENT_FILE).read_text())["instruction_source"] == "machine"
    evaluate = ["--pretrain", str(policy), "--eval_episodes", "2", "--num_envs", "1", "--output"]
    heard.clear()
    eval_vla.main([*evaluate, str(tmp_path / "eval.json")])
    assert heard and any(text.endswith(": move close to the target") for text in heard)
