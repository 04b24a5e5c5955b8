"""The lean decoder against transformers' own forward pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from rlvla.models.vla.decoder import Attention, LayerCache, build_language_model, decode, decode_next, rotary_tables
from rlvla.utils.errors import ConfigError


def small_config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    return LlamaConfig(**{**settings, **changes})


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}, {"rope_theta": 500.0}, {"head_dim": 16}])
@torch.no_grad()
def test_equals_transformers_with_a_bidirectional_mask(changes):
    config = small_config(**changes)
    torch.manual_seed(0)
    independent = LlamaForCausalLM(config).eval()
    model = build_language_model(config, 40, 256)
    model.load_state_dict(independent.state_dict())
    hidden = torch.randn(2, 11, 32)
    real = torch.tensor([11, 8])
    mask = (torch.arange(11) < real[:, None])[:, None, None]
    positions = torch.tensor([[3, 4, 5, 6], [1, 2, 3, 4]])
    rotary = rotary_tables(config, 11, hidden.device, hidden.dtype)
    states = decode(model, hidden, Attention(False, real), positions, rotary)
    logits = independent(inputs_embeds=hidden, attention_mask=mask.expand(2, 1, 11, 11)).logits
    expected = torch.stack([logits[i, positions[i], 40:296] for i in (0, 1)])
    assert torch.allclose(model.lm_head(states), expected, atol=1e-5)
    causal = independent(inputs_embeds=hidden, attention_mask=mask[:, 0, 0].long()).logits
    assert (causal[0, positions[0], 40:296] - expected[0]).abs().max() > 1e-3, "the comparison would miss a causal mask"


@torch.no_grad()
def test_causal_decoding_and_its_cache_equal_transformers():
    """Sequences of two lengths: three tokens beyond each prompt, at once and one by one."""
    config = small_config()
    torch.manual_seed(0)
    independent = LlamaForCausalLM(config).eval()
    model = build_language_model(config, 40, 256)
    model.load_state_dict(independent.state_dict())
    prompts, tokens = [torch.randn(1, n, 32) for n in (8, 5)], torch.randn(2, 3, 32)
    expected = torch.cat(
        [
            independent(inputs_embeds=torch.cat([p, tokens[i : i + 1]], 1)).logits[:, p.shape[1] - 1 :, 40:296]
            for i, p in enumerate(prompts)
        ]
    )
    rotary = rotary_tables(config, 11, tokens.device, tokens.dtype)
    whole = torch.randn(2, 11, 32)  # what is left of it is padding
    start = torch.tensor([[7], [4]])
    for i, p in enumerate(prompts):
        whole[i, : p.shape[1] + 3] = torch.cat([p[0], tokens[i]])
    states = decode(model, whole, Attention(True, start[:, 0] + 4), start + torch.arange(4), rotary)
    assert torch.allclose(model.lm_head(states), expected, atol=1e-5)

    caches = [LayerCache(room=3) for _ in model.model.layers]
    tables = rotary[0][:8], rotary[1][:8]
    hidden = decode(model, whole[:, :8], Attention(True, start[:, 0] + 1), start, tables, caches=caches)
    steps = [model.lm_head(hidden)]
    for t in range(3):
        hidden = decode_next(model, tokens[:, t : t + 1], start + 1 + t, rotary, caches, "sdpa")
        steps.append(model.lm_head(hidden))
    assert torch.allclose(torch.cat(steps, 1), expected, atol=1e-5)


def test_only_action_rows_of_the_head_are_multiplied():
    model = build_language_model(small_config(vocab_size=32064), 31744, 256)
    with FlopCounterMode(display=False) as counter:
        model.lm_head(torch.ones(5, 32))
    assert counter.get_total_flops() == 2 * 5 * 32 * 256


def test_only_action_rows_of_the_head_get_gradient():
    model = build_language_model(small_config(), 40, 256)
    model.lm_head(torch.ones(1, 32)).sum().backward()
    touched = model.lm_head.weight.grad.abs().sum(1) > 0
    assert touched[40:296].all() and not touched[:40].any() and not touched[296:].any()


def test_unsupported_decoders_are_refused():
    with pytest.raises(ConfigError, match="attention_bias"):
        build_language_model(small_config(attention_bias=True), 40, 256)
    scaled = small_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ConfigError, match="linear"):
        build_language_model(scaled, 40, 256)
