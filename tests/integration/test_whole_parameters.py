"""The rollout computes with the trained weights themselves, under every ZeRO stage and at each rank's own pace."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.policy import Decision
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine, OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from tests.support.two_ranks import run

OPTIM = OptimConfig(1e-3, (0.9, 0.999), 0.0, "constant", 0.0, 10)
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 1, 64, 64, 3), dtype=np.uint8)
PROPRIO = np.zeros((2, 2), np.float32)


def act(actor: Actor) -> Decision:
    return actor.act(IMAGES, PROPRIO, ["reach the red disc"] * 2, noise=np.full((2, 8), 0.5, np.float32))


def train_step(engine: Engine) -> None:
    engine.train()
    inputs = {"images": torch.from_numpy(IMAGES), "proprio": torch.from_numpy(PROPRIO)}
    ids, mask = engine.module.inputs.prompt(["reach the red disc"] * 2, torch.device("cpu"))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    scores = engine(input_ids=ids, attention_mask=mask, trace={"tokens": tokens}, **inputs)
    engine.backward(-scores["log_probs"].mean(), last=True)


def engine_of(actor: Actor, stage: int) -> Engine:
    return DeepspeedStrategy(StrategyConfig(zero_stage=stage)).prepare(actor, OPTIM)


def storages(module: torch.nn.Module) -> set[int]:
    return {p.data_ptr() for p in module.parameters()}


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_policy_is_the_trained_module(policy_folder: Path, stage: int, lora: int) -> None:
    actor = Actor.from_pretrained(policy_folder, ActorConfig(lora_rank=lora))
    engine = engine_of(copy.deepcopy(actor), stage)
    with engine.full_parameters() as module:  # before any training step ZeRO-3 would give up parameters after each use
        assert module is engine.module, "no second copy"
        actor.load_state_dict(module.state_dict())
        inside = storages(module)
        first, want = act(module), act(actor)
        assert (first.trace["tokens"] == want.trace["tokens"]).all() and (first.log_probs == want.log_probs).all()
        assert storages(module) == inside, "no forward pass moves, gives up or gathers a parameter"
    if stage == 3:
        assert all(p.numel() == 0 for p in engine.module.parameters()), "given up again afterwards"
    train_step(engine)
    with engine.full_parameters() as module:
        assert not (act(module).log_probs == first.log_probs).all(), "the next rollout sees the next step"


def rank_at_its_own_pace(rank: int, policy: str) -> torch.Tensor:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    engine = engine_of(Actor.from_pretrained(policy), 3)
    found = []
    for calls in (1 + 4 * rank, 5 - 4 * rank):
        with engine.full_parameters() as module:
            found += [torch.from_numpy(act(module).log_probs) for _ in range(calls)][-1:]
        train_step(engine)
    return torch.stack(found)


@pytest.mark.slow
def test_ranks_ask_the_sharded_policy_differently_often(policy_folder: Path) -> None:
    one, other = run(rank_at_its_own_pace, str(policy_folder))
    assert torch.equal(one, other), "both compute with the same whole weights"
    assert not torch.equal(one[0], one[1])
