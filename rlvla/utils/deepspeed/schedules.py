"""Learning-rate schedules: warm-up, then constant, linear or cosine decay to 0.

Same factors as `transformers.get_scheduler`, whose import would take longer than starting a run.
"""

from __future__ import annotations

import math

SCHEDULERS = ("constant", "linear", "cosine")


def scheduled(scheduler: str, warmup: int, total: int, step: int) -> float:
    """Factor of the learning rate at a step.

    Args:
        scheduler: one of `SCHEDULERS`.
        warmup: steps in which the factor rises linearly from 0.
        total: steps of the whole schedule.
        step: counted from 0.
    """
    if step < warmup:
        return step / warmup
    if scheduler == "constant":
        return 1.0
    decay = max(1, total - warmup)
    if scheduler == "linear":
        return max(0.0, (total - step) / decay)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / decay))))


def falling(factor: float, start: int, steps: int, step: int) -> float:
    """A factor that falls linearly to 0, from `factor` at step `start`."""
    return factor * max(0.0, 1.0 - (step - start) / steps)
