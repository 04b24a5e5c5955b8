"""Plain OpenVLA: one action, token by token."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from rlvla.models.vla.inputs import VLAInputs
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny

SENTENCES = ["lift the red cube", "reach", "put the bowl on the plate and lift the zebra"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, statistics):
    return build_tiny(
        tmp_path_factory.mktemp("autoregressive"),
        sentences=SENTENCES,
        dataset_statistics=statistics,
        image_size=32,
        num_images_in_input=2,
        use_proprio=True,
        proprio_dim=6,
        model_variant="autoregressive",
    )


@pytest.fixture
def model(folder):
    return OpenVLAForActionPrediction.from_pretrained(folder)


@pytest.fixture
def batch(folder):
    """Three decisions with prompts of three lengths."""
    generator = torch.Generator().manual_seed(1)
    processor = VLAInputs.from_pretrained(folder)
    ids, mask = processor.collate_prompts(SENTENCES)
    assert len(set(mask.sum(1).tolist())) == 3
    images = torch.randint(0, 256, (3, 2, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return ids, mask, processor.pixel_values(images), torch.rand(3, 6, generator=generator) * 2 - 1


@pytest.fixture
def action_ids(model):
    return model.first_action_id + torch.randint(0, 256, (3, 7), generator=torch.Generator().manual_seed(2))


def test_a_decision_is_one_action(model, batch, action_ids):
    assert model.config.action_chunk_len == 1 and model.config.num_action_tokens == 7
    assert model.action_logits(*batch, action_ids).shape == (3, 7, 256)


@torch.no_grad()
def test_logits_equal_those_of_transformers(model, batch, action_ids):
    """The published sequence, [BOS][patches][proprio][prompt][tokens], through an independent causal Llama."""
    independent = LlamaForCausalLM(model.config.text_config).eval()
    independent.load_state_dict(model.language_model.state_dict())
    logits = model.action_logits(*batch, action_ids)
    ids, mask, pixels, proprio = batch
    patches = model.projector(model.vision_features(pixels))
    visual = torch.cat([patches, model.proprio_projector(proprio)[:, None]], 1)
    first = model.first_action_id
    for i in range(3):
        text = torch.cat([ids[i, mask[i].bool()], action_ids[i]])
        embedded = model.language_model.model.embed_tokens(text)
        embeds = torch.cat([embedded[:1], visual[i], embedded[1:]])[None]
        expected = independent(inputs_embeds=embeds).logits[0, -8:-1, first : first + 256]
        assert torch.allclose(logits[i], expected, atol=1e-5)


def test_cached_decoding_equals_a_full_forward(model, batch):
    uniforms = torch.rand(3, 7, generator=torch.Generator().manual_seed(3))
    chosen = []

    def choose(logits, step):
        chosen.append((logits.softmax(-1).cumsum(-1) < uniforms[:, step, None]).sum(-1).clamp_max(255))
        return chosen[-1]

    logits = model.act_step_by_step(*batch, choose)
    tokens = torch.stack(chosen, 1)
    with torch.no_grad():
        full = model.action_logits(*batch, tokens + model.first_action_id)
    difference = (logits.log_softmax(-1) - full.log_softmax(-1)).abs().max()
    assert difference < 1e-5
    assert tokens.shape == (3, 7) and len(set(tokens.flatten().tolist())) > 3


def test_mixed_prompts_equal_single_ones(model, batch):
    together = model.act_step_by_step(*batch)
    for i, length in enumerate(batch[1].sum(1).tolist()):
        ids, mask, pixels, proprio = (tensor[i : i + 1] for tensor in batch)
        alone = model.act_step_by_step(ids[:, -length:], mask[:, -length:], pixels, proprio)
        assert (together[i] - alone[0]).abs().max() < 1e-5


def test_image_and_prompt_pass_once(model, batch):
    lengths, towers = [], []
    model.language_model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda module, inputs, _: lengths.append(inputs[0].shape[1])
    )
    model.vision_backbone.register_forward_hook(lambda *_: towers.append(1))
    model.act_step_by_step(*batch)
    prefix = 2 * 16 + 1 + batch[0].shape[1]
    assert lengths == [prefix] + [1] * 6 and len(towers) == 1


@torch.no_grad()
def test_a_token_depends_on_those_before_it_only(model, batch, action_ids):
    before = model.action_logits(*batch, action_ids)
    changed = action_ids.clone()
    changed[:, 3] = model.first_action_id + (changed[:, 3] - model.first_action_id + 100) % 256
    after = model.action_logits(*batch, changed)
    moved = (after - before).abs().amax((0, 2))
    assert moved[:4].max() == 0.0 and moved[4:].min() > 1e-4


def test_without_tokens_logits_are_those_of_greedy_decoding(model, batch):
    greedy = model.action_logits(*batch)
    with torch.no_grad():
        again = model.action_logits(*batch, greedy.argmax(-1) + model.first_action_id)
    assert torch.equal(greedy.argmax(-1), again.argmax(-1))
    with pytest.raises(ValueError, match="needs the action tokens"):
        model.action_hidden_states(*batch)


def test_gradients_reach_the_embeddings_of_earlier_tokens(model, batch, action_ids):
    model.train()
    model.gradient_checkpointing_enable()
    model(*batch, action_ids).log_softmax(-1)[:, -1, 5].sum().backward()
    touched = model.language_model.model.embed_tokens.weight.grad.abs().sum(1) > 0
    assert touched[action_ids[:, :-1]].all()
