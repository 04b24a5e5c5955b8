"""Peak memory and peak speed."""

from __future__ import annotations

from pathlib import Path

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


def test_the_largest_resident_memory_is_what_the_kernel_says() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    assert max_rss_gb() == pytest.approx(kilobytes * 1024 / 1e9, rel=0.02)
