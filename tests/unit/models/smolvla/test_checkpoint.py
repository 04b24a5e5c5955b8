"""Folders: written as read, older ones, and one sentence for each that cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlvla.models.smolvla.checkpoint import SmolVLAFiles, check_smolvla
from rlvla.models.smolvla.tiny import build_tiny_smolvla
from rlvla.models.smolvla.vlm import find_vlm
from rlvla.utils.errors import ConfigError
from tests.support.lerobot_cases import edit, resave

from .conftest import SMALL, STATISTICS

WEIGHTS = "model.safetensors"
STATE_FILE = "policy_preprocessor_step_5_normalizer_processor.safetensors"


def make_older(folder: Path) -> None:
    """The layout before LeRobot 0.4."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for prefix in ("normalize_inputs", "normalize_targets", "unnormalize_outputs"):
            key = "observation.state" if prefix == "normalize_inputs" else "action"
            for name, values in STATISTICS[key].items():
                tensors[f"{prefix}.buffer_{key.replace('.', '_')}.{name}"] = torch.tensor(values)

    resave(folder / WEIGHTS, add)
    for path in folder.glob("policy_*"):
        path.unlink()


def test_same_seed_same_files(built: Path, tmp_path: Path) -> None:
    options = {"sentences": ["pick up the cube", "open the drawer"], "statistics": STATISTICS, "vlm": SMALL}
    options |= {"cameras": ("top", "wrist"), "chunk_size": 4, "state_dim": 3, "action_dim": 2}
    again = build_tiny_smolvla(tmp_path / "again", **options)
    files = [path.relative_to(built) for path in built.rglob("*") if path.is_file()]
    assert all((built / name).read_bytes() == (again / name).read_bytes() for name in files)
    other = build_tiny_smolvla(tmp_path / "other", **options, seed=1)
    assert (built / WEIGHTS).read_bytes() != (other / WEIGHTS).read_bytes()


def test_default_size(tmp_path: Path) -> None:
    statistics = {key: {"mean": [0.0] * n, "std": [1.0] * n} for key, n in (("observation.state", 8), ("action", 7))}
    folder = build_tiny_smolvla(tmp_path, sentences=["reach"], statistics=statistics)
    assert 400_000 < sum(np.prod(s) for s in check_smolvla(folder).folder.shapes.values()) < 600_000


def test_changed_weights_are_written_and_nothing_else(checkpoint: SmolVLAFiles, tmp_path: Path) -> None:
    state = checkpoint.load_network().state_dict()
    changed = {name: value + 1e-3 for name, value in state.items()}
    checkpoint.save(tmp_path / "new", changed)
    new = check_smolvla(tmp_path / "new").load_network().state_dict()
    assert all(torch.equal(new[name], changed[name]) for name in changed)
    source = checkpoint.folder.path
    for path in source.rglob("*"):
        if path.is_file() and path.name != WEIGHTS:
            assert path.read_bytes() == (tmp_path / "new" / path.relative_to(source)).read_bytes()


def test_weights_and_code_that_are_not_the_policys_are_left_behind(folder: Path, tmp_path: Path) -> None:
    """Only the tensors that the pipelines name belong to a policy, wherever they are."""
    (folder / "statistics").mkdir()
    shutil.move(folder / STATE_FILE, folder / "statistics" / "kept.safetensors")
    edit(folder / "policy_preprocessor.json", lambda c: c["steps"][5].update(state_file="statistics/kept.safetensors"))
    others = ("optimizer.pt", "reward_head.safetensors", "flow_std.safetensors", "modeling.py", "vlm/model.safetensors")
    for name in others:
        (folder / name).write_bytes(b"x")
    checkpoint = check_smolvla(folder)
    checkpoint.save(tmp_path / "copy", checkpoint.load_network().state_dict())
    copied, present = (
        {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}
        for root in (tmp_path / "copy", folder)
    )
    assert copied == present - set(others) and "statistics/kept.safetensors" in copied
    check_smolvla(tmp_path / "copy")


def test_a_copy_can_be_written_without_the_source(folder: Path, tmp_path: Path) -> None:
    checkpoint = check_smolvla(folder)
    state = checkpoint.load_network().state_dict()
    shutil.rmtree(folder)
    checkpoint.save(tmp_path / "copy", state)
    assert check_smolvla(tmp_path / "copy").config == checkpoint.config


