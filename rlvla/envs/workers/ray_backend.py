"""Workers as actors on the machines of a Ray cluster (`--env_backend ray`).

An actor executes the same commands as a worker process. Its answers are bytes: the JSON of `rlvla.envs.workers.codec`,
then the arrays, camera images raw or as PNG (lossless).
"""

from __future__ import annotations

import io
import json
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlvla.envs.workers.backend import WorkerGoneError, WorkerOptions
from rlvla.envs.workers.codec import decode_message, encode_answer, encode_hello, join_answers
from rlvla.envs.workers.guardian import MARK, new_mark
from rlvla.envs.workers.messages import Hello, SlotAnswer, SlotCommand, dump_commands, load_commands
from rlvla.envs.workers.processes import WORKER_ENVIRONMENT, resident_bytes, worker_environment
from rlvla.envs.workers.ray_cluster import account_of, address_problem, connect, least_busy_node, ray_module
from rlvla.envs.workers.worker import Worker, answers_of, hello
from rlvla.utils.errors import ConfigError, MissingExtraError, Problem

# Encodings of camera images in messages.
FRAMES = ("raw", "png")
# Prefixes of the environment variables that are forwarded to workers on other machines.
_FORWARDED = ("MUJOCO_", "PYOPENGL_", "LIBERO_", "ROBOTWIN_", "RLVLA_")
# Seconds for idle workers to close their environments.
_GRACE_SECONDS = 3.0
# Timeout in seconds: an announced answer is already on this machine, unless it was lost in transit.
_FETCH_SECONDS = 10.0
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Envelope:
    """Header of a reply: the state of its process.

    Attributes:
        pid, host: the process and its machine.
        rss_bytes: its resident memory.
        is_batched: whether commands should be sent together.
        message_bytes: length of the message that follows; the arrays come after it.
    """

    pid: int
    host: str
    rss_bytes: int
    is_batched: bool = False
    message_bytes: int = 0


class ArrayWriter:
    """Serializes the arrays of a message, camera images raw or as PNG.

    Args:
        frames: encoding of camera images, one of `FRAMES`.
    """

    def __init__(self, frames: str):
        self._frames, self._end = frames, 0
        self.chunks: list[bytes] = []

    def store(self, array: np.ndarray) -> dict[str, Any]:
        """Append an array; ValueError for an array of Python objects."""
        if array.dtype.hasobject:
            raise ValueError(f"an array of Python objects (dtype {array.dtype}) cannot be sent")
        is_image = array.dtype == np.uint8 and array.ndim >= 3 and array.shape[-1] == 3 and array.size > 0
        as_png = self._frames == "png" and is_image
        data = _compressed(array) if as_png else array.tobytes()
        start, self._end = self._end, self._end + len(data)
        self.chunks.append(data)
        return {"start": start, "end": self._end, "shape": array.shape, "dtype": array.dtype.str, "png": as_png}


def read_array(data: memoryview, reference: Mapping[str, Any]) -> np.ndarray:
    """A copy of the array of a reference into these bytes."""
    part = data[reference["start"] : reference["end"]]
    array = _decompressed(part) if reference["png"] else np.frombuffer(part, dtype=reference["dtype"]).copy()
    return array.reshape(reference["shape"])


def _compressed(images: np.ndarray) -> bytes:
    """Encode images [..., H, W, 3] uint8, stacked vertically, as one PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    width = images.shape[-2]
    Image.fromarray(np.ascontiguousarray(images).reshape(-1, width, 3)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _decompressed(data: memoryview) -> np.ndarray:
    from PIL.PngImagePlugin import PngImageFile

    # Unlike `Image.open`, without a limit on the pixels of all frames of an episode together.
    with PngImageFile(io.BytesIO(data)) as image:
        return np.array(image)


def write_reply(envelope: Envelope, message: bytes, arrays: Sequence[bytes]) -> bytes:
    """Encode the return value of an actor."""
    head = json.dumps(vars(replace(envelope, message_bytes=len(message)))).encode()
    return b"".join([_LENGTH.pack(len(head)), head, message, *arrays])


def read_reply(data: bytes) -> tuple[Envelope, Hello | list[SlotAnswer]]:
    """Decode the return value of an actor; DecodeError: see `decode_message`."""
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    envelope = Envelope(**json.loads(data[_LENGTH.size : start]))
    end = start + envelope.message_bytes
    arrays = memoryview(data)[end:]
    return envelope, decode_message(data[start:end], lambda reference: read_array(arrays, reference))


class RayWorker:
    """The actor: a worker that receives commands by remote calls.

    Args:
        custom_modules: see `EnvPool`.
        frames: encoding of camera images, one of `FRAMES`.
        num_slots: number of slots, i.e. concurrent episodes.
        max_kept: limit of `Suite.kept`.
    """

    def __init__(self, custom_modules: Sequence[str], frames: str, num_slots: int, max_kept: int):
        os.environ[MARK] = new_mark()  # for processes started by the simulator
        self._worker = Worker(custom_modules, num_slots, max_kept)
        self._frames = frames

    def hello(self) -> bytes:
        """The first message."""
        return self._reply(encode_hello(hello()), [])

    def execute(self, commands: bytes) -> bytes:
        """Execute commands of different slots and return their answers."""
        arrays = ArrayWriter(self._frames)
        groups = answers_of(
            self._worker, load_commands(commands), lambda _, answer: encode_answer(answer, arrays.store)
        )
        message = join_answers([answer for group in groups for answer in group])
        return self._reply(message, arrays.chunks)

    def close(self) -> None:
        """Close the environments, ignoring exceptions."""
        self._worker.close()

    def _reply(self, message: bytes, arrays: Sequence[bytes]) -> bytes:
        envelope = Envelope(os.getpid(), socket.gethostname(), resident_bytes("self"), self._worker.is_batched)
        return write_reply(envelope, message, arrays)


class RayChannel:
    """An actor and its pending calls, in the order of execution."""

    def __init__(self, actor: Any):
        self.actor = actor
        self._calls: deque[Any] = deque([actor.hello.remote()])
        self._header = Envelope(0, "a machine of the Ray cluster", 0)
        self._end = "the worker was killed"
        self.ended = False

    @property
    def pid(self) -> int:
        """The process id on the worker's machine; 0 before its `Hello`."""
        return self._header.pid

    @property
    def place(self) -> str:
        """The machine."""
        return self._header.host

    @property
    def pending(self) -> Any:
        """The oldest pending call."""
        return self._calls[0]

    def send(self, commands: Sequence[SlotCommand]) -> None:
        """Call the actor; `receive` reports whether it has ended.

        Commands share a call if a batched environment executes them together; otherwise, each has its own call, so that
        no answer waits for another slot.
        """
        calls = [commands] if self._header.is_batched else [[command] for command in commands]
        for call in calls:
            self._calls.append(self.actor.execute.remote(dump_commands(call)))

    def receive(self) -> Hello | list[SlotAnswer]:
        """Read the result of the next pending call."""
        ray = ray_module()
        try:
            data = ray.get(self._calls.popleft(), timeout=_FETCH_SECONDS)
        except ray.exceptions.RayError as error:
            self.ended = True
            self._end = f"the process on {self.place} has ended: {account_of(error)}"
            raise WorkerGoneError from error
        self._header, message = read_reply(data)
        return message

    def kill(self) -> None:
        """End the actor's process."""
        ray_module().kill(self.actor)

    def reap(self) -> str:
        """Ensure that the process has ended, if its machine is reachable."""
        self.kill()
        self._calls.clear()
        self.ended = True
        return self._end

    def rss_bytes(self) -> int:
        """Resident memory as of the last answer."""
        return self._header.rss_bytes


