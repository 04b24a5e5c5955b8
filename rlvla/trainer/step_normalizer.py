"""Normalizers of an optimizer step over all ranks, and the selection of tokens over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

TRAJECTORY_MODE = "traj-mean-token-mean"


@dataclass(frozen=True)
class StepCounts:
    """Counts of the valid entries of an optimizer step over all ranks.

    Attributes:
        num_tokens: number of valid entries.
        num_rows: number of decisions with a valid entry.
        num_trajectories: number of episodes with a valid entry; None if not needed.
        trajectory_tokens: [B], valid entries of the episode to which each row of this rank belongs; None if not needed.
    """

    num_tokens: float
    num_rows: float
    num_trajectories: float | None = None
    trajectory_tokens: Tensor | None = None


class StepNormalizer:
    """Counts the valid entries of optimizer steps and turns the counts into arguments of the losses.

    Args:
        strategy: sums the counts over ranks.
        mode: aggregation mode, see `rlvla.algorithms.losses.aggregate_loss`.
        horizon: divisor of `seq-mean-token-sum-norm`, or None.
    """

    def __init__(self, strategy: DeepspeedStrategy, mode: str, horizon: float | None = None):
        self._strategy, self._mode, self._horizon = strategy, mode, horizon

    def count(self, mask: Tensor, episodes: Tensor) -> StepCounts:
        """Count the valid entries of a step.

        Args:
            mask: [B, L] bool, all rows of this rank.
            episodes: [B] int64, episode of each row; an episode has the same number on all ranks.
        """
        local_counts = {"tokens": float(mask.sum()), "rows": float(mask.any(-1).sum())}
        sums = self._strategy.all_reduce(local_counts, "sum")
        counts = StepCounts(max(1.0, sums["tokens"]), max(1.0, sums["rows"]))
        if self._mode != TRAJECTORY_MODE:
            return counts
        per_row = mask.sum(-1).tolist()
        local: Counter[int] = Counter()
        for episode, tokens in zip(episodes.tolist(), per_row):
            local[episode] += tokens
        everywhere: Counter[int] = sum(self._strategy.gather_objects(local), Counter())
        trajectory_tokens = torch.tensor([everywhere[episode] for episode in episodes.tolist()], dtype=torch.long)
        return StepCounts(counts.num_tokens, counts.num_rows, max(1.0, float(len(everywhere))), trajectory_tokens)

    def options(self, counts: StepCounts, rows: Tensor, *, own_mode: bool = False) -> dict[str, Any]:
        """Keyword arguments of a loss for one micro-batch.

        Args:
            counts: counts of the step.
            rows: [M] int64, the rows of the step in this micro-batch; empty for a placeholder.
            own_mode: the loss always averages over decisions, regardless of the aggregation mode.
        """
        options: dict[str, Any] = {
            "agg_mode": self._mode,
            "num_tokens": counts.num_tokens,
            "num_sequences": counts.num_rows,
            "dp_size": self._strategy.world_size,
            "horizon": self._horizon,
        }
        if counts.trajectory_tokens is not None and not own_mode:
            tokens = counts.trajectory_tokens[rows] if len(rows) else torch.ones(1, dtype=torch.long)
            options |= {
                "num_sequences": counts.num_trajectories,
                "trajectory_tokens": tokens.to(self._strategy.device),
            }
        return options


def choose_over_ranks(
    strategy: DeepspeedStrategy, choose: Callable[..., Tensor], rows: Sequence[Tensor], options: Mapping[str, Any]
) -> Tensor:
    """Select tokens among those of all ranks; called on all ranks, with the same result.

    Args:
        strategy: gathers the tensors.
        choose: `select_tokens` of a policy loss.
        rows: tensor arguments of `choose`, [B, L], with all rows of the step on this rank.
        options: keyword arguments of `choose`.

    Returns:
        [B, L] bool on the host: the selected tokens of this rank's rows.
    """
    seed = int(torch.randint(2**62, ()))  # that of rank 0 is used, so that all ranks select the same tokens
    everyone = strategy.gather_objects((seed, [tensor.cpu() for tensor in rows]))
    whole = [torch.cat(parts) for parts in zip(*(tensors for _, tensors in everyone))]
    generator = torch.Generator().manual_seed(everyone[0][0])
    chosen = choose(*whole, generator=generator, **options)
    lengths = [len(tensors[0]) for _, tensors in everyone]
    return chosen.split(lengths)[strategy.rank]
