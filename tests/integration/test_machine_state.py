"""A policy that is told the reward machine's state: in rollouts, updates and evaluations alike, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cli import eval_vla, train_ppo_vla
from rlvla.checkpoints.policy_folder import ENVIRONMENT_FILE
from rlvla.data.reading import read_demonstrations
from rlvla.envs import list_tasks
from rlvla.envs.base import ChunkResult, Observation
from rlvla.models.actor import Actor
from rlvla.models.vla.tiny import build_tiny
from rlvla.rewards import RewardConfig, RewardPlan, StateInput, StateInputSettings
from rlvla.rollout.episode import Episode, EpisodeRequest
from tests.support.policies import ScriptedPolicy

STAGES = "rm_state_input"
TASKS = list_tasks("toy_reach")
IMAGES = np.zeros((1, 8, 8, 3), np.uint8)


def observation() -> Observation:
    return Observation(IMAGES, np.array([0.5, -0.5], np.float32), "reach the red disc")


def played(form: str):
    """Two chunks of two actions: near in the second step, reached and successful in the third, the fourth is lost."""
    state_input = StateInput.from_config(RewardConfig(reward=("success", "rm"), rm_state_input=form), TASKS)
    request, plan = EpisodeRequest("toy_reach", 0, 0, 0, "u"), RewardPlan({"success": 1.0})
    episode = Episode(request, TASKS[0], plan, ScriptedPolicy(2, 2), state_input)
    episode.on_observation(observation())
    near, reached = frozenset({"near"}), frozenset({"near", "reached"})
    for held, events in (([False, False], [frozenset(), near]), ([True, False], [reached, near])):
        trace = {"tokens": np.zeros(4, np.int64)}
        episode.on_decision(np.zeros((2, 2), np.float32), np.zeros(4, np.float32), trace)
        last = held[0]
        zeros = np.zeros(2, np.float32)
        episode.on_chunk(ChunkResult(observation(), 2, zeros, np.array(held), False, last, False, events=events))
    return episode.to_sample()


def test_the_prompt_tells_the_stage_of_each_decision() -> None:
    sample = played("prompt")
    assert sample.instruction == "reach the red disc"  # what judges and dumps read
    assert sample.decision_instructions == ["reach the red disc, stage u0", "reach the red disc, stage u1"]
    assert sample.last_instruction == "reach the red disc, stage u2"
    assert sample.proprio.shape == (2, 2)


def test_proprio_tells_the_stage_one_hot() -> None:
    sample = played("proprio")
    assert sample.proprio[:, 2:].tolist() == [[1, 0, 0], [0, 1, 0]] and sample.last_proprio[2:].tolist() == [0, 0, 1]
    assert sample.decision_instructions == ["reach the red disc"] * 2
    assert sample.env_proprio.tolist() == [[0.5, -0.5]] * 3  # what dumps and guards look at


def test_nothing_is_told_by_default() -> None:
    sample = played("none")
    assert sample.prompted_instructions is None and sample.proprio.shape == (2, 2)
    assert sample.decision_instructions == ["reach the red disc"] * 2 == [sample.last_instruction] * 2


def run(policy: Path, save_path: Path, *flags: str) -> list[dict]:
    words = ["--pretrain", str(policy), "--save_path", str(save_path), "--num_episodes", "8", "--num_envs", "1"]
    words += ["--rollout_batch_size", "8", "--train_batch_size", "8", "--eval_episodes", "4", "--no-use_tensorboard"]
    words += ["--no-val_before_train", "--rm_formula", "F(near & F success)", *flags]
    train_ppo_vla.main(words)
    return [json.loads(line) for line in (save_path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def stage_policy(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for one iteration with the stage in its prompt."""
    folder = tmp_path_factory.mktemp("stages") / "ppo"
    lines = run(policy_folder, folder, "--reward", "success", "rm:0.5", f"--{STAGES}", "prompt")
    # Rollouts decide from observations, old log-probs come from training rows: both were told the same.
    rollout = next(line for line in lines if "rollout/success_at_end" in line)
    assert rollout["rollout_corr/probs_diff_max"] < 1e-7
    return folder / "policy"


