"""A second copy of the weights in this process (`--rollout_backend colocated`)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlvla.models.policy import Decision, PolicySpec
from rlvla.rollout.backends.base import RolloutBackend, register_rollout_backend
from rlvla.rollout.backends.replica import tensors_of
from rlvla.rollout.config import COLOCATED, BackendSetup


@register_rollout_backend(COLOCATED)
class PolicyCopy(RolloutBackend):
    """A copy of a policy that plays while the policy itself is trained; see `RolloutBackend`.

    Used with `--async_rollout`; otherwise the policy itself plays.
    """

    in_process: ClassVar[bool] = True

    def __init__(self, policy: nn.Module, setup: BackendSetup | None = None):
        self._policy: Any = copy.deepcopy(policy).requires_grad_(False)
        self._policy.eval()
        self._lock = threading.Lock()
        self._staged: list[Tensor] = []
        self.version = self.newest = -1
        self._closed = False

    @property
    def spec(self) -> PolicySpec:
        """See `PolicySpec`."""
        return self._policy.spec

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RolloutPolicy.prepare`."""
        return self._policy.prepare(images, proprio)

    def act(
        self, images: np.ndarray, proprio: np.ndarray | None, instructions: Sequence[str], **options: Any
    ) -> Decision:
        """See `RolloutPolicy.act`; decisions carry the version of the weights."""
        if self._closed:
            raise RuntimeError("the copy of the policy is closed")
        with self._lock:
            decision = self._policy.act(images, proprio, instructions, **options)
            decision.version = self.version
        return decision

    def use_cuda_graphs(self) -> None:
        """See `NetworkPolicy.use_cuda_graphs`."""
        with self._lock:
            self._policy.use_cuda_graphs()

    def anneal_noise(self, end: float, progress: float) -> None:
        """Set the noise level of further decisions."""
        with self._lock:
            self._policy.anneal_noise(end, progress)

    def load(self, policy: nn.Module, version: int) -> None:
        """Load weights, complete on this rank, at once."""
        with self._lock:
            self._put(tensors_of(self._policy), tensors_of(policy))
            self.version = self.newest = version

    def stage(self, policy: nn.Module, version: int) -> None:
        """Keep weights for the next `renew`."""
        with self._lock:
            if not self._staged:
                self._staged = [torch.empty_like(tensor) for tensor in tensors_of(policy)]
            self._put(self._staged, tensors_of(policy))
            self.newest = version

    def renew(self) -> None:
        """Load the staged weights, if there are new ones."""
        with self._lock:
            if self.newest > self.version:
                self._put(tensors_of(self._policy), self._staged)
                self.version = self.newest

    def close(self) -> None:
        """Refuse further decisions."""
        self._closed = True

    @staticmethod
    @torch.no_grad()
    def _put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for old, new in zip(tensors, values, strict=True):
            if (old.dtype, old.device) == (new.dtype, new.device):
                old.copy_(new)
            else:  # DeepSpeed has changed dtype or device since the copy was made
                old.data = new.detach().clone()