def test_half_precision_is_kept_where_it_loses_nothing(folder: Path, tmp_path: Path) -> None:
    resave(folder / WEIGHTS, lambda tensors: tensors.update({n: v.bfloat16() for n, v in tensors.items()}))
    checkpoint = check_smolvla(folder)
    state = checkpoint.load_network().state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    state["model.state_proj.bias"] = state["model.state_proj.bias"] + 1e-4
    checkpoint.save(tmp_path / "copy", state)
    copy = load_file(str(tmp_path / "copy" / WEIGHTS))
    assert [name for name in copy if copy[name].dtype != torch.bfloat16] == ["model.state_proj.bias"]
    assert torch.equal(copy["model.state_proj.bias"], state["model.state_proj.bias"])


def test_other_tensors_are_not_written(checkpoint: SmolVLAFiles, tmp_path: Path) -> None:
    state = checkpoint.load_network().state_dict()
    state.pop("model.state_proj.bias")
    with pytest.raises(ConfigError, match=r"model\.state_proj\.bias"):
        checkpoint.save(tmp_path / "copy", state)
    assert not (tmp_path / "copy").exists()


def test_tied_heads_may_be_left_out(folder: Path, tmp_path: Path) -> None:
    head = "model.vlm_with_expert.vlm.lm_head.weight"
    edit(folder / "vlm" / "config.json", lambda c: c.update(tie_word_embeddings=True))
    resave(folder / WEIGHTS, lambda tensors: tensors.pop(head))
    checkpoint = check_smolvla(folder)
    state = checkpoint.load_network().state_dict()
    assert torch.equal(state[head], state["model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"])
    checkpoint.save(tmp_path / "copy", state)
    assert (tmp_path / "copy" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_older_folders(folder: Path, tmp_path: Path) -> None:
    before = check_smolvla(folder)
    make_older(folder)
    older = check_smolvla(folder)
    state, actions = np.ones((2, 3), np.float32), np.ones((2, 4, 2), np.float32)
    assert np.array_equal(older.processors.state.normalize(state), before.processors.state.normalize(state))
    assert np.array_equal(older.processors.action.unnormalize(actions), before.processors.action.unnormalize(actions))
    older.save(tmp_path / "copy", older.load_network().state_dict())
    assert load_file(str(tmp_path / "copy" / WEIGHTS)).keys() == load_file(str(folder / WEIGHTS)).keys()
    copy = check_smolvla(tmp_path / "copy").processors.state
    assert np.array_equal(copy.normalize(state), before.processors.state.normalize(state))


def test_states_and_actions(checkpoint: SmolVLAFiles) -> None:
    state = np.array([[1.1, 2.2, 3.3]])
    np.testing.assert_allclose(checkpoint.processors.state.normalize(state), [[1.0, 1.0, 1.0]], rtol=1e-5)
    actions, action = np.array([[0.6, -0.1]]), checkpoint.processors.action
    np.testing.assert_allclose(action.normalize(actions), [[1.0, 2.0]], rtol=1e-5)
    np.testing.assert_allclose(action.unnormalize(action.normalize(actions)), actions, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"features": {}}, {"normalize_observation_keys": ["observation.environment_state"]}, {"norm_map": {}}],
)
def test_unlisted_features_are_not_normalized(settings: dict[str, Any], folder: Path) -> None:
    edit(folder / "policy_preprocessor.json", lambda c: c["steps"][5]["config"].update(settings))
    state = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(check_smolvla(folder).processors.state.normalize(state), state)


def test_prompts(checkpoint: SmolVLAFiles) -> None:
    tokens, mask = checkpoint.tokenizer(["open the drawer", "pick up the cube\n"])
    ids = [checkpoint.tokenizer.ids(sentence) for sentence in ("open the drawer\n", "pick up the cube")]
    assert mask.sum(dim=1).tolist() == [len(row) for row in ids]
    assert tokens[0, mask[0]].tolist() == ids[0]
    assert mask[:, 0].all()
    assert len(checkpoint.tokenizer.ids("grüße " * 60)) == checkpoint.config.tokenizer_max_length


