"""A small engine and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from rlvla.checkpoints.training import save_checkpoint
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

OPTIM = OptimConfig(0.1, (0.9, 0.999), 0.0, "linear", 0.0, 10)


def trained_engine(strategy: DeepspeedStrategy, steps: int, seed: int = 0):
    torch.manual_seed(seed)
    engine = strategy.prepare(torch.nn.Linear(3, 2), OPTIM)
    for step in range(steps):
        engine.backward(engine(torch.full((4, 3), float(step + 1))).square().mean(), last=True)
    return engine


def save(strategy: DeepspeedStrategy, folder: Path, iteration: int, engine=None, keep: int = 2) -> None:
    engines = {"net": engine or trained_engine(strategy, 0)}
    save_checkpoint(folder, iteration, engines, {"totals": {"n": iteration}}, strategy, keep)
