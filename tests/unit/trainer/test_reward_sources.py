"""Reward settings against the learner (discount of the shaping, level, truncation), and the learned source."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlvla.envs import list_tasks
from rlvla.experience import Experience
from rlvla.models.value_models import RewardModel
from rlvla.rewards import RewardConfig, RewardPlan, SuccessConfig, reward_names
from rlvla.rewards.success_source import _FACTORIES
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.reward_sources import configure_for_learner, learner_gamma, reward_problems
from rlvla.utils.errors import Problem
from tests.support.experience import SAMPLES

TASKS = list_tasks("toy_reach")
GAE = AlgorithmConfig(advantage_estimator="gae", gamma=0.99)
GRPO = AlgorithmConfig(advantage_estimator="grpo", gamma=0.99)
RM = {"reward": ("success", "rm:0.5")}


VLM = {"reward": ("success", "vlm"), "vlm_progress_term": "potential"}


def test_shaping_follows_the_learner() -> None:
    assert learner_gamma(GAE) == 0.99 and learner_gamma(GRPO) == 1.0
    for algorithm, ends in ((GAE, False), (GRPO, False), (AlgorithmConfig(bootstrap_truncated=False), True)):
        plan = RewardPlan.from_config(RewardConfig(**RM))
        configure_for_learner(plan, algorithm, "cpu")
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
        configure_for_learner(RewardPlan({"success": 1.0}, sources={"success": source}), algorithm, "cpu")
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
        assert re.search(word, str(problem))


def test_a_simulator_that_ends_nothing_pays_nothing() -> None:
    """Unless its reward is dense, as it may be in a suite of one's own."""

    class Judge:
        def __init__(self, models: object):
            """It needs none."""

    own = [dataclasses.replace(task, suite="lab") for task in TASKS]
    dense = [dataclasses.replace(task, dense_reward=True) for task in TASKS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_FACTORIES, "vlm", Judge)
        cases = (("vlm", TASKS, ["no_effect"]), ("vlm", own, []), ("vlm", dense, []), ("simulator", TASKS, []))
        for (success, tasks, reasons), source in itertools.product(cases, ("env", "env_progress")):
            config = RewardConfig(reward=("success", f"{source}:0.5"))
            tasks = [dataclasses.replace(task, reward_range=(0.0, 1.0)) for task in tasks]
            problems = reward_problems(config, GAE, tasks, SuccessConfig(success))
            assert [p.reason for p in problems if p.flag == "reward"] == reasons


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "remax", "grpo", "rloo", "gdpo"])
def test_a_potential_needs_a_method_that_looks_at_single_steps(estimator: str) -> None:
    """The sum over an episode is the same for all; what is still to come is not."""
    algorithm = AlgorithmConfig(advantage_estimator=estimator)
    found = [p for p in reward_problems(RewardConfig(**VLM), algorithm, TASKS) if "--vlm_progress_term" in p]
    assert bool(found) == (estimator in ("grpo", "rloo", "gdpo"))
    assert all(f"--advantage_estimator {estimator} " in problem and "delta" in problem for problem in found)
    assert not any("--vlm_progress_term" in p for p in reward_problems(RewardConfig(**RM), algorithm, TASKS))


# As the engine hands them to sample sources: with what the environment showed.
EPISODES = [
    dataclasses.replace(
        sample,
        observed_images=torch.cat([sample.images, sample.last_images[None]]),
        observed_proprio=torch.cat([sample.proprio, sample.last_proprio[None]]),
    )
    for sample in SAMPLES
]


