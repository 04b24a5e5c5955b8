"""Folders: written as read, names of converted files, prompts, and one sentence for each that cannot be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlvla.models.families import check_checkpoint
from rlvla.models.inspection import describe
from rlvla.models.lerobot.new import NewPolicyFacts
from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.models.pi0.checkpoint import EXPERT_HEAD, HEAD, Pi0Files, check_pi0, prompts_with_states, state_in_bins
from rlvla.models.pi0.config import PALIGEMMA
from rlvla.models.pi0.network import VLM
from rlvla.utils.errors import ConfigError
from tests.support.lerobot_cases import edit, resave

from .conftest import NEW_KEYS, STATISTICS, build, to_lerobot_06

WEIGHTS = "model.safetensors"
EMBEDDING = f"{VLM}model.language_model.embed_tokens.weight"


def rename(tensors: dict[str, torch.Tensor], change: Callable[[str], str]) -> None:
    for name in list(tensors):
        tensors[change(name)] = tensors.pop(name)


def test_same_seed_same_files(built: Path, checkpoint: Pi0Files, tmp_path: Path) -> None:
    again = build(tmp_path / "again", checkpoint.config.type)
    files = [path.relative_to(built) for path in built.rglob("*") if path.is_file()]
    assert len(files) == 10
    assert all((built / name).read_bytes() == (again / name).read_bytes() for name in files)


def test_changed_weights_are_written_and_nothing_else(checkpoint: Pi0Files, tmp_path: Path) -> None:
    changed = {name: value + 1e-3 for name, value in checkpoint.load_network().state_dict().items()}
    checkpoint.save(tmp_path / "new", changed)
    new = check_pi0(tmp_path / "new").load_network().state_dict()
    assert all(torch.equal(new[name], changed[name]) for name in changed)
    source = checkpoint.folder.path
    for path in source.rglob("*"):
        if path.is_file() and path.name != WEIGHTS:
            assert path.read_bytes() == (tmp_path / "new" / path.relative_to(source)).read_bytes()


def test_disabled_relative_actions_are_kept(lerobot_06: Path, tmp_path: Path) -> None:
    """LeRobot >= 0.5.1 writes their steps and settings into every folder."""
    checkpoint = check_pi0(lerobot_06)
    checkpoint.save(tmp_path / "copy", checkpoint.load_network().state_dict())
    for path in lerobot_06.rglob("*"):
        if path.is_file() and path.name != WEIGHTS:
            assert path.read_bytes() == (tmp_path / "copy" / path.relative_to(lerobot_06)).read_bytes()
    assert NEW_KEYS.items() <= json.loads((tmp_path / "copy" / "config.json").read_text()).items()


def test_other_data_keeps_the_steps_of_relative_actions(lerobot_06: Path, tmp_path: Path) -> None:
    before = check_pi0(lerobot_06)
    statistics = {"proprio": STATISTICS["observation.state"], "action": STATISTICS["action"]}
    before.refit(tmp_path / "new", NewPolicyFacts(["push"], statistics, "pushes", ("front",), (24, 24), 3, 3, 2))
    check_pi0(tmp_path / "new")
    place = 3 if before.config.state_in_prompt else 6
    for name, number, step in (("pre", place, "normalizer"), ("post", 0, "unnormalizer")):
        steps, old = (
            json.loads((folder / f"policy_{name}processor.json").read_text())["steps"]
            for folder in (tmp_path / "new", lerobot_06)
        )
        assert [s["registry_name"] for s in steps] == [s["registry_name"] for s in old]
        assert steps[number]["state_file"] == f"policy_{name}processor_step_{number}_{step}_processor.safetensors"
    relative = before.processors.steps["relative_actions_processor"] | {"action_names": None}
    assert check_pi0(tmp_path / "new").processors.steps["relative_actions_processor"] == relative
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (NEW_KEYS | {"action_feature_names": None}).items() <= config.items()


@pytest.mark.parametrize(
    ("file", "step"),
    [
        ("policy_preprocessor.json", "relative_actions_processor"),
        ("policy_postprocessor.json", "absolute_actions_processor"),
        ("config.json", "use_relative_actions"),
    ],
)
def test_relative_actions_are_refused(file: str, step: str, lerobot_06: Path) -> None:
    def enable(content: dict[str, Any]) -> None:
        for entry in content.get("steps", ()):
            if entry["registry_name"] == step:
                entry["config"]["enabled"] = True
        if step in content:
            content[step] = True

    edit(lerobot_06 / file, enable)
    with pytest.raises(ConfigError, match=f"{file}.*{step}.*not supported") as error:
        check_pi0(lerobot_06)
    assert len(error.value.problems) == 1


def test_settings_of_a_run_are_written(checkpoint: Pi0Files, tmp_path: Path) -> None:
    checkpoint.with_sampling(2, 3).save(tmp_path / "new", checkpoint.load_network().state_dict())
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (content["n_action_steps"], content["num_inference_steps"]) == (2, 3)
    assert check_pi0(tmp_path / "new").config.steps == 3


def test_half_precision_is_kept_where_it_loses_nothing(folder: Path, tmp_path: Path) -> None:
    resave(folder / WEIGHTS, lambda tensors: tensors.update({n: v.bfloat16() for n, v in tensors.items()}))
    checkpoint = check_pi0(folder)
    state = checkpoint.load_network().state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    state["model.state_proj.bias"] = state["model.state_proj.bias"] + 1e-4
    checkpoint.save(tmp_path / "copy", state)
    copy = load_file(str(tmp_path / "copy" / WEIGHTS))
    assert [name for name in copy if copy[name].dtype != torch.bfloat16] == ["model.state_proj.bias"]


def test_tied_and_unused_heads(folder: Path, tmp_path: Path) -> None:
    """Either name of the shared weights will do; a head that nothing reads is kept, without its source."""
    before = check_pi0(folder).load_network().state_dict()
    extra = torch.randn(512, 24)
    resave(folder / WEIGHTS, lambda t: t.update({EMBEDDING: t[HEAD].clone(), EXPERT_HEAD: extra}))
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    resave(other / WEIGHTS, lambda t: t.pop(HEAD))
    both, checkpoint = check_pi0(folder), check_pi0(other)
    for loaded in (both, checkpoint):
        state = loaded.load_network().state_dict()
        assert all(torch.equal(state[name], before[name]) for name in before)
    for path in (folder, other):
        shutil.rmtree(path)
    changed = {name: value + 1 for name, value in before.items()}
    both.save(tmp_path / "both", changed)
    checkpoint.save(tmp_path / "one", changed)
    for name, heads in (("both", {HEAD, EMBEDDING}), ("one", {EMBEDDING})):
        copy = load_file(str(tmp_path / name / WEIGHTS))
        assert {HEAD, EMBEDDING} & set(copy) == heads
        assert all(torch.equal(copy[head], before[EMBEDDING] + 1) for head in heads)
        assert torch.equal(copy[EXPERT_HEAD], extra)


def test_the_embedding_is_read_and_a_stale_head_kept(folder: Path, tmp_path: Path) -> None:
    """LeRobot >= 0.5 stores both; full fine-tuning trains the embedding alone."""
    embedding = torch.randn(512, 32)
    resave(folder / WEIGHTS, lambda t: t.update({EMBEDDING: embedding}))
    checkpoint = check_pi0(folder)
    state = checkpoint.load_network().state_dict()
    assert torch.equal(state[EMBEDDING], embedding)
    before = load_file(str(folder / WEIGHTS))
    checkpoint.save(tmp_path / "copy", state | {EMBEDDING: embedding + 1})
    after = load_file(str(tmp_path / "copy" / WEIGHTS))
    assert after.keys() == before.keys()
    assert torch.equal(after[EMBEDDING], embedding + 1) and torch.equal(after[HEAD], before[HEAD])


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_names_of_converted_files(family: str, pi0_folder: Path, pi05_folder: Path, tmp_path: Path) -> None:
    """Without `model.`, with the other type's name for the time's MLP, and with tensors that pi0.5 does not have."""
    source, folder = pi0_folder if family == "pi0" else pi05_folder, tmp_path / "policy"
    shutil.copytree(source, folder)
    before = check_pi0(folder).load_network().state_dict()
    own, other = ("action_time_mlp_", "time_mlp_") if family == "pi0" else ("time_mlp_", "action_time_mlp_")

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        rename(tensors, lambda name: name.removeprefix("model.").replace(own, other))
        if family == "pi05":
            tensors["state_proj.weight"] = torch.ones(24, 5)
            tensors["paligemma_with_expert.gemma_expert.model.norm.weight"] = torch.ones(24)

    resave(folder / WEIGHTS, convert)
    checkpoint = check_pi0(folder)
    state = checkpoint.load_network().state_dict()
    assert all(torch.equal(state[name], before[name]) for name in before)
    checkpoint.save(tmp_path / "copy", state)
    assert (tmp_path / "copy" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_other_tensors_are_not_written(checkpoint: Pi0Files, tmp_path: Path) -> None:
    state = checkpoint.load_network().state_dict()
    state.pop("model.action_in_proj.bias")
    with pytest.raises(ConfigError, match=r"model\.action_in_proj\.bias"):
        checkpoint.save(tmp_path / "copy", state)
    assert not (tmp_path / "copy").exists()


def test_states_and_actions(pi0_folder: Path, pi05_folder: Path) -> None:
    actions = np.array([[0.6, 0.25]])
    state, expected = np.array([[1.1, 2.2, 3.0]]), {"pi0": [1.0, 1.0, 0.9], "pi05": [0.05, 0.6, 1.0]}
    for folder in (pi0_folder, pi05_folder):
        checkpoint = check_pi0(folder)
        normalized, action = checkpoint.processors.state.normalize(state), checkpoint.processors.action
        np.testing.assert_allclose(normalized, [expected[checkpoint.config.type]], rtol=1e-5)
        np.testing.assert_allclose(action.unnormalize(action.normalize(actions)), actions, rtol=1e-5)


def test_states_in_bins() -> None:
    edges = np.array([[-1.1, -1.0, -0.9999, 0.0, 0.9999, 1.0, 7.0]], np.float32)
    assert state_in_bins(edges, 8).tolist() == [[-1, 0, 0, 128, 255, 255, 255, 128]]
    centers = -1 + (np.arange(256, dtype=np.float64)[None] + 0.5) / 128
    assert state_in_bins(centers, 3).tolist() == [list(range(256))]


def test_prompts(pi0_folder: Path, pi05_folder: Path) -> None:
    texts, state = ["open the drawer", "pick_up the\ncube "], torch.tensor([[0.0, -1.0, 1.0], [0.5, 0.0, 0.0]])
    older, newer = check_pi0(pi0_folder), check_pi0(pi05_folder)
    tokens, mask = older.prompts(texts, state)
    assert tokens.shape == (2, 24) and torch.equal(*(older.prompts(texts, s)[0] for s in (state, state + 1)))
    assert tokens[0, mask[0]].tolist() == older.tokenizer.ids("open the drawer\n")
    assert prompts_with_states(texts, state.numpy(), 4) == [
        "Task: open the drawer, State: 128 0 255 128;\nAction: ",
        "Task: pick up the cube, State: 192 128 128 128;\nAction: ",
    ]
    tokens, mask = newer.prompts(texts, state)
    assert newer.tokenizer.max_length == tokens.shape[1] == 90 and mask[:, 0].all()
    assert not torch.equal(tokens, newer.prompts(texts, state / 2)[0])


def test_a_tokenizer_outside_is_found_from_a_copy(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / PALIGEMMA, tmp_path / "words")
    step = "policy_preprocessor.json"
    edit(
        folder / step,
        lambda c: [
            s["config"].update(tokenizer_name="../words") for s in c["steps"] if "tokenizer_name" in s["config"]
        ],
    )
    checkpoint = check_pi0(folder)
    checkpoint.save(tmp_path / "elsewhere" / "copy", checkpoint.load_network().state_dict())
    assert check_pi0(tmp_path / "elsewhere" / "copy").tokenizer.folder == tmp_path / "words"


def _record(folder: Path, **settings: Any) -> None:
    (folder / SETTINGS_FILE).write_text(json.dumps(settings))


def _stale_head(folder: Path) -> None:
    resave(folder / WEIGHTS, lambda tensors: tensors.update({EMBEDDING: tensors[HEAD] + 1}))


def _trained(folder: Path) -> None:
    (folder / "train_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("changes", "inputs", "reason"),
    [
        ([], "0.5", "assumed"),
        ([to_lerobot_06], "0.5", "relative_actions_processor"),
        ([_trained], "0.4", "one tensor"),
        ([_trained, _stale_head], "0.5", "assumed"),
        ([_trained, to_lerobot_06], "0.5", "relative_actions_processor"),
        ([lambda f: _record(f, flow_method="sde")], "0.5", "assumed"),
        ([lambda f: _record(f, critic_features="expert")], "0.4", "before"),
        ([to_lerobot_06, lambda f: _record(f, lerobot_inputs="0.4")], "0.4", "recorded"),
        ([_trained, lambda f: _record(f, lerobot_inputs="0.5")], "0.5", "recorded"),
    ],
)
def test_whose_inputs_a_policy_reads(
    changes: list[Callable[[Path], Any]], inputs: str, reason: str, newer: Path, tmp_path: Path
) -> None:
    """The choice is recorded in a copy, and stays."""
    for change in changes:
        change(newer)
    checkpoint = check_checkpoint(newer)
    policy: Any = checkpoint.load_policy()
    policy.save_pretrained(tmp_path / "copy")
    files, copy = check_pi0(newer), check_pi0(tmp_path / "copy")
    assert (files.inputs, copy.inputs) == (inputs, inputs) and reason in files.inputs_reason
    assert copy.inputs_reason == "recorded in rlvla_policy.json"
    prompt = {"0.4": "128 0 255" + " 128" * 29, "0.5": "128 0 255"}[inputs]
    state = np.array([[0.0, -1.0, 1.0]], np.float32)
    for read in (files, copy):
        assert read.prompt_texts(["go"], state) == [f"Task: go, State: {prompt};\nAction: "]
    images = files.pixels(torch.full((1, 1, 20, 40, 3), 255, dtype=torch.uint8))
    assert images[..., 0, 0].unique().tolist() == [{"0.4": -3.0, "0.5": -1.0}[inputs]]
    padding = {"0.4": "images padded with -3, state in the prompt padded to 32 numbers", "0.5": "not padded"}[inputs]
    assert padding in describe(newer).facts["inputs"] and reason in describe(newer).facts["inputs"]


def test_the_size_of_the_padded_state_in_the_prompt(newer: Path) -> None:
    step = "policy_preprocessor.json"
    edit(newer / step, lambda c: c["steps"][3]["config"].update(max_state_dim=5))
    assert check_pi0(newer).prompt_state_dim == 3
    _record(newer, lerobot_inputs="0.4")
    assert check_pi0(newer).prompt_state_dim == 5


def test_an_instruction_beyond_the_vocabulary(pi0_folder: Path) -> None:
    """PaliGemma's tokenizer has a token for images that the embedding does not have, and prompts do not use."""
    checkpoint = check_pi0(pi0_folder)
    texts, state = ["x", "pick up the cube"], torch.zeros(2, 3)
    largest = int(checkpoint.prompts(texts, state)[0].max())
    replace(checkpoint, sizes=replace(checkpoint.sizes, vocabulary=largest + 1)).prompts(texts, state)
    with pytest.raises(ConfigError, match="pick up the cube"):
        replace(checkpoint, sizes=replace(checkpoint.sizes, vocabulary=largest)).prompts(texts, state)


