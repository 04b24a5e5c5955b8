"""The ranks of a program on this machine: `python -m rlvla.recipes.ranks NUMBER PROGRAM [FLAG ...]`.

They get the arguments and environment variables of the DeepSpeed launcher, whose two processes import torch and
DeepSpeed before the first rank starts (8 s of processor time); this one imports neither.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

_POLL_SECONDS = 0.05
_SAVE_SECONDS = 30.0  # for ranks to end after SIGTERM, as the DeepSpeed launcher grants them


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for their end; SIGINT and SIGTERM, or the failure of one, end the others.

    Args:
        argv: number of ranks; program, a file or `-m` and a module; its flags.

    Returns:
        The exit status of the first rank that failed, 0 if none did, 1 after a signal.
    """
    number, *words = sys.argv[1:] if argv is None else argv
    program, flags = (words[:2], words[2:]) if words[0] == "-m" else (words[:1], words[1:])
    ranks: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []

    def stop(received: int, frame: FrameType | None) -> None:
        stopped.append(received)

    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, stop)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": number, "LOCAL_SIZE": number}
    for rank in range(int(number)):
        variables = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-u", *program, f"--local_rank={rank}", *flags]
        ranks.append(subprocess.Popen(command, env=variables))
    while not stopped and not any(rank.poll() for rank in ranks) and any(rank.poll() is None for rank in ranks):
        time.sleep(_POLL_SECONDS)
    failed = [rank.returncode for rank in ranks if rank.returncode]
    _end(ranks)
    status = failed[0] if failed else 1 if stopped else 0
    return 128 - status if status < 0 else status


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run: SIGTERM, after which they save, and later SIGKILL."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _SAVE_SECONDS
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
        if rank.poll() is None:
            rank.kill()
            rank.wait()


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
