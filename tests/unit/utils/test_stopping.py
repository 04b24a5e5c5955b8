"""Interrupts that come at a bad moment."""

from __future__ import annotations

import shlex
import signal
import threading

import pytest

from rlvla.utils.stopping import interrupts_deferred, resume_command


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
