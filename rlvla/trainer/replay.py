"""The replay list: training rows of an iteration, split into optimizer steps by episode, and into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rlvla.algorithms import balancing
from rlvla.experience import Experience
from rlvla.models.policy import Policy
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

EPISODES_PER_RANK = 2**40  # rank r numbers its episodes from r times this, so that numbers are unique over ranks


class ReplayList:
    """Stores `Experience` rows until they have been trained on.

    Rows of an episode are never split over optimizer steps.
    """

    def __init__(self) -> None:
        self._parts: list[Experience] = []

    def append(self, experience: Experience) -> None:
        """Add rows; their episodes are numbered consecutively after those in the list."""
        first = max((int(part.episode_index.max()) % EPISODES_PER_RANK + 1 for part in self._parts), default=0)
        self._parts.append(experience.with_fields(episode_index=experience.episode_index + first))

    def clear(self) -> None:
        """Remove all rows."""
        self._parts.clear()

    def __len__(self) -> int:
        """Number of rows."""
        return sum(len(part) for part in self._parts)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return sum(len(part.episode_index.unique()) for part in self._parts)

    def experience(self) -> Experience:
        """All rows as one batch."""
        if len(self._parts) > 1:
            self._parts = [Experience.cat(self._parts)]
        return self._parts[0]

    def optimizer_steps(self, sizes: Sequence[int], rng: np.random.Generator) -> Iterator[Experience]:
        """Shuffle the episodes and yield the rows of one optimizer step after the other.

        The rows of a step are shuffled as well, so that its micro-batches are alike.

        Args:
            sizes: number of episodes of each step, see `step_sizes`; a step without episodes is a fully masked row.
            rng: generator for the shuffles.
        """
        everything = self.experience()
        episodes = everything.episode_index.numpy()
        order = rng.permutation(np.unique(episodes))
        for portion in np.split(order, np.cumsum(sizes)[:-1]):
            rows = np.flatnonzero(np.isin(episodes, portion))
            yield everything.take(torch.from_numpy(rng.permutation(rows)))


def step_sizes(episodes: Sequence[int], train_batch_size: int) -> list[list[int]]:
    """Divide the episodes of an iteration into optimizer steps, `[ranks][steps]`.

    There are ceil(total / train_batch_size) steps, and their totals over the ranks differ by at most one. The remainder
    is not left to the last step: it would move the policy as far as a full one.

    Args:
        episodes: number of episodes on each rank.
        train_batch_size: largest number of episodes per step, over all ranks.
    """
    steps = max(1, -(-sum(episodes) // train_batch_size))
    sizes: list[list[int]] = []
    surplus = 0  # each rank goes on with its surplus episodes where the previous rank stopped
    for count in episodes:
        each, rest = divmod(count, steps)
        sizes.append([each + ((step - surplus) % steps < rest) for step in range(steps)])
        surplus += rest
    return sizes


def micro_batches(step: Experience, rows: int, count: int) -> Iterator[Experience]:
    """Split a batch into exactly `count` micro-batches of at most `rows` rows.

    Since all ranks must run the same number of micro-batches, surplus ones consist of one fully masked row.
    """
    for part in consecutive(len(step), rows, count):
        yield step.take(part)


def consecutive(total: int, rows: int, count: int) -> list[torch.Tensor]:
    """Row indices 0..total-1 in `count` parts of at most `rows`; parts beyond the last row are empty."""
    return [torch.arange(min(i * rows, total), min((i + 1) * rows, total)) for i in range(count)]


class MicroBatchPlanner:
    """Splits optimizer steps into micro-batches, the same number on each rank.

    Args:
        strategy: used to agree on the number of micro-batches and to exchange rows.
        batch: micro-batch sizes and the kind of balancing.
        policy: gives the number of tokens of a row.
    """

    def __init__(self, strategy: DeepspeedStrategy, batch: BatchConfig, policy: Policy):
        self._strategy, self._batch, self._policy = strategy, batch, policy

    def _row_tokens(self, step: Experience) -> list[int]:
        return self._policy.row_tokens(step.instructions, step.images.shape[1])

    def plan(self, step: Experience) -> list[Tensor]:
        """Row indices [M] int64 of each micro-batch; empty for micro-batches that only other ranks need."""
        if not self._batch.use_dynamic_batch:
            size = self._batch.micro_train_batch_size
            return consecutive(len(step), size, self._agree(-(-len(step) // size)))
        sizes = self._row_tokens(step)
        plan = balancing.micro_batches(sizes, self._batch.train_max_tokens_per_gpu)
        plan += [[] for _ in range(self._agree(len(plan)) - len(plan))]
        return [torch.tensor(rows, dtype=torch.long) for rows in plan]

    def measure_balance(self, before: Experience, after: Experience, metrics: Metrics) -> None:
        """Tokens of the step on each rank, as collected and after `spread`: extremes, mean and largest difference.

        Adds `global_seqlen/*`, the means over the optimizer steps of an iteration.
        """
        strategy = self._strategy
        tokens = {"collected": self._tokens(before)}
        tokens["balanced"] = tokens["collected"] if after is before else self._tokens(after)
        negative = {f"-{name}": -number for name, number in tokens.items()}
        most = strategy.all_reduce(tokens | negative, "max")
        total = strategy.all_reduce({"tokens": tokens["collected"]}, "sum")["tokens"]
        measured = {
            "min": -most["-collected"],
            "max": most["collected"],
            "minmax_diff": most["collected"] + most["-collected"],
            "balanced_min": -most["-balanced"],
            "balanced_max": most["balanced"],
            "mean": total / strategy.world_size,
        }
        metrics.mean({f"global_seqlen/{name}": number for name, number in measured.items()}, 1.0)

    def _tokens(self, step: Experience) -> float:
        """Tokens of a step on this rank, without fully masked placeholders, see `Experience.take`."""
        real = step.action_mask.any(1).tolist()
        return float(sum(tokens for tokens, counts in zip(self._row_tokens(step), real) if counts))

    def _agree(self, count: int) -> int:
        return int(self._strategy.all_reduce({"n": count}, "max")["n"])

    def spread(self, step: Experience) -> Experience:
        """The rows of this rank after balancing the step over the ranks; the step itself if balancing is off."""
        strategy = self._strategy
        if self._batch.balance_ranks == "none" or strategy.world_size == 1:
            return step
        # The placeholder for an empty batch (see `Experience.take`) has no tokens and stays where it is.
        tokens = self._row_tokens(step) if bool(step.action_mask.any()) else [0] * len(step)
        sizes = strategy.gather_objects(tokens)
        owners = [(rank, row) for rank, of_rank in enumerate(sizes) for row in range(len(of_rank))]
        assignment = assign_rows(
            [size for of_rank in sizes for size in of_rank],
            [rank for rank, _ in owners],
            strategy.world_size,
            self._batch.balance_ranks == "rows",
        )
        leaving, staying = {}, torch.empty(0, dtype=torch.long)
        for rank, indices in enumerate(assignment):
            rows = torch.tensor([owners[i][1] for i in indices if owners[i][0] == strategy.rank], dtype=torch.long)
            if rank == strategy.rank:
                staying = rows
            elif len(rows):
                leaving[rank] = step.index(rows)
        arriving = [sent[strategy.rank] for sent in strategy.gather_objects(leaving) if strategy.rank in sent]
        kept = [step.index(staying)] if len(staying) else []
        rows_here = [*kept, *arriving]
        return Experience.cat(rows_here) if rows_here else step.take(staying)


def assign_rows(sizes: Sequence[int], owners: Sequence[int], num_ranks: int, equal_rows: bool) -> list[list[int]]:
    """Assign rows to ranks by the largest differencing method (Karmarkar-Karp).

    Args:
        sizes: tokens of each row.
        owners: the rank on which each row is now; each part is assigned to the rank that already has most of it.
        num_ranks: number of ranks.
        equal_rows: require numbers of rows that differ by at most one.

    Returns:
        The rows of each rank, ascending.
    """
    count = len(sizes)
    blanks = -count % num_ranks if equal_rows else 0  # pad with empty rows to a multiple of the ranks
    parts = balancing.karmarkar_karp([*sizes, *[0] * blanks], num_ranks, equal_rows)
    parts = [[row for row in part if row < count] for part in parts]
    weights = [[sum(sizes[row] for row in part if owners[row] == rank) for part in parts] for rank in range(num_ranks)]
    placed: list[list[int]] = [[] for _ in range(num_ranks)]
    free_ranks, free_parts = set(range(num_ranks)), set(range(num_ranks))
    while free_ranks:
        rank, part = max(
            ((r, p) for r in free_ranks for p in free_parts), key=lambda pair: (weights[pair[0]][pair[1]], -pair[0])
        )
        placed[rank] = parts[part]
        free_ranks.remove(rank)
        free_parts.remove(part)
    return placed
