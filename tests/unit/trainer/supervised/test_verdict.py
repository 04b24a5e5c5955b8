"""The verdict on supervised runs, from synthetic facts: conclusions, and figures in the text."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rlvla.evaluation.results import Rate
from rlvla.trainer.supervised.validation import Baselines, Measurement, Quality, relative_error
from rlvla.trainer.supervised.verdict import Facts, judge, trend

BASELINES = Baselines(0.2, (0.1, 10.0), (0.08, 8.0))
STEPS = range(0, 101, 10)
FALLING = [3.0 - 0.2 * i for i in range(11)]
SETTLED = [3.0, 2.0, 1.5, 1.2, 1.1, 1.05, 1.03, 1.02, 1.01, 1.0, 1.0]


def facts(
    train: list[float], heldout: list[float] | None, share: float = 0.3, success: int | None = None, **more: object
) -> Facts:
    """A run with these losses; errors are a share of the median action's, success of 20 episodes at the end."""
    errors = (0.1 * share, 10.0 * share)
    points = []
    for index, step in enumerate(STEPS):
        played = success if index == len(STEPS) - 1 else None
        rate = None if played is None else Rate.of([i < played for i in range(20)])
        side = None if heldout is None else Quality(heldout[index], 0.5, errors)
        points.append(Measurement(step, step / 10, Quality(train[index], 0.6, errors), side, rate))
    baselines = BASELINES, None if heldout is None else BASELINES
    return replace(Facts(tuple(points), baselines, demonstrated=(200, 200), image_size=64, parameters=280_000), **more)


def offset(losses: list[float], gap: float) -> list[float]:
    return [loss + gap * i / 10 for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("case", "missing"),
    [
        (facts(FALLING, FALLING), ("epochs",)),
        (facts(FALLING, offset(FALLING, 0.8)), ("epochs", "data")),
        (facts(SETTLED, offset(SETTLED, 1.5)), ("data",)),
        (facts(FALLING, [3.0, 2.5, 2.2, 2.0, 2.0, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5]), ("data",)),
        (facts(SETTLED, SETTLED, 0.3), ("variety",)),
        (facts(SETTLED, SETTLED, 0.9), ("images", "model")),
        (facts(SETTLED, SETTLED, 0.6), ("model", "images")),
        (facts(FALLING, None), ("epochs",)),
        (facts(SETTLED, None), ()),
        (facts([1.0] * 11, [2.0] * 11), ("variety",)),
        (facts([1.0] * 11, None), ()),
    ],
)
def test_what_is_missing(case: Facts, missing: tuple[str, ...]) -> None:
    assert judge(case).missing == missing


def test_nothing_is_missing_at_the_level_of_the_demonstrations() -> None:
    verdict = judge(facts(FALLING, offset(FALLING, 0.8), success=20))
    assert verdict.missing == () and any("100.0%" in sentence for sentence in verdict.sentences)
    poor = judge(facts(FALLING, FALLING, success=7))
    assert poor.missing == ("epochs",) and any("65 points" in s for s in poor.sentences)


def test_unrecorded_success_of_the_demonstrations_is_named() -> None:
    verdict = judge(facts(SETTLED, offset(SETTLED, 1.5), success=19, demonstrated=None))
    assert (
        "episodes from new initial states succeed; success of the demonstrations is not recorded."
        in (verdict.sentences[0])
    )
    assert verdict.missing == ("data",) and "level of its demonstrations" not in " ".join(verdict.sentences)


def test_losses_that_may_be_negative_and_any_unit_give_the_same_conclusion() -> None:
    for scale, shift in ((0.01, 0.0), (1.0, -50.0), (1000.0, 3.0)):
        for losses, gap, missing in ((FALLING, 0.0, ("epochs",)), (SETTLED, 1.5, ("data",))):
            moved = [[scale * loss + shift for loss in side] for side in (losses, offset(losses, gap))]
            assert judge(facts(*moved)).missing == missing


def test_a_policy_as_good_as_a_constant_has_learned_nothing() -> None:
    assert any("constant" in s for s in judge(facts(SETTLED, SETTLED, 0.97)).sentences)
    assert not any("constant" in s for s in judge(facts(SETTLED, SETTLED, 0.5)).sentences)


@pytest.mark.parametrize("heldout", [SETTLED, None])
def test_whether_anything_was_learned(heldout: list[float] | None) -> None:
    """Nearer than the median action or, where no errors are known, more often right than the most frequent tokens."""
    for share, most_frequent, learned in ((0.5, 0.9, True), (0.97, 0.2, False), (None, 0.4, True), (None, 0.7, False)):
        case = facts(SETTLED, heldout, share or 0.5)
        errors = BASELINES.median_errors if share else ()
        baselines = replace(BASELINES, majority_accuracy=most_frequent, median_errors=errors)
        verdict = judge(replace(case, baselines=(baselines, baselines if heldout else None)))
        assert verdict.learned is learned
        assert any("a constant is as good" in s for s in verdict.sentences) is not learned


