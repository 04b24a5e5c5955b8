"""Off-policy runs through the command: learning, resuming, demonstrations, judges, ranks, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cli.collect_demos import main as collect_demos
from cli.eval_vla import main as evaluate
from cli.export_policy import main as export
from cli.train_sac_vla import build_parser
from cli.train_sac_vla import main as train
from rlvla.commands.off_policy.flags import SACRun
from rlvla.commands.off_policy.learner_checks import learner_problems
from rlvla.commands.off_policy.train import run_sac
from rlvla.commands.runs.flags import flags_of
from rlvla.data.reading import read_demonstrations
from rlvla.envs.config import EnvConfig
from rlvla.models.value_models import RewardModel
from rlvla.options import Options, arg
from rlvla.replay import priorities
from rlvla.replay.priorities import hybrid_priority
from rlvla.rewards.base import REWARDS, register_reward
from rlvla.trainer.observers import RewardCheck, Rollout
from rlvla.trainer.off_policy.sac import SAC
from rlvla.utils.errors import TrainingHalted
from tests.support.launching import launch
from tests.support.robosuite_reference import require_simulator

SUITE = ["--custom_module", "tests/support/state_reach.py", "--task_suite_name", "state_reach"]
CHUNKS = ["--action_chunk_len", "3"]  # a primitive takes as many steps as it needs
BASE = [
    *("--num_envs", "1", "--deterministic_rollout", "--hidden_sizes", "16", "--train_batch_size", "16"),
    *("--rollout_batch_size", "4", "--random_episodes", "4", "--eval_episodes", "2", "--no-val_before_train"),
    *("--no-use_tensorboard", "--actor_learning_rate", "1e-2"),
]
SMALL = [*BASE, *CHUNKS]
HYBRID = [
    *("--reward", "success", "rm:1", "--rm_state_input", "proprio", "--replay_priority", "hybrid"),
    *("--replay_score_source", "rm", "--n_step", "2", "--n_critics", "3", "--replay_refresh_interval", "5"),
    *("--replay_capacity", "40", "--actor_interval", "2"),
]
# Four states on the way, which are reached in the first four steps.
RELABELLED = [*HYBRID, "--her_ratio", "1.5", "--rm_formula", "X X X X F reached"]
STATE = ["--task_suite_name", "hidden_reach", "--use_proprio", "--disc_state", "--read_images", "--image_size", "16"]
ASYMMETRIC = [*RELABELLED, *STATE, "--critic_state", "--utd_ratio", "0.5"]
TASKS = ["--task_suite_name", "toy_push", "--task_names", "red_to_green", "blue_to_yellow", "--use_proprio"]
CURRICULUM = [*TASKS, "--max_steps", "12", "--task_sampling", "inverse_success", "--task_success_horizon", "4"]
FLOW = ["--policy", "flow", "--flow_steps", "2"]
SEEING = ["--read_images", "--image_size", "16", "--image_shift", "2", "--replay_priority", "td", "--utd_ratio", "0.5"]
SEEING += ["--cql_coef", "0.5", "--cql_actions", "1"]

LIFT = ["--task_suite_name", "robosuite", "--task_ids", "0", "--control_freq", "10", "--object_state"]
LIFT += ["--action_space", "primitives", "--policy", "primitives", "--primitives", "reach", "grasp", "open"]
LIFT += ["--max_steps", "30", "--choice_exploration", "10", "--replay_priority", "td"]


def run(out: Path, episodes: int, *more: str) -> Path:
    chunks = [] if "primitives" in more else CHUNKS
    train([*SUITE, *BASE, *chunks, "--save_path", str(out), "--num_episodes", str(episodes), *more])
    return out / "policy"


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("options", "task_ids"),
    [(HYBRID, []), (SEEING, []), ([*RELABELLED, *FLOW], []), (ASYMMETRIC, []), (CURRICULUM, [0, 3])]
    + [pytest.param(LIFT, [0], marks=pytest.mark.nightly)],
    ids=["hybrid", "images", "flow, hindsight", "state", "tasks", "primitives"],
)
def test_a_run_resumes_to_the_bit(options: list[str], task_ids: list[int], tmp_path: Path) -> None:
    if "robosuite" in options:
        require_simulator()
    options = [*options, "--save_steps", "1", "--max_ckpt_num", "4"]
    whole = load_file(run(tmp_path / "whole", 16, *options) / "model.safetensors")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    resumed = run(tmp_path / "parts", 16, "--load_checkpoint", "iteration_000002", *options)
    parts = load_file(resumed / "model.safetensors")
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    last, again = metrics(tmp_path / "whole")[-2], metrics(tmp_path / "parts")[-2]
    same = [name for name in last if name.startswith(("actor/", "critic/", "replay/", "rollout"))]
    same = [name for name in same if not name.endswith("_per_s")]
    assert {name: last[name] for name in same} == {name: again[name] for name in same} and len(same) > 10
    assert last["critic/updates"] > 0 and last["replay/rows"] > 0
    assert 0 < last.get("replay/relabelled", 1) < last["replay/rows"]
    record = json.loads((resumed / "rlvla_environment.json").read_text())
    assert record["task_ids"] == task_ids and "task_names" not in record
    of_tasks = {name for record in metrics(tmp_path / "parts") for name in record if name.startswith("rollout_tasks/")}
    assert len(of_tasks) == (len(task_ids) if len(task_ids) > 1 else 0)


@pytest.mark.parametrize("file", ["rows_000004.npz", pytest.param("images.rows", marks=pytest.mark.nightly)])
def test_a_damaged_buffer_is_resumed_from_the_iteration_before(file: str, tmp_path: Path) -> None:
    options = [*SEEING, "--save_steps", "1", "--max_ckpt_num", "4"]
    whole = load_file(run(tmp_path / "whole", 16, *options) / "model.safetensors")
    (path,) = (tmp_path / "whole" / "replay").rglob(file)
    content = bytearray(path.read_bytes())
    at = len(content) // 2
    if file == "images.rows":  # the newest image, which only the fourth state needs; the rest is unused
        at = json.loads((path.parent / "state_000004.json").read_text())["mapped"][file] - 1
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        run(tmp_path / "whole", 16, "--load_checkpoint", "iteration_000004", *options)
    again = load_file(run(tmp_path / "whole", 16, "--load_checkpoint", *options) / "model.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert (tmp_path / "whole" / "checkpoints" / "damaged_iteration_000004").is_dir()


def test_a_policy_is_evaluated_in_its_environment(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    policy = run(tmp_path / "run", 8, *HYBRID, *FLOW)
    evaluate([*SUITE[:2], "--pretrain", str(policy), "--eval_episodes", "3", "--num_envs", "1"])
    record = ["--num_demos", "2", "--num_envs", "1", "--keep", "all", "--output", str(tmp_path / "demos")]
    collect_demos([*SUITE[:2], "--policy", str(policy), *record])
    shutil.rmtree(policy)
    with pytest.raises(SystemExit):
        export([str(tmp_path / "run")])
    assert "exports its policies itself" in " ".join(capsys.readouterr().err.split())


def test_critics_see_what_the_policy_does_not(tmp_path: Path) -> None:
    states = 6  # of the machine
    learner = learner_after(tmp_path / "run", 8, *ASYMMETRIC, "--dump_rollouts")
    config = json.loads((tmp_path / "run" / "policy" / "config.json").read_text())
    assert config["proprio_dim"] == 2 + states and config["num_images_in_input"] == 1
    assert learner.critic.module.encoder.mean.shape == (4 + states,) and not learner.critic.module.encoder.cameras
    assert learner.memory.proprio_sums()[1].shape == (4 + states,)
    own = learner.actor.module.encoder.mean
    assert torch.equal(own, learner.critic.module.encoder.mean[[0, 1, *range(4, 4 + states)]]) and own.any()
    record = json.loads((tmp_path / "run" / "policy" / "rlvla_environment.json").read_text())
    assert not record["disc_state"], "none of it is needed to play"
    evaluate([*SUITE[:2], "--pretrain", str(tmp_path / "run/policy"), "--eval_episodes", "2", "--num_envs", "1"])
    played = read_demonstrations(sorted((tmp_path / "run" / "rollouts").rglob("*.hdf5"))[0], ())
    assert played.proprio[0].shape[1] == 4, "what was shown is written"


def test_an_evaluation_leaves_the_buffer_alone(tmp_path: Path) -> None:
    options = [*HYBRID, "--save_steps", "1", "--max_ckpt_num", "4"]
    run(tmp_path / "run", 12, *options)
    saved = sorted(path.name for path in (tmp_path / "run" / "replay").rglob("*"))
    run(tmp_path / "run", 12, "--load_checkpoint", "iteration_000002", "--val_only", *options)
    assert sorted(path.name for path in (tmp_path / "run" / "replay").rglob("*")) == saved
    run(tmp_path / "run", 12, "--load_checkpoint", *options)


def test_scores_of_the_machine_reach_the_buffer(tmp_path: Path) -> None:
    run(tmp_path / "run", 12, *HYBRID)
    found = metrics(tmp_path / "run")[-2]
    assert found["replay/unjudged_share"] == 0 and 0 < found["replay/is_weight_mean"] <= 1
    assert found["replay/refreshed"] > 0 and found["replay/rows"] <= 40


def test_tensorboard_charts_what_an_off_policy_run_logs(tmp_path: Path) -> None:
    learner = learner_after(tmp_path / "run", 12, *RELABELLED, "--use_tensorboard")
    logged = {name for record in metrics(tmp_path / "run") for name in record}
    layout = learner.layout(["success", "rm"])
    assert "is it stable?" not in layout
    for category in ("are its values right?", "what is in the replay buffer?"):
        patterns = [pattern for chart in layout[category].values() for pattern in chart]
        empty = [pattern for pattern in patterns if not any(re.match(pattern, name) for name in logged)]
        assert empty == (["actor/choice_entropy"] if "values" in category else []), "there are no primitives"
    assert set(SAC.overview) - logged == set() and sorted(set(SAC.overview.values())) == sorted(SAC.overview.values())
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(SAC.overview.values()) <= set(events.Tags()["scalars"])


def learner_after(out: Path, episodes: int, *more: str) -> SAC:
    argv = [*SUITE, *SMALL, "--save_path", str(out), "--num_episodes", str(episodes), *more]
    with flags_of(SACRun, build_parser, argv) as flags:
        trainer = run_sac(flags)
    assert trainer is not None and isinstance(trainer.algorithm, SAC)
    return trainer.algorithm


def test_rewards_are_scaled_and_temperatures_follow_their_flags(tmp_path: Path) -> None:
    options = ["--init_temperature", "0.5", "--temperature_learning_rate", "0.1", "--target_entropy", "100"]
    learner = learner_after(tmp_path / "run", 8, "--reward", "rm:1", "--reward_scale", "10", *options)
    stored = [episode.rewards.sum() for episode in learner.memory.buffer.stored_episodes()]
    paid = [line["reward/rm"] for line in metrics(tmp_path / "run")[:-1]]
    assert np.mean(stored) == pytest.approx(10 * np.mean(paid), rel=1e-5) and np.mean(paid) > 0
    # Each step of Adam is the learning rate while the gap hardly changes: 100 x 6 numbers, and an entropy of a few.
    steps, state = learner.updates, learner.temperatures.state_dict()
    assert learner.temperatures["parameters"] == pytest.approx(0.5 * math.exp(-0.1 * steps), rel=0.01)
    assert float(state["first"]) / (1 - 0.9**steps) == pytest.approx(600, abs=10)


def test_the_replay_weighs_draws_and_evicts_as_told(tmp_path: Path) -> None:
    options = ["--replay_combine", "product", "--replay_eviction", "value", "--replay_share", "0", "0"]
    buffer = learner_after(tmp_path / "run", 16, *HYBRID, *options).memory.buffer
    assert {line["replay/is_weight_mean"] for line in metrics(tmp_path / "run")[:-1]} == {1.0}, "all draws are uniform"
    rows = np.flatnonzero(buffer.drawable)
    seen = buffer.gather(rows, ["action_score", "progress", "td_error"])
    known = np.isfinite(seen["td_error"])
    scores = {name: values[known] for name, values in seen.items()}
    product = hybrid_priority(**scores, combine="product")
    assert known.sum() > 8 and buffer.tree.get(rows[known]) == pytest.approx(product, rel=1e-4)
    versions = [int(episode.policy_version[0]) for episode in buffer.stored_episodes()]
    assert len(versions) >= 8 and len(set(versions)) > 2, "with fifo only those of the last two iterations are left"


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demos")
    collect = ["--task_suite_name", "toy_reach", "--num_demos", "4", "--num_envs", "1", "--image_size", "16"]
    collect_demos([*collect, "--output", str(folder)])
    return folder / "demos.hdf5"


def test_demonstrations_are_part_of_every_batch(demos: Path, tmp_path: Path) -> None:
    options = ["--task_suite_name", "toy_reach", "--demos", str(demos), "--read_images", "--image_size", "16"]
    small = [*SMALL, *FLOW, "--num_episodes", "8", "--utd_ratio", "0.5"]
    train([*options, *small, "--save_path", str(tmp_path / "run")])
    without = ["--task_suite_name", "toy_reach", "--read_images", "--image_size", "16"]
    train([*without, *small, "--save_path", str(tmp_path / "alone")])
    shown, alone = metrics(tmp_path / "run")[-2], metrics(tmp_path / "alone")[-2]
    record = json.loads((tmp_path / "run" / "policy" / "rlvla_environment.json").read_text())
    assert len(record["learned_from"]) == 2, "the states of the run, and those of the demonstrations"
    assert shown["actor/imitated_share"] == 0.5 and shown["actor/flow_matching"] > 0, "demonstrations, half of a batch"
    assert shown["critic/target_mean"] > alone["critic/target_mean"] + 0.02, "they succeed, random actions do not"


def test_offline_updates_come_before_the_first_episode(
    demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    steps, step = [], SAC._step

    def recorded(self: SAC, batch: Any, number: int, metrics: Any) -> np.ndarray:
        steps.append((self._episodes, number, int(batch.demonstrated.sum())))
        return step(self, batch, number, metrics)

    monkeypatch.setattr(SAC, "_step", recorded)
    at = SMALL.index("--random_episodes")
    options = ["--task_suite_name", "toy_reach", "--demos", str(demos), "--read_images", "--image_size", "16"]
    options += [*SMALL[:at], *SMALL[at + 2 :], "--num_episodes", "4", "--utd_ratio", "0.2", "--cql_coef", "0.5"]
    train([*options, "--offline_updates", "3", "--save_path", str(tmp_path / "run")])
    assert steps[:3] == [(0, 1, 16), (0, 2, 16), (0, 3, 16)], "batches of demonstrations alone"
    assert steps[3] == (4, 1, 8) and all(one[2] == 8 for one in steps[3:]), "then they are half of a batch"
    assert metrics(tmp_path / "run")[-2]["critic/updates"] == len(steps) - 3
    assert "3 offline updates on" in "".join(capfd.readouterr())
    with pytest.raises(SystemExit):
        train([*options, "--offline_updates", "3", "--random_episodes", "4", "--save_path", str(tmp_path / "other")])
    assert "after --offline_updates the policy plays from the start" in " ".join(capfd.readouterr().err.split())


def test_offline_updates_are_kept_if_the_run_is_interrupted_before_the_first_iteration(
    demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = SMALL.index("--random_episodes")
    options = ["--task_suite_name", "toy_reach", "--demos", str(demos), "--read_images", "--image_size", "16"]
    options += [*SMALL[:at], *SMALL[at + 2 :], "--num_episodes", "4", "--utd_ratio", "0.2", "--offline_updates", "3"]
    train([*options, "--save_path", str(tmp_path / "whole")])
    whole = load_file(tmp_path / "whole" / "policy" / "model.safetensors")
    with monkeypatch.context() as broken:
        broken.setattr(SAC, "plan", Mock(side_effect=TrainingHalted("no episodes")))
        with pytest.raises(SystemExit):
            train([*options, "--save_path", str(tmp_path / "parts")])
    monkeypatch.setattr(SAC, "pretrain", Mock(side_effect=AssertionError("they are not repeated")))
    train([*options, "--save_path", str(tmp_path / "parts"), "--load_checkpoint"])
    parts = load_file(tmp_path / "parts" / "policy" / "model.safetensors")
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


def test_episodes_of_a_halted_iteration_are_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their judge may have failed; the iteration is played again after a resume."""
    whole = load_file(run(tmp_path / "whole", 8) / "model.safetensors")

    def halt(check: RewardCheck, rollout: Rollout, metrics: Any) -> None:
        if rollout.iteration == 1:
            raise TrainingHalted("the judge fails")

    with monkeypatch.context() as broken:
        broken.setattr(RewardCheck, "after_rollout", halt)
        with pytest.raises(SystemExit):
            run(tmp_path / "parts", 8)
    parts = load_file(run(tmp_path / "parts", 8, "--load_checkpoint") / "model.safetensors")
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    last, again = metrics(tmp_path / "whole")[-2], metrics(tmp_path / "parts")[-2]
    assert last["replay/rows"] == again["replay/rows"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [[], pytest.param(FLOW, marks=pytest.mark.nightly)], ids=["gaussian", "flow"])
