"""Learning-rate schedules, and ending them early."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import get_scheduler

from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.schedules import SCHEDULERS, scheduled


def schedule(factor: partial) -> torch.optim.lr_scheduler.LambdaLR:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@pytest.mark.parametrize("warmup", [0, 1, 7, 50])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_factors_are_those_of_transformers_to_the_bit(name: str, warmup: int) -> None:
    theirs = get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0),
        num_warmup_steps=warmup,
        num_training_steps=50,
    )
    (factor,) = theirs.lr_lambdas
    assert [scheduled(name, warmup, 50, step) for step in range(70)] == [factor(step) for step in range(70)]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rate_falls_linearly_to_zero(name: str) -> None:
    scheduler = schedule(partial(scheduled, name, 2, 100))
    engine = Engine(SimpleNamespace(lr_scheduler=scheduler, get_lr=scheduler.get_last_lr), StrategyConfig())

    def step() -> float:
        scheduler.optimizer.step()
        scheduler.step()
        return engine.learning_rate

    for _ in range(40):
        before = step()
    engine.cool_down(4)
    rates = [step() for _ in range(6)]
    assert before > 0 and rates == pytest.approx([before * share for share in (0.75, 0.5, 0.25, 0.0, 0.0, 0.0)])


def test_a_scaled_learning_rate_stays_scaled_and_is_part_of_the_state() -> None:
    scheduler, plain = (schedule(partial(scheduled, "linear", 2, 100)) for _ in range(2))
    engine = Engine(
        SimpleNamespace(lr_scheduler=scheduler, get_lr=lambda: [scheduler.optimizer.param_groups[0]["lr"]]),
        StrategyConfig(),
    )
    for number in range(20):
        if number in (5, 9):
            engine.scale_learning_rate(1.5)
        for one in (scheduler, plain):
            one.optimizer.step()
            one.step()
        factor = 1.5 ** ((number >= 5) + (number >= 9))
        assert engine.learning_rate == pytest.approx(factor * plain.get_last_lr()[0])
    resumed = schedule(partial(scheduled, "linear", 2, 100))
    resumed.load_state_dict(scheduler.state_dict())
    for one in (scheduler, resumed):
        one.optimizer.step()
        one.step()
    assert resumed.get_last_lr() == scheduler.get_last_lr()
