"""One choice of tokens for all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.policy_losses.covariance import choose_for_clip_cov
from rlvla.trainer.updater import choose_over_ranks

LENGTHS = (5, 1, 6)
OPTIONS = {"cov_ratio": 0.25, "cov_low": -100.0, "cov_high": 100.0, "kl_coef": 1.0}


def choose_on(rank: int, rows: list[Tensor], sent: list[Any], received: list[Any] | None) -> Tensor:
    """The choice of a rank with random numbers of its own; what it sends is put down."""

    def gather_objects(item: Any) -> list[Any]:
        sent.append(item)
        return received or [item] * len(LENGTHS)

    torch.manual_seed(rank)
    strategy = SimpleNamespace(rank=rank, gather_objects=gather_objects)
    return choose_over_ranks(strategy, choose_for_clip_cov, rows, OPTIONS)


def test_ranks_share_one_random_choice() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(sum(LENGTHS), 4, generator=generator) for _ in range(3)]
    whole[1] = whole[0].clone()  # no ratio is clipped
    whole.append(torch.rand(sum(LENGTHS), 4, generator=generator) > 0.2)
    ranks = [list(parts) for parts in zip(*(tensor.split(LENGTHS) for tensor in whole))]
    sent: list[Any] = []
    for rank, rows in enumerate(ranks):
        choose_on(rank, rows, sent, None)
    choices = [choose_on(rank, rows, [], sent) for rank, rows in enumerate(ranks)]
    assert [len(choice) for choice in choices] == list(LENGTHS)
    joined = torch.cat(choices)
    assert int(joined.sum()) == int(0.25 * int(whole[3].sum())) and not joined[~whole[3]].any()
