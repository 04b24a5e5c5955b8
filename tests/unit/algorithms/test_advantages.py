import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvla.algorithms import get_advantage_estimator, list_advantage_estimators, masking, register_advantage_estimator
from rlvla.algorithms.advantages import group, temporal
from tests.support import slow_reference as slow
from tests.support.algorithm_cases import pair_ids, random_batch

ALL = [
    "gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline", "reinforce", "reinforce_baseline",
    "reinforce_plus_plus", "remax", "rloo",
]  # fmt: skip
WHITENED = {"gae", "gdpo", "reinforce_baseline", "reinforce_plus_plus"}


def options_of(b, ids=None):
    return {
        "group_ids": b["ids"] if ids is None else ids,
        "values": b["values"],
        "reward_baselines": b["baselines"],
        "old_log_probs": b["old"],
        "sum_pi_squared": b["squares"],
        "rollout_weights": b["weights"],
        "component_rewards": {"success": b["rewards"], "speed": b["adv"]},
        "component_weights": {"success": 1.0, "speed": 0.5},
        "gamma": 0.9,
        "lam": 0.8,
    }


def estimate(name, b, **changes):
    ids = pair_ids(len(b["mask"]), 4) if name == "grpo_passk" else None
    options = {**options_of(b, ids), **changes}
    return get_advantage_estimator(name)(b["rewards"], b["mask"], **options)


def expected(name, b):
    """The same as `estimate`, by the slow loops."""
    mask, rewards = slow.masks_of(b["mask"]), slow.rows_of(b["rewards"])
    ids = pair_ids(len(mask), 4) if name == "grpo_passk" else b["ids"]
    scores = slow.scores_of(rewards, mask)
    if name == "gae":
        return slow.gae(rewards, mask, slow.rows_of(b["values"]), 0.9, 0.8)
    if name in ("reinforce", "reinforce_plus_plus"):
        returns = slow.return_to_go(rewards, mask, 0.9)
        return (returns if name == "reinforce" else slow.whiten(returns, mask)), returns
    if name == "remax":
        returns = slow.return_to_go(rewards, mask)
        base = b["baselines"].tolist()
        rows = zip(returns, mask, base)
        return [[g - c if m else 0.0 for g, m in zip(gs, ms)] for gs, ms, c in rows], returns
    if name == "optimal_token_baseline":
        return slow.token_baseline(
            rewards, mask, ids, slow.rows_of(b["old"]), slow.rows_of(b["squares"]), slow.rows_of(b["weights"])
        )
    if name == "gdpo":
        speed = slow.grpo_rows(slow.scores_of(slow.rows_of(b["adv"]), mask), ids)
        rows = [s + 0.5 * v for s, v in zip(slow.grpo_rows(scores, ids), speed)]
    elif name == "gpg":
        nonzero = sum(s != 0 for s in scores)
        rows = [len(scores) / nonzero * (s - slow.group_mean(scores, ids, i)) for i, s in enumerate(scores)]
    else:
        rows = {
            "grpo": lambda: slow.grpo_rows(scores, ids),
            "grpo_passk": lambda: slow.passk_rows(scores, ids),
            "rloo": lambda: slow.rloo_rows(scores, ids),
            "opo": lambda: slow.opo_rows(scores, mask, ids),
            "reinforce_baseline": lambda: slow.grpo_rows(scores, ids, norm_by_std=False),
        }[name]()
    spread = slow.broadcast(rows, mask)
    if name in WHITENED:
        spread = slow.whiten(spread, mask)
    return spread, spread


def test_every_estimator_of_the_specification_is_registered():
    assert set(ALL) <= set(list_advantage_estimators())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ALL)
def test_equals_the_slow_reference(name, seed):
    b = random_batch(seed, rows=16)
    for actual, wanted in zip(estimate(name, b), expected(name, b)):
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-4)])
@pytest.mark.parametrize("name", ALL)
def test_low_precision_input_is_computed_in_float32(name, dtype, tolerance):
    b = random_batch(5, dtype=dtype)
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in b.items()}
    for actual, wanted in zip(estimate(name, b), estimate(name, wide)):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ALL)
def test_nothing_outside_the_mask(name):
    b = random_batch(1)
    for result in estimate(name, b):
        assert not result.requires_grad
        assert (result[~b["mask"]] == 0).all()
        assert result[b["mask"]].isfinite().all()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(ALL),
    garbage=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]),
    extra=st.integers(0, 5),
)
def test_invariant_to_padding(seed, name, garbage, extra):
    b, other = random_batch(seed, garbage=0.0), random_batch(seed, garbage=garbage)
    for key, value in other.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            fill = False if value.dtype == torch.bool else garbage
            other[key] = torch.nn.functional.pad(value, (0, extra), value=fill)
    for base, longer in zip(estimate(name, b), estimate(name, other)):
        torch.testing.assert_close(longer[:, : base.shape[1]], base, rtol=1e-12, atol=1e-12)
        assert (longer[:, base.shape[1] :] == 0).all()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(set(ALL) - {"grpo_passk"})), data=st.data())
