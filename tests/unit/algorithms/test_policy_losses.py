import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvla.algorithms import get_policy_loss, list_policy_losses
from rlvla.algorithms.policy_losses import POLICY_LOSSES
from tests.support import slow_reference as slow
from tests.support.algorithm_cases import random_batch

ALL = [
    "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "ppo", "sapo",
]  # fmt: skip
PER_TOKEN = ["ppo", "gspo", "sapo", "gpg", "cispo", "dro", "dppo_tv", "dppo_kl"]
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
OWN_AGGREGATION = {"gspo", "sapo", "geo_mean"}


def compute(name, b, **options):
    if name == "clip_cov":
        options.setdefault("generator", torch.Generator().manual_seed(0))
    return get_policy_loss(name)(b["new"], b["old"], b["adv"], b["mask"], **options)


def slow_arguments(b):
    return [slow.rows_of(b[key]) for key in ("new", "old", "adv")] + [slow.masks_of(b["mask"])]


def test_every_loss_of_the_specification_is_registered():
    assert set(ALL) <= set(list_policy_losses())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PER_TOKEN)
def test_equals_the_slow_reference(name, mode):
    for seed in range(3):
        b = random_batch(seed)
        counts = {"num_tokens": 321, "num_sequences": 40, "dp_size": 4, "horizon": 17}
        low, high = (0.05, 0.11) if name == "gspo" else (0.1, 0.28)
        loss, _ = compute(name, b, agg_mode=mode, clip_low=low, clip_high=high, rollout_weights=b["weights"], **counts)
        wanted = slow.policy_loss(
            name, *slow_arguments(b), mode, slow.rows_of(b["weights"]), counts, low=low, high=high
        )
        assert float(loss) == pytest.approx(wanted, rel=1e-10, abs=1e-12)
        assert float(compute(name, b, agg_mode=mode)[0]) == pytest.approx(
            slow.policy_loss(name, *slow_arguments(b), mode), rel=1e-10, abs=1e-12
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [("ppo", {"clip_dual": 1.2}), ("sapo", {"tau_pos": 2.0, "tau_neg": 3.0}), ("dro", {"beta": 0.7}),
     ("dppo_tv", {"clip_dual": 1.1}), ("dppo_kl", {"clip_dual": 1.1})],
)  # fmt: skip
def test_options_reach_the_formula(name, options):
    b = random_batch(7)
    renamed = {"dual" if k == "clip_dual" else k: v for k, v in options.items()}
    loss, _ = compute(name, b, **options)
    assert float(loss) == pytest.approx(slow.policy_loss(name, *slow_arguments(b), **renamed), rel=1e-10)
    assert float(loss) != pytest.approx(float(compute(name, b)[0]), rel=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_geo_mean_equals_the_slow_reference(weighted):
    for seed in range(3):
        b = random_batch(seed)
        weights = b["weights"] if weighted else None
        loss, _ = compute("geo_mean", b, clip_low=0.1, clip_high=0.2, rollout_weights=weights)
        arguments = [*slow_arguments(b), 0.1, 0.2, slow.rows_of(weights) if weighted else None]
        assert float(loss) == pytest.approx(slow.geo_mean(*arguments), rel=1e-10)


def test_geo_mean_by_global_count_sums_to_the_whole_batch():
    b = random_batch(2, rows=12)
    whole, _ = compute("geo_mean", b, num_sequences=12)
    halves = [
        compute("geo_mean", {k: v[rows] for k, v in b.items() if isinstance(v, torch.Tensor)}, num_sequences=12)[0]
        for rows in (slice(0, 5), slice(5, 12))
    ]
    torch.testing.assert_close(sum(halves), whole)


def test_kl_cov_penalises_the_top_share():
    b = random_batch(8)
    new, old, adv, mask = slow_arguments(b)
    covariance = slow.covariances(new, adv, mask)
    count = int(0.1 * len(covariance))
    top = sorted(covariance, key=covariance.get)[-count:]
    total = 0.0
    for i, t in covariance:
        ratio = torch.tensor(new[i][t] - old[i][t], dtype=torch.float64)
        total += float(-adv[i][t] * ratio.exp() + (2.0 * ratio.abs() if (i, t) in top else 0.0))
    loss, metrics = compute("kl_cov", b, cov_ratio=0.1, kl_coef=2.0)
    assert float(loss) == pytest.approx(total / len(covariance), rel=1e-10)
    assert float(metrics["pg_clipfrac"]) == pytest.approx(count / len(covariance), rel=1e-6)


def test_clip_cov_drops_a_random_share_of_the_candidates():
    b = random_batch(9, rows=40)
    new, old, adv, mask = slow_arguments(b)
    candidates = set()
    for (i, t), value in slow.covariances(new, adv, mask).items():
        ratio = torch.tensor(new[i][t] - old[i][t]).exp().item()
        caught = -adv[i][t] * slow.clip(ratio, 0.8, 1.2) > -adv[i][t] * ratio
        if 0.2 < value < 1.0 and not caught:
            candidates.add((i, t))
    valid = sum(map(sum, mask))
    b["new"].requires_grad_()
    dropped_sets = set()
    for seed in range(3):
        options = {"cov_ratio": 0.05, "cov_low": 0.2, "cov_high": 1.0, "agg_mode": "token-sum"}
        loss, metrics = compute("clip_cov", b, **options, generator=torch.Generator().manual_seed(seed))
        assert round(float(metrics["pg_clipfrac"]) * valid) == int(0.05 * valid) < len(candidates)
        (grad,) = torch.autograd.grad(loss, b["new"])
        dropped = {(i, t) for i, t in candidates if grad[i, t] == 0}
        assert len(dropped) == int(0.05 * valid)
        full = slow.policy_loss("ppo", new, old, adv, mask, "token-sum")
        loss = loss.detach()
        lost = sum(slow.token_loss("ppo", new[i][t], old[i][t], adv[i][t]) for i, t in dropped)
        assert float(loss) == pytest.approx(full - lost, rel=1e-9)
        dropped_sets.add(frozenset(dropped))
    assert len(dropped_sets) == 3


def test_clip_cov_drops_at_least_one_candidate_and_none_without_candidates():
    b = random_batch(9, rows=40)
    _, metrics = compute("clip_cov", b, cov_low=0.2, cov_high=1.0, cov_ratio=1e-9)
    assert round(float(metrics["pg_clipfrac"]) * int(b["mask"].sum())) == 1
    assert float(compute("clip_cov", b, cov_low=50.0, cov_high=60.0)[1]["pg_clipfrac"]) == 0.0


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_chosen_of_the_whole_make_its_parts_sum_to_it(name):
    b = random_batch(9, rows=12)
    b = {k: v for k, v in b.items() if isinstance(v, torch.Tensor)}
    options = {"cov_ratio": 0.05, "cov_low": 0.1, "cov_high": 2.0, "num_tokens": int(b["mask"].sum())}
    whole, metrics = compute(name, b, **options)
    generator = torch.Generator().manual_seed(0)
    chosen = POLICY_LOSSES.attribute(name, "select_tokens")(
        b["new"], b["old"], b["adv"], b["mask"], generator=generator, **options
    )
    assert float(metrics["pg_clipfrac"]) * options["num_tokens"] == pytest.approx(int(chosen.sum()))
    assert int(chosen.sum()) == int(0.05 * options["num_tokens"]) > 1 and not chosen[~b["mask"]].any()

    def total(given):
        rows = [slice(0, 1), slice(1, 5), slice(5, 12)]
        return sum(compute(name, {k: v[r] for k, v in b.items()}, **given(r), **options)[0] for r in rows)

    torch.testing.assert_close(total(lambda r: {"chosen": chosen[r]}), whole)
    assert not torch.allclose(total(lambda r: {}), whole), "each part by itself chooses others"
    for wrong in (chosen[:5], chosen.double()):
        with pytest.raises(ValueError, match="chosen"):
            compute(name, b, chosen=wrong, **options)


@pytest.mark.parametrize("name", ALL)
def test_gradcheck(name):
    """Numerical against analytic gradients, for the losses that stop no gradient through a factor."""
    b = random_batch(11, rows=4, tokens=5, garbage=0.0)
    stopped = {"cispo", "dppo_tv", "dppo_kl", "gspo"}

    def scalar(new):
        return compute(name, {**b, "new": new}, rollout_weights=b["weights"])[0]

    new = b["new"].clone().requires_grad_()
    if name not in stopped:
        assert torch.autograd.gradcheck(scalar, (new,), eps=1e-7, atol=1e-6)
    else:
        torch.testing.assert_close(torch.autograd.grad(scalar(new), new)[0], stopped_gradient(name, b))


def stopped_gradient(name, b):
    """By hand: d loss / d log_prob of one token, with the stopped factors held fixed."""
    new, old, adv, mask = slow_arguments(b)
    weights, gradient = slow.rows_of(b["weights"]), torch.zeros_like(b["new"])
    rows, tokens = sum(map(any, mask)), sum(map(sum, mask))
    for i, ms in enumerate(mask):
        length = sum(ms)
        for t in [t for t, m in enumerate(ms) if m]:
            if name == "gspo":
                mean = sum(new[i][u] - old[i][u] for u, m in enumerate(ms) if m) / length
                ratio = torch.tensor(mean, dtype=torch.float64).exp().item()
                free = -adv[i][t] * ratio >= -adv[i][t] * slow.clip(ratio, 0.8, 1.2)
                value = -adv[i][t] * ratio / (length + 1e-8) / rows if free else 0.0
            else:
                value = slow.token_loss(name, new[i][t], old[i][t], adv[i][t]) / new[i][t] / tokens
            gradient[i, t] = value * weights[i][t]
    return gradient


@pytest.mark.parametrize("name", ALL)
def test_ratio_one_gives_the_plain_policy_gradient(name):
    """At the first update every loss has the gradient -A / n on every valid token."""
    b = random_batch(12)
    b["adv"] = torch.where(b["mask"], b["adv"], 0.0)
    b["adv"] = b["adv"].sum(-1, keepdim=True).expand_as(b["adv"]).contiguous()  # equal in a row, for geo_mean
    new = b["old"].clone().requires_grad_()
    loss, metrics = compute(name, {**b, "new": new}, cov_low=50.0, cov_high=60.0, kl_coef=0.0)
    (gradient,) = torch.autograd.grad(loss, new)
    if name in OWN_AGGREGATION:
        rows = len(b["mask"]) if name == "geo_mean" else b["mask"].any(-1).sum()
        scale = 1.0 / b["mask"].sum(-1, keepdim=True).clamp(min=1) / rows
    else:
        scale = 1.0 / b["mask"].sum()
    torch.testing.assert_close(gradient, torch.where(b["mask"], -b["adv"] * scale, 0.0), rtol=1e-6, atol=1e-12)
    assert float(metrics["ppo_kl"]) == 0.0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
def test_padding_never_leaks(name, garbage):
    results = []
    for content in (0.0, garbage):
        b = random_batch(13, garbage=content)
        b["new"].requires_grad_()
        loss, metrics = compute(name, b, rollout_weights=b["weights"])
        (gradient,) = torch.autograd.grad(loss, b["new"])
        assert (gradient[~b["mask"]] == 0).all()
        assert not any(value.requires_grad for value in metrics.values())
        results.append([loss.detach(), gradient, *metrics.values()])
    for clean, dirty in zip(*results):
        torch.testing.assert_close(dirty, clean, rtol=1e-12, atol=1e-14)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(set(ALL) - {"clip_cov", "kl_cov"})), data=st.data())
