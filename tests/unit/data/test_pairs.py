"""Which of two episodes is better, and the frames by which a model tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reward_model_rows import EpisodeFrames, at_most, ranked_pairs

STEPS = (4, 6, 3, 5, 4)


class SeesAll:
    """Prepares observations by leaving them alone."""

    def prepare(self, images, proprio):
        return images, proprio


def demonstrations(**changed) -> Demonstrations:
    """Episodes 0 and 1 succeed, 2 and 3 fail; 4, a success, is of another task."""
    images = [np.full((n, 1, 2, 2, 3), 10 * i, np.uint8) + np.arange(n, dtype=np.uint8)[:, None, None, None, None]
              for i, n in enumerate(STEPS)]  # fmt: skip
    fields = {
        "env_args": {"cameras": ["front"]},
        "statistics": {},
        "images": images,
        "proprio": None,
        "actions": [np.zeros((n, 2), np.float32) for n in STEPS],
        "instructions": ["reach", "reach", "reach", "reach", "push"],
        "success": [True, True, False, False, True],
        "init_states": [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)],
    }
    return Demonstrations(**{**fields, **changed})


def test_success_is_better_than_failure_of_the_same_task() -> None:
    assert ranked_pairs(demonstrations(), range(5), "success") == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert ranked_pairs(demonstrations(), [0, 1, 4], "success") == []
    one_task = demonstrations(init_states=[], instructions=["reach"] * 5)
    assert (4, 2) in ranked_pairs(one_task, range(5), "success")


def test_the_shorter_success_is_better_and_failures_are_alike() -> None:
    assert ranked_pairs(demonstrations(), range(5), "length") == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]


def test_recorded_returns_and_ranks() -> None:
    rewards = [np.full(n, value, np.float32) for n, value in zip(STEPS, (0.0, 1.0, 2.0, 1.2, 9.0))]
    assert ranked_pairs(demonstrations(rewards=rewards), range(4), "return") == [(1, 0), (2, 0), (3, 0)]
    ranks = [3.0, 1.0, 2.0, 2.0, 1.0]
    assert set(ranked_pairs(demonstrations(ranks=ranks), range(5), "rank")) == {(1, 0), (1, 2), (1, 3), (2, 0), (3, 0)}


@pytest.mark.parametrize("order", ["return", "rank"])
def test_what_is_not_recorded(order: str) -> None:
    with pytest.raises(ValueError, match="records no"):
        ranked_pairs(demonstrations(), range(4), order)


def test_frames_are_spread_over_the_episode_and_end_with_its_last() -> None:
    demos = demonstrations()
    assert [at_most(demos, 1, n).tolist() for n in (1, 2, 3, 99)] == [[5], [0, 5], [0, 2, 5], list(range(6))]
    frames = EpisodeFrames(demos, [3, 0], 2, SeesAll())
    rows, positions = frames.of([0, 3, 0])
    pixels = frames.rows.inputs.images[rows, 0, 0, 0, 0]
    assert pixels.tolist() == [0, 3, 30, 34, 0, 3] and positions.tolist() == [0, 0, 1, 1, 2, 2]
    assert frames.rows.progress.tolist() == [0, 1, 0, 1] and frames.rows.failed.tolist() == [True, True, False, False]
    assert torch.equal(frames.rows.success[-1:], torch.ones(1))
