"""Schedules for the weights of reward components."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlvla.utils.errors import ConfigError

SHAPES = ("linear", "cosine", "step")


def fraction_done(index: int, total: int) -> float:
    """Training progress at iteration `index` of `total`: 0 at the first, 1 at the last."""
    return index / (total - 1) if total > 1 else 0.0


@dataclass(frozen=True)
class WeightSchedule:
    """A factor that changes from `start` to `end`.

    Attributes:
        shape: "linear", "cosine" (slow at both ends) or "step" (switches to `end` halfway).
        start, end: factors at the first and the last iteration.
    """

    shape: str
    start: float
    end: float

    def at(self, fraction: float) -> float:
        """The factor at `fraction` (0..1) of training."""
        if self.shape == "step":
            share = float(fraction >= 0.5)
        else:
            share = fraction if self.shape == "linear" else (1 - math.cos(math.pi * fraction)) / 2
        return self.start + share * (self.end - self.start)


def parse_schedules(specs: Sequence[str], components: Collection[str]) -> dict[str, WeightSchedule]:
    """`["rm:linear:1.0:0.1"]` -> `{"rm": WeightSchedule("linear", 1.0, 0.1)}`.

    Raises:
        ConfigError: malformed schedules and unknown components (all reported at once).
    """
    schedules: dict[str, WeightSchedule] = {}
    problems = []
    for spec in specs:
        name, _, rest = spec.partition(":")
        fields = rest.split(":")
        if name not in components:
            problems.append(
                f"--reward_schedule {spec}: there is no component '{name}'; --reward has: {', '.join(components)}"
            )
        elif name in schedules:
            problems.append(f"--reward_schedule {spec}: '{name}' is given twice")
        elif len(fields) != 3 or fields[0] not in SHAPES:
            problems.append(
                f"--reward_schedule {spec}: write NAME:SHAPE:START:END with SHAPE one of {', '.join(SHAPES)}, e.g. "
                f"{name}:linear:1.0:0.1"
            )
        else:
            try:
                start, end = float(fields[1]), float(fields[2])
            except ValueError:
                start = end = math.nan
            if not (math.isfinite(start) and math.isfinite(end)):
                problems.append(f"--reward_schedule {spec}: START and END must be finite numbers")
            schedules[name] = WeightSchedule(fields[0], start, end)
    if problems:
        raise ConfigError(problems)
    return schedules
