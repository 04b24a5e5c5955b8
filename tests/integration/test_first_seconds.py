"""Workers lost, and signals, between the start of a run and its first rollout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.launching import PPO_FLAGS, PPO_SCRIPT, ROOT, environment
from tests.support.processes import MARK, running, wait_for

pytestmark = pytest.mark.slow
WORKER = "rlvla.envs.workers.worker"


@contextmanager
def training(policy: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two iterations, with one worker; nothing is left of it afterwards."""
    command = [sys.executable, PPO_SCRIPT, "--pretrain", str(policy), *PPO_FLAGS, "--save_path", str(folder / "run")]
    variables = environment() | {MARK: str(folder)}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            assert wait_for(lambda: bool(running(WORKER, str(folder))) or run.poll() is not None)
            assert run.poll() is None, run.communicate()[0]
            yield run
        finally:
            for pid in running("", str(folder)):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
def test_a_worker_killed_in_the_first_second_costs_nothing(policy_folder: Path, tmp_path: Path) -> None:
    with training(policy_folder, tmp_path) as run:
        for pid in running(WORKER, str(tmp_path)):
            os.kill(pid, signal.SIGKILL)
        text, _ = run.communicate(timeout=600)
    assert run.returncode == 0 and "iteration 2/2" in text, text
    assert "Traceback" not in text


@pytest.mark.nightly
@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed first"])
def test_sigterm_before_the_first_rollout(policy_folder: Path, tmp_path: Path, fate: int) -> None:
    """The launcher signals workers before their run, so the worker may be gone when the signal arrives."""
    with training(policy_folder, tmp_path) as run:
        for pid in running(WORKER, str(tmp_path)):
            os.kill(pid, fate)
        run.send_signal(signal.SIGTERM)
        text, _ = run.communicate(timeout=100)  # less than the time limit of a starting worker
        assert wait_for(lambda: not running("", str(tmp_path))), running("", str(tmp_path))
    assert run.returncode == 128 + signal.SIGTERM, text
    assert text.count("train_ppo_vla.py: terminated; ") == 1
    assert "Traceback" not in text
