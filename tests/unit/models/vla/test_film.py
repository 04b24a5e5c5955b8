"""FiLM: vision blocks modulated by the mean language embedding, in a separate file as written by OpenVLA-OFT."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from rlvla.models.vla.inputs import VLAInputs
from rlvla.models.vla.openvla import OpenVLAForActionPrediction

FILE = "vision_backbone--7_checkpoint.pt"
TOWERS = ("featurizer", "fused_featurizer")


def film_file(folder, generator):
    """The state dict of the public wrapper: other weights than the safetensors hold, and FiLM in every block."""
    state = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key.startswith("vision_backbone."):
            key = key.replace(".blocks.", ".blocks@").replace("@", ".", 1)
            head, _, rest = key.partition(".blocks.")
            if rest:
                index, _, rest = rest.partition(".")
                key = f"{head}.blocks.{index}.block.{rest}"
            state[key] = tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
    for tower in TOWERS:
        for i in range(3):
            for part in ("scale", "shift"):
                stem = f"vision_backbone.{tower}.blocks.{i}.{part}"
                state[f"{stem}.weight"] = 0.3 * torch.randn(48, 64, generator=generator)
                state[f"{stem}.bias"] = 0.3 * torch.randn(48, generator=generator)
    return state


@pytest.fixture
def film_folder(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "film")
    torch.save(film_file(folder, torch.Generator().manual_seed(0)), folder / FILE)
    return folder


@pytest.fixture
def batch(film_folder):
    generator = torch.Generator().manual_seed(1)
    processor = VLAInputs.from_pretrained(film_folder)
    ids, mask = processor.collate_prompts(["lift the red cube", "reach"])
    images = torch.randint(0, 256, (2, 2, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return ids, mask, processor.pixel_values(images), torch.rand(2, 6, generator=generator) * 2 - 1


def film_tower(state, tower, pixels, language, heads=3):
    """A tower with FiLM, written out from the published formulas on the tensors of the file."""

    def get(name):
        return state[f"vision_backbone.{tower}.{name}"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], get(f"{name}.weight"), get(f"{name}.bias"), 1e-6)

    def linear(x, name):
        return F.linear(x, get(f"{name}.weight"), get(f"{name}.bias"))

    x = F.conv2d(pixels, get("patch_embed.proj.weight"), get("patch_embed.proj.bias"), stride=8).flatten(2).mT
    x = x + get("pos_embed")
    prefix = f"vision_backbone.{tower}.cls_token" in state
    if prefix:
        x = torch.cat([get("cls_token").expand(len(x), -1, -1), x], 1)
    for i in range(2):
        b = f"blocks.{i}.block"
        qkv = linear(norm(x, f"{b}.norm1"), f"{b}.attn.qkv").unflatten(-1, (3, heads, 16)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        attended = ((q @ k.mT / 4.0).softmax(-1) @ v).transpose(1, 2).flatten(2)
        scale1 = get(f"{b}.ls1.scale_factor") if prefix else 1.0
        scale2 = get(f"{b}.ls2.scale_factor") if prefix else 1.0
        x = x + scale1 * linear(attended, f"{b}.attn.proj")
        x = x * (1 + linear(language, f"blocks.{i}.scale")[:, None]) + linear(language, f"blocks.{i}.shift")[:, None]
        x = x + scale2 * linear(F.gelu(linear(norm(x, f"{b}.norm2"), f"{b}.mlp.fc1")), f"{b}.mlp.fc2")
    return x[:, int(prefix) :]


@torch.no_grad()
def test_features_follow_the_published_formulas(film_folder, batch):
    model = OpenVLAForActionPrediction.from_pretrained(film_folder)
    state = torch.load(film_folder / FILE, weights_only=True)
    assert model.config.use_film and model.config.model_variant == "oft"
    ids, mask, pixels, proprio = batch
    features = []
    hook = model.projector.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    model.action_logits(*batch)
    hook.remove()
    embed, eos = model.language_model.model.embed_tokens.weight, model.config.text_config.eos_token_id
    # The prompt with BOS, and the end token; neither padding nor placeholders.
    language = torch.stack([embed[[*i[m.bool()].tolist(), eos]].mean(0) for i, m in zip(ids, mask)])
    images = [
        torch.cat([film_tower(state, t, pixels[:, 6 * n + 3 * k :][:, :3], language) for k, t in enumerate(TOWERS)], -1)
        for n in range(2)
    ]
    assert torch.allclose(features[0], torch.cat(images, 1), atol=1e-5)


@torch.no_grad()
def test_the_instruction_reaches_the_vision_features(film_folder, batch):
    model = OpenVLAForActionPrediction.from_pretrained(film_folder)
    together = model.action_logits(*batch)
    length = int(batch[1][1].sum())
    alone = model.action_logits(batch[0][1:, -length:], batch[1][1:, -length:], batch[2][1:], batch[3][1:])
    assert (together[1] - alone[0]).abs().max() < 1e-5, "padding must not enter the mean"
    with pytest.raises(ValueError, match="mean language embedding"):
        model.vision_features(batch[2])


def test_every_tensor_of_both_files_survives(film_folder, tmp_path):
    OpenVLAForActionPrediction.from_pretrained(film_folder).save_pretrained(tmp_path / "out")
    for name, read in (("model.safetensors", load_file), (FILE, lambda p: torch.load(p, weights_only=True))):
        before, after = read(film_folder / name), read(tmp_path / "out" / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), name


def test_trained_towers_go_into_their_file(film_folder, tmp_path):
    model = OpenVLAForActionPrediction.from_pretrained(film_folder)
    with torch.no_grad():
        model.vision_backbone.featurizer.blocks[0].scale.bias.add_(1.0)
    model.save_pretrained(tmp_path / "out")
    again = OpenVLAForActionPrediction.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in model.state_dict().items())


def test_adapters_in_the_file_are_merged(film_folder):
    """OFT trains with LoRA and saves the wrapped towers as they are: rank 32 means a scale of 16 / 32."""
    plain = OpenVLAForActionPrediction.from_pretrained(film_folder)
    state = torch.load(film_folder / FILE, weights_only=True)
    stem = "vision_backbone.featurizer.blocks.0.block.attn.qkv"
    state[f"{stem}.base_layer.weight"] = state.pop(f"{stem}.weight")
    state[f"{stem}.base_layer.bias"] = state.pop(f"{stem}.bias")
    down, up = torch.randn(32, 48), torch.randn(144, 32)
    state[f"{stem}.lora_A.default.weight"], state[f"{stem}.lora_B.default.weight"] = down, up
    torch.save(state, film_folder / FILE)
    merged = OpenVLAForActionPrediction.from_pretrained(film_folder)
    qkv = [m.vision_backbone.featurizer.blocks[0].attn.qkv.weight for m in (plain, merged)]
    assert torch.allclose(qkv[1], qkv[0] + 0.5 * up @ down, atol=1e-4)
