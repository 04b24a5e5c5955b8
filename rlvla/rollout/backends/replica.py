"""Policy replicas on a Ray cluster (`--rollout_backend actors`): the process, and its weights."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlvla.envs.registry import load_custom_module
from rlvla.models.policy import Decision

# A tensor as (its index in `tensors_of`, dtype, shape, bytes).
Packed = tuple[int, torch.dtype, tuple[int, ...], np.ndarray]


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, in the same order for every copy of a module."""
    return [*module.parameters(), *module.buffers()]


def without_weights(policy: nn.Module) -> bytes:
    """Pickle a copy of a policy whose parameters and buffers have shapes but no storage.

    Raises:
        Exception: the policy cannot be pickled; of any type, as raised by its classes.
    """
    from ray import cloudpickle

    empty: dict[int, Any] = {
        id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
        for tensor in policy.parameters()
    }
    empty |= {id(tensor): torch.empty_like(tensor, device="meta") for tensor in policy.buffers()}
    return cloudpickle.dumps(copy.deepcopy(policy, empty))  # deepcopy takes these from its memo instead of copying


def pack(tensors: Sequence[Tensor], indices: Iterable[int]) -> list[Packed]:
    """Selected tensors as bytes on the host; a tensor that is on the host is not copied."""
    packed = []
    for index in indices:
        tensor = tensors[index].detach()
        data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        packed.append((index, tensor.dtype, tuple(tensor.shape), data))
    return packed


class ReceivedPolicy:
    """A policy pickled without weights, which it receives as `Packed` tensors.

    Args:
        pickled: from `without_weights`.
        device: where it decides. On the CPU parameters stay in the memory they arrive in, which other processes may
            share; buffers are copied.
    """

    def __init__(self, pickled: bytes, device: torch.device):
        self.policy: Any = pickle.loads(pickled).eval()
        self._device = device
        owners: dict[int, list[tuple[dict[str, Any], str]]] = {}  # by id of the tensor; tied ones have several
        for kind in ("_parameters", "_buffers"):
            for module in self.policy.modules():
                for name, tensor in getattr(module, kind).items():
                    if tensor is not None:
                        owners.setdefault(id(tensor), []).append((getattr(module, kind), name))
        self._owners = list(owners.values())
        self._num_parameters = len(list(self.policy.parameters()))

    @torch.no_grad()
    def load(self, packed: Sequence[Packed]) -> None:
        """Replace the tensors named by their index."""
        for index, dtype, shape, data in packed:
            with warnings.catch_warnings():  # read-only memory, which nothing writes to
                warnings.simplefilter("ignore", UserWarning)
                tensor = torch.from_numpy(data).view(dtype).reshape(shape).to(self._device)
            is_parameter = index < self._num_parameters
            value = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor.clone()
            for table, name in self._owners[index]:
                table[name] = value


@dataclass(frozen=True)
class Place:
    """Process, host, Ray node and device of a replica."""

    pid: int
    host: str
    node: str
    device: str


class Replica:
    """A copy of a policy, as a Ray actor; `begin` comes first.

    Args:
        custom_modules: the user's modules, imported before the policy is unpickled.
    """

    _received: ReceivedPolicy

    def __init__(self, custom_modules: Sequence[str]):
        self._custom_modules = custom_modules
        self._version = -1

    def begin(self, pickled: bytes) -> Place:
        """Unpickle the policy, still without weights."""
        import ray

        for source in self._custom_modules:
            load_custom_module(source)
        device = torch.device("cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.allow_tf32 = False  # as in training, see DeepspeedStrategy
        self._received = ReceivedPolicy(pickled, device)
        return Place(os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id(), str(device))

    def load(self, version: int, *batches: Sequence[Packed]) -> None:
        """Load weights for all further decisions."""
        for packed in batches:
            self._received.load(packed)
        self._version = version

    def anneal_noise(self, end: float, progress: float) -> None:
        """See `NetworkPolicy.anneal_noise`."""
        self._received.policy.anneal_noise(end, progress)

    def act(self, images: np.ndarray, proprio: np.ndarray | None, instructions: list[str], **options: Any) -> Decision:
        """See `RolloutPolicy.act`; decisions carry the version of the weights."""
        # Arrays from Ray are read-only, and networks may write to their inputs.
        images, proprio = np.array(images), None if proprio is None else np.array(proprio)
        if options["noise"] is not None:
            options["noise"] = np.array(options["noise"])
        decision = self._received.policy.act(images, proprio, instructions, **options)
        decision.version = self._version
        return decision
