"""One prefix for many evaluations, padding that changes nothing, and which parameters get gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlvla.models.lerobot.config import Feature, Features
from rlvla.models.smolvla.checkpoint import SmolVLAFiles
from rlvla.models.smolvla.config import SmolVLAConfig
from rlvla.models.smolvla.network import VLM, SmolVLANetwork
from rlvla.models.smolvla.vlm import VlmConfig

B, R = 3, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SMOLVLM2_500M = {
    "model_type": "smolvlm",
    "scale_factor": 4,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}


@pytest.fixture
def network(checkpoint: SmolVLAFiles) -> SmolVLANetwork:
    return checkpoint.load_network()


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    token_mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]])
    return {
        "images": torch.rand(B, 2, 3, 32, 32, generator=g) * 2 - 1,
        "image_mask": torch.tensor([[True, True], [True, False], [True, True]]),
        "tokens": torch.randint(0, 200, (B, 5), generator=g),
        "token_mask": token_mask,
        "state": torch.randn(B, 3, generator=g),
    }


@pytest.fixture(scope="module")
def noisy() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, R, 4, 2, generator=g), torch.rand(B, R, generator=g) * 0.9 + 0.1


def padded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same observations with more padding and a camera that is missing everywhere."""
    g = torch.Generator().manual_seed(2)
    more = {"images": torch.rand(B, 1, 3, 32, 32, generator=g), "image_mask": torch.zeros(B, 1, dtype=torch.bool)}
    more |= {"tokens": torch.randint(0, 200, (B, 6), generator=g), "token_mask": torch.zeros(B, 6, dtype=torch.bool)}
    return {name: torch.cat([inputs[name], more[name]], dim=1) if name in more else inputs[name] for name in inputs}


@torch.no_grad()
def test_padding_changes_nothing(network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: Any) -> None:
    few, many = network.prefix(**inputs), network.prefix(**padded(inputs))
    assert many.mask.shape[1] > few.mask.shape[1]
    assert torch.equal(few.length, many.length)
    torch.testing.assert_close(few.pooled, many.pooled, **CLOSE)
    torch.testing.assert_close(network.velocity(few, *noisy), network.velocity(many, *noisy), **CLOSE)


@torch.no_grad()
def test_masked_content_changes_nothing(network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: Any) -> None:
    other = {name: value.clone() for name, value in inputs.items()}
    other["images"][~inputs["image_mask"]] = 0.3
    other["tokens"][~inputs["token_mask"]] = 7
    torch.testing.assert_close(
        network.velocity(network.prefix(**inputs), *noisy), network.velocity(network.prefix(**other), *noisy), **CLOSE
    )


@torch.no_grad()
def test_every_input_counts(network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: Any) -> None:
    before = network.velocity(network.prefix(**inputs), *noisy)
    changes = {"images": inputs["images"].flip(-1), "tokens": inputs["tokens"] + 1, "state": inputs["state"] + 1}
    for name, value in changes.items():
        after = network.velocity(network.prefix(**inputs | {name: value}), *noisy)
        assert ((after - before).abs().amax(dim=(1, 2, 3)) > 1e-4).all(), name


@torch.no_grad()
def test_evaluations_at_once_equal_one_by_one(
    network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: tuple[Tensor, Tensor]
) -> None:
    x, t = noisy
    prefix = network.prefix(**inputs)
    together = network.velocity(prefix, x, t)
    assert together.shape == x.shape
    for index in range(R):
        fresh = network.prefix(**inputs)
        alone = network.velocity(fresh, x[:, index : index + 1], t[:, index : index + 1])
        torch.testing.assert_close(together[:, index : index + 1], alone, **CLOSE)


@torch.no_grad()
def test_a_decision_alone_equals_it_among_others(
    network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: tuple[Tensor, Tensor]
) -> None:
    x, t = noisy
    together = network.velocity(network.prefix(**inputs), x, t)
    alone = network.prefix(**{name: value[1:2] for name, value in inputs.items()})
    torch.testing.assert_close(network.velocity(alone, x[1:2], t[1:2]), together[1:2], **CLOSE)


@torch.no_grad()
def test_actions_are_causal(network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: tuple[Tensor, Tensor]) -> None:
    x, t = noisy
    later = x.clone()
    later[:, :, 2:] += 1
    prefix = network.prefix(**inputs)
    before, after = network.velocity(prefix, x, t), network.velocity(prefix, later, t)
    torch.testing.assert_close(before[:, :, :2], after[:, :, :2], **CLOSE)
    assert (before[:, :, 2:] - after[:, :, 2:]).abs().min() > 0


