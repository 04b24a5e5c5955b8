"""What is refused because of the way in which a policy draws its actions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlvla.commands.ppo_checks import quantity_problems
from rlvla.commands.train_sft import supervision_problems
from rlvla.models.action_heads import missing_of
from rlvla.models.actor import policy_spec
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.options import Entry
from rlvla.trainer.algorithm import Algorithm
from rlvla.trainer.algorithm_config import LEARNERS, AlgorithmConfig
from rlvla.trainer.supervised.config import SFTConfig


@pytest.mark.parametrize(
    ("flag", "value"),
    [("advantage_estimator", "optimal_token_baseline"), ("policy_loss", "dppo_tv"), ("policy_loss", "dppo_kl")],
)
def test_what_densities_do_not_have_is_refused_by_name(flag: str, value: str) -> None:
    algorithm = AlgorithmConfig(**{flag: value})
    (problem,) = quantity_problems(policy_spec(OpenVLAConfig(model_variant="oft_regression")), algorithm)
    assert (problem.flag, problem.reason) == (flag, "mismatch") and value in problem
    assert not quantity_problems(policy_spec(OpenVLAConfig()), algorithm)


def test_what_densities_have_is_not_refused() -> None:
    algorithm = AlgorithmConfig(entropy_loss_coef=0.01, init_kl_coef=0.1, kl_estimator="full", policy_loss="clip_cov")
    assert not quantity_problems(policy_spec(OpenVLAConfig(model_variant="oft_regression")), algorithm)


def test_a_learner_without_critic_and_reference_needs_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(policy_spec(OpenVLAConfig()), missing={"critic": "it has none", "kl": "it has none"})
    flags = {"init_kl_coef": 0.1, "kl_estimator": "full"}
    assert {p.flag for p in quantity_problems(spec, AlgorithmConfig(**flags))} == {
        "advantage_estimator",
        "kl_estimator",
    }
    monkeypatch.setitem(LEARNERS._entries, "cloning", Entry(Algorithm))
    assert not quantity_problems(spec, AlgorithmConfig(algorithm="cloning", **flags))


def test_losses_of_the_other_kind_of_policy_are_refused() -> None:
    assert (
        supervision_problems(missing_of("oft_regression"), SFTConfig(label_smoothing=0.1))[0].flag == "label_smoothing"
    )
    assert supervision_problems(missing_of("oft"), SFTConfig(sft_loss="l1"))[0].flag == "sft_loss"
    assert not supervision_problems(missing_of("oft_regression"), SFTConfig(sft_loss="nll"))
