"""Ending a learning-rate schedule early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import get_scheduler

from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine


@pytest.mark.parametrize("name", ["cosine", "linear", "constant_with_warmup"])
def test_the_learning_rate_falls_linearly_to_zero(name: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=100)
    engine = Engine(SimpleNamespace(lr_scheduler=scheduler, get_lr=scheduler.get_last_lr), StrategyConfig())

    def step() -> float:
        optimizer.step()
        scheduler.step()
        return engine.learning_rate

    for _ in range(40):
        before = step()
    engine.cool_down(4)
    rates = [step() for _ in range(6)]
    assert before > 0 and rates == pytest.approx([before * share for share in (0.75, 0.5, 0.25, 0.0, 0.0, 0.0)])