def test_evaluations_do_not_travel_with_the_weights(folder: Path) -> None:
    for name in ("eval.json", "eval.md", "eval_1.json", "notes.json"):
        (folder / name).write_text("{}")
    companions = check_smolvla(folder).folder.companions
    assert "notes.json" in companions and not any(name.startswith("eval") for name in companions)


def test_a_vlm_in_another_place(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder / "vlm", elsewhere)
    edit(folder / "config.json", lambda c: c.update(vlm_model_name=str(elsewhere)))
    edit(folder / "policy_preprocessor.json", lambda c: c["steps"][3]["config"].update(tokenizer_name=str(elsewhere)))
    checkpoint = check_smolvla(folder)
    assert checkpoint.vlm_folder == elsewhere
    assert not any("vlm" in name for name in checkpoint.folder.companions)


def test_folders_that_a_policy_names_are_found_from_its_copy(folder: Path, tmp_path: Path) -> None:
    """A vision-language model outside, and a tokenizer in a second folder inside or outside."""
    shutil.copytree(folder / "vlm", folder / "words")
    shutil.move(folder / "vlm", tmp_path / "vlm")
    edit(folder / "config.json", lambda c: c.update(vlm_model_name="../vlm"))
    for number, name in enumerate(("words", "../vlm")):
        step = {"tokenizer_name": name}
        edit(folder / "policy_preprocessor.json", lambda c, step=step: c["steps"][3]["config"].update(step))
        checkpoint = check_smolvla(folder)
        target = tmp_path / "elsewhere" / str(number) / "copy"
        checkpoint.save(target, checkpoint.load_network().state_dict())
        copy = check_smolvla(target)
        assert copy.vlm_folder == tmp_path / "vlm"
        assert copy.tokenizer.folder == (target / "words" if name == "words" else tmp_path / "vlm")


