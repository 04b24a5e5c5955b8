"""vla-eval's protocol 1, on the path /vla-eval: one action for each observation.

A message is a msgpack map of `type`, `payload`, `seq` and `timestamp`. The client sends `hello`, then for each episode
`episode_start`, `observation`s and `episode_end`; the server answers `hello` with `hello` and an observation with
`action`, which repeats its `seq`, or with `error`. Observations have `images` by camera (PNG or JPEG),
`task_description` and `state` or `states`. The server plays its chunk: a
decision gives the actions of the next H observations.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlvla.models.policy import PolicySpec
from rlvla.serving.messages import MessageError, described, unpack
from rlvla.serving.observations import PROMPT, STATE, EpisodeNoise
from rlvla.version import __version__

PATH = "/vla-eval"
PROTOCOL = 1
_FIELDS = ("type", "payload", "seq")


def vla_eval_keys(cameras: tuple[str, ...]) -> dict[str, str]:
    """Key of each camera, of the state and of the prompt in an observation of vla-eval."""
    return {camera: f"images/{camera}" for camera in cameras} | {STATE: "state", PROMPT: "task_description"}


async def read_message(data: bytes | str) -> dict[str, Any]:
    """A message as a map of its fields.

    Raises:
        MessageError: it is not one.
    """
    if isinstance(data, str):
        raise MessageError("a text frame; messages are binary frames with a msgpack map")
    message = await asyncio.to_thread(unpack, data, images=True)  # decoding pictures takes milliseconds
    if not isinstance(message, dict) or any(name not in message for name in _FIELDS):
        raise MessageError(f"a message is a map of {', '.join(_FIELDS)} and timestamp, not {described(message)}")
    if not isinstance(message["payload"], dict) or type(message["seq"]) is not int:
        raise MessageError("payload is a map, seq an integer")
    return message


def message(kind: str, payload: Mapping[str, Any], seq: int) -> dict[str, Any]:
    """A message of the server."""
    return {"type": kind, "payload": payload, "seq": seq, "timestamp": time.time()}


def hello(spec: PolicySpec, observation: Mapping[str, str]) -> dict[str, Any]:
    """The server's answer to `hello`."""
    return {
        "harness_version": __version__,
        "protocol_version": PROTOCOL,
        "model_server": "rlvla",
        "capabilities": {},
        "observation_params": {"send_state": bool(spec.proprio_dim), "send_wrist_image": (spec.cameras or 1) > 1},
        "observation": dict(observation),
    }


def flat_observation(payload: Mapping[Any, Any]) -> dict[Any, Any]:
    """An observation with the keys of `vla_eval_keys`."""
    images = payload.get("images")
    flat = {key: value for key, value in payload.items() if key != "images"}
    flat |= {f"images/{name}": image for name, image in (images.items() if isinstance(images, dict) else ())}
    return {STATE: payload["states"], **flat} if "states" in payload else flat


def coded(action: np.ndarray) -> dict[str, Any]:
    """An array as vla-eval reads it."""
    return {"__ndarray__": True, "data": action.tobytes(), "dtype": action.dtype.str, "shape": list(action.shape)}


class EpisodePlayer:
    """The actions of an episode that are not yet played.

    Args:
        noise: of the connection.
        seed: of the server.
    """

    def __init__(self, noise: EpisodeNoise, seed: int):
        self.noise, self._seed = noise, seed
        self._actions: deque[np.ndarray] = deque()

    def begin(self, payload: Mapping[Any, Any]) -> None:
        """Begin an episode; equal tasks (name, initial state, seed of the harness) get equal random numbers."""
        self._actions.clear()
        task = json.dumps(payload.get("task"), sort_keys=True, default=str)
        self.noise.begin(self._seed, "vla-eval", task)

    @property
    def needs_decision(self) -> bool:
        """Whether no action is left."""
        return not self._actions

    def add(self, actions: np.ndarray) -> None:
        """Append a chunk [A, D]."""
        self._actions.extend(actions)

    def take(self) -> np.ndarray:
        """The next action [D]."""
        return self._actions.popleft()
