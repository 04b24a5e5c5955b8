"""The interface of rollout backends; `rlvla.rollout.testing` has its requirements as tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import nn

from rlvla.models.policy import RolloutPolicy
from rlvla.rollout.config import ROLLOUT_BACKENDS, BackendSetup
from rlvla.utils.errors import Problem

register_rollout_backend = ROLLOUT_BACKENDS.register


class RolloutBackend(RolloutPolicy, Protocol):
    """A copy of the policy for training episodes, whose weights are updated from the policy in training.

    A backend is a class registered by name. It is created from the policy before DeepSpeed changes it, and has no
    weights yet. The trainer calls `load` or `stage` while it holds complete weights, which change after the call.
    `act`, `renew`, `anneal_noise` and `metrics` may run on one thread while `load` and `stage` run on another. `act`
    returns the weights' version as `Decision.version`, one for the whole batch; an exception where the policy runs is
    raised by it, with its traceback, and the next call may succeed.

    Evaluations use the policy in training itself.

    Args:
        policy: the policy to be trained.
        setup: flags and environment of the run.

    Attributes:
        in_process: whether its weights are in the memory of this process (`--dry_run` counts them).
        uncounted: description of the memory that `--dry_run` does not count, after "the policy".
        uses_ray: whether it runs on the cluster of `--ray_address`.
        version: iterations of training behind the weights that decide; -1 before the first `load`.
        newest: the same for staged weights, if there are any, else `version`.
    """

    in_process: ClassVar[bool] = False
    uncounted: ClassVar[str] = "which is in other processes"
    uses_ray: ClassVar[bool] = False
    version: int
    newest: int

    def __init__(self, policy: nn.Module, setup: BackendSetup): ...

    @classmethod
    def problems(cls, setup: BackendSetup) -> list[Problem]:
        """Reasons why it cannot serve this policy with these flags on this machine, before anything is started."""
        return []

    def load(self, policy: nn.Module, version: int) -> None:
        """Load weights, complete on this rank, for all further decisions."""
        ...

    def stage(self, policy: nn.Module, version: int) -> None:
        """Keep weights, complete on this rank, for the next `renew`; they replace earlier staged ones."""
        ...

    def renew(self) -> None:
        """Load the staged weights, if there are new ones."""
        ...

    def anneal_noise(self, end: float, progress: float) -> None:
        """Set the noise level of further decisions, see `NetworkPolicy.anneal_noise`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, to be summed over ranks; always the same names."""
        return {}

    @property
    def pids(self) -> Sequence[int]:
        """Running processes that it has started on this machine."""
        return ()

    def close(self) -> None:
        """End everything it has started; may be called again. `act` then raises an error."""
