"""Fixtures of the models' tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.experience import Experience
from rlvla.models.vla.tiny import build_tiny

T = 8  # tokens per decision of `policy_folder`


@pytest.fixture(scope="module")
def rows() -> Experience:
    """Three played decisions of toy_reach, without meaning."""
    g = torch.Generator().manual_seed(0)
    return Experience(
        images=torch.randint(0, 256, (3, 1, 64, 64, 3), dtype=torch.uint8, generator=g),
        proprio=torch.rand(3, 2, generator=g),
        instructions=["reach the red disc", "reach the blue disc", "reach the extraordinarily yellow disc"],
        trace={"tokens": torch.randint(0, 256, (3, T), generator=g)},
    )


@pytest.fixture(scope="session")
def statistics() -> dict:
    def entry(dims: int) -> dict:
        ramp = np.arange(1, dims + 1, dtype=float)
        return {
            "q01": (-0.1 * ramp).tolist(),
            "q99": (0.2 * ramp).tolist(),
            "min": (-0.3 * ramp).tolist(),
            "max": (0.4 * ramp).tolist(),
        }

    return {"toy": {"action": {**entry(7), "mask": [True] * 6 + [False]}, "proprio": entry(6)}}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, statistics) -> Path:
    """Two cameras and proprio, so that the longest path is the one most tests take."""
    return build_tiny(
        tmp_path_factory.mktemp("tiny"),
        sentences=["lift the red cube", "reach the blue disc", "put the yellow bowl on the wooden plate"],
        dataset_statistics=statistics,
        image_size=32,
        num_images_in_input=2,
        use_proprio=True,
        proprio_dim=6,
        action_chunk_len=3,
    )
