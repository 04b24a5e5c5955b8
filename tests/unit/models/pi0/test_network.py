"""The networks of pi0 and pi0.5: attention among actions, gradients, freezing, and their full sizes."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvla.models.lerobot.network import FlowNetwork
from rlvla.models.pi0.checkpoint import EXPERT_HEAD, HEAD
from rlvla.models.pi0.config import PI0, PI05
from rlvla.models.pi0.network import VLM
from tests.support.flow_networks import FlowNetworkContract, Noisy, gradients
from tests.support.pi0_cases import full_shapes


class TestPi0Network(FlowNetworkContract):
    @torch.no_grad()
    def test_actions_see_each_other(self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy) -> None:
        x, t = noisy
        later = x.clone()
        later[:, :, 3:] += 1
        prefix = network.prefix(**inputs)
        before, after = network.velocity(prefix, x, t), network.velocity(prefix, later, t)
        assert ((before - after).abs().amax(dim=-1) > 0).all()

    @pytest.mark.parametrize(
        ("given", "frozen"),
        [
            ({"train_expert_only": True, "freeze_vision_encoder": False}, VLM),
            ({"train_expert_only": False, "freeze_vision_encoder": True}, f"{VLM}model.vision_tower."),
            ({}, "nothing"),
        ],
    )
    def test_freezing(self, network: FlowNetwork, given: dict[str, bool], frozen: str) -> None:
        network.set_trainable(**given)
        for name, parameter in network.named_parameters():
            assert parameter.requires_grad == bool(network.part_of(name) and not name.startswith(frozen)), name

    def test_a_frozen_vlm_stays_out_of_the_graph(
        self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy
    ) -> None:
        network.set_trainable(train_expert_only=True)
        prefix = network.prefix(**inputs)
        assert not prefix.pooled.requires_grad
        assert prefix.keys[-1].requires_grad != network.config.state_in_prompt  # that of the state, in the expert
        reached = gradients(network, network.velocity(prefix, *noisy).square().sum())
        assert reached.keys() == {name for name, p in network.named_parameters() if p.requires_grad}


# LeRobot 0.4.4: tensors, parameters (shared ones once), and a digest of all names and shapes.
FULL = {PI0: (778, 3_501_372_176, "9a78c92a967cb9d5"), PI05: (813, 3_616_757_520, "b1ae413f56b1846d")}


@pytest.mark.parametrize("family", [PI0, PI05])
def test_full_size(family: str) -> None:
    """lerobot/pi0_base and lerobot/pi05_base; benchmarks/lerobot_agreement.py compares with LeRobot's classes."""
    shapes = full_shapes(family)
    embedding = f"{VLM}model.language_model.embed_tokens.weight"
    assert shapes[HEAD] == shapes[embedding] == (257152, 2048) and shapes[EXPERT_HEAD] == (257152, 1024)
    count = sum(int(np.prod(shape)) for name, shape in shapes.items() if name != embedding)
    separate = count + int(np.prod(shapes[HEAD]))  # in a file of LeRobot >= 0.5
    assert family == PI05 or separate == 4_028_019_472
    listed = json.dumps({name: list(shapes[name]) for name in sorted(shapes)})
    assert (len(shapes), count, hashlib.sha256(listed.encode()).hexdigest()[:16]) == FULL[family]
    towers = "model.paligemma_with_expert."
    vision = f"{towers}paligemma.model.vision_tower.vision_model."
    expected = {
        f"{vision}embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        f"{vision}embeddings.position_embedding.weight": (256, 1152),
        f"{vision}encoder.layers.26.mlp.fc1.weight": (4304, 1152),
        f"{towers}paligemma.model.multi_modal_projector.linear.weight": (2048, 1152),
        f"{towers}paligemma.model.language_model.layers.17.mlp.gate_proj.weight": (16384, 2048),
        f"{towers}paligemma.model.language_model.layers.0.self_attn.k_proj.weight": (256, 2048),
        f"{towers}gemma_expert.model.layers.17.self_attn.q_proj.weight": (2048, 1024),
        f"{towers}gemma_expert.model.layers.17.mlp.down_proj.weight": (1024, 4096),
        "model.action_in_proj.weight": (1024, 32),
    }
    norms = (f"{towers}gemma_expert.model.layers.0.input_layernorm", f"{towers}gemma_expert.model.norm")
    if family == PI05:
        expected |= {f"{norm}.dense.weight": (3072, 1024) for norm in norms}
        expected |= {"model.time_mlp_in.weight": (1024, 1024)}
    else:
        expected |= {f"{norm}.weight": (1024,) for norm in norms}
        expected |= {"model.state_proj.weight": (1024, 32), "model.action_time_mlp_in.weight": (1024, 2048)}
    assert {name: shapes.get(name) for name in expected} == expected
