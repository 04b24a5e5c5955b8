"""Validation of worker answers, so that invalid ones never reach the training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_chunk_length
from rlvla.envs.experts.episode import ExpertEpisode
from rlvla.envs.workers.codec import readable

# Longest instruction in characters, and most propositions of a step where the task does not name them.
_LONGEST_INSTRUCTION, _MOST_EVENTS = 10_000, 1_000
_FLAGS = ("terminated", "truncated", "success_at_end")


class BadAnswerError(ValueError):
    """A worker's answer has a wrong type, shape, dtype or value, or contradicts itself."""


class AnswerChecker:
    """Validates answers for a task, of single and batched environments; methods raise `BadAnswerError`.

    Args:
        task: the task, which determines the proprio shape, the propositions, the step limit and the range of rewards.
        options: keyword arguments of `make_env`; if number of cameras or image size are missing, they are taken from
            the first observation.
    """

    def __init__(self, task: TaskSpec, options: Mapping[str, Any]):
        self._task = task
        size, cameras = options.get("image_size"), options.get("cameras")
        self._size: int | None = size
        self._cameras = None if cameras is None else len(cameras)
        self._proprio = bool(options.get("use_proprio", False))
        self._propositions = frozenset(task.propositions)

    def made(self, value: object) -> None:
        """Check that the environment is the one of the task."""
        if not isinstance(value, TaskSpec):
            raise BadAnswerError(f"a task was due, not {type(value).__name__}")
        other = [name for name, expected in vars(self._task).items() if getattr(value, name) != expected]
        if other:
            shown = ", ".join(f"{name} {_shown(getattr(value, name))}" for name in other)
            raise BadAnswerError(f"the environment says its task has {shown}, unlike the suite's list: {self._task}")

    def observation(self, value: object) -> None:
        """Check an `Observation`: images [N, H, W, 3] uint8, finite proprio [P] float32 if requested, instruction."""
        if not isinstance(value, Observation):
            raise BadAnswerError(f"an observation was due, not {type(value).__name__}")
        self._images(value.images)
        self._instruction(value.instruction)
        if self._proprio:
            _numbers("proprio", value.proprio, (self._task.proprio_dim,), np.float32)
        elif value.proprio is not None:
            raise BadAnswerError("proprio was not asked for")

    def chunk(self, value: object, length: int, *, steps_before: int = 0, record_frames: bool = False) -> None:
        """Check that a `ChunkResult` for `length` actions is valid and consistent.

        Only a primitive may end before its last action while the episode goes on.

        Args:
            value: the answer.
            length: number of actions.
            steps_before: steps of the episode before this chunk.
            record_frames: whether frames were requested.

        Raises:
            BadAnswerError: it is not.
            ValueError: the task has primitives, and chunks of another length.
        """
        check_chunk_length(self._task, length)
        if not isinstance(value, ChunkResult):
            raise BadAnswerError(f"the result of a chunk was due, not {type(value).__name__}")
        self.observation(value.observation)
        executed = value.steps_executed
        if isinstance(executed, bool) or not isinstance(executed, int | np.integer) or not 1 <= executed <= length:
            raise BadAnswerError(f"steps_executed must lie in 1..{length}, not {_shown(executed)}")
        self._ending(value, steps_before + int(executed))
        if executed < length and not (value.terminated or value.truncated or self._task.macro_steps):
            raise BadAnswerError(f"{executed} of {length} actions were executed, yet the episode goes on")
        self._rewards(value.rewards, length)
        _numbers("successes", value.successes, (length,), np.bool_)
        if value.rewards[executed:].any() or value.successes[executed:].any():
            raise BadAnswerError(f"rewards or successes after the last of {executed} executed steps")
        if value.success_at_end and not value.successes[executed - 1]:
            raise BadAnswerError("success_at_end, yet the last executed step is no success")
        self._components(value.components, length, int(executed))
        self._events(value.events, int(executed))
        self._frames(value.frames, int(executed), record_frames)
        self._step_actions(value.step_actions, int(executed))

    def expert_episode(self, value: object, init_state_id: int, seed: int) -> None:
        """Check that an `ExpertEpisode` from this initial state and seed is valid and consistent."""
        if not isinstance(value, dict) or value.keys() != ExpertEpisode.__annotations__.keys():
            raise BadAnswerError("an episode of the expert was due")
        actions, steps = value["actions"], 0
        if isinstance(actions, np.ndarray) and actions.ndim:
            steps = len(actions)
        if not steps:
            raise BadAnswerError("an episode without actions")
        for flag in (*_FLAGS, "success_once"):
            _flag(flag, value[flag])
        self._limits(value["terminated"], value["truncated"], value["success_at_end"], steps)
        if value["terminated"] == value["truncated"]:
            raise BadAnswerError("an episode must end by termination or truncation")
        _numbers("actions", actions, (steps, self._task.action_dim), np.float32)
        self._rewards(value["rewards"], steps)
        _numbers("successes", value["successes"], (steps,), np.bool_)
        if value["success_at_end"] and not value["successes"][-1]:
            raise BadAnswerError("success_at_end, yet the last step is no success")
        if value["success_once"] != value["successes"].any():
            raise BadAnswerError("success_once contradicts the successes")
        images = value["images"]
        if not isinstance(images, np.ndarray) or len(images) != steps:
            raise BadAnswerError(f"images of {steps} steps were due, not {_describe(images)}")
        self._images(images[0])
        if self._proprio:
            _numbers("proprio", value["proprio"], (steps, self._task.proprio_dim), np.float32)
        elif value["proprio"] is not None:
            raise BadAnswerError("proprio was not asked for")
        self._instruction(value["instruction"])
        if (value["init_state_id"], value["seed"]) != (init_state_id, seed):
            raise BadAnswerError("an episode from another initial state or seed")

    def privileged_state(self, value: object) -> None:
        """Check that a simulator state is a dict of arrays."""
        if not isinstance(value, dict) or not all(isinstance(item, np.ndarray) for item in value.values()):
            raise BadAnswerError("a dict of arrays was due")

    def _images(self, images: object) -> None:
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise BadAnswerError(f"images must be [N, H, W, 3] uint8, not {_describe(images)}")
        self._cameras = images.shape[0] if self._cameras is None else self._cameras
        self._size = images.shape[1] if self._size is None else self._size
        expected = (self._cameras, self._size, self._size, 3)
        if images.shape != expected:
            raise BadAnswerError(f"images must have shape {list(expected)}, not {list(images.shape)}")

    def _instruction(self, text: object) -> None:
        if not isinstance(text, str):
            raise BadAnswerError(f"the instruction must be text, not {type(text).__name__}")
        if len(text) > _LONGEST_INSTRUCTION:
            raise BadAnswerError(f"the instruction has {len(text)} characters, more than {_LONGEST_INSTRUCTION}")
        if not text.isprintable() and readable(text, _LONGEST_INSTRUCTION) != text:
            raise BadAnswerError(f"the instruction holds control characters or lone surrogates: {_shown(text)}")

    def _ending(self, value: ChunkResult, steps: int) -> None:
        """Check the flags of a chunk at whose end `steps` steps of the episode have been executed."""
        for name in _FLAGS:
            _flag(name, getattr(value, name))
        self._limits(value.terminated, value.truncated, value.success_at_end, steps)

    def _limits(self, terminated: bool, truncated: bool, success_at_end: bool, steps: int) -> None:
        if terminated and truncated:
            raise BadAnswerError("an episode cannot be terminated and truncated at once")
        if terminated and not success_at_end:
            raise BadAnswerError("terminated without success_at_end")
        if steps > self._task.max_steps:
            raise BadAnswerError(f"{steps} steps were executed, more than the limit of {self._task.max_steps}")

    def _rewards(self, rewards: object, length: int) -> None:
        numbers = _numbers("rewards", rewards, (length,), np.float32)
        if self._task.reward_range is None:
            return
        low, high = map(np.float32, self._task.reward_range)  # rounded like the rewards themselves
        lowest, highest = numbers.min(), numbers.max()
        if lowest < min(low, 0) or highest > max(high, 0):  # 0 where not executed
            raise BadAnswerError(f"rewards from {lowest:g} to {highest:g}; the suite's range is {low:g} to {high:g}")

    def _components(self, components: object, length: int, executed: int) -> None:
        declared = self._task.reward_components
        if not isinstance(components, dict) or components.keys() != set(declared):
            found = list(components) if isinstance(components, dict) else type(components).__name__
            raise BadAnswerError(f"components must be {list(declared)}, not {_shown(found)}")
        for name, values in components.items():
            if _numbers(f"component {name}", values, (length,), np.float32)[executed:].any():
                raise BadAnswerError(f"component {name} after the last of {executed} executed steps")

    def _events(self, events: object, executed: int) -> None:
        if not isinstance(events, list):
            raise BadAnswerError(f"events must be a list of sets, not {type(events).__name__}")
        if events and len(events) != executed:
            raise BadAnswerError(f"{len(events)} sets of events for {executed} executed steps")
        for happened in events:
            if not isinstance(happened, frozenset):
                raise BadAnswerError(f"events of a step must be a frozenset, not {type(happened).__name__}")
            if self._propositions:
                if not happened <= self._propositions:
                    unknown = _shown(list(happened - self._propositions))
                    raise BadAnswerError(f"events that are not among the task's propositions: {unknown}")
            elif len(happened) > _MOST_EVENTS or not all(isinstance(name, str) for name in happened):
                raise BadAnswerError(f"events must be at most {_MOST_EVENTS} names, not {_shown(list(happened))}")

    def _frames(self, frames: object, executed: int, requested: bool) -> None:
        if not requested:
            if frames is not None:
                raise BadAnswerError("frames were not asked for")
            return
        expected = (executed, self._size, self._size, 3)
        if not isinstance(frames, np.ndarray) or frames.shape != expected or frames.dtype != np.uint8:
            raise BadAnswerError(f"frames must be {list(expected)} uint8, not {_describe(frames)}")

    def _step_actions(self, actions: object, executed: int) -> None:
        if self._task.step_action_dim:
            _numbers("step_actions", actions, (executed, self._task.step_action_dim), np.float32)
        elif actions is not None:
            raise BadAnswerError("step_actions, yet the task's step_action_dim is 0")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool | np.bool_):
        raise BadAnswerError(f"{name} must be a bool, not {_shown(value)}")


def _numbers(name: str, value: object, shape: Sequence[int], dtype: type[np.generic]) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != shape:
        raise BadAnswerError(f"{name} must be {list(shape)} {np.dtype(dtype).name}, not {_describe(value)}")
    if dtype is not np.bool_ and not np.isfinite(value).all():
        raise BadAnswerError(f"{name} holds NaN or infinity")
    return value


def _describe(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def _shown(value: object) -> str:
    """A value from a worker in a message."""
    return readable(repr(value), 100)
