"""Perturbations of observations and initial states, to evaluate generalization. Needs no simulator.

Each is written KIND=LEVEL. Random draws depend on the task and the initial state only, not on the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlvla.envs.options import SuiteOptions
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import Problem

# Kind -> effect of LEVEL, which lies in (0, 1], or is an integer up to the maximum in `COUNTED`.
KINDS = {
    "camera": "moves cameras by up to 10 LEVEL cm (on a hand: 2 LEVEL cm) and turns them by up to 10 LEVEL degrees",
    "light": "changes the color of each light, and its brightness by up to 70 LEVEL %",
    "texture": "mixes a random color into static geometry, with share LEVEL",
    "distractor": "adds LEVEL purely visual objects, 1 to 8",
    "instruction": "paraphrase number LEVEL of the instruction, 1 or 2",
    "initial_state": "samples object positions from ranges 1 + LEVEL times as wide",
}
COUNTED = {"distractor": 8, "instruction": 2}


@dataclass(frozen=True)
class Surface:
    """A horizontal rectangle on which objects can stand: corners `low` and `high` [2] and its height, in meters."""

    low: tuple[float, float]
    high: tuple[float, float]
    height: float


@dataclass(frozen=True)
class PerturbedOptions(SuiteOptions):
    """Options of a suite that can be perturbed.

    Attributes:
        perturb: KIND=LEVEL, see `KINDS`.
    """

    perturb: tuple[str, ...] = arg(
        (),
        "perturbations, all applied together; " + "; ".join(f"{name}: {text}" for name, text in KINDS.items()),
        nargs="+",
        metavar="KIND=LEVEL",
    )

    def problems(self) -> list[Problem]:
        """All problems of the values."""
        return super().problems() + perturbation_problems(self.perturb)


def levels(perturb: Sequence[str]) -> Mapping[str, float]:
    """Parse valid values of `--perturb`: `["camera=0.5"]` -> {"camera": 0.5}."""
    return {kind: float(level) for kind, _, level in (item.partition("=") for item in perturb)}


def perturbation_problems(perturb: Sequence[str]) -> list[Problem]:
    """Validation errors of the values of `--perturb`."""
    problems, kinds = [], [item.partition("=")[0] for item in perturb]
    for index, item in enumerate(perturb):
        kind, _, level = item.partition("=")
        reason = _problem_of(kind, level)
        if reason is None and kind in kinds[:index]:
            reason = "duplicate", f"{kind} is given twice"
        if reason is not None:
            problems.append(Problem("perturb", reason[0], f"--perturb {item}: {reason[1]}"))
    return problems


def _problem_of(kind: str, text: str) -> tuple[str, str] | None:
    if kind not in KINDS:
        return "unknown_name", f"there is no perturbation {kind or 'without a name'}; there are {', '.join(KINDS)}"
    try:
        level = float(text)
    except ValueError:
        return "malformed", f"write KIND=LEVEL, e.g. {kind}={1 if kind in COUNTED else 0.5}"
    most = COUNTED.get(kind)
    if most is not None and level not in range(1, most + 1):
        return "out_of_range", f"the level must be an integer from 1 to {most}"
    if most is None and not 0.0 < level <= 1.0:
        return "out_of_range", "the level must be above 0 and at most 1"
    return None
