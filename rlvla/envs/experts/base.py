"""What a scripted expert is, and how it can be made to see well and act badly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlvla.utils.errors import ConfigError


@dataclass(frozen=True)
class ExpertConfig:
    """How far an expert departs from its best behaviour. The default is the best it can do.

    Attributes:
        noise_std: standard deviation of Gaussian noise added to every action dimension that moves the arm.
        offset_prob: probability that an episode aims beside its target (systematic error).
        offset_max: largest distance (metres, or table units) of that per-episode offset, uniform in [0, offset_max]
            in a uniformly random direction of the table plane.
        offset_bias: fixed offset (table plane x, y) added in every episode.
        gripper_shift: steps by which the gripper acts too late (positive) or too early (negative).
        action_quantum: actions are rounded to multiples of this (0: not at all), which gives few, sharp modes.
    """

    noise_std: float = 0.0
    offset_prob: float = 0.0
    offset_max: float = 0.0
    offset_bias: tuple[float, float] = (0.0, 0.0)
    gripper_shift: int = 0
    action_quantum: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError naming every value out of range."""
        ranges = {
            "noise_std": (self.noise_std, 0.0, math.inf),
            "offset_prob": (self.offset_prob, 0.0, 1.0),
            "offset_max": (self.offset_max, 0.0, math.inf),
            "action_quantum": (self.action_quantum, 0.0, 1.0),
        }
        problems = [
            f"expert {name} must be a finite number in [{low:g}, {high:g}], not {value}"
            for name, (value, low, high) in ranges.items()
            if not (math.isfinite(value) and low <= value <= high)
        ]
        if len(self.offset_bias) != 2 or not all(math.isfinite(value) for value in self.offset_bias):
            problems.append(f"expert offset_bias must be two finite numbers (x, y), not {self.offset_bias}")
        if problems:
            raise ConfigError(problems)


class Expert(Protocol):
    """A scripted policy on privileged state."""

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode; draws the episode's offset."""
        ...

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """One action [D] float32 in [-1, 1] for the state of `Env.privileged_state`."""
        ...


def draw_offset(config: ExpertConfig, rng: np.random.Generator) -> np.ndarray:
    """The episode's target offset [2] in the table plane."""
    offset = np.asarray(config.offset_bias, dtype=np.float64)
    wanders, radius, angle = rng.random(), rng.random() * config.offset_max, rng.random() * 2 * np.pi
    if wanders < config.offset_prob:
        offset = offset + radius * np.array([np.cos(angle), np.sin(angle)])
    return offset


def disturb(action: np.ndarray, moving: slice, config: ExpertConfig, rng: np.random.Generator) -> np.ndarray:
    """Add the noise on the moving dimensions, round to the quantum, clip; returns [D] float32."""
    action = np.array(action, dtype=np.float64)
    if config.noise_std > 0:
        action[moving] += rng.normal(0.0, config.noise_std, size=action[moving].shape)
    if config.action_quantum > 0:
        action = np.round(action / config.action_quantum) * config.action_quantum
    return np.clip(action, -1.0, 1.0).astype(np.float32)
