"""Episodes of all ranks, counted while they are played."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_EPISODE = 1 << 32  # successes are counted below it, so that both numbers change at once
_number = itertools.count()  # the ranks of a process group make the same tallies in the same order
_store: dist.Store | None = None


def share(store: dist.Store) -> None:
    """Count in this store from now on; ranks that share none count for themselves."""
    global _store
    own: Any = store  # torch does not declare `clone`
    _store = dist.PrefixStore("tally", own.clone())  # a separate connection, which is never blocked


class Tally:
    """Counts finished episodes without waiting for other ranks; all ranks make the same tallies in the same order."""

    def __init__(self) -> None:
        number = next(_number)
        self._key, self._own = str(number), 0
        if _store is not None and number > 1:
            with suppress(RuntimeError):
                _store.delete_key(str(number - 2))  # a collective operation lies between

    def add(self, success: bool) -> tuple[int, int]:
        """Count an episode of this rank; returns (episodes, successes) of all ranks so far."""
        self._own += _EPISODE + success
        total = self._own
        if _store is not None:
            with suppress(RuntimeError):  # another rank is gone, which the next collective operation reports
                total = _store.add(self._key, _EPISODE + success)
        return divmod(total, _EPISODE)
