"""Interface of scripted experts, and controlled degradation of their actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from rlvla.options import arg, given
from rlvla.utils.cli.flags import range_problems
from rlvla.utils.errors import ConfigError


@dataclass(frozen=True)
class ExpertConfig:
    """Deviations of an expert from its best behavior; none by default.

    Distances are in meters (robosuite) or table units (toy_reach, toy_push).
    """

    noise_std: float = arg(0.0, "std of Gaussian noise on every action dimension that moves the arm", minimum=0)
    offset_prob: float = arg(
        0.0, "probability that an episode has a target offset", minimum=0, maximum=1, read_if=given("offset_max")
    )
    offset_max: float = arg(
        0.0,
        "maximum of the per-episode offset, which is uniform in [0, offset_max] in a random direction",
        minimum=0,
        read_if=given("offset_prob"),
    )
    offset_bias: tuple[float, ...] = arg(
        (0.0, 0.0), "fixed offset of the target in every episode, x y", nargs=2, metavar="M"
    )
    gripper_shift: int = arg(0, "steps by which the gripper acts too late (positive) or too early (negative)")
    action_quantum: float = arg(
        0.0, "actions are rounded to multiples of this, which gives few, sharp modes (0: off)", minimum=0
    )

    def __post_init__(self):
        problems = range_problems(self)
        if problems:
            raise ConfigError(problems)


class Expert(Protocol):
    """A scripted policy on privileged state."""

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode and draw its offset."""
        ...

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Action [D] float32 in [-1, 1] for a state from `Env.privileged_state`.

        The first call of an episode may come at any of its steps, where the expert takes over from a policy.
        """
        ...


def draw_offset(config: ExpertConfig, rng: np.random.Generator) -> np.ndarray:
    """Sample the target offset [2] of an episode in the table plane."""
    offset = np.asarray(config.offset_bias, dtype=np.float64)
    wanders, radius, angle = rng.random(), rng.random() * config.offset_max, rng.random() * 2 * np.pi
    if wanders < config.offset_prob:
        offset = offset + radius * np.array([np.cos(angle), np.sin(angle)])
    return offset


def disturb(action: np.ndarray, moving: slice, config: ExpertConfig, rng: np.random.Generator) -> np.ndarray:
    """Add noise to the `moving` dimensions, round to the action quantum, and clip; returns [D] float32."""
    action = np.array(action, dtype=np.float64)
    if config.noise_std > 0:
        action[moving] += rng.normal(0.0, config.noise_std, size=action[moving].shape)
    if config.action_quantum > 0:
        action = np.round(action / config.action_quantum) * config.action_quantum
    return np.clip(action, -1.0, 1.0).astype(np.float32)


class TableExpert:
    """Base of experts with planar velocity actions; subclasses implement `_velocity`.

    Args:
        config: deviations from the best behavior; `gripper_shift` must be 0, because there is no gripper.

    Raises:
        ConfigError: `gripper_shift` is not 0.
    """

    suite: ClassVar[str]

    def __init__(self, config: ExpertConfig):
        if config.gripper_shift != 0:
            raise ConfigError(f"{self.suite} has no gripper: gripper_shift must be 0, not {config.gripper_shift}")
        self.config = config
        self._rng: np.random.Generator | None = None
        self._offset = np.zeros(2)

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode and draw its offset. `rng` also generates the action noise."""
        self._rng = rng
        self._offset = draw_offset(self.config, rng)

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Velocity [2] float32, as fast as the per-axis limits allow."""
        if self._rng is None:
            raise RuntimeError("call reset before act")
        return disturb(self._velocity(state), slice(0, 2), self.config, self._rng)

    def _velocity(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Velocity [2] in [-1, 1] toward the target plus `_offset`."""
        raise NotImplementedError
