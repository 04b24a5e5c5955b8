"""`--share_backbone`: the loss of the one network, and whole runs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlvla.checkpoints.training import list_checkpoints
from rlvla.models.actor import Actor, ActorCritic
from rlvla.models.value_models import Critic
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.updater import Updater
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.files import read_metrics
from tests.support import resume_cases
from tests.support.equality import assert_equal_to_the_bit
from tests.support.updates import OPTIM, batch

VF_COEF = 0.3


@pytest.fixture
def plain_gradient_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda parameters, lr, betas, weight_decay: torch.optim.SGD(parameters, lr=lr)
    )


def change(model: torch.nn.Module, after: torch.nn.Module, rename: dict[str, str]) -> dict[str, torch.Tensor]:
    """What a step has added to each parameter, under the names of the shared model."""
    moved, found = dict(after.named_parameters()), {}
    for name, before in model.named_parameters():
        head, _, rest = name.partition(".")
        found[f"{rename.get(head, head)}.{rest}"] = (moved[name] - before).detach()
    return found


@pytest.mark.parametrize(("micro", "stage"), [(3, 0), (100, 0), (3, 2)])
@pytest.mark.parametrize("mode", ["token-mean", "traj-mean-token-mean"])
@pytest.mark.usefixtures("plain_gradient_descent")
def test_its_gradient_is_that_of_the_policy_and_a_share_of_the_critics(
    policy_folder: Path, micro: int, stage: int, mode: str
) -> None:
    """Under plain gradient descent the steps of two separate networks with the same weights add up."""
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage, max_norm=1e6))
    actor, critic = Actor.from_pretrained(policy_folder), Critic.from_pretrained(policy_folder)
    shared = ActorCritic.from_pretrained(policy_folder)
    torch.nn.init.normal_(shared.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    critic.head.load_state_dict(shared.value_head.state_dict())
    rows, metrics = batch(actor), [Metrics(), Metrics()]

    def step(model: torch.nn.Module, kind: str, into: Metrics, **more: float) -> torch.nn.Module:
        engine = strategy.prepare(copy.deepcopy(model), OPTIM)
        config = AlgorithmConfig(entropy_loss_coef=0.1, loss_agg_mode=mode, **more)
        updater = Updater(strategy, BatchConfig(micro_train_batch_size=micro), config, actor)
        if kind == "policy":
            updater.policy_step(engine, rows, 0.0, into, first_of_iteration=True)
        else:
            updater.value_step(engine, rows, into)
        return engine.module

    ours = change(shared, step(shared, "policy", metrics[0], share_backbone=True, vf_coef=VF_COEF), {})
    policy = change(actor, step(actor, "policy", metrics[1]), {})
    value = change(critic, step(critic, "value", metrics[1]), {"head": "value_head"})
    assert ours.keys() == policy.keys() | value.keys()
    for name, moved in ours.items():
        expected = policy.get(name, 0.0) + VF_COEF * value[name]
        assert torch.allclose(moved, expected, atol=1e-6, rtol=1e-4), name
    assert float(ours["value_head.weight"].abs().max()) > 1e-4
    body = "vla.projector.fc1.weight"
    assert float(value[body].abs().max()) > 1e-4 and float(policy[body].abs().max()) > 1e-4
    found, expected = (m.reduce(strategy) for m in metrics)
    for name in ("actor/pg_loss", "actor/entropy", "critic/vf_loss", "critic/vf_clipfrac"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    assert "critic/grad_norm" not in found


@pytest.mark.parametrize(
    "more", [pytest.param([], marks=pytest.mark.nightly), ["--lora_rank", "4"]], ids=["all weights", "adapters"]
)
def test_stopping_and_continuing_changes_nothing(policy_folder: Path, tmp_path: Path, more: list[str]) -> None:
    """And the run learns values, has one engine, and ends with a plain policy."""
    resume_cases.CASES["shared"] = [*resume_cases.PPO, "--share_backbone", "--vf_coef", "0.2", *more]
    try:
        whole, parts = (resume_cases.case("shared", policy_folder, tmp_path / name) for name in ("whole", "parts"))
    finally:
        del resume_cases.CASES["shared"]
    resume_cases.run(whole)
    resume_cases.run(parts, stop_after=2)
    resume_cases.run([*parts, "--load_checkpoint"])
    assert_equal_to_the_bit(tmp_path / "parts", tmp_path / "whole")
    newest = list_checkpoints(tmp_path / "whole" / "checkpoints")[-1]
    assert (newest / "actor").is_dir() and not (newest / "critic").exists()
    records = [r for r in read_metrics(tmp_path / "whole") if "actor/entropy" in r]
    assert len(records) == 3 and all(r["critic/vf_loss"] > 0 for r in records)
    assert all(r["critic/values/std"] == 0 for r in records[:1]) and records[-1]["critic/values/std"] > 0
    exported, start = (load_file(f / "model.safetensors") for f in (tmp_path / "whole" / "policy", policy_folder))
    assert exported.keys() == start.keys()
