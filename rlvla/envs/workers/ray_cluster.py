"""Connection to the Ray cluster of workers and policies, and placement on its nodes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from rlvla.envs.workers.codec import readable
from rlvla.utils.errors import ConfigError, require

_CONNECT_SECONDS = 5.0
# Ray's default for addresses without a port.
_DEFAULT_PORT = 6379


def connect(address: str) -> None:
    """Connect this process to the cluster as a driver; no effect if already connected.

    Args:
        address: HOST:PORT of the cluster's head; "auto": the cluster of this machine; "local": a cluster on this
            machine only, which is started now and ends with this process.

    Raises:
        ConfigError: the cluster cannot be reached or started, or runs another version of Ray or Python.
    """
    # For a cluster started here: no usage statistics, and workers with normal scheduling priority.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray = ray_module()
    if ray.is_initialized():
        return
    problem = address_problem(address)
    if problem:
        raise ConfigError(problem)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Hide log messages of other machines that `log_to_driver` does not cover; relevant errors are part of the answers.
    ray._private.worker._worker_logs_enabled = False
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **local)
    except Exception as error:  # Ray also raises plain `Exception`
        hint = "the same versions of Ray and Python, and the same token, are needed on all machines: docs/scaling.md"
        if address == "local":
            hint = "Ray's own account is in session_latest/logs below $RAY_TMPDIR, by default /tmp/ray"
        text = f"--ray_address {address}: {account_of(error)} ({hint})"
        raise ConfigError.of("ray_address", "unavailable", text) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray replaces the trainer's handler


def address_problem(address: str) -> str | None:
    """Why the address of a cluster is unusable, or None; does not connect to Ray.

    Args:
        address: see `connect`.
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
        return f"--ray_address {address}: '{place}' is not an address; give HOST:PORT, auto or local"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return (
            f"--ray_address {address}: nothing answers at {place} ({error}); start Ray there with "
            f"`ray start --head --port {port}`, and on this machine with `ray start --address {place}`"
        )
    return None


def least_busy_node(taken: Mapping[str, int]) -> str | None:
    """Node with the lowest ratio of actors of this process (`taken` by node) to cores; None if no node has a core.

    Ray's own scheduling uses delayed statistics.
    """
    cores = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray_module().nodes() if node["Alive"]}
    fit = [node for node, number in cores.items() if number >= 1]
    return min(fit, key=lambda node: (taken.get(node, 0) + 1) / cores[node], default=None)


def _address_of_this_machine() -> str | None:
    """Cluster address from $RAY_ADDRESS or from `ray start` on this machine."""
    from ray._common.utils import get_ray_address_file

    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    try:
        with open(get_ray_address_file(None), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return None


def ray_module() -> Any:
    """The `ray` module; MissingExtraError if it is not installed."""
    return require("ray", extra="ray")


def account_of(error: BaseException) -> str:
    """Ray's error message in one line, without its list of common causes."""
    return readable(" ".join(str(error).split()).partition(" Some common causes")[0], 1000)
