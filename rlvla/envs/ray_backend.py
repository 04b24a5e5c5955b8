"""Workers as actors of a Ray cluster (`--env_backend ray`), on as many machines as it has.

An actor executes the commands that a worker process executes. Messages travel as bytes, camera images in them as they
are or as PNG, which loses nothing.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvla.envs.backend import WorkerGoneError, WorkerOptions
from rlvla.envs.messages import Command, replace_leaves
from rlvla.envs.processes import WORKER_ENVIRONMENT, resident_bytes, worker_environment
from rlvla.envs.worker import Worker, hello
from rlvla.utils.errors import ConfigError, MissingExtraError, require

# How camera images travel.
FRAMES = ("raw", "png")
# Variables of the trainer that workers on other machines get too, beside those that every worker gets.
_FORWARDED = ("MUJOCO_", "PYOPENGL_", "LIBERO_", "ROBOTWIN_", "RLVLA_")
# How long an idle worker may take to close its environment, and a killed one to be gone.
_GRACE_SECONDS = 3.0
# An answer that has been announced is on this machine, unless it was lost on the way.
_FETCH_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
# The default of Ray, too, if there is no port in an address.
_DEFAULT_PORT = 6379


@dataclass(frozen=True)
class _PNG:
    """Images [..., H, W, 3] uint8 below each other in one picture."""

    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class _Reply:
    """What an actor returns: a message, and what only its machine knows."""

    message: Any
    pid: int
    host: str
    rss_bytes: int


def encode(message: Any, frames: str) -> bytes:
    """A message as bytes; with `frames` "png" its images are compressed.

    Raises:
        ValueError: an array of Python objects.
    """

    def packed(array: np.ndarray) -> np.ndarray | _PNG:
        if array.dtype.hasobject:
            raise ValueError(f"an array of Python objects (dtype {array.dtype}) cannot be sent")
        is_image = array.dtype == np.uint8 and array.ndim >= 3 and array.shape[-1] == 3 and array.size > 0
        return _compressed(array) if frames == "png" and is_image else array

    return pickle.dumps(replace_leaves(message, np.ndarray, packed), protocol=pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> Any:
    """The way back from `encode`; arrays belong to the caller."""
    return replace_leaves(pickle.loads(data), _PNG, _decompressed)


def _compressed(images: np.ndarray) -> _PNG:
    from PIL import Image

    buffer = io.BytesIO()
    width = images.shape[-2]
    Image.fromarray(np.ascontiguousarray(images).reshape(-1, width, 3)).save(buffer, "PNG", compress_level=1)
    return _PNG(images.shape, buffer.getvalue())


def _decompressed(png: _PNG) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(png.data)) as image:
        return np.array(image).reshape(png.shape)


class RayWorker:
    """The actor: a worker that is called instead of being written to.

    Args:
        custom_modules: see `EnvPool`.
        frames: how images travel, one of `FRAMES`.
    """

    def __init__(self, custom_modules: Sequence[str], frames: str):
        self._worker = Worker(custom_modules)
        self._frames = frames

    def hello(self) -> bytes:
        """The first message."""
        return self._reply(hello())

    def execute(self, command: bytes) -> bytes:
        """Answer one command."""
        try:
            return self._reply(self._worker.execute(decode(command)))
        except Exception as error:
            return self._reply(self._worker.fail(error))

    def close(self) -> None:
        """Close the environment, come what may."""
        self._worker.discard()

    def _reply(self, message: Any) -> bytes:
        return encode(_Reply(message, os.getpid(), socket.gethostname(), resident_bytes("self")), self._frames)


class RayChannel:
    """An actor, and the one call that it has not answered yet."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.pending: Any = actor.hello.remote()
        self._known = _Reply(None, 0, "a machine of the Ray cluster", 0)
        self._end = "the worker was ended"
        self.ended = False

    @property
    def pid(self) -> int:
        """The process id on the worker's machine; 0 until it has said hello."""
        return self._known.pid

    @property
    def place(self) -> str:
        """The machine."""
        return self._known.host

    def send(self, command: Command) -> None:
        """Call the actor; that it is gone shows in the answer."""
        self.pending = self.actor.execute.remote(encode(command, "raw"))

    def receive(self) -> Any:
        """The answer that has arrived."""
        ray = _ray()
        pending, self.pending = self.pending, None
        try:
            self._known = decode(ray.get(pending, timeout=_FETCH_SECONDS))
        except ray.exceptions.RayError as error:
            self.ended = True
            self._end = f"the process on {self.place} has ended: {_account(error)}"
            raise WorkerGoneError from error
        return self._known.message

    def kill(self) -> None:
        """End the actor's process."""
        _ray().kill(self.actor)

    def bury(self) -> str:
        """Make sure that the process is gone, as far as its machine can be reached."""
        self.kill()
        self.pending, self.ended = None, True
        return self._end

    def rss_bytes(self) -> int:
        """Resident memory as of the last answer."""
        return self._known.rss_bytes


