"""The further files of public folders: LoRA adapters, regression heads, code."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.families import check_checkpoint
from rlvla.models.lora import ADAPTER_FIELDS
from rlvla.models.vla.checkpoint import detect_variant, read_config
from rlvla.models.vla.checkpoint_files import find_tensors
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.errors import ConfigError


@pytest.fixture
def copy(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "copy")


@pytest.fixture
def adapted(tiny_folder, tmp_path):
    """A policy with trained adapters on all linear layers, and its folder."""
    actor = Actor.from_pretrained(tiny_folder, ActorConfig(lora_rank=3, lora_alpha=6, lora_targets=("all-linear",)))
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    actor.save_pretrained(tmp_path / "adapted")
    return tmp_path / "adapted"


def load(folder, **overrides):
    return OpenVLAForActionPrediction.from_pretrained(folder, **overrides)


@pytest.mark.parametrize("nested", [True, False])
def test_an_adapter_alone_is_merged_into_its_base(adapted, tmp_path, nested):
    alone = tmp_path / "alone"
    shutil.copytree(adapted / "lora_adapter", alone / "lora_adapter" if nested else alone)
    merged, loaded = load(adapted).state_dict(), load(alone).state_dict()
    assert all(torch.equal(merged[name], loaded[name]) for name in merged)
    base = load_file(read_base(adapted) / "model.safetensors")
    assert not torch.equal(merged["projector.fc1.weight"], base["projector.fc1.weight"])
    Actor.from_pretrained(alone)  # tokenizer and statistics are the base model's
    load(alone).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def read_base(folder):
    from pathlib import Path

    return Path(json.loads((folder / "lora_adapter" / "adapter_config.json").read_text())["base_model_name_or_path"])


def test_small_adapters_on_a_bfloat16_base_are_rounded_once(tiny_folder, tmp_path):
    """Two adapters, each of a third of the spacing of bfloat16: rounded one by one, both would vanish."""
    load(tiny_folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    actor = Actor.from_pretrained(tmp_path / "base", ActorConfig(lora_rank=1, lora_alpha=1), dtype=torch.float32)
    layer = next(m for name, m in actor.named_modules() if name.endswith("layers.0.self_attn.q_proj"))
    with torch.no_grad():
        spacing = layer.base_layer.weight.abs().max().log2().floor().exp2() / 128
        layer.lora_A["default"].weight.fill_(1.0)
        layer.lora_B["default"].weight.fill_(spacing / 3)
    actor.save_pretrained(tmp_path / "adapted")
    name, base = "language_model.model.layers.0.self_attn.q_proj.weight", tmp_path / "base"
    for count in (1, 2):
        alone = shutil.copytree(tmp_path / "adapted" / "lora_adapter", tmp_path / f"alone{count}")
        config = json.loads((alone / "adapter_config.json").read_text())
        (alone / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
        base = alone
        exact = load(tmp_path / "base").state_dict()[name].float() + count * spacing / 3
        torch.testing.assert_close(load(alone, dtype=torch.float32).state_dict()[name], exact, rtol=0, atol=1e-7)
        assert torch.equal(load(alone).state_dict()[name], exact.bfloat16())


def test_an_adapter_beside_merged_weights_is_not_added_twice(adapted):
    assert not find_tensors(adapted).adapters


def test_the_adapter_file_is_one_that_peft_reads(adapted, tiny_folder):
    import peft

    model = load(tiny_folder)
    peft.PeftModel.from_pretrained(model, str(adapted / "lora_adapter")).merge_and_unload()
    merged = load(adapted).state_dict()
    assert all(torch.allclose(merged[name], p, atol=1e-5) for name, p in model.state_dict().items())


def test_the_adapter_has_only_fields_that_every_version_of_peft_knows(adapted):
    config = json.loads((adapted / "lora_adapter" / "adapter_config.json").read_text())
    assert set(config) == set(ADAPTER_FIELDS)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model_name_or_path": "openvla/openvla-7b"}, "'openvla/openvla-7b' is not a folder here"),
        ({"use_dora": True}, "use_dora cannot be merged"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"r": 0}, "rank of the adapters"),
        ({"r": -3, "use_rslora": True}, "rank of the adapters"),
        ({"r": 10**400}, "rank of the adapters"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    ],
)
def test_adapters_that_cannot_be_merged_are_named(adapted, tmp_path, change, message):
    alone = shutil.copytree(adapted / "lora_adapter", tmp_path / "alone")
    path = alone / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        load(alone)


def test_an_adapter_of_another_model_is_named(adapted, tmp_path):
    alone = shutil.copytree(adapted / "lora_adapter", tmp_path / "alone")
    tensors = load_file(alone / "adapter_model.safetensors")
    stem = "base_model.model.projector.fc1"
    tensors[f"{stem}.lora_B.weight"] = tensors[f"{stem}.lora_B.weight"][:-1].contiguous()
    tensors["base_model.model.nothing.lora_A.weight"] = torch.ones(3, 3)
    save_file(tensors, alone / "adapter_model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load(alone)
    assert "projector.fc1." in str(caught.value) and "nothing." in str(caught.value)


@pytest.mark.parametrize(
    ("prepare", "variant", "reason"),
    [
        (lambda f: None, "oft", "assumed"),
        (lambda f: (f / "modeling_prismatic.py").write_text("NUM_ACTIONS_CHUNK = 8"), "oft", "decodes chunks"),
        (
            lambda f: (f / "modeling_prismatic.py").write_text("def f(): ..."),
            "autoregressive",
            "does not decode chunks",
        ),
        (lambda f: torch.save({}, f / "action_head--1_checkpoint.pt"), "oft", "holds action_head--1"),
        (
            lambda f: edit_config(f, auto_map={"AutoConfig": "openvla/openvla-7b--configuration_prismatic.C"}),
            "autoregressive",
            "auto_map",
        ),
        (lambda f: edit_config(f, model_variant="autoregressive"), "autoregressive", "config.json says so"),
    ],
)
def test_the_variant_is_detected_from_the_files(tmp_path, tiny_folder, prepare, variant, reason):
    folder = shutil.copytree(tiny_folder, tmp_path / "folder")
    edit_config(folder, model_variant=None)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "proprio" not in k}, folder / "model.safetensors")
    prepare(folder)
    detected = detect_variant(folder, read_config(folder), find_tensors(folder), None)
    assert detected[0] == variant and reason in detected[1]


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_code_in_the_folder_is_not_run(copy, tmp_path):
    (copy / "modeling_prismatic.py").write_text("raise SystemExit('run')\nACTIONS_CHUNK = 8\n")
    edit_config(copy, auto_map={"AutoModel": "modeling_prismatic.OpenVLAForActionPrediction"})
    load(copy).save_pretrained(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.py"))


def test_a_contradicted_variant_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match="'autoregressive' contradicts"):
        load(tiny_folder, model_variant="autoregressive")


def test_a_regression_head_travels_with_its_weights(copy, tmp_path):
    torch.save({"fc.weight": torch.ones(2)}, copy / "action_head--9_checkpoint.pt")
    load(copy).save_pretrained(tmp_path / "out")
    name = "action_head--9_checkpoint.pt"
    assert (tmp_path / "out" / name).read_bytes() == (copy / name).read_bytes()


def test_shards_replace_earlier_files(copy):
    from rlvla.models.vla.checkpoint import save_folder

    before = load(copy)
    save_folder(before, copy, max_shard_bytes=200_000)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and not (copy / "model.safetensors").exists()
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in before.state_dict().values())
    again = load(copy)
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in before.state_dict().items())
    save_folder(again, copy)
    assert [p.name for p in copy.glob("*.safetensors*")] == ["model.safetensors"]


def test_evaluations_of_the_start_are_not_those_of_what_is_trained_from_it(copy, tmp_path):
    for name in ("eval.json", "eval.md", "eval_1.json", "evaluation_notes.json"):
        (copy / name).write_text("{}")
    Actor.from_pretrained(copy).save_pretrained(tmp_path / "saved")
    assert [p.name for p in sorted((tmp_path / "saved").glob("eval*"))] == ["evaluation_notes.json"]


def test_platforms_are_explicit(copy):
    edit_config(copy, action_chunk_len=None, image_preprocessing=None, gripper_convention=None)
    raw = {k: v for k, v in json.loads((copy / "config.json").read_text()).items() if v is not None}
    (copy / "config.json").write_text(json.dumps(raw))
    config = load(copy, platform="libero").config
    assert (config.action_chunk_len, config.image_preprocessing, config.gripper_convention) == (8, "libero", "libero")
    checkpoint = check_checkpoint(copy, overrides={"platform": "libero"})
    for model in (checkpoint.load_reward_model(new=True), checkpoint.load_return_model(new=True)):
        assert model.inputs.config == config, "as the policy"
    with pytest.raises(ConfigError) as caught:
        load(copy, platform="robotwin")
    assert "action_dim 14" in str(caught.value) and "action_normalization bounds" in str(caught.value)
    with pytest.raises(ConfigError, match="platform 'moon' is unknown"):
        load(copy, platform="moon")
