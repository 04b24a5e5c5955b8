"""The share of an iteration that carries a signal, and the distance from the start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlvla.trainer.progress import report
from rlvla.trainer.progress.report import StartDistance, signal_share, trainable_and_all
from tests.support.ranks import OneRank


def test_groups_with_equal_scores_carry_none() -> None:
    scores = [("a", 0.0), ("a", 1.0), ("b", 0.0), ("b", 0.0), ("c", 1.0), ("c", 1.0), ("d", 0.5), ("d", 0.0)]
    assert signal_share(scores, groups=True) == (0.5, 4)


def test_without_groups_the_usual_score_carries_none() -> None:
    scores = [(str(i), float(i < 3)) for i in range(100)]
    assert signal_share(scores, groups=False) == (pytest.approx(0.03), 100)
    assert signal_share([("a", 1.0), ("b", 1.0)], groups=False) == (0.0, 2)
    assert signal_share([], groups=True) == (0.0, 0)


@pytest.mark.parametrize("kept", [2**20, 10])
def test_the_distance_is_relative_to_the_start(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_SAMPLED", kept)
    model = nn.Linear(30, 20)
    frozen = model.bias.requires_grad_(False)
    state = torch.get_rng_state()
    distance = StartDistance(model, OneRank())
    assert distance.measure() == 0.0
    with torch.no_grad():
        model.weight *= 1.25
        frozen += 100
    assert distance.measure() == pytest.approx(0.25)
    assert torch.equal(state, torch.get_rng_state())
    assert trainable_and_all(model) == (600, 620)
