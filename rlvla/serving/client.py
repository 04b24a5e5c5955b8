"""A remote policy that speaks openpi's protocol, for evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlvla.models.families import Checkpoint
from rlvla.models.policy import Decision, PolicySpec
from rlvla.serving.config import RemoteConfig, read_api_key
from rlvla.serving.messages import MessageError, described, described_map, pack, unpack
from rlvla.serving.observations import NOISE_KEY, PROMPT, STATE
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.terminal import log, printable

_MAX_ANSWER = 64 * 2**20  # bytes
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before a retry, doubled each time
_SHOWN = 500  # characters of a server's error


class NoAnswer(Exception):
    """No complete answer: a time-out, no connection, or a lost one. Another attempt may succeed."""


class Refused(Exception):
    """The server answered with an error."""


class Channel:
    """A connection to a policy server, opened when it is first used, and after a loss again.

    Args:
        config: address, key and time limit.
    """

    def __init__(self, config: RemoteConfig):
        assert config.remote is not None
        self._url, self._seconds = config.remote, config.remote_seconds
        key = read_api_key(config.remote_key_file, "remote_key_file")
        self._headers = {} if key is None else {"Authorization": f"Api-Key {key}"}
        self._socket: Any = None
        self._stack = ExitStack()  # closes the connection
        self._deadline = math.inf

    def open(self) -> dict[Any, Any]:
        """Connect; returns the server's metadata, {} if it sends something else than a map."""
        client = require("websockets.sync.client", extra="serve")
        self.close()
        self._deadline = time.monotonic() + self._seconds
        try:
            connection = client.connect(
                self._url,
                compression=None,
                proxy=None,
                additional_headers=self._headers,
                max_size=_MAX_ANSWER,
                open_timeout=self._seconds,
                ping_timeout=None,  # a server may be busy with a decision
                close_timeout=1.0,
            )
            self._socket = self._stack.enter_context(connection)
        except (OSError, self._errors()) as error:
            raise NoAnswer(f"no connection ({printable(str(error), _SHOWN)})") from None
        metadata = self.receive()
        return metadata if isinstance(metadata, dict) else {}

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request; `receive` has to follow."""
        if self._socket is None:
            self.open()
        self._deadline = time.monotonic() + self._seconds
        try:
            self._socket.send(pack(request))
        except (OSError, self._errors()) as error:
            raise self._lost(error) from None

    def receive(self) -> Any:
        """The next message of the server: the answer to the request that was sent last.

        Raises:
            NoAnswer: it did not come in time, or the connection was lost.
            Refused: the server answered with an error.
            MessageError: the answer cannot be read.
        """
        try:
            return self._receive()
        except BaseException:
            self.close()  # a late answer must not be taken for the next one
            raise

    def _receive(self) -> Any:
        try:
            answer = self._socket.recv(timeout=max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._seconds:g} s") from None
        except (OSError, self._errors()) as error:
            raise self._lost(error) from None
        if isinstance(answer, str):
            raise Refused(printable(answer, _SHOWN))
        return unpack(answer)

    def close(self) -> None:
        """Close the connection."""
        self._socket = None
        with suppress(OSError, self._errors()):
            self._stack.close()

    def _lost(self, error: Exception) -> NoAnswer:
        self.close()
        return NoAnswer(f"the connection was lost ({printable(str(error), _SHOWN)})")

    @staticmethod
    def _errors() -> type[Exception]:
        return require("websockets.exceptions", extra="serve").WebSocketException


def read_actions(answer: Any, spec: PolicySpec) -> np.ndarray:
    """The first A actions [A, D] float32 of an answer; MessageError if it holds none that can be executed."""
    length, dim = spec.action_chunk_len, spec.action_dim
    actions = answer.get("actions") if isinstance(answer, Mapping) else None
    if isinstance(actions, list):
        with suppress(ValueError, TypeError):
            actions = np.asarray(actions, np.float32)
    if not isinstance(actions, np.ndarray) or actions.ndim != 2 or len(actions) < length or actions.shape[1] != dim:
        received = described_map(answer) if isinstance(answer, Mapping) else described(answer)
        raise MessageError(f"needed are actions [{length} or more, {dim}]; the server answered {received}")
    actions = actions[:length].astype(np.float32)
    if not np.isfinite(actions).all():
        raise MessageError("the server's actions hold NaN or infinity")
    return actions


class RemotePolicy:
    """Decisions of a policy server, one connection for each episode of a batch; see `RolloutPolicy`.

    A decision without usable actions is one of `Decision.failures`, and its actions are zero.

    Args:
        config: address and limits.
        spec: of the policy, as far as it is known.
        cameras: names of the cameras, in the order of the images.
        keys: see `request_keys`.
    """

    def __init__(self, config: RemoteConfig, spec: PolicySpec, cameras: Sequence[str], keys: Mapping[str, str]):
        self._config, self.spec = config, spec
        self._image_keys, self._keys = [keys[camera] for camera in cameras], keys
        self._channels: list[Channel] = []

    def eval(self) -> Self:
        """Nothing to do."""
        return self

    def to(self, device: Any) -> Self:
        """Nothing to do: the server decides where it runs."""
        return self

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Observations as they are: the server prepares them."""
        return images, proprio

    def request(
        self, images: np.ndarray, proprio: np.ndarray | None, instruction: str, noise: np.ndarray | None
    ) -> dict[str, Any]:
        """The request for an observation: images [N, H, W, 3] uint8, proprio [P] or None."""
        content: dict[str, Any] = dict(zip(self._image_keys, images))
        if proprio is not None:
            content[self._keys[STATE]] = proprio
        if noise is not None:
            content[NOISE_KEY] = noise
        return content | {self._keys[PROMPT]: instruction}

    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        noise: np.ndarray | None,
        temperature: float = 1.0,
        greedy: bool = True,
    ) -> Decision:
        """See `RolloutPolicy.act`; the server decides how actions are chosen."""
        rows, spec = range(len(images)), self.spec
        requests = [
            self.request(
                images[row],
                None if proprio is None else proprio[row],
                instructions[row],
                None if noise is None else noise[row],
            )
            for row in rows
        ]
        while len(self._channels) < len(requests):
            self._channels.append(Channel(self._config))
        actions = np.zeros((len(requests), spec.action_chunk_len, spec.action_dim), np.float32)
        failures: dict[int, str] = {}
        waiting = list(rows)
        for attempt in range(self._config.remote_retries + 1):
            if attempt:
                log.warning(f"{self._config.remote}: {failures[waiting[0]]}; attempt {attempt + 1}")
                time.sleep(min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))
            results = self._exchange({row: requests[row] for row in waiting})
            waiting = []
            for row, result in results.items():
                if isinstance(result, np.ndarray):
                    actions[row] = result
                    failures.pop(row, None)
                    continue
                failures[row] = str(result)
                if isinstance(result, NoAnswer):
                    waiting.append(row)
            if not waiting:
                break
        log_probs = np.zeros((len(requests), spec.columns), np.float32)
        return Decision(actions, log_probs, {}, failures=failures)

    def _exchange(self, requests: Mapping[int, Mapping[str, Any]]) -> dict[int, np.ndarray | Exception]:
        """Send all requests, then wait for the answers: the server decides for them together."""
        results: dict[int, np.ndarray | Exception] = {}
        for row, request in requests.items():
            try:
                self._channels[row].send(request)
            except (NoAnswer, Refused, MessageError) as error:
                results[row] = error
        for row in requests.keys() - results.keys():
            try:
                results[row] = read_actions(self._channels[row].receive(), self.spec)
            except (NoAnswer, Refused, MessageError) as error:
                results[row] = error
        return dict(sorted(results.items()))

    def close(self) -> None:
        """Close all connections."""
        for channel in self._channels:
            channel.close()


