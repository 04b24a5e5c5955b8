"""What the machine has and what a process has used of it: peak memory, and the accelerator's peak speed."""

from __future__ import annotations

import re
import resource
import sys

import torch

GB = 1e9

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets; patterns of the name that the driver reports, the
# first that matches counts.
_BF16_PEAKS = (
    (r"B200", 2250e12),
    (r"H200|GH200", 989e12),
    (r"H100.*PCIe", 756e12),
    (r"H100.*NVL", 835e12),
    (r"H100", 989e12),
    (r"A100|A800", 312e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"A40", 150e12),
    (r"L4\b", 121e12),
    (r"A10\b", 125e12),
    (r"RTX 4090", 165e12),
    (r"RTX 3090", 71e12),
    (r"MI300X", 1307e12),
    (r"MI250X", 383e12),
)


def bf16_peak(name: str) -> float | None:
    """Peak bfloat16 FLOP/s (dense) of a device by the name its driver reports; None where it is not known."""
    return next((peak for pattern, peak in _BF16_PEAKS if re.search(pattern, name)), None)


def device_bf16_peak(device: torch.device) -> float | None:
    """As `bf16_peak`, of the device at hand; None for a CPU."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return bf16_peak(name(device)) if name is not None else None


def max_rss_gb() -> float:
    """Largest resident memory this process has had since its start, in GB (1e9 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024  # what `ru_maxrss` counts
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GB


def max_memory_allocated_gb(device: torch.device) -> float | None:
    """Most memory torch has had allocated on the device since the start, in GB (1e9 bytes); None for a CPU."""
    allocated = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return allocated(device) / GB if allocated is not None else None
