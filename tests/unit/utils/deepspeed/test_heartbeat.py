"""Ranks that freeze, die or leave, as the others see them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlvla.utils.deepspeed.heartbeat import Heartbeat, accept, connect, listen
from tests.support.processes import wait_for

ROOT = Path(__file__).resolve().parents[4]
TIMEOUT = 3.0

# A rank whose main thread does what its arguments say, as soon as all others have a heartbeat.
RANK = """
import atexit, os, sys, time
from rlvla.utils.cli.command import command
from rlvla.utils.deepspeed.heartbeat import Heartbeat, accept, connect, listen
from rlvla.utils.signals import begin
from rlvla.utils.errors import RunEnded, TrainingHalted

begin("__main__")
rank, world, port, token, does = int(os.environ["RANK"]), 3, int(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3]

@command()
def work(argv):
    if rank:
        peers = connect("127.0.0.1", port, token, rank)
    else:
        import socket
        peers = accept(socket.socket(fileno=port), token, world)
    heartbeat = Heartbeat(rank, peers, float(sys.argv[4]))
    heartbeat.start()
    atexit.register(heartbeat.leave)
    print("begun", flush=True)
    if does in ERRORS or does == "leaves":
        sys.stdin.readline()  # the others have begun
    if does in ERRORS:
        raise ERRORS[does]("this is wrong")
    time.sleep(0 if does == "leaves" else 600)

ERRORS = {error.__name__: error for error in (RunEnded, TrainingHalted, KeyError)}
work(None)
"""


@contextmanager
def ranks(*does: str, timeout: float = TIMEOUT) -> Iterator[list[subprocess.Popen[str]]]:
    """Three ranks with heartbeats."""
    server, token = listen("127.0.0.1")
    processes = []
    for rank, what in enumerate(does):
        port = server.getsockname()[1] if rank else server.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(port), token.hex(), what, str(timeout)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "3"},
            pass_fds=[server.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    server.close()
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def printed(processes: list[subprocess.Popen[str]]) -> str:
    return "".join(process.communicate(timeout=60)[1] for process in processes)


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_frozen_rank_ends_the_others_with_one_line(frozen: int) -> None:
    with ranks("works", "works", "works") as processes:
        os.kill(processes[frozen].pid, signal.SIGSTOP)
        others = [process for rank, process in enumerate(processes) if rank != frozen]
        line = f"rank {frozen} is gone: no sign of life for 3 s (--rank_timeout); the same command starts over"
        assert printed(others) == f"\n-c: {line}\n"
        assert [process.returncode for process in others] == [1, 1]
        os.kill(processes[frozen].pid, signal.SIGCONT)
        assert printed([processes[frozen]]) == "" and processes[frozen].returncode == 1, "it knows that it was lost"


def test_a_killed_rank_is_noticed_at_once() -> None:
    with ranks("works", "works", "works", timeout=600.0) as processes:
        processes[1].kill()
        assert printed([processes[0], processes[2]]).count("rank 1 is gone: its connection broke; the same") == 1


def test_a_signal_to_one_rank_reaches_all() -> None:
    with ranks("works", "works", "works", timeout=600.0) as processes:
        processes[2].terminate()
        assert printed(processes) == "\n-c: terminated; the same command starts over\n"
        assert [process.returncode for process in processes] == [143, 143, 143]


def test_a_rank_that_is_done_is_not_missed() -> None:
    timeout = 10.0  # a busy machine may take some of them
    with ranks("works", "leaves", "works", timeout=timeout) as processes:
        assert processes[1].wait(300) == 0
        assert not wait_for(lambda: processes[0].poll() is not None, timeout + 1)
        assert processes[2].poll() is None


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", ["RunEnded", "KeyError"])
def test_a_rank_that_fails_ends_the_others_with_one_line(error: str, failing: int) -> None:
    does = [error if rank == failing else "works" for rank in range(3)]
    with ranks(*does, timeout=600.0) as processes:
        others = printed([process for rank, process in enumerate(processes) if rank != failing])
        assert others == f"\n-c: rank {failing} is gone: its connection broke; the same command starts over\n"
        assert "this is wrong" in printed([processes[failing]])
        assert [process.returncode for process in processes] == [1, 1, 1]


def test_an_error_of_all_ranks_is_no_loss() -> None:
    with ranks("TrainingHalted", "TrainingHalted", "TrainingHalted", timeout=600.0) as processes:
        assert printed(processes) == "-c: the run was ended: this is wrong\n"


def test_a_process_with_many_open_files_has_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """`select.select` takes no descriptor from 1024 on."""
    monkeypatch.setattr("rlvla.utils.deepspeed.heartbeat.has_failed", lambda: False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    mine, other = socket.socketpair()
    heartbeat = Heartbeat(0, {1: mine}, 600.0)
    try:
        assert mine.fileno() >= 1024
        heartbeat.start()
        other.settimeout(10)
        assert other.recv(5) and heartbeat.is_alive()
        other.sendall(bytes(5))
        heartbeat.leave()
        assert other.recv(5)[0] == 1, "goodbye"
    finally:
        for descriptor in files:
            os.close(descriptor)
        other.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_are_turned_away() -> None:
    server, token = listen("127.0.0.1")
    port = server.getsockname()[1]
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(20))
    with ThreadPoolExecutor() as threads:
        friend = threads.submit(connect, "127.0.0.1", port, token, 1)
        connections = accept(server, token, 2)
    assert list(connections) == [1] and connections[1].getpeername() == friend.result()[0].getsockname()
    for connection in (stranger, friend.result()[0], connections[1]):
        connection.close()
