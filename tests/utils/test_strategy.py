"""What DeepSpeed leaves behind, and what it is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from rlvla.utils.strategy import DeepspeedStrategy, OptimConfig, StrategyConfig

OPTIM = OptimConfig(0.1, (0.9, 0.999), 0.0, "constant", 0.0, 10)
LAUNCHER = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_process_of_its_own_leaves_no_variables_of_a_launcher(stage: int) -> None:
    """A process that was started later would take them for its own and join a group that is not there."""
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage))
    engine = strategy.prepare(torch.nn.Linear(3, 2), OPTIM)
    engine.backward(engine(torch.ones(1, 3)).sum(), last=True)
    assert (strategy.rank, strategy.world_size) == (0, 1)
    assert not LAUNCHER & os.environ.keys()


def test_a_launcher_that_is_there_is_obeyed() -> None:
    """In a fresh process: a group is made once per process."""
    code = (
        "import os, torch; from rlvla.utils.strategy import *; s = DeepspeedStrategy(StrategyConfig()); "
        "s.prepare(torch.nn.Linear(3, 2), OptimConfig(0.1, (0.9, 0.999), 0.0, 'constant', 0.0, 10)); "
        "print(s.world_size, os.environ['LOCAL_RANK'], torch.distributed.get_rank())"
    )
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["1", "0", "0"]


def test_a_port_that_is_taken_is_told_in_a_sentence() -> None:
    code = """
from rlvla.utils.commands import command
from rlvla.utils.strategy import DeepspeedStrategy, StrategyConfig

@command()
def main(argv=None):
    DeepspeedStrategy(StrategyConfig())

main()
"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | launched, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"port 127.0.0.1:{port} is taken" in done.stderr and "--master_port" in done.stderr
