"""How many bytes of tensors are alive, on any device and also where nothing is computed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside the block read or make, each once, until they are freed.

    What a kernel allocates and frees by itself is not seen. Under torch's `FakeTensorMode` tensors have no memory and
    the count is what they would need.

    Attributes:
        now: bytes alive.
        peak: the most since the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self.peak = self.now

    def see(self, *values: Any) -> None:
        """Count tensors (in any nesting) that no operation has touched yet."""
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":  # shapes only, no memory
                self._add(value.untyped_storage())
        self.peak = max(self.peak, self.now)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known or size == 0:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, freed)
        self.now += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count."""
        result = func(*args, **(kwargs or {}))
        self.see(args, kwargs, result)
        return result