def test_two_ranks_share_the_buffer_and_one_goes_on(policy: list[str], tmp_path: Path) -> None:
    more = [*HYBRID, *policy, "--replay_capacity", "400"]
    options = [*SUITE, *SMALL, "--save_path", str(tmp_path / "run"), *more]
    launch("cli/train_sac_vla.py", *options, "--num_episodes", "8")
    two = metrics(tmp_path / "run")[-2]
    assert two["replay/episodes"] == 8
    run(tmp_path / "run", 12, "--load_checkpoint", *more)
    assert metrics(tmp_path / "run")[-2]["replay/episodes"] == 12, "no episode is lost"


def test_a_priority_of_ones_own_reads_scores_if_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = priorities.REPLAY_PRIORITIES
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    judged: list[bool] = []

    @dataclass(frozen=True)
    class Steep(Options):
        steep_floor: float = arg(0.1, "added to each priority", above=0)

    @priorities.register_priority("steep_progress", options=Steep)
    def steep_progress(action_score: Any, progress: Any, td_error: Any, *, steep_floor: float) -> np.ndarray:
        judged.append(bool(np.isfinite(progress).any()))
        assert steep_floor == 0.2
        return np.nan_to_num(np.asarray(progress)) ** 2 + steep_floor

    own = ["--replay_priority", "steep_progress", "--steep_floor", "0.2"]
    run(tmp_path / "judged", 8, *own, "--reward", "success", "rm:0", "--replay_score_source", "rm")
    assert any(judged)
    judged.clear()
    run(tmp_path / "alone", 8, *own)
    assert judged and not any(judged)


