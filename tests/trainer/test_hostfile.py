"""Several machines by host file: over ssh to this one where that works, and without ssh, started on each of them."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from test_launcher import LAUNCHER, PPO_FLAGS, PPO_SCRIPT, ROOT, environment

from rlvla.models.actor import Actor
from rlvla.utils.logging import read_metrics

pytestmark = pytest.mark.slow


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def training(policy: Path, folder: Path) -> list[str]:
    return [PPO_SCRIPT, "--pretrain", str(policy), *PPO_FLAGS, "--num_episodes", "8", "--save_path", str(folder)]


def trained_on_two_ranks(folder: Path) -> None:
    (record,) = [r for r in read_metrics(folder) if "rollout/env_steps" in r]
    assert record["total/episodes"] == 8
    newest = folder / "checkpoints" / "iteration_000001"
    assert {path.name for path in newest.glob("rank*")} == {"rank0.pt", "rank1.pt"}
    Actor.from_pretrained(folder / "policy")


def test_started_on_each_machine_without_ssh(policy_folder: Path, tmp_path: Path) -> None:
    """Two names of this machine stand for two machines."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    shared = [LAUNCHER, "--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--master_addr", "127.0.0.1"]
    shared += ["--master_port", free_port()]
    processes = [
        subprocess.Popen(
            [*shared, "--node_rank", str(node), *training(policy_folder, tmp_path / "run")],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-2000:] for text in printed)
    assert sum(text.count("next: python cli/eval_vla.py") for text in printed) == 1
    trained_on_two_ranks(tmp_path / "run")


def why_no_ssh() -> str | None:
    """What is missing for the launcher to reach this machine over ssh, or None."""
    for program in ("ssh", "pdsh"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", "localhost", "true"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return None if done.returncode == 0 else f"ssh localhost does not work: {done.stderr.strip().splitlines()[-1:]}"


def test_over_ssh(policy_folder: Path, tmp_path: Path) -> None:
    missing = why_no_ssh()
    if missing:
        pytest.skip(missing)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    command = [LAUNCHER, "--hostfile", str(tmp_path / "hosts"), "--force_multi", "--master_addr", "127.0.0.1"]
    command += ["--master_port", free_port(), *training(policy_folder, tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    trained_on_two_ranks(tmp_path / "run")