def test_a_dimension_that_depends_on_something_unseen_is_named() -> None:
    case = facts(SETTLED, SETTLED, 0.3)
    half_blind = replace(case.measurements[-1], heldout=Quality(1.0, 0.5, (0.02, 11.0)))
    (said,) = [
        s for s in judge(replace(case, measurements=(*case.measurements[:-1], half_blind))).sentences if "cam" in s
    ]
    assert "dimension 1:" in said and "110%" in said and "20%" in said
    assert not any("dimension" in s for share in (0.3, 0.97) for s in judge(facts(SETTLED, SETTLED, share)).sentences)


@pytest.mark.parametrize(
    ("attempts", "rl"),
    [
        ((), None),
        (((0, 8),) * 20, "no"),
        (((1, 8),) * 1 + ((0, 8),) * 29, "no"),
        (((1, 8),) * 3 + ((0, 8),) * 17, "slow"),
        (((4, 8),) * 10 + ((0, 8),) * 10, "ready"),
        (((4, 8),) * 5 + ((0, 8),) * 15, "ready"),  # a quarter
        (((8, 8),) * 19 + ((7, 8),), "saturated"),
        (((8, 8),) * 10 + ((0, 8),) * 10, "no"),  # no group is mixed
    ],
)
def test_whether_rl_can_start(attempts: tuple[tuple[int, int], ...], rl: str | None) -> None:
    verdict = judge(facts(SETTLED, SETTLED, attempts=attempts))
    assert verdict.rl == rl
    if attempts:
        reached = sum(successes > 0 for successes, _ in attempts) / len(attempts)
        assert f"{100 * reached:.1f}%" in verdict.sentences[-1]


def test_the_policy_that_is_kept_is_named() -> None:
    case = facts(SETTLED, [3.0, 2.0, 1.5, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1])
    hinted = [s for s in judge(case).sentences if "--early_stopping" in s]
    assert hinted and "epoch 3.0" in hinted[0]
    kept = judge(replace(case, kept=case.measurements[3], patience=3)).sentences
    assert any("epoch 3.0 (step 30)" in s for s in kept) and not any("--early_stopping" in s for s in kept)
    # The first measurement is of the policy before training, which cannot be kept.
    rising = [1.0, 2.0, 1.9, *[1.8] * 8]
    for losses in (SETTLED, rising, [3.0, math.nan, *SETTLED[2:]]):
        assert not any("--early_stopping" in s for s in judge(facts(SETTLED, losses)).sentences)


def test_a_short_run_has_no_trend() -> None:
    case = facts(FALLING, FALLING)
    assert judge(replace(case, measurements=case.measurements[:3])).missing == ()
    assert judge(Facts(())).sentences == ()
    without_heldout = replace(facts(FALLING, None), measurements=facts(FALLING, None).measurements[:3])
    assert not any(s.startswith("Missing") for s in judge(without_heldout).sentences)


def test_losses_that_are_not_finite_are_left_out() -> None:
    case = facts(FALLING, FALLING)
    broken = replace(case.measurements[5], train=Quality(float("nan"), 0.0))
    points = (*case.measurements[:5], broken, *case.measurements[6:])
    assert judge(replace(case, measurements=points)).missing == ("epochs",)
    assert judge(replace(case, measurements=(broken,))).sentences == ()


def test_the_trend_is_that_of_the_second_half() -> None:
    late = trend(STEPS, [5.0] * 5 + [4.0 - 0.1 * i for i in range(6)])
    assert late.change == pytest.approx(-0.5) and late.direction == -1
    assert trend(STEPS, SETTLED).direction == 0 and trend([0, 1, 2, 3], [2.0, 1.0, 1.2, 1.4]).direction == 1
    assert trend([0, 1, 2, 3], [1.0, 1.0, 1.0, 1.0]).direction == 0


def test_a_decayed_learning_rate_is_allowed_for() -> None:
    """Little changes at the end of a short schedule, because the steps are small; as much training again would help."""
    losses = [3.0, 1.5, 1.2, 1.1, 1.06, 1.05, 1.03, 1.02, 1.01, 1.0, 0.99]
    case = facts(losses, losses)
    assert judge(case).missing == ("variety",)
    rates = [sum(1 + np.cos(np.pi * t / 100) for t in range(step)) for step in STEPS]
    points = tuple(replace(m, learned=rate) for m, rate in zip(case.measurements, rates))
    assert judge(replace(case, measurements=points)).missing == ("epochs",)


def test_errors_are_compared_dimension_by_dimension() -> None:
    assert relative_error((1.0, 10.0, 5.0), (2.0, 20.0, 0.0)) == pytest.approx(0.5)
    assert relative_error((), (1.0,)) is None and relative_error((1.0,), ()) is None
    assert relative_error((1.0,), (0.0,)) is None
    assert isinstance(relative_error(np.ones(2).tolist(), [1.0, 2.0]), float)
