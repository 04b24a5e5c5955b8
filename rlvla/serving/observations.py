"""Observations of a policy in the requests of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvla.models.policy import PolicySpec
from rlvla.serving.messages import MessageError, described, described_map
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.seeding import derive_rng

STATE, PROMPT = "state", "prompt"
# Keys of requests of rlvla's own: the seed of an episode, and the random numbers of a decision (`PolicySpec.draw`).
SEED_KEY, NOISE_KEY = "rlvla_episode_seed", "rlvla_noise"
_MAX_PROMPT = 10_000
_NO_IMAGES = np.zeros((0, 8, 8, 3), np.uint8)


@dataclass(frozen=True)
class Observation:
    """An observation as a request brings it: images [N, H, W, 3] uint8, proprio [P] float32 or None, instruction."""

    images: np.ndarray
    proprio: np.ndarray | None
    instruction: str


def request_keys(cameras: Sequence[str], renamed: Sequence[str] = (), flag: str = "serve_map") -> dict[str, str]:
    """Key of each camera, of the state and of the prompt in requests; `cameras` are in the policy's order.

    Args:
        cameras: names of the cameras.
        renamed: NAME=KEY for other keys than openpi's.
        flag: that of `renamed`.

    Raises:
        ConfigError: an unknown camera, an entry without a key, or a key that is given twice.
    """
    keys = {camera: f"observation/{camera}_image" for camera in cameras}
    keys |= dict(zip(cameras, ("observation/image", "observation/wrist_image")))
    keys |= {STATE: "observation/state", PROMPT: "prompt"}
    problems = []
    for entry in renamed:
        name, equals, key = entry.partition("=")
        if not (equals and key):
            problems.append(Problem(flag, "invalid", f"--{flag} {entry}: write NAME=KEY"))
        elif name not in keys:
            text = f"--{flag} {entry}: there is no camera {name}; the names are {', '.join(keys)}"
            problems.append(Problem(flag, "unknown_name", text))
        else:
            keys[name] = key
    twice = sorted({key for key in keys.values() if list(keys.values()).count(key) > 1})
    problems += [Problem(flag, "duplicate", f"--{flag}: the key {key} is given twice") for key in twice]
    if problems:
        raise ConfigError(problems)
    return keys


class ObservationReader:
    """Reads the observations of a policy from requests.

    Args:
        spec: of the policy.
        cameras: names of its cameras, in its order.
        keys: result of `request_keys`.
    """

    def __init__(self, spec: PolicySpec, cameras: Sequence[str], keys: Mapping[str, str]):
        self._spec, self.cameras = spec, tuple(cameras)
        self._image_keys = [keys[camera] for camera in cameras] if spec.reads_images else []
        self._state_key = keys[STATE] if spec.proprio_dim else None
        self._prompt_key = keys[PROMPT]

    def with_keys(self, keys: Mapping[str, str]) -> ObservationReader:
        """The same with other keys."""
        return ObservationReader(self._spec, self.cameras, keys)

    @property
    def expected(self) -> dict[str, str]:
        """Key -> type and shape, for people."""
        size = self._spec.image_size
        image = f"uint8 [{size}, {size}, 3]" if size else "uint8 [H, W, 3], all of one size"
        state = {} if self._state_key is None else {self._state_key: f"floats [{self._spec.proprio_dim}]"}
        return {**dict.fromkeys(self._image_keys, image), **state, self._prompt_key: "text"}

    def read(self, request: Any) -> Observation:
        """The observation of a request; other keys are ignored.

        Raises:
            MessageError: keys are missing, or a value has another type or shape, or is not finite; lists both sides.
        """
        if not isinstance(request, Mapping):
            raise MessageError(f"a request is a map, not {described(request)}; {self._both({})}")
        missing = [key for key in self.expected if key not in request]
        if missing:
            raise MessageError(f"the request lacks {', '.join(missing)}; {self._both(request)}")
        images = [request[key] for key in self._image_keys]
        wrong = [key for key, image in zip(self._image_keys, images) if not self._is_image(image)]
        if not wrong and len({image.shape for image in images}) > 1:
            wrong = self._image_keys
        state, prompt = None, request[self._prompt_key]
        if self._state_key is not None:
            state = _vector(request[self._state_key], self._spec.proprio_dim)
            wrong += [self._state_key] if state is None else []
        if not isinstance(prompt, str) or len(prompt) > _MAX_PROMPT:
            wrong.append(self._prompt_key)
        if wrong:
            raise MessageError(f"the request has {', '.join(wrong)} of another type or shape; {self._both(request)}")
        if state is not None and not np.isfinite(state).all():
            raise MessageError(f"{self._state_key} holds NaN or infinity")
        return Observation(np.stack(images) if images else _NO_IMAGES, state, prompt)

    def _is_image(self, value: Any) -> bool:
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
            return False
        size = self._spec.image_size
        return min(value.shape) > 0 if size is None else value.shape[:2] == (size, size)

    def _both(self, request: Mapping[Any, Any]) -> str:
        expected = ", ".join(f"{key} ({kind})" for key, kind in self.expected.items())
        return f"needed: {expected}; received: {described_map(request)}"


def _vector(value: Any, length: int) -> np.ndarray | None:
    """A float32 vector of this length from an array or a list of numbers; None if the value is neither."""
    if isinstance(value, list) and all(isinstance(number, (int, float)) for number in value):
        value = np.array(value, np.float32)
    if not isinstance(value, np.ndarray) or value.shape != (length,):
        return None
    return value.astype(np.float32)


class EpisodeNoise:
    """Random numbers of the decisions on a connection.

    A new `SEED_KEY` begins an episode with the generator of an evaluation episode of that seed; `NOISE_KEY` brings the
    numbers of a single decision. Without both, the generator of the connection goes on.

    Args:
        spec: of the policy.
        keys: of the connection's generator.
    """

    def __init__(self, spec: PolicySpec, *keys: int | str):
        self._spec, self._rng = spec, derive_rng(*keys)
        self._seed: int | None = None

    def begin(self, *keys: int | str) -> None:
        """Begin an episode with another generator."""
        self._rng = derive_rng(*keys)

    def draw(self, request: Mapping[Any, Any]) -> np.ndarray:
        """The random numbers [*noise_shape] of the next decision; MessageError if the request's own are not usable."""
        if NOISE_KEY in request:
            given, shape = request[NOISE_KEY], self._spec.noise_shape
            if not isinstance(given, np.ndarray) or given.shape != shape or not np.isfinite(given).all():
                raise MessageError(f"{NOISE_KEY} is {described(given)}; needed are finite numbers {list(shape)}")
            return given.astype(np.float64)
        if SEED_KEY in request:
            seed = request[SEED_KEY]
            if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or not 0 <= seed < 2**63:
                raise MessageError(f"{SEED_KEY} is {described(seed)}; needed is an integer in [0, 2^63)")
            if seed != self._seed:
                self._seed = int(seed)
                self.begin(self._seed, "sampling")
        return self._spec.draw(self._rng)
