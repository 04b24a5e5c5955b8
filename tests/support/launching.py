"""Runs under the deepspeed launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PPO_SCRIPT = "cli/train_ppo_vla.py"

LAUNCHER = str(Path(sys.executable).with_name("deepspeed"))

PPO_FLAGS = [
    *("--num_episodes", "16", "--rollout_batch_size", "8", "--train_batch_size", "4", "--num_envs", "1"),
    *("--eval_episodes", "4", "--no-val_before_train", "--no-use_tensorboard", "--max_steps", "8"),
    *("--entropy_loss_coef", "0.05", "--actor_learning_rate", "3e-4"),
]


def environment() -> dict[str, str]:
    """One thread per process: the ranks share the cores."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def launch_command(script: str, *argv: object) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [LAUNCHER, "--num_accelerators", "2", "--master_port", str(port), script, *map(str, argv)]


def launch(script: str, *argv: object) -> str:
    """Run on two ranks to the end; returns what was printed."""
    done = subprocess.run(
        launch_command(script, *argv), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
