import pytest
import torch

from rlvla.algorithms.choices import AGGREGATION_MODES
from rlvla.algorithms.losses import aggregate_loss, count_trajectory_tokens, explained_variance, value_loss
from tests.support import slow_reference as slow
from tests.support.algorithm_cases import random_batch

ROW_MODES = [mode for mode in AGGREGATION_MODES if mode != "traj-mean-token-mean"]


@pytest.mark.parametrize("counts", [{}, {"num_tokens": 99, "num_sequences": 31, "dp_size": 3, "horizon": 20}])
@pytest.mark.parametrize("mode", ROW_MODES)
def test_equals_the_slow_reference(mode, counts):
    for seed in range(3):
        b = random_batch(seed)
        wanted = slow.aggregate(slow.rows_of(b["adv"]), slow.masks_of(b["mask"]), mode, **counts)
        assert float(aggregate_loss(b["adv"], b["mask"], mode, **counts)) == pytest.approx(wanted, rel=1e-11)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_padding_and_gradients(mode):
    b = random_batch(4, rows=5, tokens=4)
    dirty = b["adv"].clone().requires_grad_()
    aggregate_loss(dirty, b["mask"], mode).backward()
    assert (dirty.grad[~b["mask"]] == 0).all()
    assert (dirty.grad[b["mask"]] > 0).all()
    clean = torch.where(b["mask"], b["adv"], 1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: aggregate_loss(x, b["mask"], mode), (clean,))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_all_masked_batch_is_zero_with_a_graph(mode):
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    total = aggregate_loss(loss, torch.zeros(2, 3, dtype=torch.bool), mode)
    total.backward()
    assert float(total.detach()) == 0.0
    assert (loss.grad == 0).all()


def test_trajectory_mean_weighs_every_trajectory_alike():
    loss = torch.tensor([[1.0, 1.0], [1.0, 9.0], [4.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    # trajectory a: rows 0 and 1, mean 1; trajectory b: row 2, mean 2
    assert float(aggregate_loss(loss, mask, "traj-mean-token-mean", trajectory_ids=["a", "a", "b"])) == 1.5
    assert float(aggregate_loss(loss, mask, "traj-mean-token-mean")) == pytest.approx((1 + 1 + 2) / 3)


@pytest.mark.parametrize("cut", [[13], [1] * 13, [4, 4, 5]])
def test_trajectory_mean_does_not_depend_on_how_trajectories_are_cut(cut):
    b = random_batch(5)
    ids = [f"episode-{i % 4}" for i in range(13)]
    whole = aggregate_loss(b["adv"], b["mask"], "traj-mean-token-mean", trajectory_ids=ids)
    tokens = count_trajectory_tokens(b["mask"], ids)
    parts = [
        aggregate_loss(
            b["adv"][rows], b["mask"][rows], "traj-mean-token-mean",
            num_sequences=4, trajectory_tokens=tokens[rows], trajectory_ids=[ids[i] for i in rows], dp_size=2,
        )
        for rows in torch.arange(13).split(cut)
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts) / 2, whole, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="trajectory_tokens"):
        aggregate_loss(b["adv"], b["mask"], "traj-mean-token-mean", num_sequences=4, trajectory_ids=ids)


@pytest.mark.parametrize("mode", [mode for mode in AGGREGATION_MODES if mode != "token-sum"])
def test_global_counts_are_required_over_ranks(mode):
    b = random_batch()
    with pytest.raises(ValueError, match=f"{mode}.*dp_size 2 needs num_"):
        aggregate_loss(b["adv"], b["mask"], mode, dp_size=2)


def test_bad_input():
    b = random_batch()
    with pytest.raises(ValueError, match="unknown aggregation mode 'mean'.*token-mean"):
        aggregate_loss(b["adv"], b["mask"], "mean")
    with pytest.raises(ValueError, match="bool"):
        aggregate_loss(b["adv"], b["mask"].float(), "token-mean")
    with pytest.raises(ValueError, match=r"\[13, 10\].*\[13, 11\]"):
        aggregate_loss(b["adv"][:, :-1], b["mask"], "token-mean")
    for name in ("num_tokens", "num_sequences", "horizon"):
        with pytest.raises(ValueError, match=f"{name} must be positive"):
            aggregate_loss(b["adv"], b["mask"], "token-mean", **{name: 0})
    with pytest.raises(ValueError, match="dp_size"):
        aggregate_loss(b["adv"], b["mask"], "token-sum", dp_size=0)


@pytest.mark.parametrize("mode", ROW_MODES)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_equals_the_slow_reference(mode, clip):
    b = random_batch(6)
    values, old, returns = (slow.rows_of(b[key]) for key in ("values", "adv", "rewards"))
    mask = slow.masks_of(b["mask"])
    error, clipped_share, valid = slow.zeros_like(mask), 0, sum(map(sum, mask))
    for i, ms in enumerate(mask):
        for t in [t for t, m in enumerate(ms) if m]:
            plain = (values[i][t] - returns[i][t]) ** 2
            near = slow.clip(values[i][t], old[i][t] - clip, old[i][t] + clip) if clip else values[i][t]
            error[i][t] = max(plain, (near - returns[i][t]) ** 2)
            clipped_share += (near - returns[i][t]) ** 2 > plain
    loss, metrics = value_loss(b["values"], b["adv"], b["rewards"], b["mask"], clip=clip, agg_mode=mode)
    assert float(loss) == pytest.approx(0.5 * slow.aggregate(error, mask, mode), rel=1e-11)
    assert float(metrics["vf_clipfrac"]) == pytest.approx(clipped_share / valid, rel=1e-6)
    assert clip is None or clipped_share > 0


def test_value_loss_padding_gradient_and_errors():
    b = random_batch(7, rows=4, tokens=3)
    dirty = b["values"].clone().requires_grad_()
    loss, _ = value_loss(dirty, b["adv"], b["rewards"], b["mask"], clip=0.5)
    loss.backward()
    assert (dirty.grad[~b["mask"]] == 0).all()
    assert dirty.grad.isfinite().all()
    clean = torch.where(b["mask"], b["values"], 0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, b["adv"], b["rewards"], b["mask"], clip=0.5)[0], (clean,))
    with pytest.raises(ValueError, match="clip"):
        value_loss(b["values"], b["adv"], b["rewards"], b["mask"], clip=-0.1)
    with pytest.raises(ValueError, match="old_values has shape"):
        value_loss(b["values"], b["adv"][:2], b["rewards"], b["mask"])


def test_explained_variance():
    b = random_batch(8)
    assert float(explained_variance(b["rewards"], b["rewards"], b["mask"])) == 1.0
    mean = torch.full_like(b["rewards"], float(b["rewards"][b["mask"]].mean()))
    assert float(explained_variance(mean, b["rewards"], b["mask"])) == pytest.approx(0.0, abs=1e-9)
    flat = torch.zeros_like(b["rewards"])
    assert float(explained_variance(b["values"], flat, b["mask"])) == 0.0
    kept = {key: b[key][b["mask"]] for key in ("values", "rewards")}
    wanted = 1 - (kept["rewards"] - kept["values"]).var(correction=0) / kept["rewards"].var(correction=0)
    assert float(explained_variance(b["values"], b["rewards"], b["mask"])) == pytest.approx(float(wanted), rel=1e-9)
