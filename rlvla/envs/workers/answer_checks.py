"""Validation of worker answers, so that invalid ones never reach the training data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_chunk_length
from rlvla.envs.experts.episode import ExpertEpisode
from rlvla.envs.pictures import NATIVE
from rlvla.envs.workers.codec import readable

# Maximum characters of an instruction, and maximum propositions of a step if the task does not list them.
_LONGEST_INSTRUCTION, _MOST_EVENTS = 10_000, 1_000
_FLAGS = ("terminated", "truncated", "success_at_end")
_SHOWN = 4  # maximum number of problems in an error message
Problems = Iterator[str]


class BadAnswerError(ValueError):
    """A worker's answer has a wrong type, shape, dtype or value, or contradicts itself.

    Args:
        problems: all problems, each with the expected value; the message holds the first few.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        more = len(self.problems) - _SHOWN
        super().__init__("; ".join(self.problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else ""))


class AnswerChecker:
    """Validates answers for a task, of single and batched environments; methods raise `BadAnswerError`.

    Args:
        task: the task, which determines the proprio shape, the propositions, the step limit and the range of rewards.
        options: keyword arguments of `make_env`; if number of cameras or image size are missing, or images have the
            shape of the camera, they are taken from the first observation.
    """

    def __init__(self, task: TaskSpec, options: Mapping[str, Any]):
        self._task = task
        size, cameras = options.get("image_size"), options.get("cameras")
        self._native = options.get("image_fit") == NATIVE
        self._size: tuple[int, int] | None = None if size is None or self._native else (size, size)
        self._cameras = None if cameras is None else len(cameras)
        self._proprio = bool(options.get("use_proprio", False))
        self._propositions = frozenset(task.propositions)

    def made(self, value: object) -> None:
        """Check that the environment has the expected task."""
        if not isinstance(value, TaskSpec):
            raise BadAnswerError([f"expected a task, not {type(value).__name__}"])
        if other := [name for name, expected in vars(self._task).items() if getattr(value, name) != expected]:
            shown = ", ".join(f"{name} {_shown(getattr(value, name))}" for name in other)
            raise BadAnswerError([f"the environment's task has {shown}, but the suite lists {self._task}"])

    def observation(self, value: object) -> None:
        """Check an `Observation`: images [N, H, W, 3] uint8, finite proprio [P] float32 if requested, instruction."""
        _refuse(self._observation(value))

    def chunk(
        self,
        value: object,
        length: int,
        *,
        steps_before: int = 0,
        record_frames: bool = False,
        by_expert: bool = False,
    ) -> None:
        """Check that a `ChunkResult` for `length` actions is valid and consistent.

        Only a primitive may end before its last action while the episode continues.

        Args:
            value: the answer.
            length: number of actions.
            steps_before: steps of the episode before this chunk.
            record_frames: whether frames were requested.
            by_expert: whether it answers a `StepExpert`, and so has the expert's actions in `step_actions`.

        Raises:
            BadAnswerError: it is invalid.
            ValueError: the task has primitives, and chunks of another length.
        """
        check_chunk_length(self._task, length)
        _refuse(self._chunk(value, length, steps_before, record_frames, by_expert))

    def expert_episode(self, value: object, init_state_id: int, seed: int) -> None:
        """Check that an `ExpertEpisode` from this initial state and seed is valid and consistent."""
        _refuse(self._expert_episode(value, init_state_id, seed))

    def privileged_state(self, value: object) -> None:
        """Check that a simulator state is a dict of arrays."""
        if not isinstance(value, dict) or not all(isinstance(item, np.ndarray) for item in value.values()):
            raise BadAnswerError(["expected a dict of arrays"])

    def _observation(self, value: object) -> Problems:
        if not isinstance(value, Observation):
            yield f"expected an observation, not {type(value).__name__}"
            return
        yield from self._images(value.images)
        yield from self._instruction(value.instruction)
        if self._proprio:
            yield from _numbers("proprio", value.proprio, (self._task.proprio_dim,), np.float32)
        elif value.proprio is not None:
            yield "proprio was not requested and must be None"

    def _chunk(self, value: object, length: int, steps_before: int, record_frames: bool, by_expert: bool) -> Problems:
        if not isinstance(value, ChunkResult):
            yield f"expected the result of a chunk, not {type(value).__name__}"
            return
        yield from self._observation(value.observation)
        executed = value.steps_executed
        if isinstance(executed, bool) or not isinstance(executed, int | np.integer) or not 1 <= executed <= length:
            yield f"steps_executed must lie in 1..{length}, not {_shown(executed)}"
            return  # all other checks depend on it
        executed = int(executed)
        wrong_flags = [problem for name in _FLAGS for problem in _flag(name, getattr(value, name))]
        yield from wrong_flags
        if not wrong_flags:
            yield from self._limits(value.terminated, value.truncated, steps_before + executed)
            if executed < length and not (value.terminated or value.truncated or self._task.macro_steps):
                yield f"{executed} of {length} actions were executed, but the episode continues"
        yield from self._rewards(value.rewards, length, executed)
        yield from _successes(value.successes, length, executed, value.terminated, value.success_at_end)
        yield from self._components(value.components, length, executed)
        yield from self._events(value.events, executed)
        yield from self._frames(value.frames, executed, record_frames)
        dims = self._task.action_dim if by_expert else self._task.step_action_dim
        yield from _step_actions(value.step_actions, executed, dims)

    def _expert_episode(self, value: object, init_state_id: int, seed: int) -> Problems:
        if not isinstance(value, dict) or value.keys() != ExpertEpisode.__annotations__.keys():
            yield "expected an episode of the expert"
            return
        actions, steps = value["actions"], 0
        if isinstance(actions, np.ndarray) and actions.ndim:
            steps = len(actions)
        if not steps:
            yield "an episode without actions"
            return
        wrong_flags = [problem for name in (*_FLAGS, "success_once") for problem in _flag(name, value[name])]
        yield from wrong_flags
        if not wrong_flags:
            yield from self._limits(value["terminated"], value["truncated"], steps)
            if value["terminated"] == value["truncated"]:
                yield "an episode must end by termination or truncation"
        yield from _numbers("actions", actions, (steps, self._task.action_dim), np.float32)
        yield from self._rewards(value["rewards"], steps, steps)
        flags = value["terminated"], value["success_at_end"]
        wrong_successes = [*_successes(value["successes"], steps, steps, *flags)]
        yield from wrong_successes
        if not wrong_flags and not wrong_successes and value["success_once"] != value["successes"].any():
            yield "success_once contradicts the successes"
        images = value["images"]
        if not isinstance(images, np.ndarray) or len(images) != steps:
            yield f"expected images of {steps} steps, not {_describe(images)}"
        else:
            yield from self._images(images[0])
        if self._proprio:
            yield from _numbers("proprio", value["proprio"], (steps, self._task.proprio_dim), np.float32)
        elif value["proprio"] is not None:
            yield "proprio was not requested and must be None"
        yield from self._instruction(value["instruction"])
        events = value["events"]
        if isinstance(events, list) and all(isinstance(names, list) for names in events):
            events = [frozenset(map(str, names)) for names in events]
        yield from self._events(events, steps)
        if (value["init_state_id"], value["seed"]) != (init_state_id, seed):
            yield "an episode from another initial state or seed"

    def _images(self, images: object) -> Problems:
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            yield f"images must be [N, H, W, 3] uint8, not {_describe(images)}"
            return
        self._cameras = images.shape[0] if self._cameras is None else self._cameras
        height, width = images.shape[1:3]
        self._size = self._size or (height, width if self._native else height)
        expected = (self._cameras, *self._size, 3)
        if images.shape != expected:
            remedy = "" if height == width else "; --image_fit crop, pad or stretch makes them square"
            yield f"images must have shape {list(expected)}, not {list(images.shape)}{remedy}"

    def _instruction(self, text: object) -> Problems:
        if not isinstance(text, str):
            yield f"the instruction must be text, not {type(text).__name__}"
        elif len(text) > _LONGEST_INSTRUCTION:
            yield f"the instruction has {len(text)} characters, more than {_LONGEST_INSTRUCTION}"
        elif not text.isprintable() and readable(text, _LONGEST_INSTRUCTION) != text:
            yield f"the instruction holds control characters or lone surrogates: {_shown(text)}"

    def _limits(self, terminated: bool, truncated: bool, steps: int) -> Problems:
        """Check the end flags and the step limit of an episode with `steps` steps so far."""
        if terminated and truncated:
            yield "an episode cannot be terminated and truncated at once"
        if steps > self._task.max_steps:
            yield f"{steps} steps were executed, more than the limit of {self._task.max_steps}"

    def _rewards(self, rewards: object, length: int, executed: int) -> Problems:
        yield from _numbers("rewards", rewards, (length,), np.float32, executed=executed)
        if not isinstance(rewards, np.ndarray) or rewards.dtype != np.float32 or self._task.reward_range is None:
            return
        low, high = map(np.float32, self._task.reward_range)  # rounded like the rewards themselves
        lowest, highest = rewards.min(initial=0), rewards.max(initial=0)  # 0 where not executed
        if lowest < min(low, 0) or highest > max(high, 0):
            yield f"rewards from {lowest:g} to {highest:g}; the suite's range is {low:g} to {high:g}"

    def _components(self, components: object, length: int, executed: int) -> Problems:
        declared = self._task.reward_components
        if not isinstance(components, dict) or components.keys() != set(declared):
            names = list(components) if isinstance(components, dict) else type(components).__name__
            yield f"components must be {list(declared)}, not {_shown(names)}"
            return
        for name, values in components.items():
            yield from _numbers(f"component {name}", values, (length,), np.float32, executed=executed)

    def _events(self, events: object, executed: int) -> Problems:
        if not isinstance(events, list):
            yield f"events must be a list of sets, not {type(events).__name__}"
            return
        if events and len(events) != executed:
            yield f"{len(events)} sets of events for {executed} executed steps: there must be one for each"
        for happened in events:
            if not isinstance(happened, frozenset):
                yield f"events of a step must be a frozenset, not {type(happened).__name__}"
                return
        if self._propositions:
            if unknown := frozenset().union(*events) - self._propositions:
                propositions = _shown(sorted(self._propositions))
                yield f"events that are not among the task's propositions {propositions}: {_shown(list(unknown))}"
            return
        for happened in events:
            if len(happened) > _MOST_EVENTS or not all(isinstance(name, str) for name in happened):
                yield f"events must be at most {_MOST_EVENTS} names, not {_shown(list(happened))}"
                return

    def _frames(self, frames: object, executed: int, requested: bool) -> Problems:
        if not requested:
            if frames is not None:
                yield "frames were not requested and must be None"
            return
        expected = (executed, *(self._size or ()), 3)
        if not isinstance(frames, np.ndarray) or frames.shape != expected or frames.dtype != np.uint8:
            yield f"frames must be {list(expected)} uint8, not {_describe(frames)}"


