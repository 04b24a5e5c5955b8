"""Memory of a network's passes on fake tensors, which have shapes and no storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def decision_bytes(build: Callable[[], Any]) -> int:
    """Most bytes alive while a policy in float32 decides for one observation, weights included.

    Args:
        build: returns its `Sketch`, see `Checkpoint.sketch`.

    Raises:
        RuntimeError: a tensor has more elements than can be counted.
    """
    live = FakeBytes()
    with torch.device("meta"):
        sketch = build()
    with ExitStack() as modes:
        for mode in (FakeTensorMode(), live):
            modes.enter_context(mode)
        place(sketch.module, torch.float32)
        live.count(list(sketch.module.parameters()), list(sketch.module.buffers()))
        sketch.decide(1)
    return live.peak


def place(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace meta tensors by fake tensors, which have a device but no memory."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new: torch.Tensor = torch.empty(old.shape, dtype=dtype if old.is_floating_point() else old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if table is module._parameters else new
                table[name] = made[id(old)]  # type: ignore[assignment]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside the block read or create, until they are freed.

    Temporary memory of a kernel is not counted. Under torch's `FakeTensorMode`, where tensors have no memory, the count
    is what they would need.

    Attributes:
        now: bytes alive.
        peak: maximum of `now` since the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._counted: dict[int, weakref.ref] = {}

    def reset_peak(self) -> None:
        """Reset the peak to the bytes alive now."""
        self.peak = self.now

    def count(self, *values: Any) -> None:
        """Count tensors (in any nested structure) that no operation has used yet."""
        for value in values:
            if isinstance(value, (tuple, list)):
                self.count(*value)
            elif isinstance(value, dict):
                self.count(*value.values())
            elif isinstance(value, torch.Tensor):
                # The attribute of a fake tensor; its property `device` is another, slow operation.
                device = value.fake_device if isinstance(value, FakeTensor) else value.device
                if device.type != "meta":  # shapes only, no memory
                    self._add(value.untyped_storage())
        self.peak = max(self.peak, self.now)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._counted or size == 0:
            return

        def freed(_: object) -> None:
            del self._counted[key]
            self.now -= size

        self._counted[key] = weakref.ref(storage, freed)
        self.now += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its inputs and outputs."""
        result = func(*args, **(kwargs or {}))
        self.count(args, kwargs, result)
        return result


class FakeBytes(LiveBytes):
    """The same for fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # by far the most frequent operation, and slow in FakeTensorMode
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)
