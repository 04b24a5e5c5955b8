"""Commands that are asked to stop, or whose launcher ends: one line, the right status, nothing left."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlvla.utils.signals import StopSignals, interrupts_deferred, receive, request_of, run_command
from tests.support import two_ranks
from tests.support.processes import children, running, wait_for

ROOT = Path(__file__).resolve().parents[3]

# A rank that works until it is asked to end, and takes a moment to clean up.
WORKER = """
import sys, time
from pathlib import Path
from rlvla.utils.signals import begin, run_command

begin("__main__")
done = Path(sys.argv[-1])

def work():
    try:
        done.with_suffix(".begun").touch()
        time.sleep(600)
    finally:
        time.sleep(0.1)
        done.touch()

run_command(work, "the same command starts over")
"""
# Starts its arguments as a child and waits, as the processes of a launcher do.
LAUNCHER = """
import os, signal, subprocess, sys

signal.signal(signal.SIGINT, lambda *_: None)  # `subprocess.run` would kill its child soon after it
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], env=os.environ | {"RANK": "0"}).returncode)
"""


# Imports a module for minutes, within which a signal cannot become an exception.
IMPORTER = """
import sys
from pathlib import Path
from rlvla.utils import signals

signals.begin("__main__")
signals._SECONDS_TO_END = 600.0
signals.run_command(lambda: __import__("slow_module"), "the same command starts over")
"""
SLOW_MODULE = """
import sys, time

print("importing", flush=True)
time.sleep(600)
"""


@contextmanager
def launched(folder: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A worker below two processes that look like those of a launcher, in a session of its own."""
    names = {"deepspeed": LAUNCHER, "torchrun": LAUNCHER, "worker.py": WORKER}
    for name, text in names.items():
        (folder / name).write_text(text)
    command = [sys.executable, *(str(folder / name) for name in names), str(folder / "done")]
    settings = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True} | options
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **settings)
    try:
        assert wait_for((folder / "done.begun").exists, 300)
        yield process
    finally:
        for pid in running("worker.py", process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("outer", [True, False], ids=["launcher", "launcher of the machine"])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, outer: bool, number: int) -> None:
    with launched(tmp_path) as process:
        os.kill(process.pid if outer else children(process.pid)[0], number)
        assert wait_for(lambda: not running("worker.py", process.pid), 300)
        assert (tmp_path / "done").exists(), "it ended in order"
        _, errors = process.communicate()
        assert errors == "\nworker.py: the launcher has ended; the same command starts over\n"


# Becomes a rank whose launcher has ended before it looks.
ORPHAN = """
import os, sys, time

launcher = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == launcher:
    time.sleep(0.01)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_rank_whose_launcher_ended_first(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    words = [str(tmp_path / "worker.py"), "--local_rank=0", str(tmp_path / "done")]
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RANK": "0"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=300)  # the rank holds the pipe open until it ends
        assert errors.startswith("\nworker.py: the launcher has ended; ")
    finally:
        for pid in running("worker.py", process.pid):
            os.kill(pid, signal.SIGKILL)


def test_a_rank_ends_with_its_terminal(tmp_path: Path) -> None:
    """Closing the terminal ends the launcher, and no longer shows what the rank prints."""
    master, slave = pty.openpty()

    def control() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    with launched(tmp_path, stdout=slave, stderr=slave, preexec_fn=control) as process:
        os.close(slave)
        os.close(master)
        assert process.wait(300) == -signal.SIGHUP
        assert wait_for(lambda: not running("worker.py", process.pid), 300)
        assert (tmp_path / "done").exists()


def test_nohup_is_respected(tmp_path: Path) -> None:
    with launched(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        os.killpg(process.pid, signal.SIGHUP)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert "worker.py: interrupted; the same command starts over" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_is_one_line_and_its_status(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(SystemExit) as end:
        run_command(lambda: signal.raise_signal(number), "it starts over")
    assert end.value.code == 128 + number
    assert capfd.readouterr().err.count("it starts over") == 1
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def interrupts_in_a_finalizer() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    Finalized()
    wait_for(lambda: False, 30)


def fails_while_it_cleans_up() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        raise OSError("the connection is broken")


@pytest.mark.parametrize("work", [interrupts_in_a_finalizer, fails_while_it_cleans_up])
def test_an_interrupt_is_neither_lost_nor_a_traceback(
    work: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Python prints and drops what a finalizer raises."""
    with pytest.raises(SystemExit, match="130"):
        run_command(work, "it starts over")
    errors = capfd.readouterr().err
    assert errors.count("interrupted; it starts over") == 1 and errors.count("\n") == 2


