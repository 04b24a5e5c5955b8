import math

import pytest
import torch

from rlvla.algorithms.rollout_correction import (
    interpolated_log_probs,
    mismatch_metrics,
    rejection_mask,
    rollout_correction_weights,
)
from tests.support import slow_reference as slow
from tests.support.algorithm_cases import random_batch

LOW, HIGH = 0.9, 1.2


def slow_weights(new, old, mask, level, mode):
    out = slow.zeros_like(mask)
    for i, ms in enumerate(mask):
        where = [t for t, m in enumerate(ms) if m]
        logs = {t: new[i][t] - old[i][t] for t in where}
        total = math.fsum(logs.values())
        for t in where:
            weight = math.exp(slow.clip(total if level == "sequence" else logs[t], -20, 20))
            if mode == "tis":
                weight = slow.clip(weight, LOW, HIGH)
            elif mode == "icepop":
                weight = weight if LOW <= weight <= HIGH else 0.0
            else:
                weight = weight if LOW <= math.exp(total / len(where)) <= HIGH else 0.0
            out[i][t] = weight
    return out


@pytest.mark.parametrize(
    ("level", "mode"),
    [("token", "tis"), ("token", "icepop"), ("token", "seq_mask_tis"), ("sequence", "tis"), ("sequence", "icepop")],
)
def test_weights_equal_the_slow_reference(level, mode):
    b = random_batch(1)
    weights, metrics = rollout_correction_weights(
        b["new"], b["old"], b["mask"], level=level, mode=mode, low=LOW, high=HIGH
    )
    mask = slow.masks_of(b["mask"])
    wanted = slow_weights(slow.rows_of(b["new"]), slow.rows_of(b["old"]), mask, level, mode)
    torch.testing.assert_close(weights, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    kept = slow.valid(wanted, mask)
    assert float(metrics["rollout_is_mean"]) == pytest.approx(sum(kept) / len(kept), rel=1e-7)
    assert float(metrics["rollout_is_max"]) == pytest.approx(max(kept))
    assert float(metrics["rollout_is_min"]) == pytest.approx(min(kept))
    ess = sum(kept) ** 2 / sum(w * w for w in kept) / len(kept)
    assert float(metrics["rollout_is_ess"]) == pytest.approx(ess, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalisation_to_mean_one(level):
    b = random_batch(2)
    arguments = (b["new"], b["old"], b["mask"])
    weights, metrics = rollout_correction_weights(*arguments, level=level, batch_normalize=True)
    plain, _ = rollout_correction_weights(*arguments, level=level)
    rows = b["mask"].any(-1)
    means = weights.sum(-1)[rows] / b["mask"].sum(-1)[rows]
    mean = means.mean() if level == "sequence" else weights[b["mask"]].mean()
    assert float(mean) == pytest.approx(1.0, rel=1e-6)
    torch.testing.assert_close(weights * metrics["rollout_is_batch_norm_factor"], plain)


def test_batch_normalisation_leaves_all_zero_weights_alone():
    b = random_batch(2)
    far = b["old"] - 5.0
    weights, metrics = rollout_correction_weights(
        b["old"], far, b["mask"], mode="icepop", low=0.5, high=2.0, batch_normalize=True
    )
    assert (weights == 0).all()
    assert float(metrics["rollout_is_batch_norm_factor"]) == 1.0


def test_equal_policies_need_no_correction():
    b = random_batch(3)
    weights, metrics = rollout_correction_weights(b["old"], b["old"], b["mask"])
    assert torch.equal(weights, b["mask"].double())
    assert float(metrics["rollout_is_ess"]) == pytest.approx(1.0, rel=1e-6)
    gap = mismatch_metrics(b["old"], b["old"], b["mask"])
    assert [float(gap[key]) for key in ("probs_diff_mean", "probs_diff_max", "kl", "k3_kl")] == [0.0] * 4
    assert float(gap["ess"]) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
def test_rejection_equals_the_slow_reference(statistic, level):
    b = random_batch(4)
    new, old, mask = slow.rows_of(b["new"]), slow.rows_of(b["old"]), slow.masks_of(b["mask"])
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - d - 1}[statistic]
    bound = 0.1 if statistic == "k1" else 0.03
    wanted = []
    for i, ms in enumerate(mask):
        values = {t: formula(new[i][t] - old[i][t]) for t, m in enumerate(ms) if m}
        if level == "sequence" and values:
            mean = math.fsum(values.values()) / len(values)
            values = dict.fromkeys(values, mean)
        wanted.append([t in values and abs(values[t]) <= bound for t in range(len(ms))])
    kept, metrics = rejection_mask(b["new"], b["old"], b["mask"], statistic=statistic, level=level, high=bound)
    assert kept.tolist() == wanted
    assert 0 < kept.sum() < b["mask"].sum()
    valid, left = sum(map(sum, mask)), sum(map(sum, wanted))
    assert float(metrics["rollout_rs_masked_fraction"]) == pytest.approx(1 - left / valid, rel=1e-6)
    lost = sum(sum(w) < sum(m) for w, m in zip(wanted, mask)) / sum(map(any, mask))
    assert float(metrics["rollout_rs_seq_masked_fraction"]) == pytest.approx(lost, rel=1e-6)


def test_mismatch_metrics():
    mask = torch.tensor([[True, True, False]])
    old = torch.log(torch.tensor([[0.5, 0.25, 0.9]], dtype=torch.float64))
    rollout = torch.log(torch.tensor([[0.25, 0.5, torch.nan]], dtype=torch.float64))
    metrics = {key: float(value) for key, value in mismatch_metrics(old, rollout, mask).items()}
    assert metrics["probs_diff_mean"] == pytest.approx(0.25, rel=1e-6)
    assert metrics["probs_diff_max"] == pytest.approx(0.25)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["k3_kl"] == pytest.approx((2 + 0.5 - 2) / 2, rel=1e-6)
    assert metrics["ess"] == pytest.approx(1.25**2 / 2.125, rel=1e-6)


def test_padding_never_leaks_and_an_empty_mask_is_no_error():
    clean, dirty = random_batch(5, garbage=0.0), random_batch(5, garbage=float("nan"))
    for function in (
        lambda b: rollout_correction_weights(b["new"], b["old"], b["mask"], level="sequence"),
        lambda b: rejection_mask(b["new"], b["old"], b["mask"], high=0.03),
        lambda b: (b["mask"], mismatch_metrics(b["new"], b["old"], b["mask"])),
    ):
        (result, metrics), (other, others) = function(clean), function(dirty)
        assert torch.equal(result, other)
        assert metrics == others
        dirty_and_empty = {**dirty, "mask": torch.zeros_like(dirty["mask"])}
        assert all(value.isfinite() for value in function(dirty_and_empty)[1].values())


def test_bad_input():
    b = random_batch()
    arguments = (b["new"], b["old"], b["mask"])
    for options, message in (
        ({"level": "chunk"}, "unknown level 'chunk'.*token"),
        ({"mode": "clip"}, "unknown mode 'clip'.*icepop"),
        ({"low": 3.0}, "low <= high"),
        ({"low": -1.0}, "low <= high"),
        ({"mode": "seq_mask_tis", "level": "sequence"}, "level='token'"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout_correction_weights(*arguments, **options)
    with pytest.raises(ValueError, match="unknown statistic"):
        rejection_mask(*arguments, statistic="k9", high=1.0)
    with pytest.raises(ValueError, match="bool"):
        mismatch_metrics(b["new"], b["old"], b["mask"].float())
    with pytest.raises(ValueError, match="rollout_log_probs has shape"):
        mismatch_metrics(b["new"], b["old"][:2], b["mask"])


def test_interpolation_equals_the_slow_reference():
    """log_b + alpha (log - log_b) with alpha = (v - 1 - v_b) / (v - v_b), v the version after the update."""
    b = random_batch(4)
    rows, after = len(b["new"]), 7
    decided_by = [6 - row % 4 for row in range(rows)]
    staleness = torch.tensor([after - 1 - version for version in decided_by])
    found = interpolated_log_probs(b["old"], b["new"].requires_grad_(), staleness)
    assert not found.requires_grad
    for row, version in enumerate(decided_by):
        alpha = (after - 1 - version) / (after - version)
        for token, (old, new) in enumerate(zip(b["old"][row].tolist(), b["new"][row].tolist())):
            assert found[row, token].item() == pytest.approx(old + alpha * (new - old), abs=1e-6, nan_ok=True)
    fresh = [row for row, version in enumerate(decided_by) if version == 6]
    assert fresh and torch.equal(found[fresh].nan_to_num(), b["old"][fresh].nan_to_num()), "to the bit"
    with pytest.raises(ValueError, match="do not fit"):
        interpolated_log_probs(b["old"], b["new"][:, 1:], staleness)
