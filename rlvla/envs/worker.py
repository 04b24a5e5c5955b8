"""The process that holds an environment: `python -m rlvla.envs.worker`, started by `rlvla.envs.pool.EnvPool`.

It answers one command at a time until the pool closes the connection, and dies with the process that started it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from rlvla.envs.base import Env
from rlvla.envs.experts import make_expert
from rlvla.envs.experts.episode import play_expert_episode
from rlvla.envs.messages import (
    PROTOCOL_VERSION,
    Answer,
    EnvSpec,
    Failure,
    Hello,
    Make,
    PrivilegedState,
    Reset,
    RunExpert,
    StepChunk,
    pack,
    receive_message,
    send_message,
    unpack,
)
from rlvla.envs.registry import load_custom_module, make_env
from rlvla.envs.slab import Slab
from rlvla.utils.errors import ConfigError, MissingExtraError
from rlvla.version import __version__

_PR_SET_PDEATHSIG = 1


class Worker:
    """Executes commands on one environment, which it builds when first asked for it.

    Args:
        custom_modules: imported before the first command is executed, see `EnvPool`.

    Attributes:
        phase: what is being done, for the report of an exception.
    """

    def __init__(self, custom_modules: Sequence[str] = ()) -> None:
        self.phase = "import"
        self._to_import = list(custom_modules)
        self._spec: EnvSpec | None = None
        self._env: Env | None = None

    def execute(self, command: object) -> Answer:
        """Answer one command."""
        while self._to_import:
            self.phase = "import"
            load_custom_module(self._to_import[0])
            del self._to_import[0]
        if isinstance(command, Make):
            return self._ensure_env(command.env).task
        if isinstance(command, Reset):
            env = self._ensure_env(command.env)
            self.phase = "reset"
            return env.reset(command.init_state_id, command.seed)
        if isinstance(command, StepChunk):
            self.phase = "step_chunk"
            if self._env is None:
                raise RuntimeError("no episode is running: send Reset first")
            return self._env.step_chunk(command.actions, record_frames=command.record_frames)
        if isinstance(command, RunExpert):
            env = self._ensure_env(command.env)
            self.phase = "run_expert"
            expert = make_expert(command.env.suite, command.env.task_id, command.expert)
            return play_expert_episode(env, expert, command.init_state_id, command.seed)
        if isinstance(command, PrivilegedState):
            self.phase = "privileged_state"
            if self._env is None:
                raise RuntimeError("there is no environment: send Reset first")
            return self._env.privileged_state()
        raise TypeError(f"unknown command {command!r}")

    def close(self) -> None:
        """Close the environment, if there is one."""
        env, self._env, self._spec = self._env, None, None
        if env is not None:
            env.close()

    def discard(self) -> None:
        """Close the environment, come what may."""
        try:
            self.close()
        except Exception:  # the exception that led here is the one to report
            traceback.print_exc()

    def fail(self, error: Exception) -> Failure:
        """What the caller is told about an exception.

        It may have left the environment in any state: the next command gets a fresh one.
        """
        failure = describe_failure(self.phase, error)
        self.discard()
        return failure

    def _ensure_env(self, spec: EnvSpec) -> Env:
        self.phase = "make"
        if self._env is None or spec != self._spec:
            self.close()
            self._env = make_env(spec.suite, spec.task_id, **spec.options)
            self._spec = spec
        return self._env


def hello() -> Hello:
    """What a worker says first."""
    return Hello(PROTOCOL_VERSION, __version__, platform.python_version(), np.__version__)


def serve(connection: Connection, slab: Slab, custom_modules: Sequence[str]) -> None:
    """Say hello, then answer commands until the other side is gone."""
    send_message(connection, hello())
    worker = Worker(custom_modules)
    try:
        while True:
            message = receive_message(connection)
            try:
                reply = pack(worker.execute(unpack(message, slab)), slab)
            except Exception as error:
                reply = worker.fail(error)
            send_message(connection, reply)
    except (EOFError, OSError):  # the pool has closed the connection, or its process is gone
        pass
    finally:
        worker.discard()


def describe_failure(phase: str, error: Exception) -> Failure:
    """What the caller is told about an exception."""
    problems: tuple[str, ...] = ()
    if isinstance(error, ConfigError):
        problems = tuple(error.problems)
    elif isinstance(error, MissingExtraError):
        problems = (str(error),)
    return Failure(phase, type(error).__name__, str(error), "".join(traceback.format_exception(error)), problems)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux; elsewhere see `serve`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        sys.exit(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the process; the arguments are for `EnvPool` alone."""
    # Ctrl-C reaches the whole process group: the parent decides what it means and closes the connection. It has started
    # this process with the signal blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parser = argparse.ArgumentParser(description="Environment worker, started by rlvla.envs.pool.EnvPool.")
    parser.add_argument("--connection_fd", type=int, required=True)
    parser.add_argument("--slab_fd", type=int, required=True)
    parser.add_argument("--parent_pid", type=int, default=None, help="die with this process")
    parser.add_argument("--custom_modules", nargs="*", default=[])
    args = parser.parse_args(argv)
    if args.parent_pid is not None:
        die_with_parent(args.parent_pid)
    slab = Slab(args.slab_fd)
    with Connection(args.connection_fd) as connection:
        serve(connection, slab, args.custom_modules)
    slab.close()


if __name__ == "__main__":
    main()