def test_invariant_to_row_order_and_group_names(seed, name, data):
    b = random_batch(seed)
    order = torch.tensor(data.draw(st.permutations(range(len(b["mask"])))))
    moved = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in b.items()}
    names = {key: f"renamed-{i}" for i, key in enumerate(reversed(list(dict.fromkeys(b["ids"]))))}
    moved["ids"] = [names[b["ids"][i]] for i in order.tolist()]
    for base, other in zip(estimate(name, b), estimate(name, moved)):
        torch.testing.assert_close(other, base[order], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ALL)
def test_row_blocks_are_invisible(name, monkeypatch):
    """Large batches are walked in blocks of rows; with tiny blocks the result stays the same."""
    b = random_batch(8, rows=16)
    whole = estimate(name, b)
    for module, constant in ((temporal, "_BLOCK_ROWS"), (masking, "_BLOCK_ROWS"), (group, "_SUM_BLOCK_ROWS")):
        monkeypatch.setattr(module, constant, 3)
    for blocked, base in zip(estimate(name, b), whole):
        torch.testing.assert_close(blocked, base, rtol=1e-12, atol=1e-12)


def test_group_of_one():
    rewards, mask = torch.tensor([[0.0, 2.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)

    def first(name, **options):
        return float(get_advantage_estimator(name)(rewards, mask, group_ids=["only"], **options)[0][0, 0])

    assert first("grpo") == pytest.approx(2.0, rel=1e-5)
    assert first("grpo", norm_by_std=False) == first("rloo") == first("opo") == first("gpg") == 2.0
    assert first("rloo", singleton="zero") == 0.0
    with pytest.raises(ValueError, match="one row"):
        first("grpo_passk")
    with pytest.raises(ValueError, match="singleton"):
        first("rloo", singleton="drop")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_equal_scores_teach_nothing(name, dtype):
    # 0.1 is not exact in binary: a group std of rounding noise would be blown up by the division
    rewards = torch.full((7, 3), 0.1, dtype=dtype)
    advantages, _ = get_advantage_estimator(name)(rewards, torch.ones(7, 3, dtype=torch.bool), group_ids=[0] * 7)
    assert not advantages.any()


@pytest.mark.parametrize("size", [1, 3, 512])
@pytest.mark.parametrize("name", sorted(WHITENED | {"gpg", "grpo", "opo", "rloo"}))
def test_equal_returns_of_a_large_batch_give_exactly_zero(name, size):
    """A mean over 160,000 tokens is off by 1e-7, which must not pass for a difference between returns."""
    if size == 1 and name not in WHITENED:
        pytest.skip("a group of one keeps its score")
    lengths = torch.randint(200, 449, (512,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(448) < lengths.unsqueeze(-1)
    rewards = torch.zeros(512, 448)
    rewards[torch.arange(512), lengths - 1] = 2.3
    ids = [row // size for row in range(512)]
    options = {"values": torch.zeros_like(rewards), "component_rewards": {"one": rewards, "two": 0.1 * rewards}}
    advantages, returns = get_advantage_estimator(name)(rewards, mask, group_ids=ids, **options)
    assert not advantages.any()
    if name in ("gae", "reinforce_plus_plus"):
        assert (returns[mask] == rewards.max()).all()


def test_group_std_has_one_degree_of_freedom_less():
    rewards = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    advantages, _ = get_advantage_estimator("grpo")(rewards, torch.ones(2, 1, dtype=torch.bool), group_ids=[0, 0])
    assert float(advantages[1]) == pytest.approx(0.5 / 0.5**0.5, rel=1e-5)


def test_passk_ties_and_second_best():
    rewards = torch.tensor([[3.0], [3.0], [1.0], [5.0], [2.0]])
    mask = torch.ones(5, 1, dtype=torch.bool)
    passk = get_advantage_estimator("grpo_passk")
    advantages, _ = passk(rewards, mask, group_ids=["t", "t", "t", "u", "u"], norm_by_std=False)
    assert advantages.flatten().tolist() == [0.0, 0.0, 0.0, 3.0, 0.0]


def test_gae_passes_holes_through():
    """A hole in the middle of a row must give what the row without the hole gives."""
    b = random_batch(3, rows=6, tokens=9)
    b["mask"] = torch.ones_like(b["mask"])
    b["mask"][:, 4] = False
    b = {k: v.nan_to_num(0.3) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in b.items()}
    keep = [t for t in range(9) if t != 4]
    dense = {k: v[:, keep] if isinstance(v, torch.Tensor) and v.dim() == 2 else v for k, v in b.items()}
    for name in ("gae", "reinforce", "reinforce_plus_plus"):
        for holed, plain in zip(estimate(name, b), estimate(name, dense)):
            torch.testing.assert_close(holed[:, keep], plain)


def test_gae_bootstraps_what_the_caller_adds_to_the_last_reward():
    values, mask = torch.tensor([[0.5, 0.6]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    final_value, gamma = 0.7, 0.9
    rewards = torch.tensor([[0.0, 1.0 + gamma * final_value]], dtype=torch.float64)
    _, returns = get_advantage_estimator("gae")(rewards, mask, values=values, gamma=gamma, lam=1.0)
    last = 1.0 + gamma * final_value
    torch.testing.assert_close(returns, torch.tensor([[gamma * last, last]], dtype=torch.float64))


def test_zero_tail_can_be_switched_off():
    b = random_batch(2, rows=8)
    b["mask"] = torch.arange(11) < torch.tensor([[11], [4], [4], [3], [5], [9], [9], [2]])
    b = {k: v.nan_to_num(0.4) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in b.items()}
    b["ids"] = [0, 0, 0, 0, 1, 1, 1, 1]  # in group 1 the longest length is shared
    arguments = [slow.rows_of(b["rewards"]), slow.masks_of(b["mask"]), b["ids"]]
    arguments += [slow.rows_of(b["old"]), slow.rows_of(b["squares"]), None]
    on, off = (slow.token_baseline(*arguments, zero_tail=flag)[0] for flag in (True, False))
    assert on != off
    for flag, wanted in ((True, on), (False, off)):
        actual, _ = estimate("optimal_token_baseline", b, handle_zero_tail=flag, rollout_weights=None)
        torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64))


def test_gdpo_accepts_numbers_per_row_and_stacked_components():
    b = random_batch(4)
    rows = {k: torch.where(b["mask"], b[k], 0.0).sum(-1) for k in ("rewards", "adv")}
    base = estimate("gdpo", b)[0]
    per_row = estimate("gdpo", b, component_rewards={"success": rows["rewards"], "speed": rows["adv"]})[0]
    stacked = torch.stack([rows["rewards"], rows["adv"]], -1)
    torch.testing.assert_close(per_row, base)
    torch.testing.assert_close(estimate("gdpo", b, component_rewards=stacked, component_weights=[1.0, 0.5])[0], base)
    with pytest.raises(ValueError, match="component_weights"):
        estimate("gdpo", b, component_weights={"success": 1.0})
    with pytest.raises(ValueError, match="component_weights has 3"):
        estimate("gdpo", b, component_rewards=stacked, component_weights=[1.0, 0.5, 2.0])
    with pytest.raises(ValueError, match="speed"):
        estimate("gdpo", b, component_rewards={"success": rows["rewards"], "speed": rows["adv"][:3]})


@pytest.mark.parametrize(
    ("name", "missing"),
    [("gae", "values"), ("remax", "reward_baselines"), ("grpo", "group_ids"), ("gdpo", "component_rewards"),
     ("optimal_token_baseline", "old_log_probs"), ("optimal_token_baseline", "sum_pi_squared")],
)  # fmt: skip
def test_a_missing_input_is_named(name, missing):
    with pytest.raises(ValueError, match=f"{name}.*needs {missing}"):
        estimate(name, random_batch(), **{missing: None})


@pytest.mark.parametrize("name", ALL)
def test_bad_shapes_and_masks(name):
    b = random_batch()
    for mask in (b["mask"].double(), b["mask"].long()):
        with pytest.raises(ValueError, match="bool"):
            estimate(name, {**b, "mask": mask})
    with pytest.raises(ValueError, match=r"\[13, 10\].*\[13, 11\]|\[13, 11\].*\[13, 10\]"):
        estimate(name, {**b, "rewards": b["rewards"][:, :-1]})


def test_bad_numbers():
    b = random_batch()
    for changes in ({"gamma": 1.5}, {"gamma": float("nan")}, {"lam": -0.1}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            estimate("gae", b, **changes)
    with pytest.raises(ValueError, match="f_norm"):
        estimate("gpg", b, f_norm=0.0)
    with pytest.raises(ValueError, match="12 entries"):
        estimate("grpo", b, group_ids=b["ids"][:-1])
    with pytest.raises(ValueError, match="reward_baselines"):
        estimate("remax", b, reward_baselines=b["baselines"][:-1])
    one = torch.zeros(1, 3, dtype=torch.bool)
    one[0, 0] = True
    with pytest.raises(ValueError, match="at least 2 valid"):
        get_advantage_estimator("gae")(torch.ones(1, 3), one, values=torch.ones(1, 3))


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="unknown advantage estimator 'gea'.*gae.*grpo"):
        get_advantage_estimator("gea")


def test_a_users_own_estimator():
    @register_advantage_estimator("test_constant")
    def constant(token_level_rewards, response_mask, *, gamma=1.0, **extra):
        return response_mask * 2.0 * gamma, response_mask * gamma

    advantages, _ = estimate("test_constant", random_batch())
    assert float(advantages.max()) == pytest.approx(1.8)
    with pytest.raises(ValueError, match="'gae' already belongs"):
        register_advantage_estimator("gae")(constant)
