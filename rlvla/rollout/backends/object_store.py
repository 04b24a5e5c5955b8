"""Writing to the object store of a Ray cluster, and what to do if it is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlvla.envs.workers.ray_cluster import account_of, ray_module
from rlvla.utils.errors import RunEnded


def stored(value: Any, what: str) -> Any:
    """A reference to a value in the object store.

    Raises:
        RunEnded: it could not be written.
    """
    with storing(what):
        return ray_module().put(value)


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Inside the block something is written to the object store; errors of Ray end the run and say what to do."""
    try:
        yield
    except ray_module().exceptions.RayError as error:
        raise RunEnded(
            f"--rollout_backend actors: Ray cannot store {what}: {account_of(error)}; if the object store of this "
            "machine is full, start Ray with a larger one (`ray start --object-store-memory BYTES`), or with a folder "
            "that has room for what does not fit (`--object-spilling-directory`)"
        ) from error
