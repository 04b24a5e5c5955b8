"""The engine against the contract of Sample, and its independence of the number of workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.envs.pool import EnvPool, EnvWorkerError
from rlvla.envs.registry import make_env
from rlvla.experience import Sample
from rlvla.models.actor import Actor
from rlvla.rollout import Decision, EpisodeRequest, RolloutEngine

KWARGS = {"cameras": ("top",), "image_size": 64, "use_proprio": True}


def requests(n: int) -> list[EpisodeRequest]:
    return [EpisodeRequest("toy_reach", 0, i // 2, 1000 + i, f"group {i // 2}") for i in range(n)]


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder).eval()


def play(actor: Actor, workers: int, n: int = 6, **kw) -> list[Sample]:
    with EnvPool(workers) as pool:
        engine = RolloutEngine(pool, KWARGS, {"success": 5.0}, min_batch=kw.pop("min_batch", None))
        return engine.run(requests(n), actor, temperature=1.3, **kw)


def same(a: Sample, b: Sample) -> bool:
    return (
        torch.equal(a.images, b.images)
        and torch.equal(a.action_tokens, b.action_tokens)
        and torch.allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
        and torch.equal(a.rewards, b.rewards)
        and a.uid == b.uid
    )


def test_episodes_do_not_depend_on_the_number_of_workers(actor: Actor) -> None:
    one, three = play(actor, 1), play(actor, 3, min_batch=2)
    assert [s.seed for s in one] == [r.seed for r in requests(6)]
    assert all(same(a, b) for a, b in zip(one, three))
    # Two members of a group start alike and sample differently.
    assert torch.equal(one[0].images[0], one[1].images[0])
    assert not torch.equal(one[0].action_tokens, one[1].action_tokens)


def test_greedy_episodes_of_a_group_are_equal(actor: Actor) -> None:
    samples = play(actor, 2, greedy=True)
    assert torch.equal(samples[0].action_tokens, samples[1].action_tokens)


def test_sample_fields(actor: Actor) -> None:
    for sample in play(actor, 2):
        decisions = sample.num_decisions
        assert sample.images.shape == (decisions, 1, 64, 64, 3) and sample.images.dtype == torch.uint8
        assert sample.proprio is not None and sample.proprio.shape == (decisions, 2)
        assert sample.action_tokens.shape == (decisions, 8) and sample.action_tokens.dtype == torch.int64
        assert sample.rollout_log_probs.shape == (decisions, 8) and sample.rollout_log_probs.dtype == torch.float32
        assert sample.rewards.shape == (decisions, 4)
        assert sample.action_mask.dtype == torch.bool and sample.action_mask.sum() == 2 * sample.finish_step
        assert sample.terminated != sample.truncated
        assert sample.truncated == (sample.finish_step == 12 and not sample.terminated)
        assert sample.last_images.shape == (1, 64, 64, 3)


class TowardsTheDisc:
    """A policy that reads the target from the simulator: it succeeds in the middle of a chunk."""

    tokens_per_decision = 2 * 5

    def __init__(self) -> None:
        self.envs = {}

    def act(self, images, proprio, instructions, *, uniforms, temperature):
        actions = np.zeros((len(images), 5, 2), dtype=np.float32)
        for row, position in enumerate(proprio):
            env = make_env("toy_reach", 0)
            env.reset(0, 0)
            state = env.privileged_state()
            remaining = state["target"] - position
            for k in range(5):
                step = np.clip(remaining / 0.2, -1, 1)
                actions[row, k] = step
                remaining = remaining - 0.2 * step
        return Decision(np.zeros((len(images), 10), np.int64), np.zeros((len(images), 10), np.float32), actions)


def test_success_in_the_middle_of_a_chunk_is_rewarded_once() -> None:
    with EnvPool(1) as pool:
        engine = RolloutEngine(pool, KWARGS, {"success": 5.0})
        (sample,) = engine.run([EpisodeRequest("toy_reach", 0, 0, 1, "g")], TowardsTheDisc(), temperature=1.0)
    assert sample.terminated and sample.success_at_end and sample.success_once
    assert sample.finish_step % 5 != 0, "the test needs an episode that ends inside a chunk"
    assert sample.score == 5.0
    flat = sample.rewards.flatten()
    assert flat.nonzero().flatten().tolist() == [sample.finish_step - 1]
    assert torch.equal(sample.reward_components["success"], sample.rewards)
    executed = sample.action_mask.flatten()
    assert executed[: 2 * sample.finish_step].all() and not executed[2 * sample.finish_step :].any()


def test_worker_failure_reaches_the_caller() -> None:
    class Nan(TowardsTheDisc):
        def act(self, *args, **kw):
            decision = super().act(*args, **kw)
            decision.actions[:] = np.nan
            return decision

    with EnvPool(1) as pool:
        engine = RolloutEngine(pool, KWARGS, {"success": 1.0})
        with pytest.raises(EnvWorkerError, match="NaN"):
            engine.run([EpisodeRequest("toy_reach", 0, 0, 1, "g")], Nan(), temperature=1.0)
