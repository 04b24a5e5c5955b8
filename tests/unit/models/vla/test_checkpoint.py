"""Checkpoint folders: reading, writing, errors."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvla.models.dataset_statistics import resolve_statistics_key
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.errors import ConfigError

UNUSED = "vision_backbone.fused_featurizer.attn_pool.latent"


@pytest.fixture
def copy(tiny_folder, tmp_path):
    """A checkpoint folder that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def load(folder, **overrides):
    return OpenVLAForActionPrediction.from_pretrained(folder, **overrides)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_saved_folder_equals_the_loaded_one(tiny_folder, tmp_path):
    load(tiny_folder).save_pretrained(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in tiny_folder.iterdir()}
    for path in tiny_folder.iterdir():
        copied = tmp_path / "out" / path.name
        if path.suffix == ".safetensors":
            before, after = load_file(path), load_file(copied)
            assert UNUSED in before and before.keys() == after.keys()
            assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
        elif path.suffix == ".json":
            assert json.loads(copied.read_text()) == json.loads(path.read_text()), path.name


def test_trained_weights_and_new_statistics_survive(tiny, tmp_path):
    with torch.no_grad():
        tiny.projector.fc1.weight.add_(1.0)
    tiny.dataset_statistics = {"other": {"action": {}}}
    tiny.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert torch.equal(again.projector.fc1.weight, tiny.projector.fc1.weight)
    assert again.dataset_statistics == {"other": {"action": {}}}


def test_saving_into_the_folder_it_came_from(copy):
    model = load(copy)
    expected = {name: p.clone() for name, p in model.state_dict().items()}
    model.save_pretrained(copy)
    assert all(torch.equal(expected[name], p) for name, p in load(copy).state_dict().items())
    assert all(torch.equal(expected[name], p) for name, p in model.state_dict().items())


def test_sharded_checkpoint_and_norm_stats_in_config(copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, copy / shard)
    (copy / "model.safetensors").unlink()
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    statistics = json.loads((copy / "dataset_statistics.json").read_text())
    (copy / "dataset_statistics.json").unlink()
    edit_json(
        copy / "config.json", norm_stats=statistics, auto_map={"AutoModel": "a/b--code.Model"}, torch_dtype="float32"
    )

    model = load(copy)
    assert model.dataset_statistics == statistics
    assert all(torch.equal(tensors[name], p) for name, p in model.state_dict().items())
    model.save_pretrained(tmp_path / "out")
    before, after = (json.loads((f / "config.json").read_text()) for f in (copy, tmp_path / "out"))
    assert after == before
    assert load(tmp_path / "out").state_dict().keys() == tensors.keys()

    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors is missing"):
        load(copy)


def test_separate_proprio_projector_file(copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    prefix = "proprio_projector."
    separate = {f"module.{k.removeprefix(prefix)}": v for k, v in tensors.items() if k.startswith(prefix)}
    edit_tensors(copy, lambda t: [t.pop(k) for k in list(t) if k.startswith(prefix)])
    torch.save(separate, copy / "proprio_projector--500_checkpoint.pt")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("use_proprio", "proprio_dim")})
    )
    model = load(copy)
    assert model.config.use_proprio and model.config.proprio_dim == 6
    assert torch.equal(model.proprio_projector.fc2.weight, tensors[f"{prefix}fc2.weight"])
    model.save_pretrained(tmp_path / "out")
    saved = torch.load(tmp_path / "out" / "proprio_projector--500_checkpoint.pt", weights_only=True)
    assert saved.keys() == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert torch.equal(saved["fc1.bias"], tensors[f"{prefix}fc1.bias"])
    assert prefix + "fc1.bias" not in load_file(tmp_path / "out" / "model.safetensors")
    assert load(tmp_path / "out").config.use_proprio


def test_overrides_reach_the_configuration(tiny_folder, tmp_path):
    model = load(tiny_folder, action_chunk_len=4, center_crop=True)
    assert model.config.num_action_tokens == 28
    model.save_pretrained(tmp_path)
    assert load(tmp_path).config.action_chunk_len == 4


def test_missing_unexpected_and_misshapen_tensors_are_all_listed(copy):
    def damage(tensors):
        tensors["foreign.weight"] = tensors.pop("projector.fc2.bias")
        tensors[UNUSED] = tensors[UNUSED][..., :-1].contiguous()

    edit_tensors(copy, damage)
    with pytest.raises(ConfigError) as caught:
        load(copy)
    message = str(caught.value)
    assert "missing: projector.fc2.bias" in message
    assert "unexpected: foreign.weight" in message
    assert f"{UNUSED} is [1, 1, 47], expected [1, 1, 48]" in message


def test_state_dict_that_lacks_tensors_is_not_saved(tiny, tmp_path):
    state = tiny.state_dict()
    del state[UNUSED]
    with pytest.raises(ConfigError, match=UNUSED):
        tiny.save_pretrained(tmp_path / "out", state_dict=state)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f), "there is no folder"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
        (lambda f: edit_json(f / "config.json", model_type="llava"), "model_type is 'llava'"),
        (lambda f: edit_json(f / "config.json", model_variant="both"), "model_variant 'both' is unknown"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
        (lambda f: (f / "model.safetensors").write_bytes(b"not tensors"), "not a readable safetensors file"),
        (lambda f: edit_json(f / "config.json", use_proprio=False), "unexpected: proprio_projector.fc1.bias"),
        (lambda f: (f / "dataset_statistics.json").write_text("nonsense"), "not valid JSON"),
    ],
)
def test_foreign_and_damaged_folders_are_named(copy, damage, message):
    damage(copy)
    with pytest.raises(ConfigError, match=message):
        load(copy)


def test_figures_of_old_weights_are_not_saved_with_new_ones(copy, tmp_path):
    (copy / "eval.json").write_text("{}")
    (copy / "notes.txt").write_text("kept")
    load(copy).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").is_file()
    assert not (tmp_path / "out" / "eval.json").exists()


def test_statistics_key():
    statistics = {"libero_goal_no_noops": {}, "bridge": {}}
    assert resolve_statistics_key(statistics, "libero_goal") == "libero_goal_no_noops"
    assert resolve_statistics_key({**statistics, "libero_goal": {}}, "libero_goal") == "libero_goal"
    assert resolve_statistics_key(statistics, "bridge") == "bridge"
    assert resolve_statistics_key({"only": {}}, None) == "only"
    with pytest.raises(ConfigError, match=r"'libero_10' .*\['bridge', 'libero_goal_no_noops'\]"):
        resolve_statistics_key(statistics, "libero_10")
    with pytest.raises(ConfigError, match="say which one"):
        resolve_statistics_key(statistics, None)
