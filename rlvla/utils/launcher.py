"""Launching of ranks; launcher processes of this rank, from /proc (Linux; elsewhere none), and accelerator devices."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Device files of accelerators. Without any of these the deepspeed launcher warns, twice, that it found none.
ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
_NODE_LAUNCHER = "deepspeed.launcher.launch"  # started by the program `deepspeed`, on every machine
RANKS_MODULE = "rlvla.recipes.ranks"  # starts the ranks of a recipe's stage
_PROGRAMS = {"deepspeed", "deepspeed.pt", "ds", "torchrun"}
_MODULES = {
    _NODE_LAUNCHER,
    RANKS_MODULE,
    "deepspeed.launcher.runner",
    "torch.distributed.run",
    "torch.distributed.launch",
}
_LEADING_ARGUMENTS = 5  # of a command line, among which its program stands: an interpreter and its options come first
_GONE = -1  # no process started then


@dataclass(frozen=True)
class Ancestor:
    """A process that this one descends from.

    Attributes:
        pid: process id.
        start: when it started, in clock ticks since boot: ids are reused.
    """

    pid: int
    start: int

    def is_alive(self) -> bool:
        """Whether it still runs."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.start and fields[0] not in "ZX"


def launchers_of_this_rank() -> list[Ancestor]:
    """The launcher of this rank and its parent launchers, also if they have ended; [] if this is not a rank."""
    if "RANK" not in os.environ:
        return []
    launchers: list[Ancestor] = []
    child, pid = os.getpid(), os.getppid()
    started_by_launcher = any(word.startswith("--local_rank") for word in sys.argv)
    while True:
        fields = _stat(pid)
        # Whoever starts the outermost launcher may end without consequence (nohup, a script's `&`).
        if started_by_launcher and _is_adopted(child, pid):
            return [*launchers, Ancestor(pid, _GONE)]
        argv = _leading_arguments(pid)
        if fields is None or not any(Path(word).name in _PROGRAMS or word in _MODULES for word in argv):
            return launchers
        launchers.append(Ancestor(pid, int(fields[19])))
        child, pid, started_by_launcher = pid, int(fields[1]), _NODE_LAUNCHER in argv


def _is_adopted(child: int, parent: int) -> bool:
    """Whether the parent did not start the child: they are in different sessions."""
    try:
        session = os.getsid(child)
        return session != child and os.getsid(parent) != session
    except (ProcessLookupError, PermissionError):
        return False


def _leading_arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:_LEADING_ARGUMENTS]
    except OSError:
        return []


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name: state, parent, ..., start time at index 19; None if it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def ranks_of(processes: int) -> int:
    """Number of ranks to launch: at most one per GPU, and a divisor of `processes`.

    A divisor also divides everything that `processes` divides, such as batch sizes.
    """
    gpus = num_gpus() if processes > 1 else 0
    return next(ranks for ranks in range(min(processes, gpus or processes), 0, -1) if processes % ranks == 0)


@functools.cache
def num_gpus() -> int:
    """Number of usable GPUs; a subprocess asks torch, which recipes do not load."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not any(map(os.path.exists, ACCELERATOR_FILES)):
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = result.stdout.split()[-1:]
    return int(last[0]) if last and last[0].isdigit() else 0


def ranks_module(processes: int) -> list[str]:
    """Arguments of Python that launch a program, which follows them, on these ranks; none for one process."""
    return ["-P", "-m", RANKS_MODULE, str(processes)] if processes > 1 else []
