"""What DeepSpeed leaves behind, and what it is told."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine, OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from tests.support.two_ranks import run

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


@pytest.mark.parametrize(
    ("gpus", "ranks", "accelerator", "refused"),
    [(1, 2, None, True), (2, 2, None, False), (0, 2, None, False), (1, 2, "cpu", False), (1, 1, None, False)],
)
def test_each_rank_needs_a_gpu(
    gpus: int, ranks: int, accelerator: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if accelerator:
        monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    assert ["--num_accelerators 1" in problem.text for problem in StrategyConfig().problems()] == [True] * refused


@pytest.mark.nightly
def test_a_launcher_that_is_there_is_obeyed() -> None:
    """In a fresh process: a group is made once per process."""
    code = (
        "import os, torch; from rlvla.utils.deepspeed.strategy import *; s = DeepspeedStrategy(StrategyConfig()); "
        "s.prepare(torch.nn.Linear(3, 2), OptimConfig(0.1, (0.9, 0.999), 0.0, 'constant', 0.0, 10)); "
        "print(s.world_size, os.environ['LOCAL_RANK'], torch.distributed.get_rank())"
    )
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["1", "0", "0"]


def test_a_port_that_is_taken_is_told_in_a_sentence() -> None:
    code = """
from rlvla.utils.cli.command import command
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy, StrategyConfig

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


@pytest.mark.parametrize(("rank", "reported"), [("0", True), ("1", False)])
def test_a_port_that_is_taken_is_reported_before_anything_is_started(
    rank: str, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first rank alone, whose port it is to be; the launcher then ends the others."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        problems = StrategyConfig().problems()
    assert [(p.flag, p.reason) for p in problems] == [("master_port", "unavailable")] * reported
    assert StrategyConfig().problems() == [], "it is free again"


# ------------------------------------------------------------------------------------------------------------ bf16
BF16 = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]  # stage, offload
MICRO_BATCHES = 400
ROW = torch.tensor([[1.0, 0.5, -0.25]])  # the gradient of each output's weights, in every micro-batch


def bf16_engine(stage: int, offload: bool = False) -> Engine:
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage, bf16=True, adam_offload=offload, max_norm=1e9))
    torch.manual_seed(0)
    return strategy.prepare(torch.nn.Linear(3, 2, bias=False), OPTIM)


def one_step(engine: Engine, micro_batches: int) -> float | None:
    """The gradient norm of a step of equal micro-batches."""
    for index in range(micro_batches):
        norm = engine.backward(engine(ROW.bfloat16()).float().sum(), last=index == micro_batches - 1)
    return norm


def master_weights(engine: Engine) -> torch.Tensor:
    return safe_get_full_fp32_param(next(engine.module.parameters())).clone()


def step_along_the_gradient(stage: int, offload: bool = False) -> tuple[float | None, torch.Tensor]:
    """Gradient norm, and how far the weights have moved, over the learning rate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", lambda p, lr, betas, weight_decay: torch.optim.SGD(p, lr=lr))
        engine = bf16_engine(stage, offload)
    before = master_weights(engine)
    norm = one_step(engine, MICRO_BATCHES)
    return norm, (before - master_weights(engine)) / OPTIM.learning_rate


def assert_float32_sum(norm: float | None, moved: torch.Tensor) -> None:
    """A sum in bfloat16 stands still when it is 256 times as large as what comes next."""
    wanted = MICRO_BATCHES * ROW.expand(2, -1)
    assert norm == pytest.approx(float(wanted.norm()), rel=1e-5)
    assert torch.allclose(moved, wanted, rtol=1e-5)


@pytest.mark.parametrize(("stage", "offload"), BF16)
def test_bf16_sums_gradients_of_micro_batches_in_float32(stage: int, offload: bool) -> None:
    assert_float32_sum(*step_along_the_gradient(stage, offload))


def on_a_rank(rank: int, *stages: int) -> list[tuple[float | None, torch.Tensor]]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return [step_along_the_gradient(stage) for stage in stages]


@pytest.mark.nightly
@pytest.mark.slow
def test_bf16_sums_gradients_in_float32_on_two_ranks() -> None:
    for found in run(on_a_rank, 0, 3):
        for norm, moved in found:
            assert_float32_sum(norm, moved)


@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bf16_engine_goes_on_from_its_files(stage: int, universal: bool, tmp_path: Path) -> None:
    engine = bf16_engine(stage)
    one_step(engine, 2)
    assert engine.save(tmp_path, "actor") is None
    saved = master_weights(engine)
    one_step(engine, 2)
    other = bf16_engine(stage)
    assert not torch.equal(master_weights(other), saved)
    if universal:
        other.convert(tmp_path / "actor", tmp_path / "universal" / "actor")
    other.load(tmp_path / "universal" if universal else tmp_path, "actor", universal=universal)
    assert torch.equal(master_weights(other), saved)
    one_step(other, 2)
    assert torch.equal(master_weights(other), master_weights(engine)), "with the moments that were saved"


@pytest.mark.parametrize(("asked", "runs"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_the_stage_that_runs_is_told(asked: int, runs: int, capsys: pytest.CaptureFixture) -> None:
    for bf16 in (False, True):
        config = StrategyConfig(zero_stage=asked, bf16=bf16)
        DeepspeedStrategy(config)
        assert config.engine_stage == (runs if bf16 else asked)
        assert bool(StrategyConfig(zero_stage=asked, bf16=bf16, adam_offload=True).problems()) == (
            not config.engine_stage
        )
        assert (f"ZeRO stage {asked} runs as {runs}" in capsys.readouterr().out) == (asked != config.engine_stage)


# ----------------------------------------------------------------------------------------------- small networks
def small_steps(rank: int, small: bool) -> tuple[torch.Tensor, list[float]]:
    """Weights and gradient norms of steps with data of each rank: clipped, not, infinite loss on one rank, plain."""
    torch.manual_seed(0)
    engine = DeepspeedStrategy(StrategyConfig(max_norm=0.5)).prepare(torch.nn.Linear(3, 2), OPTIM, small=small)
    norms = []
    for scale, added in ((10.0, 0.0), (0.1, 0.0), (1.0, math.inf if rank == 0 else 0.0), (0.1, 0.0)):
        loss = engine(torch.full((1, 3), 1.0 + rank)).square().sum() * scale + added
        norms.append(float(engine.backward(loss, last=True)))
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()]), norms


def same_steps_both_ways(rank: int) -> list[tuple[torch.Tensor, list[float]]]:
    return [small_steps(rank, small) for small in (False, True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_small_networks_take_the_steps_of_deepspeed(ranks: int) -> None:
    found = [same_steps_both_ways(0)] if ranks == 1 else run(same_steps_both_ways)
    for (weights, norms), (small_weights, small_norms) in found:
        assert torch.allclose(weights, small_weights, atol=1e-6)
        assert norms[0] > 0.5 > norms[1] and math.isnan(small_norms[2])
        assert small_norms == pytest.approx(norms, rel=1e-5, nan_ok=True)
    assert torch.equal(found[0][1][0], found[-1][1][0]), "the ranks stay equal"


def test_small_networks_do_not_accumulate() -> None:
    engine = DeepspeedStrategy(StrategyConfig()).prepare(torch.nn.Linear(3, 2), OPTIM, small=True)
    with pytest.raises(ValueError, match="one backward pass"):
        engine.backward(engine(torch.ones(1, 3)).sum(), last=False)
