"""Reward settings against the learner: discount of the shaping, level, truncation."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from rlvla.envs import list_tasks
from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.trainer.config import AlgorithmConfig
from rlvla.trainer.reward_setup import learner_gamma, reward_problems, tie_to_learner

TASKS = list_tasks("toy_reach")
GAE = AlgorithmConfig(advantage_estimator="gae", gamma=0.99)
GRPO = AlgorithmConfig(advantage_estimator="grpo", gamma=0.99)
RM = {"reward": ("success", "rm:0.5")}


VLM = {"reward": ("success", "vlm"), "vlm_progress_term": "potential"}


def test_shaping_follows_the_learner() -> None:
    assert learner_gamma(GAE) == 0.99 and learner_gamma(GRPO) == 1.0
    for algorithm, ends in ((GAE, False), (GRPO, False), (AlgorithmConfig(bootstrap_truncated=False), True)):
        plan = RewardPlan.from_config(RewardConfig(**RM))
        tie_to_learner(plan, algorithm, "cpu")
        machine = plan.sources["rm"]
        assert machine.settings(TASKS[0]).gamma == learner_gamma(algorithm)
        assert machine.truncation_ends == ends


def test_a_judged_potential_goes_on_only_where_the_learner_does() -> None:
    """GRPO and REINFORCE see nothing behind a truncated episode, and neither does PPO that is told not to."""
    source = SimpleNamespace(bootstraps=None)
    for algorithm, bootstraps in (
        (GAE, True),
        (AlgorithmConfig(bootstrap_truncated=False), False),
        (GRPO, False),
        (AlgorithmConfig(advantage_estimator="reinforce"), False),
    ):
        tie_to_learner(RewardPlan({"success": 1.0}, sources={"success": source}), algorithm, "cpu")
        assert source.bootstraps == bootstraps


@pytest.mark.parametrize(
    ("rewards", "algorithm", "words"),
    [
        ({}, GAE, []),
        (RM, GAE, []),
        ({**RM, "gamma_shaping": 0.99}, GAE, []),
        ({**RM, "gamma_shaping": 0.9}, GAE, ["--gamma_shaping 0.9 must equal the learner's discount, 0.99 "]),
        ({**RM, "gamma_shaping": 0.99}, GRPO, ["discount, 1.0 "]),
        (RM, AlgorithmConfig(gamma=0.99, advantage_level="chunk"), ["--advantage_level chunk"]),
        ({**RM, "rm_mode": "progression"}, AlgorithmConfig(gamma=0.99, advantage_level="chunk"), []),
        ({**RM, "dynamic_truncation": True}, AlgorithmConfig(bootstrap_truncated=False), ["--dynamic_truncation with"]),
        ({**RM, "rm_formula": "F flown"}, GAE, ["flown.*near, reached, success"]),
    ],
)
def test_problems(rewards: dict, algorithm: AlgorithmConfig, words: list[str]) -> None:
    problems = reward_problems(RewardConfig(**rewards), algorithm, TASKS)
    assert len(problems) == len(words)
    for problem, word in zip(problems, words):
        assert re.search(word, problem)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "remax", "grpo", "rloo", "gdpo"])
def test_a_potential_needs_a_method_that_looks_at_single_steps(estimator: str) -> None:
    """The sum over an episode is the same for all; what is still to come is not."""
    algorithm = AlgorithmConfig(advantage_estimator=estimator)
    found = [p for p in reward_problems(RewardConfig(**VLM), algorithm, TASKS) if "--vlm_progress_term" in p]
    assert bool(found) == (estimator in ("grpo", "rloo", "gdpo"))
    assert all(f"--advantage_estimator {estimator} " in problem and "delta" in problem for problem in found)
    assert not any("--vlm_progress_term" in p for p in reward_problems(RewardConfig(**RM), algorithm, TASKS))
