"""DeepSpeed engines on a GPU: every ZeRO stage, bfloat16, and what is moved to host memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from rlvla.models.actor import Actor
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine, OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from tests.support.devices import CUDA, needs_a_gpu
from tests.support.frozen_models import NothingPersists

pytestmark = needs_a_gpu
OPTIM = OptimConfig(0.1, (0.9, 0.999), 0.0, "constant", 0.0, 10)
WIDTH = 1024
MOMENTS = 2 * WIDTH * WIDTH * 4  # bytes of AdamW's two moments of one layer


def engine_of(strategy: DeepspeedStrategy) -> Engine:
    torch.manual_seed(0)
    return strategy.prepare(torch.nn.Linear(WIDTH, WIDTH, bias=False), OPTIM)


def step(engine: Engine, micro_batches: int = 2) -> float | None:
    """A step along a sum of equal gradients; its norm before clipping."""
    dtype = torch.bfloat16 if engine.config.bf16 else torch.float32
    rows = torch.ones(1, WIDTH, dtype=dtype, device=CUDA)
    for index in range(micro_batches):
        norm = engine.backward(engine(rows).float().sum(), last=index == micro_batches - 1)
    return norm


def weights(engine: Engine) -> torch.Tensor:
    """The master weights, on the host."""
    return safe_get_full_fp32_param(next(engine.module.parameters())).cpu().clone()


def test_float32_is_not_rounded_in_convolutions() -> None:
    """The rounding of TF32 depends on the kernel, thus on the number of rows, and ratios of PPO with it."""
    torch.manual_seed(0)
    layer, rows = torch.nn.Conv2d(32, 64, 4, 2), torch.randn(14, 32, 31, 31)
    expected = layer(rows)
    DeepspeedStrategy(StrategyConfig())
    assert torch.allclose(layer.to(CUDA)(rows.to(CUDA)).cpu(), expected, atol=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_takes_the_step_of_plain_torch(stage: int, bf16: bool) -> None:
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage, bf16=bf16, max_norm=1e9))
    assert strategy.device.type == "cuda"
    engine = engine_of(strategy)
    before = weights(engine) if bf16 or stage else next(engine.module.parameters()).detach().cpu().clone()
    assert step(engine, micro_batches=400) == pytest.approx(400 * WIDTH, rel=1e-2), "bfloat16 stops at 256"
    after = weights(engine) if bf16 or stage else next(engine.module.parameters()).detach().cpu()
    # Adam's first step is the learning rate, against the sign of the gradient, and its weight decay is 0.
    assert torch.allclose(before - after, torch.full_like(before, OPTIM.learning_rate), atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_leave_the_gpu_and_come_back_to_the_bit(stage: int) -> None:
    engine = engine_of(DeepspeedStrategy(StrategyConfig(zero_stage=stage)))
    step(engine)
    gc.collect()  # engines of other tests
    before, used = weights(engine), torch.cuda.memory_allocated(CUDA)
    engine.offload_states(weights=True)
    freed = used - torch.cuda.memory_allocated(CUDA)
    assert freed >= 0.9 * MOMENTS
    engine.reload_states()
    assert torch.equal(weights(engine), before)
    assert torch.cuda.memory_allocated(CUDA) >= used - 0.1 * MOMENTS
    step(engine)
    untouched = engine_of(DeepspeedStrategy(StrategyConfig(zero_stage=stage)))
    step(untouched)
    step(untouched)
    assert torch.equal(weights(engine), weights(untouched)), "the moments have come back as they were"


def test_optimizer_states_stay_in_host_memory() -> None:
    engine = engine_of(DeepspeedStrategy(StrategyConfig(zero_stage=2, adam_offload=True)))
    step(engine)
    states = [v for state in engine.engine.optimizer.optimizer.state.values() for v in state.values()]
    moments = [value for value in states if torch.is_tensor(value) and value.dim()]
    assert len(moments) == 2 and {moment.device.type for moment in moments} == {"cpu"}
    assert next(engine.module.parameters()).device.type == "cuda"


def test_shares_of_parameters_wait_in_host_memory_and_nothing_changes(policy_folder: Path) -> None:
    after = []
    for offload, place in ((False, "cuda"), (True, "cpu")):
        strategy = NothingPersists(StrategyConfig(zero_stage=3, param_offload=offload))
        frozen = Actor.from_pretrained(policy_folder)
        strategy.prepare_frozen(frozen)
        engine = engine_of(strategy)
        for module in (frozen, engine.module):
            assert {parameter.ds_tensor.device.type for parameter in module.parameters()} == {place}
        step(engine)
        after.append(weights(engine))
    assert torch.equal(*after)