def test_images(checkpoint: Pi0Files) -> None:
    """Centered; padded with black."""
    images = checkpoint.pixels(torch.full((1, 1, 20, 40, 3), 255, dtype=torch.uint8))
    assert images.shape == (1, 1, 3, 32, 32)
    assert (images[..., 8:24, :] == 1).all()
    assert (images[..., :8, :] == -1).all() and (images[..., 24:, :] == -1).all()


def _other_statistics(folder: Path, fill: float) -> None:
    name = "policy_preprocessor_step_5_normalizer_processor.safetensors"
    resave(folder / name, lambda t: t["observation.state.std"].fill_(fill))


def _late_normalizer(folder: Path) -> None:
    edit(folder / "policy_preprocessor.json", lambda c: c["steps"].append(c["steps"].pop(2)))


BAD: dict[str, tuple[str, Callable[[Path], Any], str, str]] = {
    "other type": ("folder", lambda f: edit(f / "config.json", lambda c: c.update(type="act")), "mismatch", "act"),
    "no weights": ("folder", lambda f: (f / WEIGHTS).unlink(), "missing_file", WEIGHTS),
    "other sizes": (
        "folder",
        lambda f: edit(f / "config.json", lambda c: c.update(max_state_dim=9)),
        "invalid_file",
        "state_proj",
    ),
    "the other family's type": (
        "folder",
        lambda f: edit(
            f / "policy_preprocessor.json",
            lambda c: (
                c["steps"].pop(2)
                and c["steps"].insert(2, {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}})
            ),
        ),
        "mismatch",
        "pi05_prepare_state",
    ),
    "no embedding": ("folder", lambda f: resave(f / WEIGHTS, lambda t: t.pop(HEAD)), "invalid_file", "embed_tokens"),
    "statistics not finite": ("folder", lambda f: _other_statistics(f, float("inf")), "invalid_file", "not finite"),
    "no tokenizer": ("folder", lambda f: shutil.rmtree(f / "google"), "missing_file", f"hf download {PALIGEMMA}"),
    "damaged tokenizer": (
        "folder",
        lambda f: (f / PALIGEMMA / "tokenizer.json").write_text("{}"),
        "invalid_file",
        "tokenizer",
    ),
    "patches that do not fit": (
        "newer",
        lambda f: edit(f / "sizes.json", lambda c: c["vision"].update(patch_size=12)),
        "invalid_file",
        "multiple of the 12",
    ),
    "sizes that do not fit": (
        "folder",
        lambda f: edit(f / "sizes.json", lambda c: c["expert"].update(depth=2)),
        "invalid_file",
        "depth",
    ),
    "states normalized too late": ("newer", _late_normalizer, "invalid_file", "normalized states"),
    "inputs of another LeRobot": ("folder", lambda f: _record(f, lerobot_inputs="0.6"), "invalid_file", "0.4, 0.5"),
    "a state of no size": (
        "newer",
        lambda f: edit(f / "policy_preprocessor.json", lambda c: c["steps"][3]["config"].update(max_state_dim=-1)),
        "invalid_file",
        "max_state_dim",
    ),
}