@pytest.fixture(scope="module")
def reward_folder(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a head that tells frames apart."""
    folder = shutil.copytree(policy_folder, tmp_path_factory.mktemp("reward") / "model")
    model = RewardModel.from_policy(policy_folder)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.weight)
    model.save_pretrained(folder)
    return folder


def scores(folder: Path, *, bf16: bool = False) -> list[float]:
    """P(success) in the last frame of each of EPISODES."""
    model = RewardModel.from_pretrained(folder).eval()
    model = model.bfloat16() if bf16 else model
    last = [(episode.observed_images[-1], episode.observed_proprio[-1]) for episode in EPISODES]
    images, proprio = model.prepare(*(torch.stack(part).numpy() for part in zip(*last)))
    batch = Experience(
        images=torch.from_numpy(images),
        proprio=None if proprio is None else torch.from_numpy(proprio),
        instructions=[episode.instruction for episode in EPISODES],
    )
    return model.success_probability(batch).tolist()


def collected(config: RewardConfig, **options: bool) -> list[dict]:
    plan = RewardPlan.from_config(config)
    configure_for_learner(plan, GAE, "cpu", **options)
    for sample in EPISODES:
        plan.submit(sample)
    return plan.collect(len(EPISODES))


def test_the_final_score_is_paid_by_either_flag_and_beside_progress(reward_folder: Path) -> None:
    folder = str(reward_folder)
    want = scores(reward_folder)
    assert len(set(want)) == len(EPISODES)
    final = RewardConfig(reward=("rm_model",), rm_model_path=folder, rm_model_pay="final", rm_model_batch_size=2)
    assert [found["rm_model"] for found in collected(final)] == pytest.approx(want, abs=1e-6)
    both = RewardConfig(reward=("success", "rm_model:2"), rm_model_path=folder, reward_pretrain=folder)
    both = dataclasses.replace(both, reward_model_coef=0.3, reward_schedule=("reward_model:linear:1:0",))
    plan = RewardPlan.from_config(both)
    assert plan.weights() == {"success": 1.0, "rm_model": 2.0, "reward_model": pytest.approx(0.3)}
    plan.start_iteration(1, 2)
    assert plan.weights()["reward_model"] == 0, "a schedule holds for it as for any source"
    found = collected(both)
    assert [episode["reward_model"] for episode in found] == want
    for episode, sample in zip(found, EPISODES):
        assert np.shape(episode["rm_model"].reward) == (sample.finish_step,), "progress, per step"
        assert len(episode["rm_model"].scores) == sample.num_decisions


def test_the_final_score_of_a_bfloat16_run_is_a_bfloat16_score(reward_folder: Path) -> None:
    """Progress is not: its changes from frame to frame would be rounded away."""
    config = RewardConfig(reward=("rm_model",), rm_model_path=str(reward_folder), reward_pretrain=str(reward_folder))
    plain, half = collected(config), collected(config, bf16=True)
    assert [episode["reward_model"] for episode in half] == scores(reward_folder, bf16=True)
    for one, other in zip(plain, half):
        assert one["reward_model"] != other["reward_model"]
        assert np.array_equal(one["rm_model"].reward, other["rm_model"].reward)


def test_the_weighted_score_is_that_of_float32_numbers(reward_folder: Path) -> None:
    """What --reward_model_coef paid before there were sources for it."""
    plan = RewardPlan.from_config(RewardConfig(reward_pretrain=str(reward_folder), reward_model_coef=0.3))
    weight = plan.weights()["reward_model"]
    for score in torch.rand(1000, generator=torch.Generator().manual_seed(0)):
        assert np.float32(weight * float(score)) == float(0.3 * score)


def test_the_flags_of_the_learned_reward(reward_folder: Path, policy_folder: Path) -> None:
    def problems(**flags: object) -> list[Problem]:
        return reward_problems(RewardConfig(**flags), GAE, TASKS)

    assert problems(reward_pretrain=str(reward_folder)) == []
    (found,) = problems(reward_pretrain=str(policy_folder))
    assert (found.flag, found.reason) == ("reward_pretrain", "invalid_file") and "is not a reward model" in found
    (found,) = problems(reward=("success", "reward_model"))
    assert str(found) == "--reward reward_model: this source is added by --reward_pretrain"
    (found,) = problems(rm_model_pay="final")
    assert "--rm_model_pay final: " in found
    assert problems(reward_pretrain=str(reward_folder), rm_model_batch_size=8) == []
    assert "reward_model" not in reward_names() and "rm_model" in reward_names()
