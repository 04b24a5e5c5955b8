"""Ctrl-C: one line, exit status 130, nothing left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.errors import RunEnded, TrainingHalted

ROOT = Path(__file__).resolve().parents[4]


@command("what was done is kept")
def interrupted(argv: object = None) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("rank", "told"), [(None, True), ("0", True), ("1", False)])
def test_one_rank_tells_in_one_line(
    rank: str | None, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["/somewhere/cli/eval_vla.py"])
    with pytest.raises(SystemExit) as end:
        interrupted()
    assert end.value.code == 130
    assert capsys.readouterr().err == ("\neval_vla.py: interrupted; what was done is kept\n" if told else "")


@pytest.mark.parametrize(
    ("error", "rank", "told"),
    [(TrainingHalted, "0", True), (TrainingHalted, "1", False), (RunEnded, "0", True), (RunEnded, "1", True)],
)
def test_the_end_of_a_run_is_told_once(
    error: type, rank: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @command()
    def main(argv: object = None) -> None:
        raise error("all rewards are equal")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["/somewhere/cli/eval_vla.py"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == ("eval_vla.py: the run was ended: all rewards are equal\n" if told else "")


def write_past_the_limit(path: Path) -> None:
    path.write_bytes(bytes(4000))


def save_past_the_limit(path: Path) -> None:
    save_file({"weights": torch.zeros(1000)}, path)


@pytest.mark.parametrize("write", [write_past_the_limit, save_past_the_limit])
def test_a_file_size_limit_is_one_line(
    write: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    @command()
    def main(argv: object = None) -> None:
        write(tmp_path / "file")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(SystemExit, match="1"):
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "the run was ended" in told and "File too large" in told


# Runs a command whose import of torch waits, half done, until standard input is closed.
HALTED_IMPORT = """
    import runpy, sys

    class Halt:
        def find_spec(self, name, path, target=None):
            if name == "torch.nn":
                print("importing", flush=True)
                sys.stdin.read()

    sys.meta_path.insert(0, Halt())
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_interrupt_while_heavy_modules_are_imported_ends_at_once() -> None:
    """SIGINT in the middle of torch's own start, where an exception may become an abort."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HALTED_IMPORT), ROOT / "cli" / "eval_vla.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        os.killpg(process.pid, signal.SIGINT)
        process.wait(300)
        _, errors = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert errors == "\neval_vla.py: interrupted; nothing had begun\n"
    assert process.returncode == 130


def test_after_heavy_imports_an_interrupt_is_an_exception_again() -> None:
    with heavy_imports():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_every_command_is_decorated() -> None:
    for path in sorted(ROOT.glob("cli/[a-z]*.py")):
        lines = path.read_text().splitlines()
        (number,) = (i for i, line in enumerate(lines) if line.startswith("def main("))
        assert lines[number - 1].startswith("@command("), path


def test_an_interrupted_recording_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """SIGINT for the whole process group, as from a terminal, while episodes are written."""
    flags = ["--task_suite_name", "toy_reach", "--num_demos", "400000", "--keep", "all", "--output", tmp_path / "demos"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "cli" / "collect_demos.py", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    part = tmp_path / "demos" / ".demos.hdf5.part"
    try:
        deadline = time.monotonic() + 300
        while not (part.is_file() and part.stat().st_size > 1_000_000):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        with pytest.raises(ProcessLookupError):  # no worker is left in the group
            os.killpg(process.pid, 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 130
    assert errors.endswith("collect_demos.py: interrupted; the same command starts over\n")
    assert "Traceback" not in errors
    assert list((tmp_path / "demos").iterdir()) == []
