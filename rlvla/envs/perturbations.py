"""Perturbations of what a policy sees and starts from, to evaluate how far it generalises. Needs no simulator.

Each is written KIND=LEVEL. What it draws depends on the task and the initial state alone, not on the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlvla.envs.options import SuiteOptions
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import Problem

# Kind -> what LEVEL means. Levels lie in (0, 1], except where a number of things is counted.
KINDS = {
    "camera": "moves cameras by up to 10 LEVEL cm (on a hand: 2 LEVEL cm) and turns them by up to 10 LEVEL degrees",
    "light": "changes the color of each light, and its brightness by up to 70 LEVEL %",
    "texture": "mixes a random color into what does not move, with share LEVEL",
    "distractor": "LEVEL objects, 1 to 8, stand around; they are seen, not felt",
    "instruction": "the task in other words: paraphrase LEVEL, 1 or 2",
    "initial_state": "objects are placed from ranges that are 1 + LEVEL times as wide",
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
        "perturbations, all at once; " + "; ".join(f"{name}: {text}" for name, text in KINDS.items()),
        nargs="+",
        metavar="KIND=LEVEL",
    )

    def problems(self) -> list[Problem]:
        """All problems of the values."""
        return super().problems() + perturbation_problems(self.perturb)


def levels(words: Sequence[str]) -> Mapping[str, float]:
    """`["camera=0.5"]` -> {"camera": 0.5}; the words must have no problems."""
    return {kind: float(level) for kind, _, level in (word.partition("=") for word in words)}


def perturbation_problems(words: Sequence[str]) -> list[Problem]:
    """Everything wrong with the values of `--perturb`."""
    found, seen = [], set[str]()
    for word in words:
        kind, _, text = word.partition("=")
        reason = _problem_of(kind, text)
        if reason is None and kind in seen:
            reason = "duplicate", f"{kind} is given twice"
        if reason is not None:
            found.append(Problem("perturb", reason[0], f"--perturb {word}: {reason[1]}"))
        seen.add(kind)
    return found


def _problem_of(kind: str, text: str) -> tuple[str, str] | None:
    if kind not in KINDS:
        return "unknown_name", f"there is no perturbation {kind or 'without a name'}; there are {', '.join(KINDS)}"
    try:
        level = float(text)
    except ValueError:
        return "malformed", f"write KIND=LEVEL, e.g. {kind}={1 if kind in COUNTED else 0.5}"
    most = COUNTED.get(kind)
    if most is not None and level not in range(1, most + 1):
        return "out_of_range", f"the level must be a whole number from 1 to {most}"
    if most is None and not 0.0 < level <= 1.0:
        return "out_of_range", "the level must be above 0 and at most 1"
    return None
