"""Moments over two real ranks equal those of the whole batch, however unevenly its rows are split."""

import torch

from rlvla.algorithms import get_advantage_estimator
from rlvla.algorithms.losses import explained_variance
from rlvla.algorithms.masking import masked_mean, masked_var, masked_whiten
from rlvla.algorithms.rollout_correction import rollout_correction_weights
from rlvla.algorithms.value_normalization import ValueNormalizer
from tests.support import two_ranks
from tests.support.algorithm_cases import random_batch

SPLIT = 5
WHITENED = ("gae", "gdpo", "gpg", "reinforce_baseline", "reinforce_plus_plus")


def batch():
    b = random_batch(6, rows=14)
    b["rewards"] = b["rewards"] + 1e3  # a large offset: sums of raw squares would lose digits
    b["ids"] = [0] * SPLIT + [1 + i % 3 for i in range(14 - SPLIT)]  # no group crosses the ranks
    return b


def everything(b, process_group):
    """Each result as [rows, ...], so that the ranks' results can be joined."""
    rows, mask = len(b["mask"]), b["mask"]
    normalizer = ValueNormalizer()
    normalizer.update(b["rewards"], mask, process_group)
    scalars = torch.stack(
        [
            masked_mean(b["rewards"], mask, process_group=process_group),
            masked_var(b["rewards"], mask, process_group=process_group),
            explained_variance(b["values"], b["rewards"], mask, process_group),
            torch.tensor(normalizer.mean, dtype=torch.float64),
            torch.tensor(normalizer.std, dtype=torch.float64),
        ]
    )
    results = {"scalars": scalars.expand(rows, -1).contiguous()}
    results["whiten"] = torch.where(mask, masked_whiten(b["rewards"], mask, process_group=process_group), 0.0)
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
        torch.testing.assert_close(joined, expected, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
