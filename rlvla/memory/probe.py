"""Memory of a model's forward and backward passes, measured by running it on fake tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlvla.models.families import Sketch

ZERO3_SMALL = 100_000  # elements; ZeRO-3 keeps parameters up to this size gathered after their first use


@dataclass(frozen=True)
class Probe:
    """Sizes of a model and of its passes, in elements or bytes.

    Attributes:
        parameters: elements of all parameters.
        trainable: elements that require gradients.
        weight_bytes: parameters and buffers.
        forward_bytes: peak of a pass without gradients beyond the weights.
        backward_bytes: peak of a micro-batch beyond the weights and the gradients accumulated before it.
        first_backward_bytes: the same for the first micro-batch, whose new gradients are included.
        bare_backward_bytes: the same if each gradient is released as soon as it has been computed.
        small: elements of the parameters that ZeRO-3 keeps gathered because they are small.
        decision_bytes: peak of a policy beyond its weights while it decides for a batch of observations.
    """

    parameters: int
    trainable: int
    weight_bytes: int
    forward_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    bare_backward_bytes: int
    small: int = 0
    decision_bytes: int = 0


def probe(
    build: Callable[[], Sketch],
    *,
    bf16: bool,
    train_rows: int,
    forward_rows: int,
    play_rows: int = 0,
) -> Probe:
    """Build a model on fake tensors and measure its passes.

    Args:
        build: constructs the model, see `Checkpoint.sketch`.
        bf16: whether the weights are bfloat16 rather than float32.
        train_rows: decisions per micro-batch; 0 if the model is never trained.
        forward_rows: decisions per pass without gradients.
        play_rows: observations per batch of decisions; 0 if the model does not act.
    """
    live = _NothingPadded()
    with torch.device("meta"):
        sketch = build()
    model = sketch.module
    with ExitStack() as modes:
        for mode in (FakeTensorMode(), live):
            modes.enter_context(mode)
        _place(model, torch.bfloat16 if bf16 else torch.float32)
        live.count(list(model.parameters()), list(model.buffers()))
        gc.collect()
        weights = live.now
        live.reset_peak()
        with torch.no_grad():
            sketch.loss(forward_rows)
        needed = live.peak
        live.reset_peak()
        if play_rows:
            sketch.decide(play_rows)
        decision = live.peak
        backward = _backward_peaks(live, model.train(), sketch.loss, train_rows) if train_rows else (0, 0, 0)
        parameters = [(p.numel(), p.requires_grad) for p in model.parameters()]
        trainable = sum(n for n, requires_grad in parameters if requires_grad) if train_rows else 0
        small = sum(n for n, _ in parameters if n <= ZERO3_SMALL)
        passes = (needed - weights, *backward)
        return Probe(sum(n for n, _ in parameters), trainable, weights, *passes, small, decision - weights)


def _place(model: nn.Module, dtype: torch.dtype) -> None:
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


def _backward_peaks(
    live: LiveBytes, model: nn.Module, forward: Callable[[int], torch.Tensor], rows: int
) -> tuple[int, int, int]:
    """`backward_bytes`, `first_backward_bytes` and `bare_backward_bytes` of `Probe`."""
    peaks, before = [], live.now
    for _ in range(2):  # the first pass allocates the gradients, the second one adds to them
        live.reset_peak()
        start = live.now
        forward(rows).backward()
        peaks.append(live.peak - start)
    model.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    live.reset_peak()
    forward(rows).backward()
    return peaks[1], peaks[0], live.peak - before


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


class _NothingPadded(LiveBytes):
    """Also answers the only data-dependent branch of a forward pass: whether all prompts have the same length."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # by far the most frequent operation, and slow in FakeTensorMode
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return True
        return super().__torch_dispatch__(func, types, args, kwargs)
