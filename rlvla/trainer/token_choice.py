"""Tokens that a policy loss treats apart, chosen over an optimiser step as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlvla.utils.strategy import DeepspeedStrategy


def choose_over_ranks(
    strategy: DeepspeedStrategy, choose: Callable[..., Tensor], rows: Sequence[Tensor], options: Mapping[str, Any]
) -> Tensor:
    """Choose among the tokens of all ranks, which all of them call; every rank comes to the same choice.

    Args:
        strategy: collectives.
        choose: one of `rlvla.algorithms.policy_losses.covariance.TOKEN_CHOICES`.
        rows: its tensors [B, L], all rows of the step on this rank.
        options: its keyword arguments.

    Returns:
        [B, L] bool on the host: what was chosen of this rank's rows.
    """
    seed = int(torch.randint(2**62, ()))  # of rank 0 for all, else each would draw other tokens
    everyone = strategy.gather_objects((seed, [tensor.cpu() for tensor in rows]))
    whole = [torch.cat(parts) for parts in zip(*(tensors for _, tensors in everyone))]
    generator = torch.Generator().manual_seed(everyone[0][0])
    chosen = choose(*whole, generator=generator, **options)
    lengths = [len(tensors[0]) for _, tensors in everyone]
    return chosen.split(lengths)[strategy.rank]