@pytest.mark.parametrize("damage", BAD)
def test_bad_folders(damage: str, folder: Path, newer: Path) -> None:
    which, harm, reason, excerpt = BAD[damage]
    path = folder if which == "folder" else newer
    harm(path)
    with pytest.raises(ConfigError) as error:
        check_pi0(path)
    texts = [problem for problem in error.value.problems if excerpt in str(problem)]
    assert texts and {problem.reason for problem in texts} == {reason}, error.value
    assert len(error.value.problems) == 1 or damage == "patches that do not fit"
    assert all("\n" not in str(problem) for problem in error.value.problems)


def test_all_problems_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "google")
    (folder / WEIGHTS).unlink()
    (folder / "sizes.json").write_text("{}")
    _other_statistics(folder, float("nan"))
    with pytest.raises(ConfigError) as error:
        check_pi0(folder)
    assert len(error.value.problems) == 7, error.value


def test_weights_that_are_not_finite(folder: Path) -> None:
    resave(folder / WEIGHTS, lambda t: t["model.state_proj.bias"].fill_(float("nan")))
    with pytest.raises(ConfigError, match=r"model\.state_proj\.bias"):
        check_pi0(folder).load_network()


def test_states_far_outside_of_the_range_fall_into_the_outermost_bins() -> None:
    """As in LeRobot and openpi, whose bin below -1 is numbered -1."""
    states = np.array([[-50.0, -1.0, 0.0, 0.999, 1.0, 50.0]])
    assert state_in_bins(states, 6).tolist() == [[-1, 0, 128, 255, 255, 255]]
