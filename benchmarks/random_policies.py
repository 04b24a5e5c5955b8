"""Policies with random weights in several sizes, and random decisions to train them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvla.experience import Experience
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact
from rlvla.models.smolvla.tiny import build_tiny_smolvla
from rlvla.models.vla.tiny import build_tiny

SENTENCE = "reach the red disc"
ACTIONS = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "min": [-1.0] * 7, "max": [1.0] * 7, "mask": [True] * 7}
# OpenVLA by the number of parameters; the rest as `build_tiny` has it.
SIZES: dict[str, dict[str, Any]] = {
    "0.3 M": {"vision_dim": 32, "llm_dim": 48, "llm_mlp_dim": 144},  # that of the quickstart
    "0.5 M": {},
    "3 M": {"vision_dim": 96, "llm_dim": 192, "llm_mlp_dim": 576, "llm_layers": 4},
    "11 M": {"vision_dim": 192, "llm_dim": 320, "llm_mlp_dim": 960, "llm_layers": 5},
    "31 M": {"vision_dim": 256, "vision_depth": 4, "llm_dim": 512, "llm_mlp_dim": 1536, "llm_layers": 6},
}


COMPACT: dict[str, dict[str, Any]] = {
    "compact": {},
    "compact flow": {"action_head": "flow"},
    "compact flow, all noisy": {"action_head": "flow", "flow_noisy_steps": "all"},
}
SMOLVLA = "smolvla"  # as `--pretrain tiny --model_family smolvla` builds it
POLICIES = (*SIZES, *COMPACT, SMOLVLA)


def new_policy(folder: Path, name: str) -> Path:
    """A checkpoint of one of `POLICIES`, with random weights."""
    numbers = {"toy": {"action": ACTIONS}}
    if name in COMPACT:
        config = CompactConfig(64, 1, 0, action_dim=7, action_chunk_len=8, **COMPACT[name])
        return build_compact(folder, config, numbers)
    if name == SMOLVLA:
        unit = {key: {"mean": [0.0] * n, "std": [1.0] * n} for key, n in (("observation.state", 8), ("action", 7))}
        return build_tiny_smolvla(folder, sentences=[SENTENCE], statistics=unit)
    return build_tiny(folder, sentences=[SENTENCE], dataset_statistics=numbers, **SIZES[name])


def random_rows(actor: Any, count: int, image_size: int = 64, instruction: str = SENTENCE) -> Experience:
    """Random images and the policy's decisions on them, in episodes of eight decisions, all of them valid.

    Args:
        actor: the policy.
        count: number of decisions.
        image_size: side of the prepared images in pixels, where the policy does not fix it.
        instruction: of all decisions.
    """
    spec, generator = actor.spec, torch.Generator().manual_seed(0)
    size, width, cameras = spec.image_size or image_size, spec.columns, spec.cameras or 1
    images = torch.randint(0, 256, (count, cameras, size, size, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.rand(count, spec.proprio_dim, generator=generator) if spec.proprio_dim else None
    rng = np.random.default_rng(0)
    noise = np.stack([spec.draw(rng) for _ in range(count)])
    numbers = None if proprio is None else proprio.numpy()
    with torch.no_grad():
        decision = actor.act(images.numpy(), numbers, [instruction] * count, noise=noise, temperature=1.0)
    mask = torch.ones(count, width, dtype=torch.bool)
    return Experience(
        images=images,
        proprio=proprio,
        instructions=[instruction] * count,
        episode_index=torch.arange(count) // 8,
        trace={name: torch.from_numpy(value) for name, value in decision.trace.items()},
        old_log_probs=torch.from_numpy(decision.log_probs),
        action_mask=mask,
        policy_mask=mask,
        advantages=torch.randn(count, width, generator=generator),
    )
