"""Priorities from scores and TD errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from rlvla.options import Options, arg
from rlvla.replay.priorities import (
    REPLAY_PRIORITIES,
    HybridOptions,
    hybrid_priority,
    make_priority,
    progress_factor,
    register_priority,
    unscored,
    vlm_score,
)
from rlvla.trainer.off_policy.config import ReplayConfig
from rlvla.utils.cli.flags import range_problems


def slow_score(action: float, progress: float) -> float:
    raised = progress + 0.3 if 0.1 <= progress < 0.8 else progress
    return 0.2 * action + 0.8 * raised


def slow_hybrid(score: float, td: float, combine: str, alpha: float, vlm: float, share: float, eps: float) -> float:
    td = min(abs(td), 20.0)
    if combine == "product":
        return (score + eps) ** (alpha * vlm) * (td + eps) ** (alpha * share)
    return (vlm * score + share * td / 20.0 + eps) ** alpha


def test_rows_that_almost_succeeded_count_more() -> None:
    progress = [0.0, 0.0999, 0.1, 0.5, 0.7999, 0.8, 1.0]
    assert progress_factor(progress) == pytest.approx([0.0, 0.0999, 0.4, 0.8, 1.0999, 0.8, 1.0])


@pytest.mark.parametrize(("combine", "eps"), [("product", 1e-6), ("additive", 1e-2)])
def test_hybrid_agrees_with_the_formula(combine: str, eps: float) -> None:
    rng = np.random.default_rng(0)
    action, progress, td = rng.random(200), rng.random(200), rng.normal(0, 15, 200)
    for alpha, vlm, share in [(0.6, 0.5, 0.5), (1.0, 0.2, 0.9), (0.3, 1.0, 0.0)]:
        wanted = [
            slow_hybrid(slow_score(a, p), t, combine, alpha, vlm, share, eps) for a, p, t in zip(action, progress, td)
        ]
        settings: dict = {"alpha": alpha, "vlm_weight": vlm, "td_weight": share, "combine": combine}
        found = hybrid_priority(action, progress, td, **settings)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        explicit = hybrid_priority(action, progress, td, eps=eps, **settings)
        np.testing.assert_array_equal(found, explicit)


def test_td_errors_are_clipped_and_lose_their_sign() -> None:
    for combine in ("product", "additive"):
        found = hybrid_priority([0.5] * 3, [0.5] * 3, [20.0, -1e9, -20.0], combine=combine)
        assert found[0] == found[1] == found[2]


def test_without_a_score_the_td_error_decides() -> None:
    action, progress, td = np.array([np.nan, 0.5, np.nan, 0.5]), np.array([0.5, np.nan, np.nan, 0.5]), np.full(4, -4.0)
    assert unscored(action, progress).tolist() == [True, True, True, False]
    product = hybrid_priority(action, progress, td, combine="product")
    assert product[:3] == pytest.approx([(4 + 1e-6) ** 0.6] * 3)
    additive = hybrid_priority(action, progress, td)
    assert additive[:3] == pytest.approx([(0.2 + 0.01) ** 0.6] * 3)
    assert np.isfinite(product[3]) and np.isfinite(additive[3])


def test_kinds() -> None:
    assert {"uniform", "td", "vlm", "hybrid"} <= set(REPLAY_PRIORITIES.names())
    action, progress, td = np.array([0.5, np.nan]), np.array([0.2, 0.4]), np.array([-3.0, 30.0])
    assert make_priority("uniform")(action, progress, td).tolist() == [1, 1]
    assert make_priority("td")(action, progress, td) == pytest.approx([(3 + 1e-6) ** 0.6, (20 + 1e-6) ** 0.6])
    assert make_priority("vlm")(action, progress, td) == pytest.approx([(0.1 + 0.4 + 0.01) ** 0.6, 1.01**0.6])
    wanted = hybrid_priority(action, progress, td, alpha=0.9, vlm_weight=0.3, td_weight=0.8, max_td_error=5.0)
    options = HybridOptions(replay_alpha=0.9, replay_vlm_weight=0.3, replay_td_weight=0.8, replay_max_td_error=5.0)
    np.testing.assert_array_equal(make_priority("hybrid", options)(action, progress, td), wanted)
    with pytest.raises(ValueError, match="unknown replay priority 'mean'; known: hybrid"):
        make_priority("mean")


def test_a_kind_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REPLAY_PRIORITIES, "_entries", dict(REPLAY_PRIORITIES._entries))

    @dataclass(frozen=True)
    class Scaled(Options):
        scale: float = arg(1.0, "factor")

    @register_priority("only_progress", options=Scaled)
    def only_progress(action_score, progress, td_error, *, scale=1.0):
        return np.asarray(progress) * scale

    assert make_priority("only_progress")([0], [0.25], [0]) == 0.25
    assert make_priority("only_progress", Scaled(2.0))([0], [0.25], [0]) == 0.5


def test_unknown_priorities_are_nan() -> None:
    nan = np.array([np.nan])
    for kind in ("td", "vlm", "hybrid"):
        assert np.isnan(make_priority(kind)(nan, nan, nan)), kind
    assert np.isnan(make_priority("hybrid")([0.5], [0.5], nan))
    assert make_priority("vlm")([0.5], [0.5], nan) == pytest.approx((0.1 + 0.64 + 0.01) ** 0.6)


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"alpha": -0.1}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
        ({"alpha": 100.0}, "alpha"),
        ({"max_td_error": 1e11, "alpha": 20.0}, "alpha"),
        ({"td_weight": 60.0, "combine": "product"}, "alpha"),
        ({"vlm_weight": -1.0}, "vlm_weight"),
        ({"td_weight": math.inf}, "td_weight"),
        ({"vlm_weight": 0.0, "td_weight": 0.0}, "vlm_weight"),
        ({"eps": 0.0}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"max_td_error": 0.0}, "max_td_error"),
    ],
)
def test_settings_are_checked(wrong: dict, flag: str) -> None:
    options = HybridOptions(**{f"replay_{name}": value for name, value in wrong.items()})
    replay = ReplayConfig(replay_priority="hybrid", replay_score_source="rm", priority_options=options)
    assert [(p.flag, p.reason) for p in range_problems(replay)] == [(f"replay_{flag}", "out_of_range")]


def test_scores_are_checked() -> None:
    with pytest.raises(ValueError, match=r"action_score holds -0\.5"):
        vlm_score([0.1, -0.5], [0, 0])
    with pytest.raises(ValueError, match="progress holds inf"):
        vlm_score([0.1], [np.inf])
