"""Keys and gamepad of a person as actions.

A control is a name with a value in [0, 1]: keys as browsers name them in lower case (`a`, `arrowup`, `space`), and of a
gamepad in the standard mapping `axis0-`, `axis0+`, ..., `button0`, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.utils.errors import ConfigError, Problem

ADVANCE = "."  # steps with a zero action while it is held
# Keys with another meaning on the page: keep, discard, restart, slower, faster; play and pause, beside a policy.
RESERVED = ("enter", "backspace", "escape", "-", "=", ADVANCE)
RESERVED_BESIDE_POLICY = (*RESERVED, "p")
# Negative and positive control of the continuous dimensions, in their order.
_KEYS = ["a/d", "s/w", "f/r", "j/l", "k/i", "o/u", "1/2", "3/4", "5/6", "7/8", "9/0", "z/x", "c/v", "b/n"]
_PAD = ["axis0-/axis0+", "axis1+/axis1-", "axis3+/axis3-", "button14/button15", "button13/button12", "axis2-/axis2+"]
# With at least this many, an end effector moves in the frame of its base, x forward and y to the left: the first two
# dimensions change places.
_END_EFFECTOR = 6
_KEYS_FORWARD, _PAD_FORWARD = ["s/w", "d/a"], ["axis1+/axis1-", "axis0+/axis0-"]
_GRIPPER_KEYS, _GRIPPER_PAD = ("space", "g", "h"), ("button0", "button1", "button2")
_HOW = "write DIM:NEGATIVE/POSITIVE or, for a dimension that a key toggles, DIM:KEY, e.g. 0:a/d 1:s/w 6:space"


@dataclass(frozen=True)
class Binding:
    """Controls of an action dimension.

    Attributes:
        dim: the dimension.
        negative: controls that lower it; () where it is toggled.
        positive: controls that raise it, or toggle it between its limits.
        toggles: whether it keeps its value.
    """

    dim: int
    negative: tuple[str, ...]
    positive: tuple[str, ...]
    toggles: bool = False


def default_bindings(task: TaskSpec) -> list[Binding]:
    """Two keys and a stick per dimension, as far as there are any; a key and a button per gripper."""
    continuous = [dim for dim in range(task.action_dim) if dim not in task.gripper_dims]
    keys, pad = list(_KEYS), list(_PAD)
    if len(continuous) >= _END_EFFECTOR:
        keys[:2], pad[:2] = _KEYS_FORWARD, _PAD_FORWARD
    bindings = []
    for position, (dim, pair) in enumerate(zip(continuous, keys)):
        pairs = [each.split("/") for each in (pair, *pad[position : position + 1])]
        bindings.append(Binding(dim, tuple(low for low, _ in pairs), tuple(high for _, high in pairs)))
    for dim, *controls in zip(task.gripper_dims, _GRIPPER_KEYS, _GRIPPER_PAD):
        bindings.append(Binding(dim, (), tuple(controls), toggles=True))
    return sorted(bindings, key=lambda binding: binding.dim)


def read_bindings(entries: Sequence[str], task: TaskSpec, reserved: Sequence[str] = RESERVED) -> list[Binding]:
    """The bindings of `--keys`, or the default ones without any.

    Raises:
        ConfigError: entries are malformed, name no dimension of the task, or a dimension or key twice.
    """
    if not entries:
        return default_bindings(task)
    bindings: list[Binding] = []
    problems, taken = [], dict.fromkeys(reserved, "a function of the page")
    for entry in entries:
        name, _, keys = entry.lower().partition(":")
        controls = keys.split("/")
        if not name.isdecimal() or len(controls) > 2 or not all(controls):
            problems.append(f"{entry}: {_HOW}")
            continue
        dim = int(name)
        if dim >= task.action_dim:
            problems.append(f"{entry}: the actions of {task.name} have dimensions 0..{task.action_dim - 1}")
        elif any(binding.dim == dim for binding in bindings):
            problems.append(f"{entry}: dimension {dim} has keys already")
        for control in controls:
            if control in taken:
                problems.append(f"{entry}: {control} is {taken[control]} already")
            taken[control] = f"a key of dimension {dim}"
        bindings.append(Binding(dim, tuple(controls[:-1]), (controls[-1],), toggles=len(controls) == 1))
    if problems:
        raise ConfigError([Problem("keys", "invalid_value", f"--keys {problem}") for problem in problems])
    return sorted(bindings, key=lambda binding: binding.dim)


class Controls:
    """Held controls, and the actions that they command.

    A tap that is shorter than a step counts for one step.

    Args:
        bindings: controls of the action dimensions.
        task: its action limit and dimensions.
        speed: share of the action limit.
        gripper_start: -1 or 1, the sign of toggled dimensions at the start of an episode.

    Attributes:
        speed: share of the action limit that a fully held control commands.
    """

    def __init__(self, bindings: Sequence[Binding], task: TaskSpec, speed: float, gripper_start: int = -1):
        self.bindings, self.speed = list(bindings), speed
        self._dim, self._limit, self._start = task.action_dim, task.action_limit, gripper_start
        self._all = {ADVANCE, *(c for binding in bindings for c in (*binding.negative, *binding.positive))}
        self._held: dict[str, float] = {}
        self._tapped: dict[str, float] = {}
        self._signs: dict[int, int] = {}
        self.begin()

    def begin(self) -> None:
        """Start an episode: toggled dimensions return to their start."""
        self.release()
        self._signs = {binding.dim: self._start for binding in self.bindings if binding.toggles}

    def release(self) -> None:
        """Let go of all controls; toggled dimensions keep their value."""
        self._held, self._tapped = {}, {}

    def hold(self, controls: Mapping[str, float]) -> None:
        """Set the held controls, name -> value in [0, 1]; unknown ones have no effect."""
        held = {name: value for name, value in controls.items() if name in self._all and value > 0}
        pressed = held.keys() - self._held.keys()
        self._tapped |= {name: held[name] for name in pressed}
        for binding in self.bindings:
            if binding.toggles and pressed & set(binding.positive):
                self._signs[binding.dim] *= -1
        self._held = held

    def follow(self, action: np.ndarray) -> None:
        """Toggled dimensions take the sign of a policy's action [D], so that a takeover does not move them."""
        self._signs |= {dim: int(np.sign(action[dim])) for dim in self._signs if action[dim]}

    @property
    def active(self) -> bool:
        """Whether a control is held, or was tapped since the last action."""
        return bool(self._held or self._tapped)

    def action(self) -> np.ndarray:
        """The commanded action [D] float32; with no control held it is 0 but for toggled dimensions."""
        values = self._tapped | self._held
        action = np.zeros(self._dim, np.float32)
        for binding in self.bindings:
            if binding.toggles:
                action[binding.dim] = self._limit * self._signs[binding.dim]
            else:
                high = max((values.get(name, 0.0) for name in binding.positive), default=0.0)
                low = max((values.get(name, 0.0) for name in binding.negative), default=0.0)
                action[binding.dim] = self._limit * self.speed * (high - low)
        return action

    def take(self) -> np.ndarray:
        """The action of the next step; forgets the taps."""
        action = self.action()
        self._tapped = {}
        return action
