"""Runs under the deepspeed launcher."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

PPO_SCRIPT = "cli/train_ppo_vla.py"

PRELOADED = [
    "deepspeed",
    "matplotlib.pyplot",
    "rlvla.commands.train_ppo",
    "rlvla.commands.train_sft",
    "scipy.stats",
]

LAUNCHER = str(Path(sys.executable).with_name("deepspeed"))

PPO_FLAGS = [
    *("--num_episodes", "16", "--rollout_batch_size", "8", "--train_batch_size", "4", "--num_envs", "1"),
    *("--eval_episodes", "4", "--no-val_before_train", "--no-use_tensorboard", "--max_steps", "8"),
    *("--entropy_loss_coef", "0.05", "--actor_learning_rate", "3e-4"),
]


def environment() -> dict[str, str]:
    """One thread per process: the ranks share the cores."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


_PORTS = itertools.count()


def free_port() -> str:
    """A port below those that the system hands out to whoever asks for any, other ones in each process of the tests."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + (1_500 * worker + os.getpid() + next(_PORTS)) % 12_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


def launch_command(script: str, *argv: object) -> list[str]:
    return [LAUNCHER, "--num_accelerators", "2", "--master_port", free_port(), script, *map(str, argv)]


def launch(script: str, *argv: object) -> str:
    """Run on two ranks to the end; returns what both printed.

    As the launcher would run them, but forked from a process that has imported what takes seconds.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    words = [str(ROOT / script), *map(str, argv)]
    with tempfile.TemporaryDirectory() as folder:
        shared = (Path(folder), environment() | address, words)
        multiprocessing.set_forkserver_preload(PRELOADED)
        torch.multiprocessing.start_processes(_rank, args=shared, nprocs=2, start_method="forkserver")
        return "".join((Path(folder) / str(rank)).read_text() for rank in range(2))


def _rank(rank: int, folder: Path, variables: dict[str, str], words: list[str]) -> None:
    os.environ.clear()
    os.environ.update(variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.chdir(ROOT)
    torch.set_num_threads(1)
    printed = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:  # processes of multiprocessing leave this out: a rank would go without a goodbye to the others
        sys.stdout.flush()
        atexit._run_exitfuncs()
