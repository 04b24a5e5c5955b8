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
    """A policy that plays with weights of its own, which follow those of the policy in training.

    A backend is a class registered by name. It is created from the policy before DeepSpeed changes that, and has no
    weights yet. The trainer calls `load` or `stage` while it holds complete weights, which change after the call.
    `act`, `renew`, `anneal_noise` and `metrics` may run on one thread while `load` and `stage` run on another. `act`
    returns `Decision.version` of the weights that decided, all of one version; an exception where the policy runs is
    raised by it, with its traceback, and the next call may succeed.

    Evaluations use the policy in training itself.

    Args:
        policy: the policy to be trained.
        setup: what is known of the run.

    Attributes:
        in_process: whether its weights are in the memory of this process (`--dry_run` counts them).
        uncounted: what `--dry_run` says about the memory that it does not count, after "the policy".
        uses_ray: whether it runs on the cluster of `--ray_address`.
        version: iterations of training behind the weights that decide; -1 before the first `load`.
        newest: the same of staged weights, if there are any, else `version`.
    """

    in_process: ClassVar[bool] = False
    uncounted: ClassVar[str] = "which is in other processes"
    uses_ray: ClassVar[bool] = False
    version: int
    newest: int

    def __init__(self, policy: nn.Module, setup: BackendSetup): ...

    @classmethod
    def problems(cls, setup: BackendSetup) -> list[Problem]:
        """Why it cannot serve this policy with these flags on this machine, before anything is started."""
        return []

    def load(self, policy: nn.Module, version: int) -> None:
        """Take over weights, complete on this rank, for all decisions to come."""
        ...

    def stage(self, policy: nn.Module, version: int) -> None:
        """Keep weights, complete on this rank, for the next `renew`; they replace those staged before."""
        ...

    def renew(self) -> None:
        """Take over what was staged since the last call, if anything."""
        ...

    def anneal_noise(self, end: float, progress: float) -> None:
        """Set the noise level of the decisions to come, see `NetworkPolicy.anneal_noise`."""
        ...

    def metrics(self) -> dict[str, float]:
        """What happened since the last call, to be summed over ranks; the names are always the same."""
        return {}

    @property
    def pids(self) -> Sequence[int]:
        """The processes that it has started on this machine and that have not ended."""
        return ()

    def close(self) -> None:
        """End everything it has started; may be called again, and then `act` raises an error."""