class RayBackend:
    """Starts workers on a Ray cluster, distributed over its machines.

    Args:
        address: see `connect`.
        frames: encoding of camera images, one of `FRAMES`.

    Raises:
        ConfigError: the cluster cannot be reached.
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, address: str = "auto", frames: str = "raw"):
        if frames not in FRAMES:
            raise ConfigError(f"frames must be one of {', '.join(FRAMES)}, not {frames!r}")
        connect(address)
        self._actor_class = ray_module().remote(RayWorker)
        self._frames = frames
        self._placed: list[tuple[str, RayChannel]] = []  # node ids and workers

    def start(self, options: WorkerOptions) -> RayChannel:
        """Start an actor on the least busy machine."""
        variables = {
            name: value
            for name, value in worker_environment(options.environment).items()
            if name in WORKER_ENVIRONMENT
            or name in options.environment
            or name == "PYTHONPATH"
            or name.startswith(_FORWARDED)
        }
        # Otherwise, Ray hides the GPUs from actors that reserve none, but simulators render on them.
        variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        variables[MARK] = new_mark()  # a stopped worker of a local cluster does not notice its end
        # No restarts by Ray: the pool must see each failure to repeat the right episode.
        settings: dict[str, Any] = {"max_restarts": 0, "runtime_env": {"env_vars": variables}}
        self._placed = [(node, channel) for node, channel in self._placed if not channel.ended]
        node = least_busy_node(Counter(node for node, _ in self._placed))
        if node is not None:
            place = ray_module().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
            settings["scheduling_strategy"] = place
        actor_class = self._actor_class.options(**settings)
        arguments = list(options.custom_modules), self._frames, options.num_slots, options.max_kept
        channel = RayChannel(actor_class.remote(*arguments))
        if node is not None:
            self._placed.append((node, channel))
        return channel

    def wait(self, channels: Sequence[RayChannel], timeout: float | None) -> Sequence[RayChannel]:
        """Channels that answered or ended."""
        pending = {channel.pending: channel for channel in channels}
        ready, others = ray_module().wait(list(pending), num_returns=1, timeout=timeout)
        if ready and others:
            ready += ray_module().wait(others, num_returns=len(others), timeout=0)[0]
        return [pending[reference] for reference in ready]

    def close(self, idle: Sequence[RayChannel], busy: Sequence[RayChannel]) -> None:
        """Let idle workers close their environments; kill busy ones."""
        ray = ray_module()
        if not ray.is_initialized():  # Ray has already shut down at process exit
            return
        for channel in busy:
            channel.kill()
        closing = [channel.actor.close.remote() for channel in idle]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_GRACE_SECONDS)
        for channel in idle:
            channel.kill()


def ray_problems(address: str, env_python: str | None) -> list[Problem]:
    """Validate workers on a Ray cluster without starting anything."""
    problems = []
    if env_python is not None:
        text = (
            f"--env_python {env_python}: workers on a Ray cluster run in the interpreter that started Ray on their "
            "machine; run `ray start` with that one, or leave out --env_backend ray"
        )
        problems.append(Problem("env_python", "contradiction", text))
    try:
        ray_module()
    except MissingExtraError as error:
        return [*problems, Problem("env_backend", "unavailable", f"--env_backend ray: {error}")]
    problem = address_problem(address)
    return [*problems, Problem("ray_address", "unavailable", problem)] if problem else problems
