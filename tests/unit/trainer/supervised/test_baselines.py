"""Baselines of supervised training, against plain loops."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rlvla.trainer.supervised.validation import majority_tokens, mean_errors, median_actions, nearest_rows


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_majority_tokens_are_the_most_frequent_unmasked_ones(rng: np.random.Generator) -> None:
    tokens, mask = rng.integers(0, 6, (80, 5)), rng.random((80, 5)) < 0.5
    mask[:, 4] = False
    expected = []
    for column in range(5):
        counts = Counter(int(t) for t, counted in zip(tokens[:, column], mask[:, column]) if counted)
        expected.append(min(counts, key=lambda token: (-counts[token], token)) if counts else 0)
    assert majority_tokens(tokens, mask).tolist() == expected


def test_the_median_has_the_least_absolute_error_of_all_constants(rng: np.random.Generator) -> None:
    actions, valid = rng.normal(size=(31, 3, 2)) ** 3, rng.random((31, 3)) < 0.7
    valid[:, 2] = False
    medians = median_actions(actions, valid)
    for a in range(2):
        for d in range(2):
            values = [float(actions[i, a, d]) for i in range(31) if valid[i, a]]
            cost = {c: sum(abs(v - c) for v in values) for c in [*values, float(medians[a, d])]}
            assert cost[float(medians[a, d])] <= min(cost.values()) + 1e-9
    assert medians[2].tolist() == [0.0, 0.0], "no such action exists"


def test_the_nearest_row_is_of_the_same_kind_and_another_episode(rng: np.random.Generator) -> None:
    references, queries = rng.normal(size=(60, 3)) * [1, 100, 0], rng.normal(size=(150, 3)) * [1, 100, 0]
    kinds = rng.integers(0, 2, 60), rng.integers(0, 3, 150)  # the last kind is asked for only
    episodes = rng.integers(0, 8, 60), rng.integers(0, 8, 150)
    nearest = nearest_rows(references, queries, kinds=kinds, episodes=episodes)
    scale = np.array([references[:, 0].std(), references[:, 1].std(), 1.0])
    for i, query in enumerate(queries):
        candidates = [
            (float((((reference - query) / scale) ** 2).sum()), j)
            for j, reference in enumerate(references)
            if kinds[0][j] == kinds[1][i] and episodes[0][j] != episodes[1][i]
        ]
        assert nearest[i] == (min(candidates)[1] if candidates else -1)
    assert (nearest == -1).sum() == (kinds[1] == 2).sum() > 0


def test_errors_are_means_over_the_actions_that_exist(rng: np.random.Generator) -> None:
    predicted, actions, valid = rng.normal(size=(7, 4, 2)), rng.normal(size=(7, 4, 2)), rng.random((7, 4)) < 0.5
    for d in range(2):
        slow = [abs(predicted[i, a, d] - actions[i, a, d]) for i in range(7) for a in range(4) if valid[i, a]]
        assert mean_errors(predicted, actions, valid)[d] == pytest.approx(sum(slow) / len(slow))
    constant = mean_errors(predicted[0], actions, valid)
    assert constant == pytest.approx(mean_errors(np.broadcast_to(predicted[0], actions.shape), actions, valid))
    assert np.isnan(mean_errors(predicted, actions, valid & False)).all()
