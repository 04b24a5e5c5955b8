"""Processes with a mark are killed, also those whose program is just being loaded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlvla.envs.workers import guardian

MARK = "1-00.11"


def write(
    folder: Path, pid: int, *, environ: bytes = b"", cmdline: bytes = b"", state: str = "S", flags: int = 0
) -> None:
    (folder / str(pid)).mkdir(exist_ok=True)
    (folder / str(pid) / "stat").write_text(f"{pid} (a (name) {state} 1 1 1 0 -1 {flags} 0")
    (folder / str(pid) / "environ").write_bytes(environ)
    (folder / str(pid) / "cmdline").write_bytes(cmdline)


def test_a_program_being_loaded_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in place of /proc: a real process is in this state for microseconds."""
    write(tmp_path, 10)
    waits: list[float] = []

    def loaded(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            write(tmp_path, 10, environ=f"A=b\0{guardian.MARK}={MARK}.7\0".encode(), cmdline=b"sleep\0")

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (10, 9)
        write(tmp_path, 10, state="Z")

    monkeypatch.setattr(guardian, "_PROC", str(tmp_path))
    monkeypatch.setattr(guardian.time, "sleep", loaded)
    monkeypatch.setattr(guardian.os, "kill", kill)
    guardian.kill_marked([MARK])
    assert (tmp_path / "10/stat").read_text().split(") ")[1][0] == "Z" and len(waits) == 4


@pytest.mark.parametrize(
    "facts", [{"flags": 0x00200000}, {"state": "Z"}, {"cmdline": b"env\0"}], ids=["kernel thread", "ended", "env -i"]
)
def test_nothing_else_is_waited_for(facts: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 10, **facts)
    monkeypatch.setattr(guardian, "_PROC", str(tmp_path))
    monkeypatch.setattr(guardian.time, "sleep", lambda seconds: pytest.fail("waits"))
    guardian.kill_marked([MARK])


def test_only_processes_with_the_mark_are_killed() -> None:
    mark = f"{os.getpid()}-test"
    of_mark, other = (
        subprocess.Popen(["sleep", "600"], env={guardian.MARK: name}) for name in (f"{mark}.1", f"{mark}2.1")
    )
    try:
        guardian.kill_marked([mark])
        assert of_mark.wait(60) == -9 and other.poll() is None
    finally:
        other.kill()
        other.wait()