def test_micro_batches_sum_to_the_whole(seed, name, data):
    """Loss and gradient of k micro-batches over n ranks equal those of the one batch."""
    b = random_batch(seed, rows=12)
    b = {k: v for k, v in b.items() if isinstance(v, torch.Tensor)}
    mode = data.draw(st.sampled_from(MODES))
    rows = 12 if name == "geo_mean" else int(b["mask"].any(-1).sum())
    counts = {"num_tokens": int(b["mask"].sum()), "num_sequences": rows, "horizon": 11}
    b["new"].requires_grad_()
    whole, _ = compute(name, b, agg_mode=mode, **counts)
    (gradient,) = torch.autograd.grad(whole, b["new"])
    sizes = data.draw(st.sampled_from([[2] * 6, [6, 6], [4, 2, 4, 2], [1] * 12]))
    ranks = 2
    order = torch.tensor(data.draw(st.permutations(range(12))))
    parts = [{k: v[rows] for k, v in b.items()} for rows in order.split(sizes)]
    total = sum(compute(name, part, agg_mode=mode, dp_size=ranks, **counts)[0] for part in parts) / ranks
    torch.testing.assert_close(total, whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, b["new"])[0], gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_all_masked_batch_is_zero_with_a_graph(name):
    b = random_batch(1)
    b["mask"] = torch.zeros_like(b["mask"])
    b["new"].requires_grad_()
    loss, metrics = compute(name, b)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert (b["new"].grad == 0).all()
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("name", PER_TOKEN)
def test_extreme_ratios_stay_finite(name):
    mask = torch.ones(1, 2, dtype=torch.bool)
    new = torch.tensor([[0.0, -300.0]], requires_grad=True)
    b = {"new": new, "old": torch.tensor([[-300.0, 0.0]]), "adv": torch.tensor([[-1.0, 1.0]]), "mask": mask}
    loss, _ = compute(name, b)
    loss.backward()
    assert loss.isfinite()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_dtypes(name):
    for dtype, wanted in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        b = random_batch(3, dtype=dtype)
        loss, metrics = compute(name, b, rollout_weights=b["weights"])
        assert loss.dtype == wanted
        assert set(metrics) == {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
        wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in b.items()}
        assert float(loss) == pytest.approx(
            float(compute(name, wide, rollout_weights=wide["weights"])[0]), rel=1e-4, abs=1e-6
        )


