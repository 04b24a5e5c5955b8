"""Peak memory and peak speed."""

from __future__ import annotations

import pytest
import torch

from rlvla.trainer.measurements import bf16_peak, device_bf16_peak, max_memory_allocated_gb, max_rss_gb


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-32GB", None),
        ("", None),
    ],
)
def test_peaks_by_the_name_of_the_driver(name: str, peak: float | None) -> None:
    assert bf16_peak(name) == peak


def test_a_cpu_has_neither_a_known_peak_nor_memory_of_its_own() -> None:
    cpu = torch.device("cpu")
    assert device_bf16_peak(cpu) is None and max_memory_allocated_gb(cpu) is None


def test_the_largest_resident_memory_grows_with_what_is_used() -> None:
    before = max_rss_gb()
    used = torch.ones(int(before * 1e9) + 2**27, dtype=torch.uint8)  # more than the process ever had
    assert 0.05 < before < 100 and max_rss_gb() - used.numel() / 1e9 > 0.03
