"""Numbers of public implementations, see tests/data/README.md."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.algorithms import get_advantage_estimator, get_policy_loss
from rlvla.algorithms.kl import AdaptiveKLController, kl_penalty
from rlvla.algorithms.losses import aggregate_loss, value_loss
from rlvla.algorithms.masking import masked_mean, masked_sum, masked_var, masked_whiten
from rlvla.algorithms.rollout_correction import rollout_correction_weights

DATA = Path(__file__).resolve().parents[2] / "data"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
ESTIMATORS = {"reinforce_plus_plus_baseline": "reinforce_baseline"}
LOSSES = {"vanilla": "ppo"}


def load(path):
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def tensor(array):
    return torch.from_numpy(np.asarray(array))


def close(actual, expected):
    expected = tensor(expected)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.detach(), expected, rtol=tolerance, atol=tolerance)


def vectors(pattern):
    found = sorted((DATA / "verl").glob(pattern))
    assert found
    return pytest.mark.parametrize("path", found, ids=lambda path: path.stem)


@vectors("adv_*.npz")
def test_advantages(path):
    d = load(path)
    name = path.stem.removeprefix("adv_").split("__")[0]
    mask = tensor(d["in_response_mask"]).bool()
    options = {
        "group_ids": d.get("in_index"),
        "gamma": float(d.get("arg_gamma", 1.0)),
        "lam": float(d.get("arg_lam", 1.0)),
        "norm_by_std": bool(d.get("arg_norm_adv_by_std_in_grpo", True)),
        "f_norm": float(d.get("arg_f_norm", 1.0)),
        "handle_zero_tail": bool(d.get("arg_handle_zero_tail", True)),
    }
    for key in ("values", "reward_baselines", "old_log_probs", "sum_pi_squared"):
        if f"in_{key}" in d:
            options[key] = tensor(d[f"in_{key}"])
    if name == "gdpo":
        options["component_rewards"] = {key: tensor(d[f"in_{key}"]) for key in ("success", "shaping")}
        rewards = torch.zeros(mask.shape, dtype=tensor(d["out_advantages"]).dtype)
        options["component_rewards"] = {k: v.to(rewards.dtype) for k, v in options["component_rewards"].items()}
    else:
        rewards = tensor(d["in_token_level_rewards"])
    advantages, returns = get_advantage_estimator(ESTIMATORS.get(name, name))(rewards, mask, **options)
    close(advantages, np.where(mask, d["out_advantages"], 0.0))
    close(returns, np.where(mask, d["out_returns"], 0.0))


@vectors("pg_*.npz")
def test_policy_losses(path):
    d = load(path)
    name = path.stem.removeprefix("pg_").split("__")[0]
    log_probs = tensor(d["in_log_prob"]).requires_grad_()
    policy = json.loads(str(d.get("arg_policy_loss", "{}")))
    renamed = {
        "clip_cov_ratio": "cov_ratio",
        "clip_cov_lb": "cov_low",
        "clip_cov_ub": "cov_high",
        "kl_cov_ratio": "cov_ratio",
        "ppo_kl_coef": "kl_coef",
        "dro_beta": "beta",
    }
    options = {renamed[key]: value for key, value in policy.items()}
    for ours, theirs in (
        ("clip_low", "arg_clip_ratio_low"),
        ("clip_high", "arg_clip_ratio_high"),
        ("clip_dual", "arg_clip_ratio_c"),
        ("tau_pos", "arg_tau_pos"),
        ("tau_neg", "arg_tau_neg"),
    ):
        if theirs in d:
            options[ours] = float(d[theirs])
    options.setdefault("clip_dual", 3.0)
    loss, metrics = get_policy_loss(LOSSES.get(name, name))(
        log_probs,
        tensor(d["in_old_log_prob"]),
        tensor(d["in_advantages"]),
        tensor(d["in_response_mask"]).bool(),
        agg_mode=str(d["arg_loss_agg_mode"]),
        **options,
    )
    loss.backward()
    close(loss, d["out_loss"])
    close(log_probs.grad, d["out_grad_log_prob"])
    for key, value in d.items():
        if key.startswith("out_metric_actor__"):
            # printed by the origin in single precision
            assert float(metrics[key.removeprefix("out_metric_actor__")]) == pytest.approx(float(value), abs=1e-7)


@vectors("agg_seq*.npz")
def test_aggregation_by_local_counts(path):
    check_aggregation(load(path))


@vectors("agg_token*.npz")
def test_aggregation_by_global_counts(path):
    d = load(path)
    check_aggregation(
        d,
        num_tokens=int(d["arg_batch_num_tokens"]),
        num_sequences=int(d["arg_global_batch_size"]),
        dp_size=int(d["arg_dp_size"]),
    )


def check_aggregation(d, **counts):
    loss = tensor(d["in_loss_mat"]).requires_grad_()
    total = aggregate_loss(loss, tensor(d["in_loss_mask"]).bool(), str(d["arg_loss_agg_mode"]), **counts)
    total.backward()
    close(total, d["out_loss"])
    close(loss.grad, d["out_grad_loss_mat"])


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_ranks_average_to_the_full_loss(mode):
    d = load(DATA / "verl" / "agg_dp_invariance.npz")
    loss, mask = tensor(d["in_loss_mat"]), tensor(d["in_loss_mask"]).bool()
    counts = {
        "num_tokens": int(d["arg_batch_num_tokens"]),
        "num_sequences": int(d["arg_global_batch_size"]),
        "horizon": int(d["arg_loss_scale_factor"]),
    }
    key = mode.replace("-", "_")
    close(aggregate_loss(loss, mask, mode, **counts), d[f"out_full_{key}"])
    shards = [
        aggregate_loss(part, part_mask, mode, dp_size=3, **counts)
        for part, part_mask in zip(loss.chunk(3), mask.chunk(3))
    ]
    close(torch.stack(shards), d[f"out_shards_{key}"])
    close(torch.stack(shards).mean(), d[f"out_dpmean_{key}"])


def test_gradient_accumulation_over_ranks():
    """The engine divides each micro-batch by the accumulation steps, which the trainer multiplies back."""
    d = load(DATA / "openrlhf" / "gas_dp_window.npz")
    loss, mask = tensor(d["in_loss"]), tensor(d["in_loss_mask"]).bool()
    ranks, steps = int(d["arg_dp_size"]), int(d["arg_gas"])
    counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum(), "dp_size": ranks}
    for mode, key in (("token-mean", "token"), ("seq-mean-token-mean", "seq")):
        micro = torch.stack(
            [
                aggregate_loss(part, part_mask, mode, **counts)
                for part, part_mask in zip(loss.split(int(d["arg_micro_batch"])), mask.split(int(d["arg_micro_batch"])))
            ]
        )
        scaled_by_engine = micro * steps / steps
        torch.testing.assert_close(
            scaled_by_engine, tensor(d[f"out_micro_losses_after_ds_scale_{key}"]), rtol=1e-7, atol=1e-9
        )
        step_loss = scaled_by_engine.view(ranks, steps).sum(1).mean()
        torch.testing.assert_close(step_loss, tensor(d[f"out_full_{key}"]), rtol=1e-7, atol=1e-9)


@vectors("kl_*.npz")
def test_kl(path):
    d = load(path)
    log_probs = tensor(d["in_logprob"]).requires_grad_()
    kl = kl_penalty(log_probs, tensor(d["in_ref_logprob"]), str(d["arg_kl_penalty"]))
    kl.sum().backward()
    close(kl, d["out_kl"])
    # Where the value of k3 is clamped, the public code has no gradient, here it is that of the unclamped value.
    kept = kl.detach().abs() < 10.0 if str(d["arg_kl_penalty"]) in ("k3", "low_var_kl") else torch.ones_like(kl).bool()
    close(log_probs.grad[kept], d["out_grad_logprob_of_sum"][kept.numpy()])
    assert (log_probs.grad[~kept] != 0).all()


@vectors("klctl_*.npz")
def test_adaptive_kl_controller(path):
    d = load(path)
    controller = AdaptiveKLController(float(d["arg_init_kl_coef"]), float(d["arg_target_kl"]), float(d["arg_horizon"]))
    seen = []
    for kl, steps in zip(d["in_current_kl"], d["in_n_steps"]):
        controller.update(float(kl), int(steps))
        seen.append(controller.value)
    np.testing.assert_allclose(seen, d["out_value_after_each"], rtol=1e-10)


@vectors("masked_stats*.npz")
def test_masked_statistics(path):
    d = load(path)
    values, mask = tensor(d["in_values"]), tensor(d["in_mask"]).bool()
    close(masked_sum(values, mask), d["out_sum"])
    close(masked_sum(values, mask, -1), d["out_sum_axis_last"])
    close(masked_mean(values, mask), d["out_mean"])
    close(masked_mean(values, mask, -1), d["out_mean_axis_last"])
    close(masked_var(values, mask), d["out_var_unbiased"])
    close(masked_var(values, mask, unbiased=False), d["out_var_biased"])
    close(masked_whiten(values, mask), d["out_whiten"])
    close(masked_whiten(values, mask, shift_mean=False), d["out_whiten_noshift"])


@vectors("value_*.npz")
def test_value_loss(path):
    d = load(path)
    values = tensor(d["in_vpreds"]).requires_grad_()
    loss, metrics = value_loss(
        values,
        tensor(d["in_values"]),
        tensor(d["in_returns"]),
        tensor(d["in_response_mask"]).bool(),
        clip=float(d["arg_cliprange_value"]),
        agg_mode=str(d["arg_loss_agg_mode"]),
    )
    loss.backward()
    close(loss, d["out_vf_loss"])
    close(metrics["vf_clipfrac"], d["out_vf_clipfrac"])
    close(values.grad, d["out_grad_vpreds"])


@vectors("rc_weights*.npz")
def test_rollout_correction(path):
    d = load(path)
    log_ratio = tensor(d["in_log_ratio"])
    weights, metrics = rollout_correction_weights(
        log_ratio,
        torch.zeros_like(log_ratio),
        tensor(d["in_response_mask"]).bool(),
        level=str(d["arg_rollout_is"]),
        high=float(d["arg_rollout_is_threshold"]),
        batch_normalize=bool(d["arg_rollout_is_batch_normalize"]),
    )
    close(weights, d["out_weights"])
    theirs = json.loads(str(d["out_metrics_json"]))
    assert float(metrics["rollout_is_max"]) == theirs["rollout_is_max"]
    assert float(metrics["rollout_is_min"]) == pytest.approx(theirs["rollout_is_min"], rel=1e-10)
    assert float(metrics["rollout_is_fraction_high"]) == pytest.approx(theirs["rollout_is_ratio_fraction_high"])
