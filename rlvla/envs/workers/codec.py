"""Safe JSON encoding of worker answers.

Workers run third-party simulators, perhaps in another interpreter. Unpickling their messages could import any class,
and even a pickle without classes can exhaust the memory in a few bytes. Arrays are not part of the JSON: the sender
stores them elsewhere (shared memory, or behind the JSON), and the answer references them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.workers.messages import Answer, Failure, Hello, PlayActions, RunExpert, SlotAnswer, SlotCommand
from rlvla.envs.workers.slab import ArrayRef
from rlvla.utils.errors import Problem

# Limits in bytes: JSON per slot, all arrays of a message, all arrays of a message with a whole episode.
LARGEST_MESSAGE, LARGEST_ARRAYS, LARGEST_EPISODE = 2**20, 2**29, 2**33
# Maximum characters of an exception's text and of its traceback.
_TEXT, _TRACEBACK = 2_000, 20_000
_MOST_PROBLEMS = 100
_DTYPE = re.compile(r"[<>|][biufcSU]\d{1,6}")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

# Stores an array and returns a JSON-serializable reference.
Store = Callable[[np.ndarray], dict[str, Any]]
# (slot, reference) -> array, owned by the caller.
Load = Callable[[int, Mapping[str, Any]], np.ndarray]


class UnreadableError(ValueError):
    """A message is too long or does not follow the protocol."""


def encode_answer(answer: Answer | Failure, store: Store) -> str:
    """Encode one answer as JSON; NumPy scalars become numbers, sets become lists.

    Raises:
        TypeError: unknown answer type, or a value that is neither plain data nor an array.
        ValueError, OSError: an array cannot be stored.
    """

    def default(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return store(value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, set | frozenset):
            return list(value)
        raise TypeError(f"an answer cannot hold a value of type {type(value).__name__}")

    return json.dumps(_tagged(answer), default=default, separators=(",", ":"))


def _tagged(answer: Answer | Failure) -> list[Any]:
    if isinstance(answer, ChunkResult):
        result = [getattr(answer, name) for name in _CHUNK_FIELDS]
        return ["chunk", _fields_of_observation(answer.observation), *result]
    if isinstance(answer, Observation):
        return ["observation", *_fields_of_observation(answer)]
    if isinstance(answer, TaskSpec):
        return ["task", vars(answer)]
    if isinstance(answer, Failure):
        problems = [[p.flag, p.reason, readable(p.text, _TEXT)] for p in answer.problems[:_MOST_PROBLEMS]]
        texts = (readable(answer.message, _TEXT), readable(answer.traceback, _TRACEBACK))
        return ["failure", answer.phase, answer.error_type, *texts, problems, answer.closed]
    if isinstance(answer, dict):
        return ["values", answer]
    raise TypeError(f"{type(answer).__name__} is not an answer of an environment")


_CHUNK_FIELDS = tuple(field.name for field in dataclasses.fields(ChunkResult) if field.name != "observation")


def _fields_of_observation(observation: object) -> list[Any]:
    if not isinstance(observation, Observation):
        raise TypeError(f"expected an observation, not {type(observation).__name__}")
    return [observation.images, observation.proprio, observation.instruction]


def encode_hello(hello: Hello) -> bytes:
    """Encode the first message of a worker."""
    return json.dumps({"hello": vars(hello)}).encode()


def join_answers(answers: Sequence[tuple[int, str]]) -> bytes:
    """Join the encoded answers of several slots into one message."""
    return ("[" + ",".join(f"[{slot},{answer}]" for slot, answer in answers) + "]").encode()


def arrays_due(commands: Iterable[SlotCommand]) -> int:
    """Maximum bytes of arrays in the answers to these commands."""
    whole = any(isinstance(command, RunExpert | PlayActions) for _, command in commands)
    return LARGEST_EPISODE if whole else LARGEST_ARRAYS


def decode_message(
    data: bytes, load: Load, num_slots: int = 1, most_arrays: int = LARGEST_ARRAYS
) -> Hello | list[SlotAnswer]:
    """Decode a message; fields of answers may have any JSON type or be arrays, see `AnswerChecker`.

    Args:
        data: a message of `encode_hello` or `join_answers`.
        load: returns the array of a reference.
        num_slots: slots of the worker.
        most_arrays: maximum bytes of all arrays together, see `arrays_due`.

    Raises:
        UnreadableError: the message is invalid.
    """
    limit = LARGEST_MESSAGE * num_slots
    if len(data) > limit:
        raise UnreadableError(f"a message of {len(data)} bytes, more than {limit}")
    try:
        return _message(json.loads(data), _counted(load, most_arrays), num_slots)
    except UnreadableError:
        raise
    except Exception as error:  # from values of the wrong type
        raise UnreadableError(readable(f"not a message of this protocol ({error!r})", _TEXT)) from error


def _message(raw: Any, load: Load, num_slots: int) -> Hello | list[SlotAnswer]:
    if isinstance(raw, dict):
        return Hello(int(raw["hello"]["protocol"]), readable(str(raw["hello"]["rlvla"]), 100))
    answers: list[SlotAnswer] = []
    for slot, answer in raw:
        if type(slot) is not int or not 0 <= slot < num_slots:
            raise UnreadableError(f"an answer of slot {readable(repr(slot), 100)}; the worker has {num_slots}")
        kind, *fields = answer
        answers.append((slot, _KINDS[kind](fields, partial(_load_value, load, slot))))
    return answers


def _counted(load: Load, limit: int) -> Load:
    """Limit the total size of arrays, and their dtypes to numbers and text."""
    left = limit

    def counted(slot: int, reference: Mapping[str, Any]) -> np.ndarray:
        nonlocal left
        shape, dtype = reference["shape"], reference["dtype"]
        if not all(type(size) is int and size >= 0 for size in shape) or not _DTYPE.fullmatch(dtype):
            raise UnreadableError("an array with an invalid shape or dtype")
        left -= math.prod(shape) * np.dtype(dtype).itemsize
        if left < 0:
            raise UnreadableError(f"arrays of more than {limit} bytes")
        return load(slot, reference)

    return counted


def reference_of(fields: Mapping[str, Any]) -> ArrayRef:
    """The reference with these fields, `vars(ArrayRef(...))` as JSON."""
    return ArrayRef(fields["offset"], tuple(fields["shape"]), fields["dtype"])


_Loaded = Callable[[Any], Any]


def _load_value(load: Load, slot: int, value: Any) -> Any:
    """Replace a reference by its array; return plain values unchanged."""
    return load(slot, value) if type(value) is dict else value


def _observation(fields: Sequence[Any], load: _Loaded) -> Observation:
    images, proprio, instruction = fields
    return Observation(load(images), load(proprio), instruction)


def _chunk(fields: Sequence[Any], load: _Loaded) -> ChunkResult:
    observation, steps, rewards, successes, terminated, truncated, success_at_end, events, frames, *more = fields
    components, step_actions = more
    return ChunkResult(
        _observation(observation, load),
        steps,
        load(rewards),
        load(successes),
        terminated,
        truncated,
        success_at_end,
        [frozenset(names) if type(names) is list else names for names in events] if type(events) is list else events,
        load(frames),
        {name: load(values) for name, values in components.items()},
        load(step_actions),
    )


def _failure(fields: Sequence[Any], load: _Loaded) -> Failure:
    phase, error_type, message, trace, problems, closed = fields
    if not all(type(slot) is int for slot in closed):
        raise UnreadableError("closed slots that are not integers")
    return Failure(
        readable(str(phase), 100),
        readable(str(error_type), 100),
        readable(str(message), _TEXT),
        readable(str(trace), _TRACEBACK + 100),
        tuple(
            Problem(
                None if flag is None else readable(str(flag), 100),
                readable(str(reason), 100),
                readable(str(text), _TEXT),
            )
            for flag, reason, text in problems[:_MOST_PROBLEMS]
        ),
        tuple(closed),
    )


_KINDS: dict[str, Callable[[Sequence[Any], _Loaded], Answer | Failure]] = {
    "chunk": _chunk,
    "observation": _observation,
    "task": lambda fields, load: TaskSpec(**fields[0]),
    "values": lambda fields, load: {name: load(value) for name, value in fields[0].items()},
    "failure": _failure,
}


def readable(text: str, most: int) -> str:
    """Replace control characters and lone surrogates, and cut the middle of a text longer than `most` characters."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
