"""Statistics over groups of rows, for any hashable group ids in any order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rlvla.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


GroupIds: TypeAlias = "Tensor | np.ndarray | Sequence[Hashable]"


def group_index(group_ids: GroupIds, num_rows: int, device: torch.device | None = None) -> tuple[Tensor, int]:
    """Number the groups.

    Args:
        group_ids: one hashable id per row: a list, a numpy array or a tensor of shape [B]. Equal ids form a group.
        num_rows: B.
        device: device of the result.

    Returns:
        index: [B] int64 in [0, number of groups), and the number of groups.

    Raises:
        ValueError: not one id per row, or an id that is not hashable.
    """
    if isinstance(group_ids, (torch.Tensor, np.ndarray)):
        if tuple(group_ids.shape) != (num_rows,):
            raise ValueError(f"group_ids has shape {list(group_ids.shape)} but the batch has {num_rows} rows")
        if isinstance(group_ids, torch.Tensor):
            unique, index = torch.unique(group_ids, return_inverse=True)
            return index.to(device), len(unique)
        group_ids = group_ids.tolist()
    ids: Sequence[Hashable] = list(group_ids)
    if any(issubclass(kind, torch.Tensor) for kind in set(map(type, ids))):  # tensors hash by identity, not by value
        ids = [i.item() if isinstance(i, torch.Tensor) else i for i in ids]
    if len(ids) != num_rows:
        raise ValueError(f"group_ids has {len(ids)} entries but the batch has {num_rows} rows")
    try:
        numbers = {key: number for number, key in enumerate(dict.fromkeys(ids))}
    except TypeError as error:
        raise ValueError(f"every group id must be hashable ({error})") from error
    index = torch.from_numpy(np.fromiter(map(numbers.__getitem__, ids), dtype=np.int64, count=num_rows))
    return index.to(device), len(numbers)


class Groups:
    """Grouped rows and the statistics that estimators need.

    Statistics are returned per row (the value of its group) unless the name says per group.

    Args:
        group_ids: see `group_index`.
        num_rows: B.
        device: device on which statistics are computed.
    """

    def __init__(self, group_ids: GroupIds, num_rows: int, device: torch.device | None = None):
        self.index, self.count = group_index(group_ids, num_rows, device)
        self.sizes = torch.bincount(self.index, minlength=self.count)  # [G]

    @property
    def size(self) -> Tensor:
        """[B] int64, size of each row's group."""
        return self.sizes[self.index]

    def sum_per_group(self, values: Tensor) -> Tensor:
        """[B, ...] -> [G, ...], sums over the rows of each group."""
        return values.new_zeros((self.count, *values.shape[1:])).index_add_(0, self.index, values)

    def sum(self, values: Tensor) -> Tensor:
        """[B, ...] -> [B, ...], each row's group sum."""
        return self.sum_per_group(values)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """[B] -> [B], each row's group mean; without rounding error in a group of equal values."""
        means = (self.sum_per_group(values) / self.sizes)[self.index]
        return torch.where(self.constant(values), values, means)

    def constant(self, values: Tensor) -> Tensor:
        """[B] -> [B] bool, whether all values of the row's group are equal."""
        return self.min(values) == self.max(values)

    def std(self, values: Tensor) -> Tensor:
        """[B] -> [B], each row's group standard deviation (ddof 1); 0 in a group of one."""
        squares = self.sum_per_group(torch.square(values - self.mean(values)))
        return torch.sqrt(squares / (self.sizes - 1).clamp(min=1))[self.index]

    def max(self, values: Tensor) -> Tensor:
        """[B] -> [B], each row's group maximum."""
        top = torch.full((self.count,), -torch.inf, dtype=values.dtype, device=values.device)
        return top.scatter_reduce_(0, self.index, values, "amax")[self.index]

    def min(self, values: Tensor) -> Tensor:
        """[B] -> [B], each row's group minimum."""
        return -self.max(-values)

    def first_where(self, condition: Tensor) -> Tensor:
        """[B] bool -> [B] bool, True at the first row of each group that meets the condition."""
        rows = torch.arange(len(condition), device=condition.device)
        beyond = torch.full_like(rows, len(condition))
        first = beyond[: self.count].clone()
        first.scatter_reduce_(0, self.index, torch.where(condition, rows, beyond), "amin")
        return condition & (rows == first[self.index])
