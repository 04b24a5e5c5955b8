"""Measurements during supervised training: when they are made, which is the best, and when it is time to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlvla.evaluation.results import Rate

MOST, LEAST = 20, 5  # measurements of a run, unless their distance is given
TOLERANCE = 0.005  # a loss that is lower by less than this share of itself is not an improvement


@dataclass(frozen=True)
class Quality:
    """How well a policy predicts the demonstrated actions of some rows.

    Attributes:
        loss: mean supervised loss per column.
        accuracy: share of the columns whose most likely outcome is right.
        errors: mean absolute error of greedy actions per action dimension, in units of the environment; () if they
            were not computed.
    """

    loss: float
    accuracy: float
    errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Baselines:
    """What predictions without images reach on the same rows.

    Attributes:
        majority_accuracy: accuracy of the most frequent token of each column; None if actions are not tokens.
        median_errors: as `Quality.errors`, of the median action; () if they were not computed.
        neighbor_errors: of the action at the nearest proprioception in the training rows, of the same instruction and
            another episode; () without proprioception.
    """

    majority_accuracy: float | None = None
    median_errors: tuple[float, ...] = ()
    neighbor_errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Where the training stands after a step.

    Attributes:
        step: optimizer steps taken.
        epoch: passes over the training rows.
        train: on training rows.
        heldout: on held-out rows; None if there are none.
        success: greedy success at end on initial states that are not in the data; None if no episodes were played.
        learned: sum of the learning rates of all steps so far; 0 if it was not recorded.
    """

    step: int
    epoch: float
    train: Quality
    heldout: Quality | None = None
    success: Rate | None = None
    learned: float = 0.0


class History:
    """The measurements of a run.

    Args:
        patience: measurements without an improvement after which training should stop; 0: never.

    Attributes:
        measurements: in order.
    """

    def __init__(self, patience: int = 0):
        self._patience = patience
        self.measurements: list[Measurement] = []

    def add(self, measurement: Measurement) -> bool:
        """Append a measurement; returns whether it is the best so far."""
        self.measurements.append(measurement)
        return self.best is measurement

    @property
    def best(self) -> Measurement | None:
        """The best measurement after at least one step.

        Highest success, ties by lowest held-out loss, then earliest; lowest held-out loss if no episodes were played.
        """
        trained = [m for m in self.measurements if m.step and (m.heldout or m.success)]
        played = [m for m in trained if m.success is not None]
        return min(played or trained, key=_rank, default=None)

    @property
    def exhausted(self) -> bool:
        """Whether neither held-out loss nor success has improved in as many measurements as the patience."""
        losses = [m.heldout.loss for m in self.measurements if m.heldout is not None]
        failures = [1.0 - m.success.rate for m in self.measurements if m.success is not None]
        waited = [since_best(losses, TOLERANCE)] * bool(losses) + [since_best(failures)] * bool(failures)
        return bool(self._patience and waited) and min(waited) >= self._patience


def _rank(measurement: Measurement) -> tuple[float, float]:
    success, heldout = measurement.success, measurement.heldout
    return -success.rate if success else 0.0, heldout.loss if heldout else 0.0


def since_best(values: Sequence[float], tolerance: float = 0.0) -> int:
    """Number of values after the last one that was lower than all before it by a share `tolerance` of itself."""
    waited, best = 0, float("inf")
    for value in values:
        if value < best - tolerance * abs(value):
            waited, best = 0, value
        else:
            waited += 1
    return waited


def measured_steps(total: int, per_epoch: int, every: int | None) -> set[int]:
    """The steps after which held-out rows are measured: also before the first and after the last one.

    Args:
        total: optimizer steps of the run.
        per_epoch: optimizer steps per epoch.
        every: steps between measurements; None: one per epoch, but about 5 to 20 in a run.
    """
    if every is None:
        epochs = max(1, total // per_epoch)
        every = -(-epochs // MOST) * per_epoch if epochs >= LEAST else max(1, total // LEAST)
    return {0, *range(every, total + 1, every), total}


def played_steps(total: int, per_epoch: int, epochs: float) -> set[int]:
    """The steps after which episodes are played: every so many epochs, and after the last step; none for 0 epochs."""
    every = max(1, round(epochs * per_epoch))
    return {*range(every, total + 1, every), total} if epochs else set()