class RayBackend:
    """Starts workers on a Ray cluster, spread over its machines.

    Args:
        address: HOST:PORT of the cluster's head; "auto": the cluster that this machine belongs to; "local": a cluster
            of this machine alone, started now and ended with this process.
        frames: how images travel, one of `FRAMES`.

    Raises:
        ConfigError: the cluster cannot be reached.
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, address: str = "auto", frames: str = "raw"):
        if frames not in FRAMES:
            raise ConfigError(f"frames must be one of {', '.join(FRAMES)}, not {frames!r}")
        connect(address)
        self._actor_class = _ray().remote(RayWorker)
        self._frames = frames
        self._placed: list[tuple[str, RayChannel]] = []  # node ids and workers

    def start(self, options: WorkerOptions) -> RayChannel:
        """Ask the cluster for an actor."""
        variables = {
            name: value
            for name, value in worker_environment(options.environment).items()
            if name in WORKER_ENVIRONMENT
            or name in options.environment
            or name == "PYTHONPATH"
            or name.startswith(_FORWARDED)
        }
        # Ray would hide the GPUs from an actor that reserves none, and simulators render on them.
        variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        # No restarts by Ray: the pool must know of every process that ended, to repeat the right episode.
        settings: dict[str, Any] = {"max_restarts": 0, "runtime_env": {"env_vars": variables}}
        node = self._least_busy_node()
        if node is not None:
            place = _ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
            settings["scheduling_strategy"] = place
        actor_class = self._actor_class.options(**settings)
        channel = RayChannel(actor_class.remote(list(options.custom_modules), self._frames))
        if node is not None:
            self._placed.append((node, channel))
        return channel

    def _least_busy_node(self) -> str | None:
        """Where our workers take the smallest share of the cores; Ray itself spreads by figures that lag behind."""
        self._placed = [(node, channel) for node, channel in self._placed if not channel.ended]
        taken = Counter(node for node, _ in self._placed)
        known = [node for node in _ray().nodes() if node["Alive"]]
        cores = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in known}
        fit = [node for node, number in cores.items() if number >= 1]
        return min(fit, key=lambda node: (taken[node] + 1) / cores[node], default=None)

    def wait(self, channels: Sequence[RayChannel], timeout: float | None) -> Sequence[RayChannel]:
        """Those that have answered or ended."""
        pending = {channel.pending: channel for channel in channels}
        ready, others = _ray().wait(list(pending), num_returns=1, timeout=timeout)
        if ready and others:
            ready += _ray().wait(others, num_returns=len(others), timeout=0)[0]
        return [pending[reference] for reference in ready]

    def close(self, idle: Sequence[RayChannel], busy: Sequence[RayChannel]) -> None:
        """An idle worker may close its environment, a busy one is killed."""
        ray = _ray()
        if not ray.is_initialized():  # the process is ending, and Ray has been there first
            return
        for channel in busy:
            channel.kill()
        closing = [channel.actor.close.remote() for channel in idle]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_GRACE_SECONDS)
        for channel in idle:
            channel.kill()


def connect(address: str) -> None:
    """Make this process a driver of the cluster; does nothing if it is one already.

    Raises:
        ConfigError: the cluster cannot be reached, or runs another version of Ray or Python.
    """
    # For a cluster that is started here: no reports to Ray's makers, and workers that get as much of a core as others.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray = _ray()
    if ray.is_initialized():
        return
    problem = address_problem(address)
    if problem:
        raise ConfigError(problem)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Messages of other machines would stand among those of a command; what matters of them comes with the answers.
    # Ray 2 offers no setting for the part that `log_to_driver` leaves.
    ray._private.worker._worker_logs_enabled = False
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray_address {address}: {_account(error)} (the same versions of Ray and Python, and the same token, are "
            "needed on all machines: docs/scaling.md)"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in the place of a trainer's


def address_problem(address: str) -> str | None:
    """What is wrong with the address of a cluster, found out without connecting to it; None if nothing is.

    Args:
        address: as for `RayBackend`.
    """
    if address == "local":
        return None
    place = address
    if address == "auto":
        place = _address_of_this_machine() or ""
        if not place:
            return (
                "--ray_address auto: no Ray cluster runs on this machine; start one with `ray start --head`, join one "
                "with `ray start --address HOST:PORT`, or give --ray_address local"
            )
    host, _, port = place.rpartition(":") if ":" in place else (place, "", str(_DEFAULT_PORT))
    if not port.isdigit() or not 0 < int(port) < 2**16 or not host:
        return f"--ray_address {address}: '{place}' is no address; give HOST:PORT, auto or local"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return (
            f"--ray_address {address}: nothing answers at {place} ({error}); start Ray there with "
            f"`ray start --head --port {port}`, and on this machine with `ray start --address {place}`"
        )
    return None


def ray_problems(address: str, env_python: str | None) -> list[str]:
    """What keeps workers from running on a Ray cluster, one sentence each; nothing is started."""
    problems = []
    if env_python is not None:
        problems.append(
            f"--env_python {env_python}: workers on a Ray cluster run in the interpreter that started Ray on their "
            "machine; run `ray start` with that one, or leave out --env_backend ray"
        )
    try:
        _ray()
    except MissingExtraError as error:
        return [*problems, f"--env_backend ray: {error}"]
    problem = address_problem(address)
    return [*problems, problem] if problem else problems


def _address_of_this_machine() -> str | None:
    """Where `ray start` on this machine, or $RAY_ADDRESS, says that the cluster is."""
    from ray._common.utils import get_ray_address_file

    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    try:
        with open(get_ray_address_file(None), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return None


def _ray() -> Any:
    """The library, or a `MissingExtraError`."""
    return require("ray", extra="ray")


def _account(error: BaseException) -> str:
    """Ray's account of an error in one line, without its advice."""
    return " ".join(str(error).split()).partition(" Some common causes")[0]
