"""Sampling settings of flow-matching policies; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlvla.algorithms.choices import FLOW_METHODS as METHODS
from rlvla.algorithms.choices import FLOW_NOISY_STEPS, SCORES
from rlvla.utils.cli.flags import no_effect
from rlvla.utils.errors import Problem

EVAL_NOISES = ("sample", "zero")
MAX_STEPS = 1000
MATCHED_PAIRS = 8  # (noise, time) pairs per decision that is scored by flow matching
PREFIX = "flow_"  # of the settings among flags and in config.json


@dataclass(frozen=True)
class FlowSettings:
    """Sampling settings, in config.json and on the command line with the prefix `flow_`.

    Attributes:
        method: distribution of a noisy step: `sde`, `cps` or `noise`, or `ode` without noise; see
            docs/algorithms/flow-policies.md.
        noise_level: of `sde` and `cps`.
        steps: K, denoising steps.
        noisy_steps: `one` step per decision is noisy, or `all`.
        eval_noise: greedy decisions start from a random `sample`, or from `zero`.
        asked_scores: the `scores` that the run needs; neither in config.json nor a flag.
    """

    method: str = "sde"
    noise_level: float = 0.5
    steps: int = 4
    noisy_steps: str = "one"
    eval_noise: str = "sample"
    asked_scores: str = "log_probs"

    @property
    def scores(self) -> str:
        """Kind of score of a decision, one of `SCORES`: `asked_scores` if these settings allow it."""
        if self.method == "ode":
            return "matching"
        # A learned standard deviation would get no gradient from mirrored errors.
        possible = {"step_log_probs": self.noisy_steps == "all", "mirrored": not self.learns_std}
        return self.asked_scores if possible.get(self.asked_scores) else "log_probs"

    @property
    def evaluations(self) -> int:
        """Evaluations of the velocity for each decision that is scored."""
        return MATCHED_PAIRS if self.method == "ode" else self.steps if self.noisy_steps == "all" else 1

    @property
    def learns_std(self) -> bool:
        """Whether the standard deviation is a function of the observation."""
        return self.method == "noise"

    def problems(self) -> list[tuple[str, str]]:
        """Invalid values: (name of the setting, problem)."""
        choices = {"method": METHODS, "noisy_steps": FLOW_NOISY_STEPS, "eval_noise": EVAL_NOISES}
        choices["asked_scores"] = SCORES
        problems = []
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                problems.append((name, f"is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}"))
        if not 1 <= self.steps <= MAX_STEPS:
            problems.append(("steps", f"is {self.steps}; it must be between 1 and {MAX_STEPS}"))
        if not 0 < self.noise_level <= 1:
            problems.append(("noise_level", f"is {self.noise_level:g}; it must be above 0 and at most 1"))
        if self.method == "cps" and self.steps == 1:
            problems.append(("steps", "is 1, and the last step of cps has no noise; take more steps, or sde"))
        return problems

    def unread_problems(self, given: Mapping[str, Any]) -> list[Problem]:
        """Flags in `given` (name -> value) that have no effect with this `method`."""
        unread = {"ode": ("noise_level", "noisy_steps"), "noise": ("noise_level",)}.get(self.method, ())
        names = [PREFIX + name for name in unread if given.get(PREFIX + name) is not None]
        return [no_effect(name, given[name], f"--{PREFIX}method {self.method} does not use it") for name in names]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FlowSettings:
        """From entries with the prefix; missing ones and None keep their default."""
        given = {field.name: values.get(PREFIX + field.name) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


ASKED_SCORES = PREFIX + "asked_scores"
FLOW_SETTINGS = tuple(PREFIX + field.name for field in fields(FlowSettings) if PREFIX + field.name != ASKED_SCORES)
