"""Target networks: slow averages of the networks in training."""

from __future__ import annotations

import torch
from torch import nn

from rlvla.algorithms.checks import check_number, check_shape


@torch.no_grad()
def update_target(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Polyak average in place: target += tau (source - target) for parameters; buffers are copied.

    With tau 1 the target equals the source to the bit.

    Args:
        target: same names and shapes as source; its parameters are float32 or float64, because small steps round to
            nothing in half precision.
        source: the network in training; not changed.
        tau: share of the source, in [0, 1].

    Raises:
        ValueError: names or shapes differ, half precision, or tau out of range. Then nothing has changed.
    """
    check_number("tau", tau, low=0.0, high=1.0)
    parameters = _pairs(dict(target.named_parameters()), dict(source.named_parameters()))
    buffers = _pairs(dict(target.named_buffers()), dict(source.named_buffers()))
    for name, (average, _) in parameters.items():
        if average.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} of the target network is {average.dtype}; averages need float32")
    averages = [average for average, _ in parameters.values()]
    if averages:
        torch._foreach_lerp_(averages, [current.to(average) for average, current in parameters.values()], tau)
    for copied, current in buffers.values():
        copied.copy_(current)


def _pairs(target: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> dict[str, tuple]:
    if target.keys() != source.keys():
        different = sorted(target.keys() ^ source.keys())
        raise ValueError(f"target and source are different networks: only one has {', '.join(different[:3])}")
    for name, tensor in target.items():
        check_shape(name, tensor, source[name].shape)
    return {name: (tensor, source[name]) for name, tensor in target.items()}
