"""Weights on their way to another process: as plain arrays, and into a policy that was sent without them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# A tensor as (its place among those of the module, dtype, shape, bytes).
Packed = tuple[int, torch.dtype, tuple[int, ...], np.ndarray]


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, in the same order for every copy of a module."""
    return [*module.parameters(), *module.buffers()]


def without_weights(policy: nn.Module) -> bytes:
    """A pickled copy of a policy whose parameters and buffers have shapes but no storage.

    Raises:
        Exception: whatever prevents pickling.
    """
    from ray import cloudpickle

    empty: dict[int, Any] = {}
    for tensor in policy.parameters():
        empty[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
    for tensor in policy.buffers():
        empty[id(tensor)] = torch.empty_like(tensor, device="meta")
    return cloudpickle.dumps(copy.deepcopy(policy, empty))  # what deepcopy finds there it does not copy


def pack(tensors: Sequence[Tensor], places: Iterable[int]) -> list[Packed]:
    """Some of the tensors of a module, on the host; those that are there already are not copied."""
    packed = []
    for place in places:
        tensor = tensors[place].detach()
        data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        packed.append((place, tensor.dtype, tuple(tensor.shape), data))
    return packed


def num_bytes(packed: Sequence[Packed]) -> int:
    """Size of the tensors."""
    return sum(data.nbytes for *_, data in packed)


class Vessel:
    """A policy that was sent without its weights, and takes them in as they come.

    Args:
        pickled: from `without_weights`.
        device: where it decides. On the CPU parameters remain where they have arrived, which may be memory that other
            processes read as well; buffers are copied.
    """

    def __init__(self, pickled: bytes, device: torch.device):
        self.policy: Any = pickle.loads(pickled).eval()
        self._device = device
        owners: dict[int, list[tuple[dict[str, Any], str]]] = {}  # of each tensor; tied ones have several
        for kind in ("_parameters", "_buffers"):
            for part in self.policy.modules():
                for name, tensor in getattr(part, kind).items():
                    if tensor is not None:
                        owners.setdefault(id(tensor), []).append((getattr(part, kind), name))
        self._owners = list(owners.values())
        self._num_parameters = len(list(self.policy.parameters()))

    @torch.no_grad()
    def take(self, packed: Sequence[Packed]) -> None:
        """Replace tensors by these."""
        for place, dtype, shape, data in packed:
            with warnings.catch_warnings():  # nothing writes to what is mapped read-only
                warnings.simplefilter("ignore", UserWarning)
                tensor = torch.from_numpy(data).view(dtype).reshape(shape).to(self._device)
            is_parameter = place < self._num_parameters
            value = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor.clone()
            for table, name in self._owners[place]:
                table[name] = value