def _step_actions(actions: object, executed: int, dims: int) -> Problems:
    if dims:
        yield from _numbers("step_actions", actions, (executed, dims), np.float32)
    elif actions is not None:
        yield "step_actions must be None where the task's step_action_dim is 0"


def _refuse(problems: Problems) -> None:
    if collected := list(problems):
        raise BadAnswerError(collected)


def _flag(name: str, value: object) -> Problems:
    if not isinstance(value, bool | np.bool_):
        yield f"{name} must be a bool, not {_shown(value)}"


def _successes(successes: object, length: int, executed: int, terminated: object, success_at_end: object) -> Problems:
    wrong = [*_numbers("successes", successes, (length,), np.bool_, executed=executed)]
    yield from wrong
    if wrong or not isinstance(successes, np.ndarray) or [*_flag("", terminated), *_flag("", success_at_end)]:
        return
    last = successes[executed - 1]
    if success_at_end and not last:
        yield "success_at_end, but the last executed step is not a success"
    if terminated and last and not success_at_end:
        yield "terminated at a successful step without success_at_end"


def _numbers(
    name: str, value: object, shape: Sequence[int], dtype: type[np.generic], *, executed: int | None = None
) -> Problems:
    """Check shape, dtype and finiteness of an array, and that it is zero after `executed` steps, if given."""
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != shape:
        yield f"{name} must be {list(shape)} {np.dtype(dtype).name}, not {_describe(value)}"
        return
    if dtype is not np.bool_ and not np.isfinite(value).all():
        yield f"{name} holds NaN or infinity"
    if executed is not None and value[executed:].any():
        rest = "False" if dtype is np.bool_ else "0"
        yield f"{name} after the last of {executed} executed steps, where it must be {rest}"


def _describe(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def _shown(value: object) -> str:
    """Printable form of a value from a worker."""
    return readable(repr(value), 100)
