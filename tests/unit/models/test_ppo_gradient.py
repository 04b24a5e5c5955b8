"""One PPO micro-step: the gradient of the whole path against a plain re-computation with autograd."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from rlvla.algorithms.policy_losses import get_policy_loss
from rlvla.experience import Experience
from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.vla.tiny import build_tiny

TEMPERATURE, LOW, HIGH = 1.6, 0.2, 0.28
SENTENCES = ["reach the red disc", "put the yellow bowl on the plate", "go"]


@pytest.fixture(params=["oft", "autoregressive"])
def actor(request: pytest.FixtureRequest, tmp_path: Path) -> Actor:
    statistics = {
        "x": {"action": {"q01": [-1.0] * 3, "q99": [1.0] * 3}, "proprio": {"q01": [-1.0] * 2, "q99": [1] * 2}}
    }
    folder = build_tiny(
        tmp_path,
        sentences=SENTENCES,
        dataset_statistics=statistics,
        image_size=16,
        num_images_in_input=2,
        use_proprio=True,
        proprio_dim=2,
        action_dim=3,
        action_chunk_len=2 if request.param == "oft" else 1,
        model_variant=request.param,
    )
    return Actor.from_pretrained(folder, ActorConfig(gradient_checkpointing=True)).train()


def rows(actor: Actor) -> tuple[Experience, torch.Tensor, torch.Tensor]:
    rng, tokens = np.random.default_rng(0), actor.spec.columns
    batch = Experience(
        images=torch.from_numpy(rng.integers(0, 256, (3, 2, 16, 16, 3), dtype=np.uint8)),  # prepared, as the state is
        proprio=torch.from_numpy(rng.uniform(-1, 1, (3, 2)).astype(np.float32)),
        instructions=SENTENCES,
        trace={"tokens": torch.from_numpy(rng.integers(0, 256, (3, tokens)))},
        action_mask=torch.from_numpy(rng.random((3, tokens)) < 0.7),
    )
    with torch.no_grad():
        old = actor(**actor.score(batch, TEMPERATURE))["log_probs"]
    # Off-policy: every other token has become likelier; every third advantage asks for more of that and is clipped.
    index = torch.arange(old.numel()).view(old.shape)
    drift = torch.where(index % 2 == 0, 0.5, -0.5)
    sign = torch.where(index % 3 == 0, drift.sign(), -drift.sign())
    advantages = sign * torch.from_numpy(rng.uniform(0.5, 1.5, old.shape)).float()
    return batch, old - drift, advantages


def plain_log_probs(actor: Actor, llama: LlamaForCausalLM, vla: torch.nn.Module, batch: Experience) -> torch.Tensor:
    """Row by row, without padding, through transformers' own Llama with an explicit mask."""
    config, processor = actor.inputs.config, actor.inputs
    oft, tokens, first = not config.is_autoregressive, actor.spec.columns, vla.first_action_id
    embed, result = llama.model.embed_tokens, []
    for i in range(len(batch)):
        prompt = torch.tensor(processor.encode_prompt(batch.instructions[i]))
        pixels = processor.pixel_values(batch.images[i])[None]
        state = batch.proprio[i : i + 1]
        visual = torch.cat([vla.projector(vla.vision_backbone(pixels)), vla.proprio_projector(state)[:, None]], 1)[0]
        text = embed(prompt)
        if oft:
            tail = torch.cat(
                [torch.zeros(tokens, text.shape[1]), embed(torch.tensor([config.text_config.eos_token_id]))]
            )
        else:
            tail = embed(batch.action_tokens[i] + first)
        sequence = torch.cat([text[:1], visual, text[1:], tail])[None]
        length = sequence.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool)
        mask = (mask if oft else mask.tril())[None, None]
        logits = llama(inputs_embeds=sequence, attention_mask=mask).logits[0]
        start = len(visual) + len(prompt) - 1
        wanted = logits[start : start + tokens, first : first + 256] / TEMPERATURE
        result.append(wanted.log_softmax(-1)[torch.arange(tokens), batch.action_tokens[i]])
    return torch.stack(result)


def test_gradient_equals_a_plain_recomputation(actor: Actor) -> None:
    batch, old, advantages = rows(actor)
    mask = batch.action_mask
    new = actor(**actor.score(batch, TEMPERATURE))["log_probs"]
    loss, metrics = get_policy_loss("ppo")(new, old, advantages, mask, clip_low=LOW, clip_high=HIGH)
    loss.backward()
    assert 0 < float(metrics["pg_clipfrac"]) < 1
    gradients = {name: p.grad for name, p in actor.vla.named_parameters() if p.grad is not None}

    vla = copy.deepcopy(actor.vla)
    vla.zero_grad()
    vla.gradient_checkpointing_disable()
    llama = LlamaForCausalLM(vla.config.text_config)
    llama.load_state_dict(vla.language_model.state_dict())
    ratio = (plain_log_probs(actor, llama, vla, batch) - old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
    plain = -objective[mask].sum() / mask.sum()
    plain.backward()
    assert torch.allclose(loss, plain, atol=1e-5)
    expected = {f"language_model.{name}": p.grad for name, p in llama.named_parameters() if p.grad is not None}
    expected |= {name: p.grad for name, p in vla.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], atol=2e-5, rtol=1e-3), name


def test_another_temperature_would_be_noticed(actor: Actor) -> None:
    """Sampling, scoring and update share one temperature; at 1 the log-probs differ by far more than any tolerance."""
    batch, _, _ = rows(actor)
    with torch.no_grad():
        scored, at_one = (actor(**actor.score(batch, t))["log_probs"] for t in (TEMPERATURE, 1.0))
        vla = actor.vla
        llama = LlamaForCausalLM(vla.config.text_config)
        llama.load_state_dict(vla.language_model.state_dict())
        plain = plain_log_probs(actor, llama, vla, batch)
    assert torch.allclose(scored, plain, atol=1e-5)
    assert (at_one - plain).abs().max() > 0.1
