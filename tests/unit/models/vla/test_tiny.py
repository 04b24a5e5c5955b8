"""The tiny checkpoint and its tokenizer."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from rlvla.models.vla.checkpoint_files import CONFIG_FILE
from rlvla.models.vla.inputs import VLAInputs, build_prompt, load_tokenizer
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny, save_tokenizer, sincos_positions, train_tokenizer
from rlvla.utils.errors import ConfigError

from_pretrained = OpenVLAForActionPrediction.from_pretrained


def build(folder, statistics, **changes):
    settings = {"sentences": ["lift the red cube"], "dataset_statistics": statistics, "image_size": 32, **changes}
    return from_pretrained(build_tiny(folder, **settings))


def test_folder_has_the_public_layout(tiny_folder):
    names = {path.name for path in tiny_folder.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "dataset_statistics.json",
    } <= names
    config = json.loads((tiny_folder / "config.json").read_text())
    assert config["model_type"] == "openvla" and config["architectures"] == ["OpenVLAForActionPrediction"]
    assert config["text_config"]["vocab_size"] - config["pad_to_multiple_of"] == config["pad_token_id"]


def test_default_size_stays_tiny(tmp_path, statistics):
    model = build(tmp_path, statistics, image_size=64)
    assert 0.25e6 < sum(p.numel() for p in model.parameters()) < 0.7e6


def test_seed_decides_the_weights(tmp_path, statistics):
    first, same, other = (
        build(tmp_path / str(i), statistics, seed=seed).state_dict() for i, seed in enumerate((3, 3, 4))
    )
    assert all(torch.equal(first[k], same[k]) for k in first)
    assert not torch.equal(first["projector.fc1.weight"], other["projector.fc1.weight"])


def test_start_is_close_to_uniform_and_depends_on_the_image(tmp_path, statistics):
    model = build(tmp_path, statistics)
    ids, mask = VLAInputs.from_pretrained(tmp_path).collate_prompts(["lift the red cube"] * 2)
    logits = model.action_logits(ids, mask, torch.randn(2, 6, 32, 32))
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert entropy.mean() > 3.5, "log 256 is 5.55; a start that is sure of itself would not explore"
    assert (logits[0] - logits[1]).abs().max() > 1e-2
    tower = model.vision_backbone.featurizer
    assert torch.equal(tower.blocks[0].ls1.scale_factor, torch.ones(48))
    assert torch.equal(tower.pos_embed[0], sincos_positions(4, 48))


def test_positions_are_distinct_and_near_ones_similar():
    table = torch.nn.functional.normalize(sincos_positions(8, 32), dim=-1)
    similarity = table @ table.T
    assert similarity.fill_diagonal_(0).max() < 0.999
    assert similarity[0, 1] > similarity[0, 7] and similarity[0, 8] > similarity[0, 56]
    with pytest.raises(ValueError, match="vision_dim is 30"):
        sincos_positions(8, 30)


def test_logits_start_as_smooth_functions_of_the_action(tmp_path, statistics):
    head = build(tmp_path, statistics).language_model.lm_head
    rows = torch.nn.functional.normalize(head.weight[head.first_row : head.first_row + 256], dim=-1)
    similarity = rows @ rows.T
    assert similarity.diagonal(1).min() > 0.98 and similarity.diagonal(100).abs().max() < 0.7


@pytest.mark.parametrize(("dim", "vision_heads", "llm_heads"), [(64, 4, 2), (40, 2, 1), (96, 6, 3)])
def test_widths_choose_their_heads(tmp_path, statistics, dim, vision_heads, llm_heads):
    config = build(tmp_path, statistics, vision_dim=dim, llm_dim=dim).config
    assert config.tower_configs()[0].num_heads == vision_heads
    assert config.text_config.num_attention_heads == llm_heads


def test_widths_that_do_not_fit_are_refused(tmp_path, statistics):
    with pytest.raises(ConfigError, match="64 does not split into 64 heads of an even width"):
        build(tmp_path, statistics, llm_heads=64)
    with pytest.raises(ConfigError, match="not a multiple of patch 7"):
        build(tmp_path, statistics, patch_size=7)


def test_training_lowers_the_loss(tiny, tiny_folder):
    processor = VLAInputs.from_pretrained(tiny_folder)
    ids, mask = processor.collate_prompts(["lift the red cube"] * 4)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(4, 12, 32, 32, generator=generator)
    labels = torch.randint(0, 256, (4, 21), generator=generator)
    optimizer = torch.optim.AdamW([p for p in tiny.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(40):
        logits = tiny(ids, mask, pixels, torch.zeros(4, 6))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], "four images must be told apart, and so must the token positions"


def test_tokenizer_encodes_anything(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder)
    for sentence in ("lift the red cube", "öffne die schublade 🤖", "tabs\tand\nlines", "<s> </s> <action_3>"):
        ids = tokenizer(build_prompt(sentence))["input_ids"]
        assert ids[0] == 1 and 0 not in ids
        if "<" not in sentence:
            assert tokenizer.decode(ids, skip_special_tokens=True) == build_prompt(sentence)
    trained_words = tokenizer("lift the red cube")["input_ids"]
    assert len(trained_words) == 5, "BOS and one token for each word of a task sentence"


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": "\xff"}', b'{"model": {"vocab": {"a": -1}}}'])
def test_a_damaged_tokenizer_is_one_sentence(tiny_folder, tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(tmp_path)
    (problem,) = refused.value.problems
    assert "tokenizer.json" in problem and "\n" not in problem.text


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": "\xff"}'])
def test_tokenizer_files_are_written_again_only_if_they_can_be_read(tiny_folder, tmp_path, content):
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.save_pretrained = lambda folder: None
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="tokenizer_config.json is not valid JSON|holds a list|tokenizer.json"):
        save_tokenizer(tokenizer, tmp_path)


def test_every_version_of_the_public_libraries_reads_the_files(tiny_folder):
    """Files for transformers 4.40 and tokenizers 0.19; tests/integration/test_public_openvla.py runs them."""
    settings, content, config = (
        json.loads((tiny_folder / name).read_text())
        for name in ("tokenizer_config.json", "tokenizer.json", CONFIG_FILE)
    )
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "backend" not in settings
    merges = content["model"]["merges"]
    assert merges and all(isinstance(merge, str) and len(merge.split(" ")) == 2 for merge in merges)
    assert (
        config["vision_backbone_id"] == "dinosiglip-vit-so-224px" and config["timm_override_act_layers"] == [None] * 2
    )
    assert config["llm_backbone_id"] == "llama2-7b-pure"
    auto = AutoTokenizer.from_pretrained(tiny_folder)
    for prompt in (build_prompt("lift the red cube"), "Zebra <s> \u00e9"):
        assert auto(prompt).input_ids == load_tokenizer(tiny_folder)(prompt).input_ids


def test_names_in_a_public_config_are_kept(tiny_folder, tmp_path):
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    config = json.loads((copy / CONFIG_FILE).read_text())
    config |= {"llm_backbone_id": "vicuna-v15-7b", "timm_override_act_layers": [None, "quick_gelu"]}
    (copy / CONFIG_FILE).write_text(json.dumps({**config, "vision_backbone_id": None, "prompt_style": None}))
    from_pretrained(copy).save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / CONFIG_FILE).read_text())
    assert saved["llm_backbone_id"] == "vicuna-v15-7b" and saved["prompt_style"] == "vicuna"
    assert saved["timm_override_act_layers"] == [None, "quick_gelu"]
    assert saved["vision_backbone_id"] == "dinosiglip-vit-so-224px"


def test_text_never_becomes_action_tokens():
    tokenizer = train_tokenizer(["lift the red cube"])
    first_action = tokenizer.convert_tokens_to_ids("<action_0>")
    assert first_action == len(tokenizer) - 1 - 256
    assert tokenizer.convert_tokens_to_ids("<pad>") == len(tokenizer) - 1
    assert max(tokenizer(build_prompt("stack the zebra"))["input_ids"]) < first_action


def test_sentences_are_required():
    with pytest.raises(ConfigError, match="at least one task sentence"):
        train_tokenizer(["  "])
