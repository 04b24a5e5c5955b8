"""The OFT model against the public implementation, and its properties."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rlvla.models.vla import openvla
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.decoder import Attention
from rlvla.models.vla.inputs import VLAInputs
from rlvla.models.vla.openvla import OpenVLAForActionPrediction, arrange

TOLERANCE = 1e-4


@pytest.fixture
def inputs(reference):
    names = ("input_ids_left_padded", "attention_mask", "pixel_values")
    return [torch.from_numpy(reference[name]) for name in names]


@pytest.fixture
def batch(tiny_folder, tiny):
    """Three decisions with prompts of three lengths, two cameras and proprio."""
    generator = torch.Generator().manual_seed(1)
    processor = VLAInputs.from_pretrained(tiny_folder)
    ids, mask = processor.collate_prompts(
        ["lift the red cube", "reach", "put the bowl on the plate and lift the zebra"]
    )
    assert len(set(mask.sum(1).tolist())) == 3
    images = torch.randint(0, 256, (3, 2, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return ids, mask, processor.pixel_values(images), torch.rand(3, 6, generator=generator) * 2 - 1


def difference(actual, expected):
    return (actual - torch.as_tensor(expected)).abs().max().item()


@torch.no_grad()
def test_every_stage_equals_public_implementation(reference_model, reference, inputs):
    ids, mask, pixels = inputs
    features = reference_model.vision_features(pixels)
    projected = reference_model.projector(features)
    embeddings = reference_model._decoder_input(ids, mask, pixels, None, None).embeddings
    logits = reference_model.action_logits(ids, mask, pixels)
    assert difference(features, reference["vision_features"]) < TOLERANCE
    assert difference(projected, reference["projected"]) < TOLERANCE
    assert difference(embeddings, reference["llm_inputs_embeds"]) < TOLERANCE
    assert difference(logits, reference["action_logits_slice"]) < TOLERANCE
    assert torch.equal(logits.argmax(-1) + 31744, torch.from_numpy(reference["greedy_ids"]))
    log_probs = (logits / 1.6).log_softmax(-1).max(-1).values
    assert difference(log_probs, reference["greedy_logprob_T1p6"]) < TOLERANCE


@torch.no_grad()
def test_causal_mask_would_be_noticed(reference_model, reference, inputs, monkeypatch):
    monkeypatch.setattr(openvla, "Attention", lambda causal, *rest: Attention(True, *rest))
    off = (reference_model.action_logits(*inputs) - torch.from_numpy(reference["action_logits_slice"])).abs()
    assert off.amax((1, 2)).min() > 100 * TOLERANCE


@torch.no_grad()
def test_wrong_tower_order_would_be_noticed(reference_model, reference, inputs):
    ids, mask, pixels = inputs
    logits = reference_model.action_logits(ids, mask, pixels.roll(3, dims=1))
    assert difference(logits, reference["action_logits_slice"]) > 100 * TOLERANCE


@torch.no_grad()
def test_missing_pad_shift_would_be_noticed(reference_model, reference, inputs, monkeypatch):
    def unshifted(input_ids, attention_mask, tail, pad_token_id):
        return arrange(input_ids, torch.ones_like(attention_mask), tail, pad_token_id)

    monkeypatch.setattr(openvla, "arrange", unshifted)
    difference_by_row = (
        reference_model.action_logits(*inputs) - torch.from_numpy(reference["action_logits_slice"])
    ).abs()
    padded = inputs[1].sum(1) < inputs[1].shape[1]
    assert difference_by_row[padded].amax((1, 2)).min() > 100 * TOLERANCE
    assert difference_by_row[~padded].max() < TOLERANCE


@torch.no_grad()
def test_batch_of_mixed_prompt_lengths_equals_single_runs(tiny, batch):
    together = tiny.action_logits(*batch)
    for i, length in enumerate(batch[1].sum(1).tolist()):
        ids, mask, pixels, proprio = (tensor[i : i + 1] for tensor in batch)
        alone = tiny.action_logits(ids[:, -length:], mask[:, -length:], pixels, proprio)
        assert difference(together[i : i + 1], alone) < 1e-5


@torch.no_grad()
def test_padding_content_does_not_matter(tiny, batch):
    ids, mask, pixels, proprio = batch
    expected = tiny.action_logits(*batch)
    assert torch.equal(tiny.action_logits(ids.masked_fill(mask == 0, 7), mask, pixels, proprio), expected)
    wider = [F.pad(ids, (5, 0), value=9), F.pad(mask, (5, 0))]
    assert difference(tiny.action_logits(*wider, pixels, proprio), expected) < 1e-5


@torch.no_grad()
def test_every_input_matters(tiny, batch):
    expected = tiny.action_logits(*batch)
    ids, mask, pixels, proprio = batch
    swapped_cameras = torch.cat([pixels[:, 6:], pixels[:, :6]], 1)
    other_ids = ids.clone()
    other_ids[:, -2] = 5
    for changed in (
        (ids, mask, swapped_cameras, proprio),
        (ids, mask, pixels, -proprio),
        (other_ids, mask, pixels, proprio),
    ):
        assert difference(tiny.action_logits(*changed), expected) > 1e-3


def test_forward_hidden_states_and_logits_agree(tiny, batch):
    hidden = tiny.action_hidden_states(*batch)
    logits = tiny.action_logits(*batch)
    first = tiny.config.base_vocab_size - 256
    assert hidden.shape == (3, 21, tiny.config.text_config.hidden_size)
    assert logits.shape == (3, 21, 256)
    assert torch.equal(tiny(*batch), logits)
    full_head = hidden @ tiny.language_model.lm_head.weight.T
    assert difference(full_head[..., first : first + 256], logits) < 1e-5


def test_gradients_reach_all_used_tensors_and_only_those(tiny, batch):
    tiny.train()
    tiny(*batch).log_softmax(-1)[..., 3].sum().backward()
    without = {name for name, p in tiny.named_parameters() if p.grad is None or not p.grad.any()}
    unused = {
        name
        for name in tiny.state_dict()
        if name.startswith("vision_backbone") and (".blocks.2." in name or "izer.norm." in name or "attn_pool" in name)
    }
    assert without == unused
    assert all(not p.requires_grad for name, p in tiny.named_parameters() if name in unused)


def test_gradient_checkpointing_changes_memory_not_gradients(tiny, batch):
    tiny.train()
    gradients = []
    for enable in (False, True):
        tiny.zero_grad()
        if enable:
            tiny.gradient_checkpointing_enable()
        tiny(*batch).log_softmax(-1)[..., 3].sum().backward()
        gradients.append({name: p.grad.clone() for name, p in tiny.named_parameters() if p.grad is not None})
    calls = []
    for module in (
        tiny.vision_backbone.featurizer.blocks[0].attn.qkv,
        tiny.language_model.model.layers[0].self_attn.q_proj,
    ):
        module.register_forward_hook(lambda module, *_: calls.append(module))
    tiny(*batch).sum().backward()
    assert len(calls) == 4, "each module runs once more in the backward pass"
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-5), name


def test_inference_mode_before_training_leaves_training_intact(tiny, batch):
    with torch.inference_mode():
        tiny.action_logits(*batch)
    tiny(*batch).sum().backward()


def test_bfloat16_runs_close_to_float32(tiny, tiny_folder, batch):
    low = OpenVLAForActionPrediction.from_pretrained(tiny_folder, dtype=torch.bfloat16)
    logits = low.action_logits(*batch)
    assert logits.dtype == low.dtype == torch.bfloat16
    assert difference(logits.float(), tiny.action_logits(*batch).detach()) < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, m, x, p: (i, m, x[:, :6], p), "6 channels"),
        (lambda i, m, x, p: (i, m, x[..., :24], p), "32x24"),
        (lambda i, m, x, p: (i, m, x, None), r"proprio of shape \[B, 6\]"),
        (lambda i, m, x, p: (i, m, x, p[:, :4]), r"got \[3, 4\]"),
        (lambda i, m, x, p: (i.flip(1), m.flip(1), x, p), "padded on the left"),
    ],
)
def test_contradictory_inputs_are_named(tiny, batch, change, message):
    with pytest.raises(ValueError, match=message):
        tiny.action_logits(*change(*batch))


def test_full_size_shapes_on_the_meta_device():
    with torch.device("meta"):
        model = OpenVLAForActionPrediction(OpenVLAConfig())
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    towers = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
    assert shapes["language_model.lm_head.weight"] == (32064, 4096)
    assert shapes["projector.fc1.weight"] == (4 * 2176, 2176)
    assert shapes[f"{towers[0]}.pos_embed"] == (1, 256, 1024)
    assert shapes[f"{towers[0]}.blocks.23.ls2.scale_factor"] == (1024,)
    assert shapes[f"{towers[1]}.attn_pool.mlp.fc1.weight"] == (4304, 1152)
    # 7.54 billion parameters, as the public checkpoint has in its index (total_size / 2 bytes).
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(7.541e9, rel=1e-3)
