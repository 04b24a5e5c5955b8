"""The network of SmolVLA: causal actions, gradients, freezing, and its full size."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.full_size import SMOLVLM2_500M
from rlvla.models.lerobot.config import Feature, Features
from rlvla.models.lerobot.network import FlowNetwork
from rlvla.models.smolvla.checkpoint import SmolVLAFiles
from rlvla.models.smolvla.config import SmolVLAConfig
from rlvla.models.smolvla.network import VLM, SmolVLANetwork
from rlvla.models.smolvla.vlm import VlmConfig
from tests.support.flow_networks import CLOSE, FlowNetworkContract, Noisy, gradients


class TestSmolVLANetwork(FlowNetworkContract):
    @torch.no_grad()
    def test_actions_are_causal(self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy) -> None:
        x, t = noisy
        later = x.clone()
        later[:, :, 2:] += 1
        prefix = network.prefix(**inputs)
        before, after = network.velocity(prefix, x, t), network.velocity(prefix, later, t)
        torch.testing.assert_close(before[:, :, :2], after[:, :, :2], **CLOSE)
        assert (before[:, :, 2:] - after[:, :, 2:]).abs().min() > 0

    def test_the_state_alone_is_kept_in_the_graph(
        self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy
    ) -> None:
        network.set_trainable(train_expert_only=False, freeze_vision_encoder=False)
        full = gradients(network, network.velocity(network.prefix(**inputs), *noisy).square().sum())
        network.set_trainable(train_expert_only=True)
        prefix = network.prefix(**inputs)
        assert prefix.keys[0].grad_fn is not None
        part = gradients(network, network.velocity(prefix, *noisy).square().sum())
        assert not any(name.startswith(VLM) for name in part) and f"{VLM}lm_head.weight" not in full
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
