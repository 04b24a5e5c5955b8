"""Optimiser steps: invariance to the micro-batch size, the ratio check, masks that contribute nothing."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch

from rlvla.algorithms.columns import Columns
from rlvla.models.actor import Actor
from rlvla.models.value_models import Critic
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.updater import RatioError, Updater
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from tests.support.two_ranks import run
from tests.support.updates import OPTIM, D, T, batch


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder)


@pytest.fixture(scope="module")
def strategy() -> DeepspeedStrategy:
    return DeepspeedStrategy(StrategyConfig())


@pytest.fixture(autouse=True)
def plain_gradient_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam divides by the gradient's size and would turn rounding noise of tiny gradients into whole steps."""
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda parameters, lr, betas, weight_decay: torch.optim.SGD(parameters, lr=lr)
    )


def step(
    strategy, actor, rows, micro: int, level: str = "token", mode: str = "token-mean", first: bool = True, **kw
) -> tuple[dict, Metrics]:
    """Parameters after one policy step."""
    engine = strategy.prepare(copy.deepcopy(actor), OPTIM)
    algorithm = AlgorithmConfig.from_flags(log_prob_level=level, loss_agg_mode=mode, entropy_loss_coef=0.1, **kw)
    means = Metrics()
    updater = Updater(strategy, BatchConfig(micro_train_batch_size=micro), algorithm, actor)
    updater.policy_step(engine, rows, 0.2, means, first_of_iteration=first)
    return {k: v.clone() for k, v in engine.module.state_dict().items()}, means.reduce(strategy)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_micro_batch_size_changes_nothing(strategy, actor, level: str, mode: str) -> None:
    rows = batch(actor)
    kl = {"use_kl_loss": True, "init_kl_coef": 0.2}
    one, metrics_one = step(strategy, actor, rows, micro=7, level=level, mode=mode, **kl)
    many, metrics_many = step(strategy, actor, rows, micro=2, level=level, mode=mode, **kl)
    start = actor.state_dict()
    moved = max(float((one[k] - start[k]).abs().max()) for k in one)
    assert moved > 1e-3, "the step must do something"
    assert all(torch.allclose(one[k], many[k], atol=1e-6) for k in one)
    for name in metrics_one:
        assert metrics_many[name] == pytest.approx(metrics_one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("level", ["token", "action"])
@pytest.mark.parametrize(
    ("loss", "share"), [("kl_cov", 0.1), ("clip_cov", 0.1), ("clip_cov", 1e-9)], ids=lambda value: str(value)
)
def test_tokens_are_chosen_over_the_whole_step(strategy, actor, loss: str, share: float, level: str) -> None:
    """Each micro-batch would choose one token at least, and others by its own means."""
    rows = batch(actor)
    rows = rows.with_fields(old_log_probs=rows.old_log_probs + torch.linspace(-0.3, 0.3, T))
    results, shares = [], set()
    for micro in (7, 2, 1):
        torch.manual_seed(5)
        flags = {"policy_loss": loss, "cov_ratio": share, "cov_low": -100.0, "cov_high": 100.0}
        after, metrics = step(strategy, actor, rows, micro, level, first=False, **flags)
        results.append(after)
        shares.add(round(metrics["actor/pg_clipfrac"], 6))
    columns = Columns(level, T, D).any(rows.policy_mask)
    assert shares == {round(max(1, int(share * int(columns.sum()))) / int(columns.sum()), 6)}
    for many in results[1:]:
        assert all(torch.allclose(results[0][k], many[k], atol=1e-6) for k in many)


def test_the_choice_of_tokens_is_drawn_anew_in_every_step(strategy, actor) -> None:
    flags = {"policy_loss": "clip_cov", "cov_ratio": 0.3, "cov_low": -100.0, "cov_high": 100.0}
    torch.manual_seed(5)
    first, again = (step(strategy, actor, batch(actor), 7, **flags)[0] for _ in range(2))
    assert any(not torch.allclose(first[k], again[k], atol=1e-6) for k in first)


def test_an_empty_row_contributes_nothing(strategy, actor) -> None:
    rows = batch(actor)
    with_empty, _ = step(strategy, actor, rows, micro=7)
    without, _ = step(strategy, actor, rows.index(torch.tensor([0, 1, 2, 3, 5, 6])), micro=7)
    assert all(torch.allclose(with_empty[k], without[k], atol=1e-6) for k in without)


def test_first_update_gradient_is_that_of_reinforce(strategy, actor) -> None:
    """At ratio 1 the PPO gradient is -A grad log pi averaged over valid tokens: checked by plain autograd."""
    rows = batch(actor)
    twin = copy.deepcopy(actor)
    log_probs = twin(**twin.score(rows, 1.0))["log_probs"]
    loss = -(log_probs * rows.advantages)[rows.policy_mask].mean()
    loss.backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    engine = strategy.prepare(copy.deepcopy(actor), OPTIM)
    means = Metrics()
    updater = Updater(strategy, BatchConfig(micro_train_batch_size=3), AlgorithmConfig(), actor)
    updater.policy_step(engine, rows, 0.0, means, first_of_iteration=True)
    assert means.reduce(strategy)["actor/grad_norm"] == pytest.approx(float(wanted), rel=1e-3)


def test_a_ratio_that_is_not_one_stops_the_run(strategy, actor) -> None:
    rows = batch(actor)
    shifted = rows.with_fields(old_log_probs=rows.old_log_probs + 0.01)
    with pytest.raises(RatioError, match="must be 1"):
        step(strategy, actor, shifted, micro=7)


@pytest.mark.parametrize(("share", "stops"), [(1.0, True), (0.1, False)])
def test_in_bfloat16_the_mean_of_the_ratios_counts(strategy, actor, share: float, stops: bool) -> None:
    """A single ratio is off by rounding; a wrong temperature moves all of them."""
    rows = batch(actor)
    updater = Updater(strategy, BatchConfig(), AlgorithmConfig(), actor)
    off = 0.3 * (torch.rand(rows.old_log_probs.shape, generator=torch.Generator().manual_seed(0)) <= share)
    check = (rows.old_log_probs + off, rows.old_log_probs, rows.policy_mask, torch.bfloat16)
    if stops:
        with pytest.raises(RatioError, match="on average .tolerance 0.1 for torch.bfloat16"):
            updater._check_ratio(*check)
    else:
        updater._check_ratio(*check)


def ratios_on_a_rank(rank: int, policy: str) -> list[str]:
    """What each rank is told where the old log-probs of rank 1 alone, of rank 0 alone, and of none are wrong."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    strategy, actor = DeepspeedStrategy(StrategyConfig()), Actor.from_pretrained(policy)
    told = []
    for wrong_rank, shift in ((1, -0.01), (0, math.nan), (None, 0.0)):
        rows = batch(actor)
        if rank == wrong_rank:
            rows = rows.with_fields(old_log_probs=rows.old_log_probs + shift)
        try:
            step(strategy, actor, rows, micro=4)
            told.append("")
        except RatioError as error:
            told.append(str(error))
    return told


@pytest.mark.slow
def test_a_ratio_that_is_not_one_on_one_rank_stops_all_of_them(policy_folder: Path) -> None:
    first, second = run(ratios_on_a_rank, str(policy_folder))
    assert first == second, "nobody waits for a rank that has left the others"
    assert "off by 0.01 (" in first[0] and "off by inf (" in first[1] and first[2] == ""


def test_value_step_moves_values_towards_returns(strategy, actor, policy_folder: Path) -> None:
    critic = Critic.from_pretrained(policy_folder)
    rows = batch(actor).with_fields(values=torch.zeros(7, T))
    engine = strategy.prepare(critic, dataclasses.replace(OPTIM, learning_rate=0.02))
    updater = Updater(strategy, BatchConfig(micro_train_batch_size=2), AlgorithmConfig(value_clip=0.0), actor)

    def error() -> float:
        with torch.no_grad():
            return float((critic(**critic.score(rows)) - rows.returns)[rows.value_mask].square().mean())

    before, means = error(), Metrics()
    for _ in range(20):
        updater.value_step(engine, rows, means)
    assert error() < 0.95 * before
    assert means.reduce(strategy)["critic/vf_loss"] == pytest.approx(before / 2, rel=0.5)


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_every_schedule_warms_up(strategy: DeepspeedStrategy, scheduler: str) -> None:
    engine = strategy.prepare(torch.nn.Linear(2, 1), OptimConfig(0.1, (0.9, 0.999), 0.0, scheduler, 0.5, 4))
    rates = []
    for _ in range(3):
        rates.append(engine.learning_rate)
        engine.backward(engine(torch.ones(1, 2)).sum(), last=True)
    assert rates == pytest.approx([0.0, 0.05, 0.1])


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_the_ratio_of_the_first_update_is_one(strategy, actor, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old log-probs as experience making computes them, other micro-batches than in the update, float32."""
    from rlvla.algorithms.policy_losses.clipped import ppo
    from rlvla.trainer import updater as updates
    from rlvla.trainer.experience_maker import ExperienceMaker
    from rlvla.trainer.scoring import Networks
    from tests.support.experience import SAMPLES

    seen = []

    def spy(new, old, advantages, mask, **options):
        seen.append(((new - old).detach().exp() - 1)[mask].abs().max())
        return ppo(new, old, advantages, mask, **options)

    monkeypatch.setattr(updates.POLICY_LOSSES, "get", lambda name: spy)
    engine = strategy.prepare(copy.deepcopy(actor), dataclasses.replace(OPTIM, learning_rate=0.0))
    algorithm = AlgorithmConfig(advantage_estimator="grpo", log_prob_level=level)
    making = BatchConfig(micro_rollout_batch_size=5)
    rows, _ = ExperienceMaker(Networks(engine, None, None), strategy, making, algorithm).make(SAMPLES, 0.0)
    updater = Updater(strategy, BatchConfig(micro_train_batch_size=3), algorithm, actor)
    updater.policy_step(engine, rows, 0.0, Metrics(), first_of_iteration=True)
    assert len(seen) == 6 and float(max(seen)) < 1e-5


def test_the_exact_kl_loss_is_that_of_plain_autograd(strategy, actor) -> None:
    """Gradient of the coefficient times the mean KL over all ids, without advantages."""
    rows = batch(actor)
    reference = torch.log_softmax(torch.randn(7, T, 256, generator=torch.Generator().manual_seed(3)), dim=-1)
    rows = rows.with_fields(advantages=torch.zeros(7, T), reference={"log_probs": reference})
    twin = copy.deepcopy(actor)
    every = twin(**twin.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"]
    kl = (every.exp() * (every - reference)).sum(-1)[rows.policy_mask].mean()
    (0.2 * kl).backward()
    algorithm = AlgorithmConfig(init_kl_coef=0.2, use_kl_loss=True, kl_estimator="full")
    metrics, engine = Metrics(), strategy.prepare(copy.deepcopy(actor), OPTIM)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    Updater(strategy, BatchConfig(micro_train_batch_size=3), algorithm, actor).policy_step(
        engine, rows, 0.2, metrics, first_of_iteration=False
    )
    assert metrics.reduce(strategy)["actor/kl_loss"] == pytest.approx(float(kl.detach()), rel=1e-4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    scale = min(1.0, 1.0 / float(norm))  # the gradient norm is clipped to 1
    grads = dict(twin.named_parameters())
    for name, parameter in engine.module.named_parameters():
        wanted = before[name] - (0.0 if grads[name].grad is None else 0.1 * scale * grads[name].grad)
        assert torch.allclose(parameter, wanted, atol=1e-5), name