def loss(network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: Any) -> Tensor:
    return network.velocity(network.prefix(**inputs), *noisy).square().sum()


def gradients(network: SmolVLANetwork) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def test_exactly_the_used_parameters_get_gradients(
    network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: Any
) -> None:
    network.requires_grad_(True)
    loss(network, inputs, noisy).backward()
    unused = {name for name, _ in network.named_parameters() if not network.part_of(name)}
    assert {name for name, p in network.named_parameters() if p.grad is None} == unused
    assert f"{VLM}lm_head.weight" in unused


def test_the_state_alone_is_kept_in_the_graph(network: SmolVLANetwork, inputs: dict[str, Tensor], noisy: Any) -> None:
    network.set_trainable(train_expert_only=False, freeze_vision_encoder=False)
    loss(network, inputs, noisy).backward()
    full = gradients(network)
    network.zero_grad()
    network.set_trainable(train_expert_only=True)
    prefix = network.prefix(**inputs)
    assert prefix.keys[0].grad_fn is not None
    network.velocity(prefix, *noisy).square().sum().backward()
    part = gradients(network)
    assert not any(name.startswith(VLM) for name in part)
    assert any(name.startswith("model.state_proj.") for name in part)
    for name, value in part.items():
        torch.testing.assert_close(value, full[name], rtol=1e-3, atol=1e-4)


def test_freezing_follows_config_json(checkpoint: SmolVLAFiles) -> None:
    config = replace(checkpoint.config, train_expert_only=False, freeze_vision_encoder=True, train_state_proj=False)
    network = SmolVLANetwork(config, checkpoint.vlm)
    network.set_trainable()
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad and network.part_of(name)}
    vision = {name for name, _ in network.named_parameters() if name.startswith(f"{VLM}model.vision_model.")}
    assert frozen == vision | {"model.state_proj.weight", "model.state_proj.bias"}


@torch.no_grad()
def test_bfloat16_is_close(checkpoint: SmolVLAFiles, inputs: dict[str, Tensor], noisy: Any) -> None:
    exact, rough = checkpoint.load_network(), checkpoint.load_network(torch.bfloat16)
    velocity = rough.velocity(rough.prefix(**inputs), *noisy)
    assert velocity.dtype == torch.float32
    gap = (velocity - exact.velocity(exact.prefix(**inputs), *noisy)).abs().mean()
    assert 0 < gap < 0.05


def test_full_size() -> None:
    """lerobot/smolvla_base."""
    features = Features({"observation.state": Feature("STATE", (6,))}, {"action": Feature("ACTION", (6,))})
    config = SmolVLAConfig(vlm_model_name="HuggingFaceTB/SmolVLM2-500M-Video-Instruct", features=features)
    with torch.device("meta"):
        network = SmolVLANetwork(config, VlmConfig.from_json(SMOLVLM2_500M, None))  # type: ignore[arg-type]
    state = network.state_dict()
    assert len(state) == 500
    assert sum(value.numel() for value in state.values()) == 450_046_176
    assert sum(value.numel() for name, value in state.items() if not name.startswith(VLM)) == 99_880_992
    shapes = {
        "model.vlm_with_expert.vlm.model.connector.modality_projection.proj.weight": (960, 12288),
        "model.vlm_with_expert.vlm.model.vision_model.embeddings.patch_embedding.weight": (768, 3, 16, 16),
        "model.vlm_with_expert.vlm.model.vision_model.encoder.layers.11.self_attn.out_proj.weight": (768, 768),
        "model.vlm_with_expert.vlm.lm_head.weight": (49280, 960),
        "model.vlm_with_expert.lm_expert.layers.0.self_attn.k_proj.weight": (320, 720),
        "model.vlm_with_expert.lm_expert.layers.15.self_attn.v_proj.weight": (320, 320),
        "model.vlm_with_expert.lm_expert.layers.15.mlp.gate_proj.weight": (2048, 720),
        "model.state_proj.weight": (960, 32),
        "model.action_in_proj.weight": (720, 32),
        "model.action_out_proj.weight": (32, 720),
        "model.action_time_mlp_in.weight": (720, 1440),
        "model.action_time_mlp_out.weight": (720, 720),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes
