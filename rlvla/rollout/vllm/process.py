"""The process that decodes with vLLM: start, requests, end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlvla.envs.workers.guardian import MARK, kill_marked, new_mark
from rlvla.envs.workers.slab import Slab, create_slab_file
from rlvla.utils.errors import RunEnded

ENGINE = Path(__file__).with_name("engine.py")
# The engine core in the program itself, no reports about usage, no model hub, no threads bound to cores.
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its logits processors have another interface
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",
}
# Variables that belong to this process: its packages and rank; and the deprecated setting of the cache size.
_NOT_PASSED_ON = (
    *("PYTHONPATH", "PYTHONHOME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "VLLM_CPU_KVCACHE_SPACE",
)
_ANSWER_SECONDS = 600.0  # for a batch of decisions or for new weights
_END_SECONDS = 3.0
_LOG_LINES = 15  # of the log, in a message
_LONGEST_LOG = 4000  # characters of them


class EngineProcess:
    """A running `engine.py`, which ends with this process even if that is killed.

    Args:
        python: interpreter that has vLLM.
        settings: see `rlvla.rollout.vllm.engine.Engine`.
        log: file for its output; appended to.
        device: of the policy; the program gets the same GPU.
        program: the program.

    Attributes:
        is_closed: whether `close` was called.
        prompts, weights: shared memory for the tensors of a command.
    """

    def __init__(
        self,
        python: str,
        settings: Mapping[str, Any],
        log: Path,
        device: torch.device | None = None,
        program: Path = ENGINE,
    ):
        self.log, self.is_closed, self._mark, self._asked = log, False, new_mark(), 0
        ours, theirs = socket.socketpair()
        files = create_slab_file(), create_slab_file()
        self.prompts, self.weights = Slab(files[0]), Slab(files[1])
        command = [python, str(program), *map(str, (theirs.fileno(), *files)), json.dumps(settings)]
        environment = engine_environment(device) | {MARK: self._mark}
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with theirs, log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    pass_fds=(theirs.fileno(), *files),
                    start_new_session=True,  # Ctrl-C in a terminal is for this process
                )
        except OSError as error:
            ours.close()
            self._close_memory()
            raise RunEnded(f"vLLM cannot be started with {python}: {error}") from error
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int | None:
        """Its process id; None if it has ended."""
        return None if self._process.poll() is not None else self._process.pid

    def wait_until_ready(self, seconds: float) -> None:
        """Wait for the model to be built.

        Raises:
            RunEnded: it ended, reported an error, or took longer.
        """
        answer = self._receive(seconds, "has not started")
        if "error" in answer:
            raise RunEnded(f"vLLM does not start; its log is {self.log}\n{answer['error']}")

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a command and wait for the answer.

        Raises:
            RunEnded: it has ended, or does not answer.
            RuntimeError: the command failed, with the program's traceback.
        """
        self._asked += 1
        try:
            self._connection.send_bytes(json.dumps({"id": self._asked, **message}).encode())
        except OSError:  # its earlier messages and its log have the reason
            raise self._gone() from None
        answer: dict[str, Any] = {}
        while answer.get("id") != self._asked:  # a signal may have ended the wait for an earlier answer
            answer = self._receive(_ANSWER_SECONDS, "has not answered")
        if "error" in answer:
            raise RuntimeError(f"vLLM failed; its log is {self.log}\n{answer['error']}")
        return answer

    def close(self) -> None:
        """End the program with its child processes; may be called again."""
        if self.is_closed:
            return
        self.is_closed = True
        self._connection.close()
        self._close_memory()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill_marked([self._mark])
        self._process.wait()

    def _close_memory(self) -> None:
        self.prompts.close()
        self.weights.close()

    def _receive(self, seconds: float, late: str) -> dict[str, Any]:
        try:
            if not self._connection.poll(seconds):
                raise RunEnded(f"vLLM {late} for {seconds:g} seconds; its log is {self.log}{self._last_lines()}")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> RunEnded:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        how = "" if self._process.poll() is None else f" with exit code {self._process.returncode}"
        return RunEnded(f"vLLM has ended{how}; its log is {self.log}{self._last_lines()}")

    def _last_lines(self) -> str:
        with suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace")[-_LONGEST_LOG:].splitlines()[-_LOG_LINES:]
            if lines:
                return ", which ends:\n  " + "\n  ".join(lines)
        return ""


def place(tensor: Tensor, memory: Slab) -> dict[str, Any]:
    """Copy a tensor into shared memory and return its ref (see `engine.py`).

    Raises:
        OSError: shared memory is full.
    """
    host = tensor.detach().cpu().contiguous()
    ref = memory.append(host.reshape(-1).view(torch.uint8).numpy())
    return {"dtype": str(host.dtype).removeprefix("torch."), "shape": list(host.shape), "offset": ref.offset}


def engine_environment(device: torch.device | None) -> dict[str, str]:
    """Environment variables of the program, for the GPU of the policy."""
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    environment |= _VLLM_ENVIRONMENT
    if device is not None and device.type == "cuda":
        index = device.index or 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return environment
