"""Fixtures of the models' tests."""

from __future__ import annotations

import pytest
import torch

from rlvla.experience import Experience

T = 8  # tokens per decision of `policy_folder`


@pytest.fixture(scope="module")
def rows() -> Experience:
    """Three played decisions of toy_reach, without meaning."""
    g = torch.Generator().manual_seed(0)
    return Experience(
        images=torch.randint(0, 256, (3, 1, 64, 64, 3), dtype=torch.uint8, generator=g),
        proprio=torch.rand(3, 2, generator=g),
        instructions=["reach the red disc", "reach the blue disc", "reach the extraordinarily yellow disc"],
        action_tokens=torch.randint(0, 256, (3, T), generator=g),
    )
