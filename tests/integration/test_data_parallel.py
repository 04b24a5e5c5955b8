"""Moments over two real ranks equal those of the whole batch, however unevenly its rows are split."""

import torch

from rlvla.algorithms import get_advantage_estimator
from rlvla.algorithms.losses import explained_variance
from rlvla.algorithms.masking import masked_mean, masked_var, masked_whiten, whiten_per_task
from rlvla.algorithms.reward_scaling import RewardScaling
from rlvla.algorithms.rollout_correction import rollout_correction_weights
from rlvla.algorithms.value_normalization import ValueNormalizer
from tests.support import two_ranks
from tests.support.algorithm_cases import random_batch

SPLIT = 5
WHITENED = ("gae", "gdpo", "gpg", "reinforce_baseline", "reinforce_plus_plus")


def batch():
    b = random_batch(6, rows=14)
    b["rewards"] = b["rewards"] + 1e3  # a large offset: sums of raw squares would lose digits
    b["equal"] = torch.full_like(b["rewards"], 2.3, dtype=torch.float32)
    b["equal_on_each_rank"] = b["equal"] + 0.2 * (torch.arange(14) < SPLIT).unsqueeze(-1)
    b["ids"] = [0] * SPLIT + [1 + i % 3 for i in range(14 - SPLIT)]  # no group crosses the ranks
    b["tasks"] = torch.tensor([i % 3 for i in range(SPLIT)] + [i % 2 for i in range(14 - SPLIT)])  # but tasks do
    return b


def everything(b, process_group):
    """Each result as [rows, ...], so that the ranks' results can be joined."""
    rows, mask = len(b["mask"]), b["mask"]
    normalizer = ValueNormalizer()
    normalizer.update(b["rewards"], mask, process_group)
    scaling = RewardScaling(normalize=True)
    scaling.update(b["rewards"].sum(1), process_group)
    scalars = torch.stack(
        [
            masked_mean(b["rewards"], mask, process_group=process_group),
            masked_var(b["rewards"], mask, process_group=process_group),
            explained_variance(b["values"], b["rewards"], mask, process_group),
            torch.tensor(normalizer.mean, dtype=torch.float64),
            torch.tensor(normalizer.std, dtype=torch.float64),
            torch.tensor(scaling.divisor, dtype=torch.float64),
        ]
    )
    results = {"scalars": scalars.expand(rows, -1).contiguous()}
    for values in ("rewards", "equal", "equal_on_each_rank"):
        whitened = masked_whiten(b[values], mask, process_group=process_group)
        results[f"whitened {values}"] = torch.where(mask, whitened, 0.0)
    results["per task"] = whiten_per_task(b["rewards"], mask, b["tasks"], 4, process_group)
    for level in ("token", "sequence"):
        results[level], _ = rollout_correction_weights(
            b["new"], b["old"], mask, level=level, batch_normalize=True, process_group=process_group
        )
    for name in WHITENED:
        results[name], _ = get_advantage_estimator(name)(
            b["rewards"],
            mask,
            group_ids=b["ids"],
            values=b["values"],
            component_rewards={"one": b["rewards"], "two": b["adv"]},
            process_group=process_group,
        )
    return results


def of_rank(rank):
    rows = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
    return everything({k: v[rows] for k, v in batch().items()}, "world")


def test_two_ranks_equal_one():
    whole, parts = everything(batch(), None), two_ranks.run(of_rank)
    for name, expected in whole.items():
        joined = torch.cat([part[name] for part in parts])
        tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(joined, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        if name == "whitened equal":
            assert not joined.any()
        if name == "whitened equal_on_each_rank":
            assert joined.abs().max() > 0.5
