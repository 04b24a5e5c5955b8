"""Validation of worker answers, so that invalid ones never reach the training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec


class BadAnswerError(ValueError):
    """A worker's answer has a wrong type, shape or dtype, or is not finite."""


class AnswerChecker:
    """Validates answers for a task; methods raise `BadAnswerError`.

    Args:
        task: the task, which determines the proprio shape.
        options: keyword arguments of `make_env`; if number of cameras or image size are missing, they are taken from
            the first observation.
    """

    def __init__(self, task: TaskSpec, options: Mapping[str, Any]):
        self._task = task
        size, cameras = options.get("image_size"), options.get("cameras")
        self._size: int | None = size
        self._cameras = None if cameras is None else len(cameras)
        self._proprio = bool(options.get("use_proprio", False))

    def observation(self, value: object) -> None:
        """Check an `Observation`: images [N, H, W, 3] uint8, finite proprio [P] float32 if requested, instruction."""
        if not isinstance(value, Observation):
            raise BadAnswerError(f"an observation was due, not {type(value).__name__}")
        images, proprio = value.images, value.proprio
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise BadAnswerError(f"images must be [N, H, W, 3] uint8, not {_describe(images)}")
        self._cameras = images.shape[0] if self._cameras is None else self._cameras
        self._size = images.shape[1] if self._size is None else self._size
        expected = (self._cameras, self._size, self._size, 3)
        if images.shape != expected:
            raise BadAnswerError(f"images must have shape {list(expected)}, not {list(images.shape)}")
        if not isinstance(value.instruction, str):
            raise BadAnswerError(f"the instruction must be text, not {type(value.instruction).__name__}")
        if not self._proprio:
            if proprio is not None:
                raise BadAnswerError("proprio was not asked for")
            return
        _numbers("proprio", proprio, (self._task.proprio_dim,), np.float32)

    def chunk(self, value: object, length: int) -> None:
        """Check that a `ChunkResult` for `length` actions is valid and consistent."""
        if not isinstance(value, ChunkResult):
            raise BadAnswerError(f"the result of a chunk was due, not {type(value).__name__}")
        self.observation(value.observation)
        executed = value.steps_executed
        if not isinstance(executed, int | np.integer) or not 1 <= executed <= length:
            raise BadAnswerError(f"steps_executed must lie in 1..{length}, not {executed!r}")
        for name in ("terminated", "truncated", "success_at_end"):
            if not isinstance(getattr(value, name), bool | np.bool_):
                raise BadAnswerError(f"{name} must be a bool, not {getattr(value, name)!r}")
        if value.terminated and value.truncated:
            raise BadAnswerError("an episode cannot be terminated and truncated at once")
        if executed < length and not (value.terminated or value.truncated):
            raise BadAnswerError(f"{executed} of {length} actions were executed, yet the episode goes on")
        _numbers("rewards", value.rewards, (length,), np.float32)
        _numbers("successes", value.successes, (length,), np.bool_)
        if value.events and len(value.events) != executed:
            raise BadAnswerError(f"{len(value.events)} sets of events for {executed} executed steps")
        if value.frames is not None:
            expected = (executed, self._size, self._size, 3)
            if not isinstance(value.frames, np.ndarray) or value.frames.shape != expected:
                raise BadAnswerError(f"frames must have shape {list(expected)}, not {_describe(value.frames)}")


def _numbers(name: str, value: object, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != shape:
        raise BadAnswerError(f"{name} must be {list(shape)} {np.dtype(dtype).name}, not {_describe(value)}")
    if not np.isfinite(value).all():
        raise BadAnswerError(f"{name} holds NaN or infinity")


def _describe(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