def test_a_vlm_in_the_local_cache(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--somebody--small" / "snapshots" / "abc"
    shutil.copytree(built / "vlm", snapshot)
    (tmp_path / "models--somebody--small" / "refs").mkdir()
    (tmp_path / "models--somebody--small" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert find_vlm("somebody/small", built) == snapshot


def _newer_step(folder: Path) -> None:
    new = {"registry_name": "relative_actions_processor", "config": {"enabled": True}}
    edit(folder / "policy_preprocessor.json", lambda c: c["steps"].append(new))


def _several_files(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


def _no_statistics(folder: Path) -> None:
    edit(folder / "policy_preprocessor.json", lambda c: c["steps"][5].pop("state_file"))


def _no_buffers(folder: Path) -> None:
    make_older(folder)
    resave(folder / WEIGHTS, lambda t: [t.pop(n) for n in list(t) if n.startswith("normalize_inputs")])


def _infinite_statistics(folder: Path) -> None:
    resave(folder / STATE_FILE, lambda t: t["observation.state.std"].fill_(float("inf")))


def _vlm_setting(part: str, name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "vlm" / "config.json", lambda c: c[part].update({name: value}))


BAD: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "other type": (lambda f: edit(f / "config.json", lambda c: c.update(type="act")), "mismatch", "act"),
    "no config": (lambda f: (f / "config.json").unlink(), "missing_file", "config.json"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "missing_file", WEIGHTS),
    "several files": (_several_files, "missing_file", "index"),
    "damaged weights": (lambda f: (f / WEIGHTS).write_bytes(b"x" * 20), "invalid_file", WEIGHTS),
    "bytes for numbers": (
        lambda f: resave(f / WEIGHTS, lambda t: t.update({"model.state_proj.bias": torch.zeros(3, dtype=torch.uint8)})),
        "invalid_file",
        "model.state_proj.bias (1 in all) is of type U8; F64, F32, F16, BF16",
    ),
    "other sizes": (
        lambda f: edit(f / "config.json", lambda c: c.update(max_state_dim=9)),
        "invalid_file",
        "state_proj",
    ),
    "newer step": (_newer_step, "mismatch", "relative_actions_processor"),
    "features of another type": (
        lambda f: edit(f / "policy_preprocessor.json", lambda c: c["steps"][5]["config"].update(features=3)),
        "invalid_file",
        "features",
    ),
    "no statistics": (_no_statistics, "invalid_file", "mean and std"),
    "no buffers": (_no_buffers, "invalid_file", "mean and std"),
    "statistics not finite": (_infinite_statistics, "invalid_file", "not finite"),
    "no state file": (lambda f: (f / STATE_FILE).unlink(), "missing_file", STATE_FILE),
    "one pipeline": (lambda f: (f / "policy_postprocessor.json").unlink(), "missing_file", "policy_postprocessor"),
    "a path that leaves": (
        lambda f: edit(f / "policy_preprocessor.json", lambda c: c["steps"][5].update(state_file="../x")),
        "invalid_file",
        "state_file",
    ),
    "no vlm": (lambda f: shutil.rmtree(f / "vlm"), "missing_file", "vlm_model_name"),
    "no tokenizer": (lambda f: (f / "vlm" / "tokenizer.json").unlink(), "missing_file", "tokenizer.json"),
    "damaged tokenizer": (lambda f: (f / "vlm" / "tokenizer.json").write_text("{}"), "invalid_file", "tokenizer"),
    "other vlm": (
        lambda f: edit(f / "vlm" / "config.json", lambda c: c.update(model_type="llava")),
        "mismatch",
        "llava",
    ),
    **{
        f"{name} {value} of the {part}": (_vlm_setting(part, name, value), "invalid_file", "vlm/config.json")
        for part, name, value in (
            ("text_config", "hidden_size", "x"),
            ("text_config", "hidden_size", 0),
            ("text_config", "rms_norm_eps", "x"),
            ("text_config", "rms_norm_eps", -1.0),
            ("text_config", "num_hidden_layers", "x"),
            ("text_config", "num_hidden_layers", 10**9),
            ("text_config", "vocab_size", 2**62),
            ("text_config", "model_type", "x"),
            ("text_config", "hidden_act", "x"),
            ("vision_config", "num_attention_heads", 0),
            ("vision_config", "num_hidden_layers", "x"),
            ("vision_config", "layer_norm_eps", 0.0),
            ("vision_config", "hidden_act", "x"),
            ("vision_config", "hidden_act", ["gelu"]),
            ("vision_config", "num_channels", 4),
        )
    },
    "images that do not fit": (
        lambda f: edit(f / "config.json", lambda c: c.update(resize_imgs_with_padding=[40, 40])),
        "invalid_file",
        "multiple of 16",
    ),
    "layers that do not fit": (
        lambda f: edit(f / "config.json", lambda c: c.update(num_expert_layers=2)),
        "invalid_file",
        "num_expert_layers",
    ),
}


@pytest.mark.parametrize("damage", BAD)
def test_bad_folders(damage: str, folder: Path) -> None:
    harm, reason, excerpt = BAD[damage]
    harm(folder)
    with pytest.raises(ConfigError) as error:
        check_smolvla(folder)
    assert len(error.value.problems) == 1, error.value
    assert error.value.problems[0].reason == reason
    assert excerpt in str(error.value)
    assert "\n" not in str(error.value)


def test_all_problems_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "vlm")
    (folder / WEIGHTS).unlink()
    _no_statistics(folder)
    with pytest.raises(ConfigError) as error:
        check_smolvla(folder)
    assert len(error.value.problems) == 3


def test_weights_that_are_not_finite(folder: Path) -> None:
    resave(folder / WEIGHTS, lambda t: t["model.state_proj.bias"].fill_(float("nan")))
    with pytest.raises(ConfigError, match=r"model\.state_proj\.bias"):
        check_smolvla(folder).load_network()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vlm": replace(SMALL, image_size=40)}, "multiple of 16"),
        ({"vlm": replace(SMALL, dim=40)}, "multiples of 32"),
        ({"statistics": {"action": STATISTICS["action"]}}, "observation.state.mean"),
        ({"sentences": [" "]}, "sentence"),
    ],
)
def test_impossible_tiny_policies(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sentences": ["reach"], "statistics": STATISTICS, "state_dim": 3, "action_dim": 2}
    with pytest.raises(ConfigError, match=reason):
        build_tiny_smolvla(tmp_path, **{**options, **change})