def test_the_policy_records_it_and_evaluations_do_the_same(
    stage_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads((stage_policy / ENVIRONMENT_FILE).read_text())["machine_state"]
    assert StateInputSettings.from_dict(record).rm_formula == "F(near & F success)"
    told: set[str] = set()
    act = Actor.act

    def listen(self, images, proprio, instructions, **kw):
        told.update(instructions)
        return act(self, images, proprio, instructions, **kw)

    monkeypatch.setattr(Actor, "act", listen)
    words = ["--pretrain", str(stage_policy), "--eval_episodes", "4", "--num_envs", "1"]
    eval_vla.main([*words, "--output", str(tmp_path / "eval.json")])
    assert told and all(", stage u" in text for text in told)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--reward", "success", "rm:0.5"], "the checkpoint was trained with --rm_state_input prompt: repeat it"),
        (
            ["--reward", "rm", f"--{STAGES}", "prompt", "--rm_order", "validate_first"],
            "--rm_order is validate_first, it was transition_first",
        ),
    ],
)
def test_a_stage_policy_is_not_trained_without_its_stages(
    stage_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit):
        run(stage_policy, tmp_path / "ppo", *flags)
    assert complaint in capsys.readouterr().err


def test_proprio_without_room_is_refused(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run(policy_folder, tmp_path / "ppo", "--reward", "rm", f"--{STAGES}", "proprio")
    assert "the checkpoint's projector takes 2; only a checkpoint trained with it fits" in capsys.readouterr().err


def wide_policy(folder: Path, demos_file: Path, states: int) -> Path:
    """A policy with room for the states behind the two numbers of toy_reach."""
    demos = read_demonstrations(demos_file)
    entry = json.loads(json.dumps(demos.statistics["toy_reach"]))
    for name, fill in (("min", 0.0), ("max", 1.0), ("q01", 0.0), ("q99", 1.0), ("mean", 0.5), ("std", 0.5)):
        entry["proprio"][name] += [fill] * states
    entry["proprio"]["mask"] += [True] * states
    sizes = {"vision_dim": 16, "vision_depth": 2, "llm_dim": 32, "llm_mlp_dim": 64, "llm_layers": 1}
    build_tiny(
        folder,
        sentences=sorted(set(demos.instructions)),
        dataset_statistics={"toy_reach": entry},
        image_size=64,
        patch_size=16,
        **sizes,
        action_chunk_len=4,
        action_dim=2,
        use_proprio=True,
        proprio_dim=2 + states,
        seed=0,
    )
    return folder


def test_proprio_with_room_trains_and_is_recorded(
    demos_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("rlvla.commands.train_ppo.check_first_decisions", lambda *_: 0.0)  # its weights are random
    flags = ["--task_suite_name", "toy_reach", "--use_proprio", "--reward", "rm", f"--{STAGES}", "proprio"]
    states = len(StateInput(StateInputSettings("prompt", rm_formula="F(near & F success)")).states(TASKS[0]))
    run(wide_policy(tmp_path / "wide", demos_file, states), tmp_path / "ppo", *flags)
    record = json.loads((tmp_path / "ppo" / "policy" / ENVIRONMENT_FILE).read_text())["machine_state"]
    assert record["rm_state_input"] == "proprio" and record["width"] == states
    words = ["--pretrain", str(tmp_path / "ppo" / "policy"), "--eval_episodes", "2", "--num_envs", "1"]
    eval_vla.main([*words, "--output", str(tmp_path / "eval.json")])
    with pytest.raises(SystemExit):
        run(wide_policy(tmp_path / "other", demos_file, states + 1), tmp_path / "again", *flags)
    assert f"make {2 + states}, but the checkpoint's projector takes {3 + states}" in capsys.readouterr().err


def test_stages_are_different_prompts(policy_folder: Path) -> None:
    actor = Actor.from_pretrained(policy_folder).eval()
    ids, _ = actor.inputs.prompt([f"reach the red disc, stage u{i}" for i in range(3)], torch.device("cpu"))
    assert len({tuple(row) for row in ids.tolist()}) == 3


def test_an_unreadable_record_is_refused(stage_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(stage_policy, folder)
    record = json.loads((folder / ENVIRONMENT_FILE).read_text())
    record["machine_state"]["rm_state_input"] = "smell"
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(record))
    with pytest.raises(SystemExit):
        eval_vla.main(["--pretrain", str(folder), "--output", str(tmp_path / "eval.json")])
    assert "record of its machine state is not readable" in capsys.readouterr().err
