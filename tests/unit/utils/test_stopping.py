"""Interrupts that come at a bad moment, or to one rank only."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlvla.utils.ending import receive, request_of
from rlvla.utils.stopping import StopSignals, interrupts_deferred, resume_command
from tests.support import two_ranks


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


@pytest.mark.parametrize("named", [["--load_checkpoint", "iteration_000010"], ["--load_checkpoint=iteration_000010"]])
def test_a_stopped_run_goes_on_from_its_newest_checkpoint(named: list[str]) -> None:
    command = resume_command(["cli/train.py", *named, "--seed", "3"])
    assert command == "python cli/train.py --load_checkpoint --seed 3"
    assert resume_command(["cli/train.py", "--load_checkpoint", "--seed", "3"]) == command


def test_an_evaluation_is_repeated_with_the_checkpoint_it_was_given() -> None:
    words = ["cli/train.py", "--val_only", "--load_checkpoint", "iteration_000010"]
    assert resume_command(words, trains=False) == shlex.join(["python", *words])
    assert resume_command(words[:2], trains=False) == "python cli/train.py --val_only", "it loaded no checkpoint"


def asked(rank: int, folder: Path, receives: int, request: int) -> tuple[int, int, int]:
    """What a rank knows after one of them was asked to stop just before all agree, and no heartbeat has told others."""
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