def test_a_judge_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REWARDS, "_entries", dict(REWARDS._entries))
    register_reward("closeness", scores_decisions=True)(dict)
    register_reward("price")(dict)
    options = ["--reward", "success", "closeness:0", "price", "--replay_priority", "vlm", "--replay_score_source"]
    flags = SACRun.from_namespace(build_parser().parse_args([*SUITE, *options, "closeness"])).completed()
    assert learner_problems(flags) == []
    flags = SACRun.from_namespace(build_parser().parse_args([*SUITE, *options, "price"])).completed()
    assert [(p.flag, p.reason) for p in learner_problems(flags)] == [("replay_score_source", "unknown_name")]


REFUSED = {
    "judge": (["--replay_priority", "vlm"], "needs --replay_score_source"),
    "no such judge": (["--replay_priority", "vlm", "--replay_score_source", "rm"], "must be a source of --reward"),
    "critics": (["--target_critics", "5"], "there are not so many"),
    "random": (["--random_episodes", "8"], "leaves none"),
    "weights": (
        ["--replay_priority", "hybrid", "--replay_score_source", "rm", "--reward", "rm:0", "success"]
        + ["--replay_vlm_weight", "0", "--replay_td_weight", "0"],
        "one of them must be positive",
    ),
    "alpha": (["--replay_priority", "td", "--replay_alpha", "-1"], "replay_alpha"),
    "powers": (["--replay_priority", "td", "--replay_alpha", "100"], "--replay_alpha 100 is too large"),
    "beta": (["--replay_priority", "td", "--replay_beta", "0.4", "1.5"], "replay_beta"),
    "n": (["--n_step", "0"], "n_step"),
    "ratio": (["--utd_ratio", "0"], "utd_ratio"),
    "capacity": (["--replay_capacity", "4"], "an episode takes up to 5 rows"),
    "silent judge": (
        ["--replay_priority", "vlm", "--replay_score_source", "rm_model", "--reward", "success", "rm_model:0"]
        + ["--rm_model_path", "nowhere", "--rm_model_pay", "final"],
        "does not score single decisions",
    ),
    "critics of no use": (["--save_value_network"], "of no use to another"),
    "choice": (["--choice_exploration", "5"], "--choice_exploration 5: --policy is gaussian"),
    "demo share": (["--demos", "nowhere", "--demo_share", "0.99"], "both parts need a decision"),
    "late profile": (["--profile_steps", "3"], "the run has 2 iterations"),
    "profile of nothing": (["--profile_steps", "1", "--val_only"], "records training"),
    "no episodes": (["--rollout_batch_size", "0"], "must be at least 1"),
    "no board": (["--wandb_name", "x"], "wandb_name"),
    "no images to shift": (["--image_shift", "2"], "--image_shift 2: it belongs to --read_images"),
    "values that are all alike": (["--replay_eviction", "value"], "all decisions have the same priority"),
    "greedy episodes": (["--eval_samples", "2"], "--eval_samples 2: no effect without --eval_temperature"),
    "policies of checkpoints": (["--save_hf_ckpt"], "--save_hf_ckpt: no effect without --save_steps"),
    "unread": (["--replay_alpha", "0.5"], "--replay_priority uniform does not use it"),
    "primitives": (["--policy", "primitives"], "the environment has none"),
    "no flow": (["--flow_matching_coef", "1"], "--flow_matching_coef 1.0: --policy is gaussian"),
    "steps of no flow": (["--flow_steps", "2"], "--flow_steps 2: --policy is gaussian"),
    "long flow": (["--policy", "flow", "--flow_steps", "17"], "flow_steps 17 is not in 0..16"),
    "sharding": (["--zero_stage", "3"], "need neither sharding"),
    "nothing to read": (["--no-use_proprio"], "the policy reads proprio"),
    "too many copies": ([*RELABELLED, "--her_ratio", "11"], "at most 10"),
    "no machine": (["--her_ratio", "1"], "the goals are states of a reward machine"),
    "equal copies": ([*RELABELLED, "--her_goal", "final"], "all copies are the same"),
    "no copies": (["--her_goal", "final"], "--her_goal final: no effect without --her_ratio"),
    "demonstrations of no state": ([*RELABELLED, "--demos", "nowhere"], "which states of the machine demonstrations"),
    "no goal pays": ([*RELABELLED, "--reward", "env", "rm:0"], "neither success nor rm pays"),
    "no state on the way": ([*RELABELLED, "--rm_formula", "F reached"], "has no state on the way"),
    "goals of a flow policy": ([*RELABELLED, "--policy", "dsrl", "--pretrain", "nowhere"], "which knows no goals"),
    "a policy that sees the state": (["--critic_state"], "--critic_state: a policy without --read_images"),
    "critics of a flow policy": (
        ["--critic_state", "--policy", "dsrl", "--pretrain", "nowhere"],
        "--critic_state: a policy without --read_images",
    ),
    "critics that see nothing else": (
        [flag for flag in [*STATE, "--critic_state"] if flag != "--disc_state"],
        "give what the critics are to see as well (--disc_state)",
    ),
    "no state in the suite": (
        ["--critic_state", "--read_images", "--task_suite_name", "state_reach"],
        "has nothing that a robot cannot know",
    ),
    "no demonstrations": (["--demo_share", "0.5"], "no effect without --demos"),
    "offline without demonstrations": (["--offline_updates", "5"], "--offline_updates 5: no effect without --demos"),
    "conservative flow": (["--policy", "flow", "--cql_coef", "1"], "--cql_coef 1.0: --policy is flow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_anything_starts(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options, words = REFUSED[case]
    with pytest.raises(SystemExit):
        run(tmp_path / "run", 8, *options)
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_reward_model_judges_beside_the_state_of_a_machine(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    judge = tmp_path / "judge"
    RewardModel.from_policy(policy_folder).save_pretrained(judge)
    options = ["--reward", "success", "rm:1", "rm_model:0", "--rm_model_path", str(judge), "--utd_ratio", "0.5"]
    options += ["--rm_state_input", "proprio", "--replay_priority", "vlm", "--replay_score_source", "rm_model"]
    options += ["--task_suite_name", "hidden_reach", "--use_proprio"]
    run(tmp_path / "run", 8, *options)
    assert metrics(tmp_path / "run")[-2]["replay/unjudged_share"] == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(tmp_path / "other", 8, *options, "--image_size", "16")
    told = " ".join(capsys.readouterr().err.split())
    assert "--rm_model_path: " in told and "these have 16" in told


def test_demonstrations_show_critics_the_state(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    collect = [*SUITE[:2], *STATE, "--num_demos", "4", "--num_envs", "1"]
    collect.remove("--read_images")
    options = [*STATE, "--critic_state", "--utd_ratio", "0.5"]
    collect_demos([*collect, "--output", str(tmp_path / "demos")])
    learner = learner_after(tmp_path / "run", 8, *options, "--demos", str(tmp_path / "demos" / "demos.hdf5"))
    assert learner._demos is not None
    shown = learner._demos.buffer
    seen = shown.gather(np.flatnonzero(shown.drawable), ["proprio", "images"])
    assert seen["proprio"].shape[1] == 4 and seen["images"].shape[1:] == (1, 16, 16, 3) and seen["proprio"][:, 2:].any()
    collect.remove("--disc_state")
    collect_demos([*collect, "--output", str(tmp_path / "less")])
    with pytest.raises(SystemExit):
        run(tmp_path / "other", 8, *options, "--demos", str(tmp_path / "less" / "demos.hdf5"))
    assert "proprio" in capsys.readouterr().err


def test_demonstrations_that_do_not_fit_are_refused(demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--task_suite_name", "toy_reach", "--demos", str(demos), "--read_images", "--image_size", "32"]
    with pytest.raises(SystemExit):
        train([*options, *SMALL, "--save_path", str(tmp_path / "run"), "--num_episodes", "8", "--reward", "rm"])
    said = " ".join(capsys.readouterr().err.split())
    assert "what rm would pay for demonstrations is not known" in said and "16" in said


def test_demonstrations_without_recorded_success_are_refused(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = Path(shutil.copytree(demos.parent, tmp_path / "demos")) / demos.name
    with h5py.File(copy, "a") as file:
        for episode in file["data"].values():
            del episode.attrs["success"]
    options = ["--task_suite_name", "toy_reach", "--demos", str(copy), "--read_images", "--image_size", "16"]
    with pytest.raises(SystemExit):
        train([*options, *SMALL, "--save_path", str(tmp_path / "run"), "--num_episodes", "8"])
    assert "success of the episodes is not recorded" in " ".join(capsys.readouterr().err.split())


def test_demonstrations_of_another_action_space_are_refused(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = EnvConfig.tasks
    monkeypatch.setattr(EnvConfig, "tasks", lambda env: [replace(task, action_dim=3) for task in tasks(env)])
    options = ["--task_suite_name", "toy_reach", "--demos", str(demos), "--read_images", "--image_size", "16"]
    with pytest.raises(SystemExit):
        train([*options, *SMALL, "--save_path", str(tmp_path / "run"), "--num_episodes", "8"])
    assert "2 action dimensions" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_buffer_of_another_task_or_shape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(tmp_path / "run", 8, "--save_steps", "1", "--max_ckpt_num", "4")
    kept = sorted(path.name for path in (tmp_path / "run" / "replay").rglob("*"))
    others = {
        "was started with state_reach": ["--task_suite_name", "hidden_reach", "--use_proprio"],
        "was started with 3": ["--action_chunk_len", "2"],
    }
    for words, other in others.items():
        with pytest.raises(SystemExit):
            run(tmp_path / "run", 12, "--load_checkpoint", *other)
        assert words in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in (tmp_path / "run" / "replay").rglob("*")) == kept
    run(tmp_path / "run", 12, "--load_checkpoint")


def test_what_a_dense_reward_would_pay_for_demonstrations_is_not_known(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = EnvConfig.tasks
    monkeypatch.setattr(EnvConfig, "tasks", lambda env: [replace(task, dense_reward=True) for task in tasks(env)])
    options = ["--task_suite_name", "toy_reach", "--demos", str(demos), "--read_images"]
    with pytest.raises(SystemExit):
        train([*options, *SMALL, "--save_path", str(tmp_path / "run"), "--num_episodes", "8", "--reward", "env"])
    assert "what env would pay for demonstrations is not known" in " ".join(capsys.readouterr().err.split())


def test_rewards_that_are_no_numbers_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from rlvla.rewards.machine_source import MachineReward

    monkeypatch.setattr(MachineReward, "step", lambda *_: float("nan"))
    with pytest.raises(SystemExit):
        run(tmp_path / "run", 8, "--reward", "success", "rm:1")
    assert "rewards hold NaN or infinity" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "policy").exists()