def test_a_signal_during_a_long_import_ends_the_command_soon(tmp_path: Path) -> None:
    """It has nothing to clean up that the next start would not; a launcher stops its ranks one after another."""
    (tmp_path / "worker.py").write_text(IMPORTER)
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    command = [sys.executable, str(tmp_path / "worker.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "importing\n"
            process.terminate()
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == "\nworker.py: terminated; the same command starts over\n"


def test_errors_are_shown_as_before() -> None:
    def fails() -> None:
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        run_command(fails, "it starts over")


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    """Python drops what a finalizer raises; without the block this KeyboardInterrupt never arrives."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    went_on = []

    def work() -> None:
        with interrupts_deferred():
            Finalized()
            went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert went_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler


IN_A_GENERATOR = """
import os, signal
from rlvla.utils.signals import interrupts_deferred, run_command

def numbers():
    os.kill(os.getpid(), signal.SIGINT)
    yield 1

@interrupts_deferred()
def write():
    list(numbers())

run_command(write, "the same command starts over")
"""


def test_an_interrupt_in_a_generator_that_has_ended_is_not_lost(tmp_path: Path) -> None:
    """Its frame no longer knows its callers, nor so that it belonged to the command."""
    (tmp_path / "write.py").write_text(IN_A_GENERATOR)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "write.py"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nwrite.py: interrupted; the same command starts over\n")


def test_nothing_changes_elsewhere() -> None:
    """Ignored signals stay ignored, other threads may use the block, and an error passes through."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    done: list[bool] = []

    @interrupts_deferred()
    def work() -> None:
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
    with pytest.raises(ValueError, match="bad"), interrupts_deferred():
        raise ValueError("bad")
    assert signal.getsignal(signal.SIGINT) is before


def asked(rank: int, folder: Path, receives: int, request: int) -> tuple[int, int, int]:
    """Stop request as a rank sees it if another rank received it just before all agree, without a heartbeat."""
    os.environ |= {"LOCAL_RANK": str(rank)}
    os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT), 2)

    def largest(values: dict[str, float], op: str) -> dict[str, float]:
        assert op == "max"
        tensor = torch.tensor(list(values.values()))
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return dict(zip(values, tensor.tolist()))

    if not rank:  # stopped before, in the same process
        with StopSignals().caught():
            signal.raise_signal(signal.SIGHUP)
        os.truncate(2, os.lseek(2, 0, os.SEEK_SET))
    with StopSignals().caught() as signals:
        assert signals.of_all_ranks(largest) == 0 == signals.received
        if rank == receives:
            receive(request)
        number = signals.of_all_ranks(largest)
        signal.raise_signal(signal.SIGTERM)  # the heartbeat, the launcher: later
    return number, signals.received, request_of(signals.received)


BY_LAUNCHER = 1 << 16


@pytest.mark.parametrize("receives", [0, 1])
@pytest.mark.parametrize(
    ("request_", "says"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM | BY_LAUNCHER, "the launcher has ended")]
)
def test_a_rank_says_why_another_one_stops(tmp_path: Path, receives: int, request_: int, says: str) -> None:
    number = request_ & ~BY_LAUNCHER
    assert two_ranks.run(asked, tmp_path, receives, int(request_)) == [(number, number, request_)] * 2
    line = f"\n{says}: stopping at the next safe point, then saving (SIGQUIT or Ctrl-\\: now)\n"
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [line, ""]
