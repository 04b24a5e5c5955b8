"""A critic on privileged state: its network, and its values in training rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlvla.models.actor import Actor
from rlvla.models.state_critic import StateCritic
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.scoring import Networks
from rlvla.trainer.updater import Updater
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from tests.support.experience import SAMPLES, A, D, OneRank, PlainEngine
from tests.support.updates import OPTIM, batch

C = 5


def with_states() -> list:
    """Episodes of two tasks, of which one has a shorter state."""
    draw = torch.Generator().manual_seed(0)
    widths = [C, C, C - 2, C, C - 2]
    return [
        replace(sample, critic_state=torch.rand(sample.num_decisions + 1, width, generator=draw))
        for sample, width in zip(SAMPLES, widths)
    ]


@pytest.fixture(scope="module")
def critic() -> StateCritic:
    model = StateCritic(C, A * D)
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder)


def test_it_starts_at_zero_the_same_in_every_run_without_a_draw_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    one = StateCritic(C, A * D).state_dict()
    assert torch.equal(torch.get_rng_state(), before) and not one["head.weight"].any()
    torch.rand(1)
    two = StateCritic(C, A * D).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_instruction_tells_tasks_apart(actor: Actor, critic: StateCritic) -> None:
    rows = batch(actor).with_fields(critic_state=torch.ones(7, C))
    values = critic(**critic.score(rows))
    assert values.shape == (7, A * D)
    assert torch.allclose(values[0], values[1], atol=1e-6) and not torch.allclose(values[0], values[6], atol=1e-3)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_rows_hold_its_values_of_normalized_states(actor: Actor, critic: StateCritic, bootstrap: bool) -> None:
    """The elapsed share counts only where nothing follows the step limit; truncated episodes end with a value."""
    config = AlgorithmConfig(critic_input="state", bootstrap_truncated=bootstrap)
    networks = Networks(PlainEngine(actor), PlainEngine(critic), None)
    maker = ExperienceMaker(networks, OneRank(), BatchConfig(micro_rollout_batch_size=3), config)
    samples = with_states()
    rows, metrics = maker.make(samples, kl_coef=0.0)
    pad = torch.nn.functional.pad
    states = [pad(sample.critic_state, (0, C - sample.critic_state.shape[1])).double() for sample in samples]
    if bootstrap:
        for state in states:
            state[:, 0] = 0.0
    seen = torch.cat([state[:-1] for state in states])
    mean, std = seen.mean(0), seen.std(0, correction=0).clamp(min=0.02)
    torch.testing.assert_close(rows.critic_state, ((seen - mean) / std).float(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        expected = critic(**critic.score(rows))
    torch.testing.assert_close(rows.values, expected, atol=1e-5, rtol=1e-5)
    assert "critic/vf_explained_var" in metrics.reduce(OneRank())
    last = ((states[1][-1:] - mean) / std).float()
    with torch.no_grad():
        value = critic(**critic.score(rows.index(torch.tensor([0])).with_fields(critic_state=last)))[0, 0]
    end = 6  # last decision of the truncated second episode, whose last action has no reward
    target = float(rows.returns[end, A * D - D])
    assert target == pytest.approx(float(value) if bootstrap else 0.0, abs=1e-4)


def test_a_step_does_not_depend_on_the_micro_batch_size(
    actor: Actor, critic: StateCritic, monkeypatch: pytest.MonkeyPatch
) -> None:
    sgd = lambda parameters, lr, betas, weight_decay: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
    monkeypatch.setattr(torch.optim, "AdamW", sgd)
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=0))
    rows = batch(actor).with_fields(critic_state=torch.randn(7, C, generator=torch.Generator().manual_seed(0)))
    after = []
    for micro in (2, 100):
        engine = strategy.prepare(copy.deepcopy(critic), OPTIM)
        updater = Updater(strategy, BatchConfig(micro_train_batch_size=micro), AlgorithmConfig(), actor)
        updater.value_step(engine, rows, Metrics())
        after.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    for name, before in critic.named_parameters():
        torch.testing.assert_close(after[0][name], after[1][name], atol=1e-6, rtol=1e-4)
        assert "embedding" in name or "mlp" in name or not torch.equal(after[0][name], before), name
