"""Where an episode's reward stands among its tokens, against SimpleVLA-RL (see tests/data/README.md).

The reference has 32 episodes of 64 steps with 7 dimensions; the models of these tests have D = 2. A reward is paid at
the last token of its step and a step is executed as a whole, so the last dimension of each step says everything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.models.actor import Actor
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.scoring import Networks
from tests.support.experience import A, D, OneRank, PlainEngine, sample

DATA = Path(__file__).resolve().parents[2] / "data" / "simplevla"


@pytest.fixture(scope="module")
def rows(policy_folder: Path):
    """The rows of the reference's episodes, and how many belong to each. With gamma 0 returns are the rewards."""
    with np.load(DATA / "reward_placement.npz") as file:
        finish, success = file["finish_step"], file["acc"].astype(bool)
    episodes = [
        sample(-(-int(steps) // A), (int(steps) - 1) % A + 1, success=bool(won), uid=str(i), seed=i)
        for i, (steps, won) in enumerate(zip(finish, success))
    ]
    settings = AlgorithmConfig(advantage_estimator="reinforce_plus_plus", gamma=0.0, advantage_level="token")
    networks = Networks(PlainEngine(Actor.from_pretrained(policy_folder)), None, None)
    maker = ExperienceMaker(networks, OneRank(), BatchConfig(micro_rollout_batch_size=64), settings)
    made, _ = maker.make(episodes, kl_coef=0.0)
    return made, [episode.num_decisions for episode in episodes]


def by_step(values: torch.Tensor, decisions: list[int]) -> torch.Tensor:
    """Rows [B, A * D] -> [32, 64, D], zero where an episode has ended."""
    grid = values.new_zeros(len(decisions), 64, D)
    for episode, part in enumerate(values.split(decisions)):
        grid[episode, : len(part) * A] = part.reshape(-1, D)
    return grid


def test_the_score_stands_at_the_last_executed_token(rows) -> None:
    experience, decisions = rows
    with np.load(DATA / "reward_placement.npz") as file:
        reference = torch.from_numpy(file["gt_scores"]).view(32, 64, 7)
    returns = by_step(experience.returns, decisions)
    assert torch.equal(returns[..., -1], reference[..., -1])
    assert not returns[..., :-1].any() and not reference[..., :-1].any()


def test_tokens_count_up_to_the_last_executed_step(rows) -> None:
    experience, decisions = rows
    with np.load(DATA / "traj_mask.npz") as file:
        steps, tokens = torch.from_numpy(file["step_mask"]), torch.from_numpy(file["token_mask"])
    mask = by_step(experience.action_mask, decisions)
    assert torch.equal(mask, steps[..., None].expand(-1, -1, D))
    assert torch.equal(tokens.view(32, 64, 7), steps[..., None].expand(-1, -1, 7))
