"""JSON encoding of worker messages.

Workers may run in another interpreter, whose NumPy or simulator classes this one could not unpickle; answers consist
of plain values, the dataclasses below and arrays. Arrays are not part of the JSON: the sender stores them elsewhere
(shared memory, or behind the JSON), and the answer references them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.workers.messages import Answer, Failure, Hello, SlotAnswer
from rlvla.utils.errors import Problem

_CLASSES = {cls.__name__: cls for cls in (TaskSpec, Observation, ChunkResult, Failure, Problem)}
_TYPE = "$type"  # key of a class name, or of "array", in JSON objects
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

# Stores an array and returns a JSON-serializable reference.
Store = Callable[[np.ndarray], dict[str, Any]]
# Reference -> array, owned by the caller.
Load = Callable[[dict[str, Any]], np.ndarray]


class DecodeError(ValueError):
    """A message is not of this protocol, or holds a value that cannot be decoded, e.g. an unhashable event."""


def encode_answer(answer: Answer | Failure, store: Store) -> str:
    """Encode one answer as JSON; NumPy scalars become numbers, sets become lists.

    Raises:
        TypeError: a value that is neither plain data nor an array.
        ValueError, OSError: an array cannot be stored.
    """

    def default(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {_TYPE: "array", **store(value)}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, set | frozenset):
            return list(value)
        for name, cls in _CLASSES.items():
            if isinstance(value, cls):
                return {_TYPE: name, **{field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}}
        raise TypeError(f"an answer cannot hold a value of type {type(value).__name__}")

    return json.dumps(answer, default=default, separators=(",", ":"))


def encode_hello(hello: Hello) -> bytes:
    """Encode the first message of a worker; every version of the protocol can decode it."""
    return json.dumps({"hello": vars(hello)}).encode()


def join_answers(answers: Sequence[tuple[int, str]]) -> bytes:
    """Join the encoded answers of several slots into one message."""
    return ("[" + ",".join(f"[{slot},{answer}]" for slot, answer in answers) + "]").encode()


def decode_message(data: bytes, load: Load) -> Hello | list[SlotAnswer]:
    """Decode a message of `encode_hello` or `join_answers`; the values of answers are unchecked, see `AnswerChecker`.

    Args:
        data: the message.
        load: returns the array of a reference.

    Raises:
        DecodeError: the message is invalid.
    """

    def construct(fields: dict[str, Any]) -> Any:
        kind = fields.pop(_TYPE, None)
        if kind is None:
            return fields
        if kind == "array":
            return load(fields)
        value = _CLASSES[kind](**fields)
        if isinstance(value, ChunkResult) and isinstance(value.events, list):
            value.events = [frozenset(names) if isinstance(names, list) else names for names in value.events]
        return value

    try:
        message = json.loads(data, object_hook=construct)
        if isinstance(message, dict):
            return Hello(message["hello"]["protocol"], message["hello"]["rlvla"])
        return [(slot, answer) for slot, answer in message]
    except (ValueError, TypeError, LookupError) as error:
        raise DecodeError(readable(repr(error), 1000)) from error


def readable(text: str, most: int) -> str:
    """Replace control characters and lone surrogates, and cut the middle of a text longer than `most` characters."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
