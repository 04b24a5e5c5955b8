"""Policy and critic on one backbone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlvla.experience import Experience
from rlvla.models.actor import Actor, ActorConfig, ActorCritic
from rlvla.models.value_models import VALUE_HEAD_FILE, Critic

T = 8


def shared(folder: Path, **config: int) -> ActorCritic:
    model = ActorCritic.from_pretrained(folder, ActorConfig(**config))
    torch.nn.init.normal_(model.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(model.value_head.bias, 0.2)
    return model.eval()


@torch.no_grad()
def test_it_is_the_actor_and_the_critic_of_the_same_weights(policy_folder: Path, rows: Experience) -> None:
    model, actor, critic = (
        shared(policy_folder),
        Actor.from_pretrained(policy_folder).eval(),
        Critic.from_pretrained(policy_folder).eval(),
    )
    critic.head.load_state_dict(model.value_head.state_dict())
    inputs = model.score(rows, 1.3)
    expected, values = actor(**inputs), critic(**critic.score(rows))
    assert float(values.abs().max()) > 0.1
    for wants in (("log_probs", "entropy"), ("log_probs", "entropy", "parameters", "values")):
        scores = model(**inputs, wants=wants)
        assert torch.equal(scores["log_probs"], expected["log_probs"])
        assert torch.equal(scores["entropy"], expected["entropy"])
    every = actor(**inputs, wants=("parameters",))["parameters/log_probs"]
    assert torch.equal(scores["parameters/log_probs"], every) and torch.equal(scores["values"], values)
    assert torch.equal(model(**model.score_values(rows))["values"], values)
    unplayed = model(**model.score_values(rows.with_fields(trace=None)))["values"]
    assert torch.equal(unplayed[:, 0], values[:, 0])


def test_a_new_head_says_zero_and_is_trained_beside_adapters(policy_folder: Path, rows: Experience) -> None:
    model = ActorCritic.from_pretrained(policy_folder, ActorConfig(lora_rank=2))
    values = model(**model.score(rows, 1.0), wants=("log_probs", "values"))["values"]
    assert values.shape == (3, T) and values.dtype == torch.float32 and not values.any()
    (values - 1).square().mean().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name or name.startswith("value_head.") for name in trained)
    assert float(model.value_head.bias.grad.abs()) > 0


@pytest.mark.parametrize("config", [{}, {"lora_rank": 2}], ids=["all weights", "adapters"])
def test_what_is_exported_is_a_plain_policy(
    policy_folder: Path, rows: Experience, tmp_path: Path, config: dict[str, int]
) -> None:
    model = shared(policy_folder, **config)
    model.save_pretrained(tmp_path / "policy")
    assert not (tmp_path / "policy" / VALUE_HEAD_FILE).exists()
    exported, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "policy", policy_folder))
    assert exported.keys() == start.keys()
    actor = Actor.from_pretrained(tmp_path / "policy").eval()
    with torch.no_grad():
        assert torch.allclose(
            actor(**actor.score(rows, 1.0))["log_probs"], model(**model.score(rows, 1.0))["log_probs"], atol=1e-6
        )
