"""Policies with random weights in several sizes, and random decisions to train them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlvla.experience import Experience
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact
from rlvla.models.vla.tiny import build_tiny

ACTIONS = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "min": [-1.0] * 7, "max": [1.0] * 7, "mask": [True] * 7}
# By the number of parameters; the rest as `build_tiny` has it.
SIZES: dict[str, dict[str, Any]] = {
    "0.3 M": {"vision_dim": 32, "llm_dim": 48, "llm_mlp_dim": 144},  # that of the quickstart
    "0.5 M": {},
    "3 M": {"vision_dim": 96, "llm_dim": 192, "llm_mlp_dim": 576, "llm_layers": 4},
    "11 M": {"vision_dim": 192, "llm_dim": 320, "llm_mlp_dim": 960, "llm_layers": 5},
    "31 M": {"vision_dim": 256, "vision_depth": 4, "llm_dim": 512, "llm_mlp_dim": 1536, "llm_layers": 6},
}


def new_policy(folder: Path, size: str) -> Path:
    """A checkpoint with random weights."""
    statistics = {"toy": {"action": ACTIONS}}
    return build_tiny(folder, sentences=["reach the red disc"], dataset_statistics=statistics, **SIZES[size])


def new_compact(folder: Path) -> Path:
    """A compact policy of the default size, with random weights."""
    config = CompactConfig(image_size=64, num_images_in_input=1, proprio_dim=0, action_dim=7, action_chunk_len=8)
    return build_compact(folder, config, {"toy": {"action": ACTIONS}})


def random_rows(actor: Any, count: int) -> Experience:
    """Decisions with random pictures and tokens, of episodes of eight, all tokens valid."""
    spec, generator = actor.spec, torch.Generator().manual_seed(0)
    size, width = spec.image_size or actor.inputs.config.image_size, spec.columns
    mask = torch.ones(count, width, dtype=torch.bool)
    cameras = spec.cameras or 1
    rows = Experience(
        images=torch.randint(0, 256, (count, cameras, size, size, 3), dtype=torch.uint8, generator=generator),
        proprio=torch.rand(count, spec.proprio_dim, generator=generator) if spec.proprio_dim else None,
        instructions=["reach the red disc"] * count,
        episode_index=torch.arange(count) // 8,
        trace={"tokens": torch.randint(0, 256, (count, width), generator=generator)},
        action_mask=mask,
        policy_mask=mask,
        advantages=torch.randn(count, width, generator=generator),
    )
    return rows.with_fields(old_log_probs=torch.full((count, width), -5.5))
