"""The policy contract, run over every family and variant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact
from rlvla.models.config import ActorConfig
from rlvla.models.testing import PolicyContract
from rlvla.models.vla.tiny import build_tiny
from tests.support.own_policy import write_new

STATISTICS = {
    "toy": {
        "action": {"q01": [-0.5, 0.25, 0.0], "q99": [1.5, 0.75, 1.0], "mask": [True, True, True]},
        "proprio": {"q01": [-1.0, -1.0], "q99": [1.0, 1.0]},
    }
}


def tiny(folder: Path, **options: Any) -> Path:
    """A small model with three action dimensions."""
    sizes = {"image_size": 16, "vision_dim": 16, "vision_depth": 2, "llm_dim": 32, "llm_mlp_dim": 64, "llm_layers": 1}
    return build_tiny(
        folder,
        sentences=PolicyContract.instructions,
        dataset_statistics=STATISTICS,
        action_dim=3,
        use_proprio=True,
        proprio_dim=2,
        **(sizes | options),
    )


def compact(folder: Path, **options: Any) -> Path:
    """A compact policy with three action dimensions."""
    sizes = {"channels": (8, 8), "kernels": (4, 3), "strides": (4, 2), "width": 32, "column_width": 16}
    config = CompactConfig(16, 2, 2, 3, 2, text_width=16, text_buckets=64, **(sizes | options))
    return build_compact(folder, config, STATISTICS)


def flow(folder: Path, **options: Any) -> Path:
    """A compact policy with a flow head whose velocity depends on everything."""
    compact(folder, action_head="flow", **options)
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if "velocity_network.output" in name or "velocity_network.std" in name]:
        state[name] = 0.3 * torch.randn(state[name].shape, generator=generator)
    save_file(state, folder / "model.safetensors")
    return folder


class Tiny(PolicyContract):
    build: ClassVar[Callable[..., Path]] = staticmethod(tiny)
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return cls.build(tmp_path_factory.mktemp("policy") / "start", **cls.options)


class TestTokens(Tiny):
    options: ClassVar = {"action_chunk_len": 2, "num_images_in_input": 2}


class TestCroppedTokens(Tiny):
    options: ClassVar = {"action_chunk_len": 2, "center_crop": True}


class TestAutoregressiveTokens(Tiny):
    options: ClassVar = {"model_variant": "autoregressive"}


class TestGaussian(Tiny):
    unreached = ("vla.language_model.lm_head.weight",)  # the head of the tokens, which stays in the checkpoint
    options: ClassVar = {"model_variant": "oft_regression", "action_chunk_len": 2}


class TestGaussianOfFeatures(TestGaussian):
    options: ClassVar = {**TestGaussian.options, "action_std": "features"}


class TestGaussianCorrelated(TestGaussian):
    overrides: ClassVar = {"action_noise_correlation": 0.8}


class TestGaussianAdapters(TestGaussian):
    config = ActorConfig(lora_rank=2)


class TestSharedCritic(TestTokens):
    value_head = True


class TestAdapters(TestTokens):
    config = ActorConfig(lora_rank=2, lora_targets=("all-linear",))


class TestOwnFamily(Tiny):
    build = staticmethod(write_new)


class TestCompactTokens(Tiny):
    build = staticmethod(compact)


class TestCompactTokensWithValueHead(TestCompactTokens):
    value_head = True


class TestCompactGaussian(TestCompactTokens):
    options: ClassVar = {"action_head": "gaussian", "action_std": "features"}


class TestCompactGaussianCorrelated(TestCompactTokens):
    options: ClassVar = {**TestCompactGaussian.options, "action_noise_correlation": 0.8}


class TestCompactFlow(Tiny):
    build = staticmethod(flow)
    value_head = True


class TestCompactFlowAllSteps(TestCompactFlow):
    options: ClassVar = {"flow_noisy_steps": "all", "flow_eval_noise": "zero", "flow_steps": 3}


class TestCompactFlowCps(TestCompactFlow):
    options: ClassVar = {"flow_method": "cps", "flow_steps": 10}


class TestCompactFlowLearnedNoise(TestCompactFlow):
    options: ClassVar = {"flow_method": "noise", "flow_noisy_steps": "all"}


class TestCompactFlowStepByStep(TestCompactFlow):
    overrides: ClassVar = {"flow_asked_scores": "step_log_probs"}
    options: ClassVar = {"flow_noisy_steps": "all", "flow_steps": 3}


class TestCompactFlowMirrored(TestCompactFlow):
    overrides: ClassVar = {"flow_asked_scores": "mirrored"}
    options: ClassVar = {"flow_method": "cps"}


class TestCompactFlowWithoutNoise(TestCompactFlow):
    value_head = False
    options: ClassVar = {"flow_method": "ode"}
