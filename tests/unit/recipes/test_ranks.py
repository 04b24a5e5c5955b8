"""Ranks of a stage: arguments and variables of the DeepSpeed launcher, one end for all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlvla.recipes.runner import launch_command
from tests.support.processes import wait_for

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
PROGRAM = f"""
import json, os, signal, sys, time
from pathlib import Path
folder, status = Path(sys.argv[2]), int(sys.argv[3])
rank = os.environ["RANK"]
variables = {{name: os.environ[name] for name in {NAMES}}}
def stop(number, frame):
    (folder / f"stopped_{{rank}}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(folder / f"new_{{rank}}").write_text(json.dumps([sys.argv, variables]))
(folder / f"new_{{rank}}").rename(folder / f"rank_{{rank}}")
if status == 0:
    sys.exit(0)
while rank == "0" or not (folder / "rank_0").exists() or status < 0:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL) if status == 9 else sys.exit(status)
"""


def start(folder: Path, status: int) -> subprocess.Popen[bytes]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(launch_command([str(program)], [str(folder), str(status)], 2))


def test_ranks_have_the_arguments_and_variables_of_the_launcher(tmp_path: Path) -> None:
    assert start(tmp_path, 0).wait(60) == 0
    (first, variables), (second, others) = (json.loads((tmp_path / f"rank_{rank}").read_text()) for rank in "01")
    assert first[1:] == ["--local_rank=0", str(tmp_path), "0"] and second[1] == "--local_rank=1"
    port = variables["MASTER_PORT"]
    assert list(variables.values()) == ["0", "0", "2", "2", "127.0.0.1", port] and port.isdigit()
    assert others == variables | {"RANK": "1", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(("status", "expected"), [(3, 3), (9, 137)])
def test_a_rank_that_fails_ends_the_other_with_its_status(tmp_path: Path, status: int, expected: int) -> None:
    assert start(tmp_path, status).wait(60) == expected
    assert (tmp_path / "stopped_0").exists()


@pytest.mark.parametrize("received", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(tmp_path: Path, received: signal.Signals) -> None:
    launcher = start(tmp_path, -1)
    assert wait_for(lambda: all((tmp_path / f"rank_{rank}").exists() for rank in "01"), 60)
    launcher.send_signal(received)
    assert launcher.wait(60) == 1
    assert all((tmp_path / f"stopped_{rank}").exists() for rank in "01")


def test_a_module_is_started_as_one() -> None:
    command = launch_command(["-m", "rlvla.cli.eval_vla"], ["--seed", "0"], 2)
    assert command == [
        sys.executable,
        "-P",
        "-m",
        "rlvla.recipes.ranks",
        "2",
        "-m",
        "rlvla.cli.eval_vla",
        "--seed",
        "0",
    ]
