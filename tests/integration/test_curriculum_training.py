"""A curriculum over tasks through the command: the harder task is played more often, and a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.train_ppo_vla import main as train_ppo
from rlvla.utils.files import read_metrics
from tests.support.equality import assert_equal_to_the_bit
from tests.support.launching import PPO_SCRIPT, launch

# In the first of two tasks the effector begins on the disc.
SUITE = """
from dataclasses import replace
from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.toy_reach.env import CAMERAS, ToyReachEnv, ToyReachOptions, list_tasks, make

class OnTheDisc(ToyReachEnv):
    def reset(self, init_state_id, seed):
        super().reset(init_state_id, seed)
        self._scene.effector = self._scene.centers[self._scene.target].copy()
        return self._observe(self._scene)

def tasks(**options):
    (task,) = list_tasks(**options)
    return [replace(task, suite="two_reach", task_id=number, name=name) for number, name in enumerate(("stay", "go"))]

def make_two(task_id, **options):
    env = make(0, **options)
    env.__class__, env.task = (OnTheDisc, ToyReachEnv)[task_id], tasks(**options)[task_id]
    return env

register_suite("two_reach", Suite(tasks, make_two, CAMERAS, options=ToyReachOptions))
"""
FLAGS = [
    *("--task_suite_name", "two_reach", "--task_names", "stay", "go", "--success_hold_steps", "1", "--num_envs", "1"),
    *("--rollout_batch_size", "16", "--n_samples_per_prompt", "1", "--train_batch_size", "16", "--eval_episodes", "2"),
    *("--advantage_estimator", "reinforce", "--deterministic_rollout", "--lr_scheduler", "constant"),
    *("--save_steps", "1", "--max_ckpt_num", "4", "--no-use_tensorboard", "--no-val_before_train", "--no-check_start"),
    *("--task_sampling", "inverse_success", "--task_success_horizon", "8", "--whiten_per_task"),
]


@pytest.mark.nightly
def test_ppo_under_a_curriculum_resumes_to_the_bit(policy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two_reach.py").write_text(SUITE)

    def ppo(name: str, iterations: int, *more: str) -> Path:
        words = ["--pretrain", str(policy_folder), "--custom_module", str(tmp_path / "two_reach.py"), *FLAGS]
        train_ppo([*words, "--save_path", str(tmp_path / name), "--num_episodes", str(16 * iterations), *more])
        return tmp_path / name

    whole, _ = ppo("whole", 4), ppo("parts", 2)
    parts = ppo("parts", 4, "--load_checkpoint")
    for iteration in (3, 4):
        states = [run / f"checkpoints/iteration_{iteration:06d}/trainer.json" for run in (whole, parts)]
        samplers = [json.loads(path.read_text())["task_sampler"] for path in states]
        assert samplers[0] == samplers[1]
    assert_equal_to_the_bit(whole, parts)
    stay, go = samplers[0]["episodes"]
    assert stay + go == 64 and go > 1.3 * stay, "the harder task was played more often"
    first = read_metrics(whole)[0]
    assert first["rollout_tasks/stay"] > first["rollout_tasks/go"] and first["actor/grad_norm"] > 0


def test_rounds_that_are_played_ahead_follow_the_curriculum_too(policy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two_reach.py").write_text(SUITE)
    words = ["--pretrain", str(policy_folder), "--custom_module", str(tmp_path / "two_reach.py"), *FLAGS]
    train_ppo([*words, "--async_rollout", "--save_path", str(tmp_path / "run"), "--num_episodes", "64"])
    state = json.loads((tmp_path / "run" / "checkpoints/iteration_000004/trainer.json").read_text())
    stay, go = state["task_sampler"]["episodes"]
    assert stay + go == 64 and go > 1.3 * stay, "the harder task was played more often"


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_follow_one_curriculum(policy_folder: Path, tmp_path: Path) -> None:
    """The draws and the statistics of tasks are those of all ranks: they are what one rank has."""
    (tmp_path / "two_reach.py").write_text(SUITE)

    def words(name: str) -> list[str]:
        start = ["--pretrain", str(policy_folder), "--custom_module", str(tmp_path / "two_reach.py"), *FLAGS]
        return [*start, "--save_path", str(tmp_path / name), "--num_episodes", "48"]

    train_ppo(words("one"))
    launch(PPO_SCRIPT, *words("two"))
    for iteration in (1, 2, 3):
        name = f"checkpoints/iteration_{iteration:06d}/trainer.json"
        one, two = (json.loads((tmp_path / run / name).read_text())["task_sampler"] for run in ("one", "two"))
        assert one == two
    assert sum(two["episodes"]) == 48
    one, two = (read_metrics(tmp_path / run) for run in ("one", "two"))
    for metric in ("rollout_tasks/stay", "rollout_tasks/go", "actor/grad_norm", "actor/pg_loss"):
        values = [[record[metric] for record in records if metric in record] for records in (one, two)]
        assert values[0] == pytest.approx(values[1], abs=1e-5) and len(values[0]) == 3, metric
