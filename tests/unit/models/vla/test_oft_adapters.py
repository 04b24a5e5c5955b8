"""LoRA folders as OpenVLA-OFT writes them, with adapters on patch convolutions and head: loaded, trained, written."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.inspection import describe
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.errors import ConfigError
from tests.support.oft_folders import FILM_FILE, PROPRIO_FILE, RANK, SCALE, finetuned

CONVOLUTION = "vision_backbone.featurizer.patch_embed.proj.weight"
HEAD = "language_model.lm_head.weight"
load = OpenVLAForActionPrediction.from_pretrained


@pytest.fixture(params=["merged", "unmerged"])
def merged(request):
    return request.param == "merged"


@pytest.fixture(params=["FiLM", "no FiLM"])
def film(request):
    return request.param == "FiLM"


@pytest.fixture
def folder(tiny_folder, tmp_path, film, merged):
    """The folder, and the weights it stands for, merged by the formula."""
    return tmp_path / "run", finetuned(tiny_folder, tmp_path / "run", film=film, merged=merged)


def same(model, other, tolerance=0.0):
    state = other.state_dict() if isinstance(other, torch.nn.Module) else other
    own = model.state_dict()
    assert own.keys() == state.keys()
    return all(torch.allclose(own[name], state[name], rtol=0, atol=tolerance) for name in own)


def test_every_weight_is_the_merged_one(folder, film, tiny_folder):
    path, expected = folder
    model = load(path)
    assert same(model, expected, 1e-5)
    assert bool(model.config.use_film) == film and model.config.model_variant == "oft"
    start = load_file(tiny_folder / "model.safetensors")
    for name in (CONVOLUTION, HEAD):
        assert not torch.allclose(expected[name], start[name], atol=1e-2)
    Actor.from_pretrained(path)  # tokenizer and statistics


def test_a_convolution_acts_as_with_its_adapter_beside(tiny_folder, tmp_path):
    finetuned(tiny_folder, tmp_path / "run", film=False, merged=False)
    adapter = load_file(tmp_path / "run" / "lora_adapter" / "adapter_model.safetensors")
    stem = "base_model.model." + CONVOLUTION.removesuffix("weight")
    down, up = adapter[f"{stem}lora_A.weight"], adapter[f"{stem}lora_B.weight"]
    patch = down.shape[-1]
    assert down.shape[:2] == (RANK, 3) and up.shape[1:] == (RANK, 1, 1)
    start = load_file(tiny_folder / "model.safetensors")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    bias = start[CONVOLUTION.replace("weight", "bias")]
    expected = F.conv2d(pixels, start[CONVOLUTION], bias, stride=patch)
    expected = expected + SCALE * F.conv2d(F.conv2d(pixels, down, stride=patch), up)
    with torch.no_grad():
        actual = load(tmp_path / "run").vision_backbone.featurizer.patch_embed.proj(pixels)
    assert torch.allclose(actual, expected.flatten(2).mT, atol=1e-4)


def test_written_again_it_reads_back_to_the_bit(folder, film, tmp_path):
    path, _ = folder
    model = load(path)
    model.save_pretrained(tmp_path / "out")
    assert same(load(tmp_path / "out"), model)
    assert (tmp_path / "out" / PROPRIO_FILE).is_file()
    if film:
        before, after = (torch.load(f / FILM_FILE, weights_only=True) for f in (path, tmp_path / "out"))
        shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (before, after)]
        assert shapes[0] == shapes[1], "OpenVLA-OFT reads the towers only with their adapters"
        assert not any(tensor.any() for name, tensor in after.items() if ".lora_B." in name), "merged, not added twice"


def test_training_goes_on_with_new_adapters(folder, tmp_path):
    """Folder -> adapters on top -> export; both the merged export and its adapter alone are the trained policy."""
    path, expected = folder
    actor = Actor.from_pretrained(path, ActorConfig(lora_rank=2, lora_alpha=4, lora_targets=("all-linear",)))
    adapted = [name for name, p in actor.named_parameters() if p.requires_grad]
    assert adapted and not any("patch_embed" in name or "lm_head" in name for name in adapted)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    actor.save_pretrained(tmp_path / "out")
    state = dict(actor.vla.merge_and_unload().state_dict())
    exported, alone = load(tmp_path / "out"), load(tmp_path / "out" / "lora_adapter")
    assert same(exported, state, 1e-5) and not same(exported, expected, 1e-2)
    assert torch.allclose(exported.state_dict()[CONVOLUTION], expected[CONVOLUTION], atol=1e-5)
    assert same(alone, exported, 1e-6)


def test_the_description_counts_the_merged_layers(tiny_folder, tmp_path):
    finetuned(tiny_folder, tmp_path / "run", film=False, merged=False)
    facts = describe(tmp_path / "run").facts["adapter"]
    assert f"lora_adapter on {tiny_folder}" in facts and "new adapters" in facts


def test_adapters_that_name_each_other_are_refused(tiny_folder, tmp_path):
    finetuned(tiny_folder, tmp_path / "run", film=False, merged=False)
    path = tmp_path / "run" / "lora_adapter" / "adapter_config.json"
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads(path.read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "run")}))
    path.write_text(json.dumps({**config, "base_model_name_or_path": str(other)}))
    with pytest.raises(ConfigError, match="base_model_name_or_path"):
        load(other)


@pytest.mark.parametrize(
    "change", [lambda up: up[:, :-1], lambda up: up.flatten(1), lambda up: up.expand(-1, -1, 2, 2)]
)
def test_a_convolution_adapter_of_another_shape_is_named(tiny_folder, tmp_path, change):
    from safetensors.torch import save_file

    finetuned(tiny_folder, tmp_path / "run", film=False, merged=False)
    path = tmp_path / "run" / "lora_adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model." + CONVOLUTION.replace("weight", "lora_B.weight")
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path)
    with pytest.raises(ConfigError, match=r"patch_embed\.proj"):
        load(tmp_path / "run")
