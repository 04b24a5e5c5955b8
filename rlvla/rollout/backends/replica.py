"""The process of a policy replica (`--rollout_backend actors`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlvla.envs.registry import load_custom_module
from rlvla.models.policy import Decision
from rlvla.rollout.backends.weights import Packed, Vessel


@dataclass(frozen=True)
class Place:
    """Where a replica runs: its process, host, Ray node and device."""

    pid: int
    host: str
    node: str
    device: str


class Replica:
    """A copy of a policy, as a Ray actor.

    Args:
        custom_modules: the user's modules, imported before the policy is read.
    """

    def __init__(self, custom_modules: Sequence[str]):
        self._custom_modules = custom_modules
        self._vessel: Vessel | None = None
        self._version = -1

    def begin(self, pickled: bytes) -> Place:
        """Read the policy, still without weights."""
        import ray

        for source in self._custom_modules:
            load_custom_module(source)
        device = torch.device("cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.allow_tf32 = False  # as where the policy is trained: see DeepspeedStrategy
        self._vessel = Vessel(pickled, device)
        return Place(os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id(), str(device))

    def load(self, version: int, *parts: Sequence[Packed]) -> None:
        """Take over weights for all decisions to come."""
        for part in parts:
            self._vessel.take(part)  # type: ignore[union-attr]
        self._version = version

    def anneal_noise(self, end: float, progress: float) -> None:
        """See `NetworkPolicy.anneal_noise`."""
        self._vessel.policy.anneal_noise(end, progress)  # type: ignore[union-attr]

    def act(self, images: np.ndarray, proprio: np.ndarray | None, instructions: list[str], **options: Any) -> Decision:
        """See `RolloutPolicy.act`; decisions bear the version of the weights."""
        # What Ray delivers is read-only, and networks may write to their inputs.
        images, proprio = np.array(images), None if proprio is None else np.array(proprio)
        if options["noise"] is not None:
            options["noise"] = np.array(options["noise"])
        decision = self._vessel.policy.act(images, proprio, instructions, **options)  # type: ignore[union-attr]
        decision.version = self._version
        return decision
