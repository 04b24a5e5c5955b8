"""One prefix for many evaluations, padding that changes nothing, who sees whom, and which parameters get gradients."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvla.models.pi0.checkpoint import EXPERT_HEAD, HEAD, Pi0Files
from rlvla.models.pi0.config import PI0, PI05
from rlvla.models.pi0.network import VLM, Pi0Network
from tests.support.pi0_cases import full_shapes

B, R = 3, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def network(checkpoint: Pi0Files) -> Pi0Network:
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
        "state": torch.randn(B, 5, generator=g),
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
def test_padding_changes_nothing(network: Pi0Network, inputs: dict[str, Tensor], noisy: Any) -> None:
    few, many = network.prefix(**inputs), network.prefix(**padded(inputs))
    assert many.mask.shape[1] > few.mask.shape[1]
    assert torch.equal(few.length, many.length)
    torch.testing.assert_close(few.pooled, many.pooled, **CLOSE)
    torch.testing.assert_close(network.velocity(few, *noisy), network.velocity(many, *noisy), **CLOSE)


@torch.no_grad()
def test_masked_content_changes_nothing(network: Pi0Network, inputs: dict[str, Tensor], noisy: Any) -> None:
    other = {name: value.clone() for name, value in inputs.items()}
    other["images"][~inputs["image_mask"]] = 0.3
    other["tokens"][~inputs["token_mask"]] = 7
    first, second = (network.velocity(network.prefix(**given), *noisy) for given in (inputs, other))
    torch.testing.assert_close(first, second, **CLOSE)


@torch.no_grad()
def test_every_input_counts(network: Pi0Network, inputs: dict[str, Tensor], noisy: Any) -> None:
    x, t = noisy
    prefix = network.prefix(**inputs)
    before = network.velocity(prefix, x, t)
    changes = {"images": inputs["images"].flip(-1), "tokens": inputs["tokens"] + 1, "state": inputs["state"] + 1}
    after = {name: network.velocity(network.prefix(**inputs | {name: v}), x, t) for name, v in changes.items()}
    after |= {"t": network.velocity(prefix, x, t / 2)}
    for name, value in after.items():
        gaps = (value - before).abs().amax(dim=(1, 2, 3))
        if name == "state" and network.config.state_in_prompt:
            assert (gaps == 0).all()
        else:
            assert (gaps > 1e-4).all(), name


@torch.no_grad()
def test_evaluations_at_once_equal_one_by_one(network: Pi0Network, inputs: dict[str, Tensor], noisy: Any) -> None:
    x, t = noisy
    prefix = network.prefix(**inputs)
    together = network.velocity(prefix, x, t)
    assert together.shape == x.shape
    for index in range(R):
        alone = network.velocity(prefix, x[:, index : index + 1], t[:, index : index + 1])
        torch.testing.assert_close(together[:, index : index + 1], alone, **CLOSE)


@torch.no_grad()
def test_a_decision_alone_equals_it_among_others(network: Pi0Network, inputs: dict[str, Tensor], noisy: Any) -> None:
    x, t = noisy
    together = network.velocity(network.prefix(**inputs), x, t)
    alone = network.prefix(**{name: value[1:2] for name, value in inputs.items()})
    torch.testing.assert_close(network.velocity(alone, x[1:2], t[1:2]), together[1:2], **CLOSE)


@torch.no_grad()
def test_actions_see_each_other(network: Pi0Network, inputs: dict[str, Tensor], noisy: Any) -> None:
    x, t = noisy
    later = x.clone()
    later[:, :, 3:] += 1
    prefix = network.prefix(**inputs)
    before, after = network.velocity(prefix, x, t), network.velocity(prefix, later, t)
    assert ((before - after).abs().amax(dim=-1) > 0).all()


def gradients(network: Pi0Network, loss: Tensor) -> set[str]:
    network.zero_grad()
    loss.backward()
    return {name for name, p in network.named_parameters() if p.grad is not None}


def test_which_parameters_are_read(network: Pi0Network, inputs: dict[str, Tensor], noisy: Any) -> None:
    network.requires_grad_(True)
    names = {name for name, _ in network.named_parameters()}
    reached = gradients(network, network.velocity(network.prefix(**inputs), *noisy).square().sum())
    assert reached == {name for name in names if network.part_of(name)} != names
    reached = gradients(network, network.prefix(**inputs).pooled.square().sum())
    assert reached == {name for name in names if network.feeds(name, "prefix")}
    states = network.expert_states(network.prefix(**inputs), *noisy)
    assert gradients(network, states.square().sum()) == {name for name in names if network.feeds(name, "expert")}


@pytest.mark.parametrize(
    ("given", "frozen"),
    [
        ({"train_expert_only": True, "freeze_vision_encoder": False}, VLM),
        ({"train_expert_only": False, "freeze_vision_encoder": True}, f"{VLM}model.vision_tower."),
        ({}, "nothing"),
    ],
)
def test_freezing(network: Pi0Network, given: dict[str, bool], frozen: str) -> None:
    network.set_trainable(**given)
    for name, parameter in network.named_parameters():
        assert parameter.requires_grad == bool(network.part_of(name) and not name.startswith(frozen)), name


def test_a_frozen_vlm_stays_out_of_the_graph(network: Pi0Network, inputs: dict[str, Tensor], noisy: Any) -> None:
    network.set_trainable(train_expert_only=True)
    prefix = network.prefix(**inputs)
    assert not prefix.pooled.requires_grad
    assert prefix.keys[-1].requires_grad != network.config.state_in_prompt  # that of the state, in the expert
    reached = gradients(network, network.velocity(prefix, *noisy).square().sum())
    assert reached == {name for name, p in network.named_parameters() if p.requires_grad}


@torch.no_grad()
def test_bfloat16_is_close(checkpoint: Pi0Files, inputs: dict[str, Tensor], noisy: Any) -> None:
    exact, rough = checkpoint.load_network(), checkpoint.load_network(torch.bfloat16)
    velocity = rough.velocity(rough.prefix(**inputs), *noisy)
    assert velocity.dtype == torch.float32
    gap = (velocity - exact.velocity(exact.prefix(**inputs), *noisy)).abs().mean()
    assert 0 < gap < 0.05


# LeRobot 0.4.4: tensors, parameters (shared ones once), and a digest of all names and shapes.
FULL = {PI0: (778, 3_501_372_176, "9a78c92a967cb9d5"), PI05: (813, 3_616_757_520, "b1ae413f56b1846d")}


@pytest.mark.parametrize("family", [PI0, PI05])
def test_full_size(family: str) -> None:
    """lerobot/pi0_base and lerobot/pi05_base; benchmarks/lerobot_agreement.py compares with LeRobot's classes."""
    shapes = full_shapes(family)
    embedding = f"{VLM}model.language_model.embed_tokens.weight"
    assert shapes[HEAD] == shapes[embedding] == (257152, 2048) and shapes[EXPERT_HEAD] == (257152, 1024)
    count = sum(int(np.prod(shape)) for name, shape in shapes.items() if name != embedding)
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