def test_ppo_metrics():
    mask = torch.tensor([[True, True, True, False]])
    new = torch.log(torch.tensor([[1.5, 4.0, 1.0, 9.0]]))
    advantages = torch.tensor([[1.0, -1.0, 1.0, -5.0]])
    _, metrics = get_policy_loss("ppo")(new, torch.zeros(1, 4), advantages, mask, clip_dual=3.0)
    assert float(metrics["pg_clipfrac"]) == pytest.approx(1 / 3)
    assert float(metrics["pg_clipfrac_lower"]) == pytest.approx(1 / 3)
    assert float(metrics["ppo_kl"]) == pytest.approx(-float(new[0, :3].mean()))


@pytest.mark.parametrize("name", ALL)
def test_bad_shapes_and_masks(name):
    b = random_batch()
    with pytest.raises(ValueError, match="bool"):
        compute(name, {**b, "mask": b["mask"].double()})
    for key, label in (("new", "log_probs"), ("old", "old_log_probs"), ("adv", "advantages")):
        with pytest.raises(ValueError, match=rf"{label} has shape \[13, 10\].*\[13, 11\]"):
            compute(name, {**b, key: b[key][:, :-1]})
    with pytest.raises(ValueError, match="rollout_weights has shape"):
        compute(name, b, rollout_weights=b["weights"][:, 0])
    with pytest.raises(ValueError, match="dp_size 2 needs num_"):
        compute(name, b, dp_size=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [("ppo", {"clip_low": 0.3, "clip_high": 0.2}), ("gspo", {"clip_low": 0.3, "clip_high": 0.2}),
     ("ppo", {"clip_low": -0.1}), ("ppo", {"clip_dual": 1.0}), ("cispo", {"clip_high": float("nan")}),
     ("sapo", {"tau_neg": 0.0}), ("dro", {"beta": -1.0}), ("clip_cov", {"cov_ratio": 0.0}),
     ("clip_cov", {"cov_low": 5.0, "cov_high": 1.0}), ("kl_cov", {"kl_coef": -1.0}), ("dppo_tv", {"clip_dual": 0.0})],
)  # fmt: skip
def test_bad_numbers(name, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        compute(name, random_batch(), **options)


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="unknown policy loss 'vanilla'.*gspo.*ppo"):
        get_policy_loss("vanilla")
