"""The decoding process: error messages, and no leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvla.envs.workers.slab import Slab, create_slab_file
from rlvla.rollout.vllm import process
from rlvla.rollout.vllm.process import EngineProcess, engine_environment, place
from rlvla.utils.errors import RunEnded
from rlvla.utils.signals import run_command
from tests.support.processes import runs, wait_for

FAKE = Path(__file__).parents[3] / "support" / "fake_engine.py"
SECONDS = 120.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[EngineProcess] = []

    def begin(fault: str = "", seconds: float = SECONDS) -> EngineProcess:
        started.append(EngineProcess(sys.executable, {"fault": fault}, tmp_path / "log", program=FAKE))
        started[-1].wait_until_ready(seconds)
        return started[-1]

    yield begin
    for engine in started:
        engine.close()


@pytest.mark.parametrize("fault", ["start", "error at start"])
def test_why_it_does_not_start(start: Any, tmp_path: Path, fault: str) -> None:
    with pytest.raises(RunEnded, match="no such head width") as error:
        start(fault)
    assert str(tmp_path / "log") in str(error.value)


def test_it_must_start_in_time(start: Any) -> None:
    with pytest.raises(RunEnded, match="has not started for 0.5 seconds; its log is .*"):
        start("slow start", 0.5)


def test_a_signal_ends_a_long_start(start: Any) -> None:
    alarm = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.start()
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: start("slow start"), "")
    alarm.join()
    assert stop.value.code == 128 + signal.SIGTERM


def test_an_invalid_interpreter(tmp_path: Path) -> None:
    with pytest.raises(RunEnded, match="cannot be started with /nowhere"):
        EngineProcess("/nowhere", {}, tmp_path / "log")


def test_an_error_is_raised_and_the_next_command_is_answered(start: Any) -> None:
    engine = start()
    with pytest.raises(RuntimeError, match="Traceback: in the program"):
        engine.ask(do="fail")
    assert engine.ask(do="answer")["child"]


def test_an_early_end_is_reported_with_the_last_lines_of_the_log(start: Any) -> None:
    engine = start()
    with pytest.raises(RunEnded, match="(?s)ended with exit code 7; its log is .*this is the log"):
        engine.ask(do="die")
    assert engine.pid is None
    with pytest.raises(RunEnded, match="ended with exit code 7"):
        engine.ask(do="answer")


def test_it_must_answer_in_time(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    monkeypatch.setattr(process, "_ANSWER_SECONDS", 0.3)
    with pytest.raises(RunEnded, match="has not answered for 0.3 seconds"):
        engine.ask(do="hang")


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    with monkeypatch.context() as patch:
        patch.setattr(process, "_ANSWER_SECONDS", 0.1)
        with pytest.raises(RunEnded):
            engine.ask(do="wait")
    assert engine.ask(do="answer")["done"] == "answer"


def test_closing_ends_it_and_its_child_processes(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_SECONDS", 0.1)
    engine = start()
    pid, child = engine.pid, engine.ask(do="answer")["child"]
    assert runs(pid) and runs(child)
    engine.close()
    engine.close()
    assert wait_for(lambda: not runs(pid) and not runs(child), 300)


def test_it_ends_with_a_killed_run(tmp_path: Path) -> None:
    """While it works, and does not see that the connection has ended."""
    code = f"""
import sys
from pathlib import Path
from rlvla.rollout.vllm.process import EngineProcess
engine = EngineProcess(sys.executable, {{"fault": ""}}, Path({str(tmp_path / "log")!r}), program=Path({str(FAKE)!r}))
engine.wait_until_ready({SECONDS})
print(engine.pid, engine.ask(do="answer")["child"], flush=True)
engine.ask(do="hang")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        pids = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 2 and all(map(runs, pids))
        os.kill(run.pid, signal.SIGKILL)
    assert wait_for(lambda: not any(map(runs, pids)), 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refs_locate_tensors(dtype: torch.dtype) -> None:
    """Of a transposed tensor the values, not the memory; one after the other."""
    fd = create_slab_file()
    memory, tensor = Slab(fd), torch.arange(6).view(2, 3).T.to(dtype)
    refs = [place(tensor, memory), place(tensor + 1, memory)]
    for ref, wanted in zip(refs, (tensor, tensor + 1)):
        data = bytearray(os.pread(fd, 6 * dtype.itemsize, ref["offset"]))
        found = torch.frombuffer(data, dtype=getattr(torch, ref["dtype"])).view(ref["shape"])
        assert torch.equal(found, wanted)
    memory.close()


def test_the_program_gets_the_gpu_of_the_policy_and_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PYTHONPATH", "/of/this/interpreter")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = engine_environment(torch.device("cuda", 1))
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "RANK" not in environment and "PYTHONPATH" not in environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert engine_environment(torch.device("cuda", 1))["CUDA_VISIBLE_DEVICES"] == "6"
    assert engine_environment(torch.device("cpu"))["CUDA_VISIBLE_DEVICES"] == "4,6"