@dataclass
class RemoteCheckpoint(Checkpoint):
    """Stands for the folder of a `RemotePolicy`.

    Attributes:
        spec: see `RemotePolicy`.
        config, cameras, keys: see `RemotePolicy`.
        metadata: of the server.
    """

    spec: PolicySpec
    config: RemoteConfig
    cameras: tuple[str, ...]
    keys: Mapping[str, str]
    metadata: Mapping[Any, Any]
    unnorm_key: str = ""

    @property
    def folder(self) -> Path:  # type: ignore[override]
        """The address."""
        return Path(str(self.config.remote))

    def load_policy(self, config: Any = None, *, value_head: bool = False) -> Any:
        """A client."""
        return RemotePolicy(self.config, self.spec, self.cameras, self.keys)


def probe(policy: RemotePolicy, channel: Channel, images: np.ndarray, proprio: np.ndarray | None, text: str) -> Any:
    """The answer of a server to an observation, and whatever it says against it as a ConfigError."""
    noise = np.zeros(policy.spec.noise_shape) if policy.spec.greedy_noise else None
    request = policy.request(images, proprio, text, noise)
    try:
        channel.send(request)
        return channel.receive()
    except (NoAnswer, Refused, MessageError) as error:
        sent = described_map(request)
        why = f"{error}; it was sent {sent}. --remote_map names other keys"
        raise ConfigError.of("remote", "mismatch", f"the server refuses an observation of this suite: {why}") from None
