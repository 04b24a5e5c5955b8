"""A tiny policy that decodes token by token, and the interpreter with vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlvla.models.testing import PolicyContract
from rlvla.models.vla.tiny import build_tiny
from rlvla.rollout.vllm.backend import interpreter, interpreter_problems

_BOUNDS = {"q01": [-1.0, -2.0, 0.0], "q99": [1.0, 2.0, 1.0], "mask": [True, True, False]}
STATISTICS = {"toy": {"action": _BOUNDS, "proprio": {"q01": [-1.0] * 2, "q99": [1.0] * 2}}}


def write_autoregressive(folder: Path, **options: Any) -> Path:
    """A policy with two cameras and proprio, whose instructions differ in length."""
    sizes = {"image_size": 32, "vision_dim": 16, "vision_depth": 2, "llm_dim": 64, "llm_layers": 2}
    return build_tiny(
        folder,
        sentences=PolicyContract.instructions,
        dataset_statistics=STATISTICS,
        model_variant="autoregressive",
        action_dim=3,
        use_proprio=True,
        proprio_dim=2,
        num_images_in_input=2,
        **(sizes | options),
    )


@torch.no_grad()
def trained_adapters(policy: Any) -> Any:
    """The policy, with adapters that have an effect."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


needs_vllm = pytest.mark.skipif(
    interpreter(None) is None or bool(interpreter_problems(None)),
    reason="there is no .venv-vllm: bash examples/scripts/install_vllm.sh (3.5 GB)",
)
