"""DSRL actors: executed actions, stored observations, folders, and the base policy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvla.models import describe
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact
from rlvla.models.dsrl.family import DSRLCheckpoint, new_dsrl
from rlvla.models.dsrl.policy import DSRLPolicy
from rlvla.models.families import check_checkpoint, checkpoint_overrides
from rlvla.models.smolvla.tiny import TinyVlm, build_tiny_smolvla
from rlvla.utils.errors import ConfigError
from tests.support.flow_folders import TWO, write_flow

VLM = TinyVlm(image_size=16, patch_size=8, vision_dim=32, vision_depth=1, dim=32, layers=2)
WORDS = ("reach the red disc", "reach the blue disc")
ROWS = 6


def write_smolvla(folder: Path) -> Path:
    """Two of three actions are executed, and both are padded from two numbers to five."""
    statistics = {"observation.state": {"mean": [0.1, -0.2], "std": [1.0, 2.0]}}
    statistics["action"] = {"mean": [0.5, -0.5], "std": [0.5, 0.2]}
    sizes = {"chunk_size": 3, "n_action_steps": 2, "state_dim": 2, "action_dim": 2, "max_action_dim": 5}
    return build_tiny_smolvla(
        folder, sentences=WORDS, statistics=statistics, cameras=("top",), vlm=VLM, num_steps=3, **sizes
    )


WRITERS = {"compact": write_flow, "learned_std": lambda f: write_flow(f, flow_method="noise"), "smolvla": write_smolvla}


@pytest.fixture(scope="module", params=WRITERS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param) / "base")


def new(base: Path, folder: Path | None = None, **options: Any) -> DSRLCheckpoint:
    settings = {"hidden_sizes": (16,), "noise_range": 0.7, "repeat_noise": False, "base_settings": {}} | options
    return new_dsrl(folder or Path("nowhere"), check_checkpoint(base), **settings)


def policy_of(base: Path, **options: Any) -> DSRLPolicy:
    torch.manual_seed(0)
    policy: Any = new(base, **options).load_policy()
    for parameter in policy.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return policy


def observations(policy: Any) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng, side = np.random.default_rng(1), policy.spec.image_size or 16
    images = rng.integers(0, 256, (ROWS, 1, side, side, 3)).astype(np.uint8)
    proprio = rng.normal(size=(ROWS, 2)).astype(np.float32)
    return *policy.prepare(images, proprio), [WORDS[row % 2] for row in range(ROWS)]


def draws(policy: Any) -> np.ndarray:
    rng = np.random.default_rng(2)
    return np.stack([policy.spec.draw(rng) for _ in range(ROWS)])


def along_the_ode(base: Any, observed: tuple, start: np.ndarray) -> np.ndarray:
    """Greedy actions of the base with `start` [B, C, M] as initial noise."""
    width = base.spec.noise_shape[0]
    noise = np.pad(start.reshape(ROWS, -1), ((0, 0), (0, width - start[0].size)))
    return base.act(*observed, noise=noise, greedy=True).actions


@pytest.mark.parametrize("repeat", [False, True])
def test_the_base_executes_the_noise_that_was_chosen(base: Path, repeat: bool) -> None:
    policy = policy_of(base, repeat_noise=repeat)
    decision = policy.act(*observations(policy), noise=draws(policy))
    length, width = policy.base.spec.start_shape
    chosen = 0.7 * decision.trace["action"].reshape(ROWS, -1, 2)
    assert chosen.shape[1] == (1 if repeat else policy.spec.action_chunk_len)
    assert np.abs(chosen).max() < 0.7 and np.ptp(chosen) > 0.5
    start = np.zeros((ROWS, length, width), np.float32)
    start[..., :2] = np.concatenate([chosen, *[chosen[:, -1:]] * (length - chosen.shape[1])], 1)
    expected = along_the_ode(policy.base, observations(policy), start)
    assert np.allclose(decision.actions, expected, atol=1e-6)
    moved = along_the_ode(policy.base, observations(policy), start + 0.1)
    assert np.abs(moved - expected).max() > 1e-3, "the noise decides what is executed"


def test_random_decisions_start_from_standard_normal_noise(base: Path) -> None:
    policy = policy_of(base)
    greedy = policy.act(*observations(policy), noise=None)
    policy.random_actions = True
    drawn = draws(policy)
    decision = policy.act(*observations(policy), noise=drawn)
    assert np.allclose(0.7 * decision.trace["action"], drawn[:, 1:], atol=1e-6) and np.abs(drawn).max() > 1
    assert np.array_equal(policy.act(*observations(policy), noise=None).actions, greedy.actions), (
        "evaluations do not explore"
    )


def test_a_new_actor_begins_near_the_middle_of_the_noise(base: Path) -> None:
    policy: Any = new(base).load_policy()
    decision = policy.act(*observations(policy), noise=None)
    start = np.zeros((ROWS, *policy.base.spec.start_shape), np.float32)
    assert np.abs(decision.trace["action"]).max() < 0.3
    assert np.abs(decision.actions - along_the_ode(policy.base, observations(policy), start)).max() < 0.3


def test_stored_observations_equal_the_base_summaries(base: Path) -> None:
    policy = policy_of(base)
    images, proprio, instructions = observations(policy)
    samples = []
    for first in (0, ROWS // 2):
        rows = slice(first, first + ROWS // 2 - 1)
        trace = policy.act(images[rows], proprio[rows], instructions[rows], noise=None).trace
        last = {"last_images": images[rows.stop], "last_proprio": proprio[rows.stop]}
        sample = {"trace": trace, **last, "last_instruction": instructions[rows.stop]}
        kept = {name: torch.from_numpy(value) for name, value in trace.items()}
        last = {name: torch.from_numpy(value) for name, value in last.items()}
        samples.append(SimpleNamespace(**{**sample, "trace": kept, **last}))
    stored = np.concatenate([columns["proprio"] for columns in policy.stored_observations(samples)])
    with torch.no_grad():
        summary = policy.base.summary(policy.base.encode(images, proprio, instructions)).numpy()
    assert np.allclose(stored, np.concatenate([summary, proprio], 1), atol=1e-5)
    assert stored.shape == (ROWS, policy.settings.state_dim) and np.ptp(stored, axis=0)[: summary.shape[1]].max() > 0.01


def test_the_base_is_neither_trained_nor_saved(base: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    policy = policy_of(base)
    policy.train()
    policy.to(torch.float64).to(torch.float32)
    assert not policy.base.training and not any(p.requires_grad for p in policy.base.parameters())
    assert next(policy.base.parameters()).dtype == torch.float32
    policy.save_pretrained(tmp_path / "actor")
    names = {path.name for path in (tmp_path / "actor").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    assert load_file(tmp_path / "actor" / "model.safetensors").keys() == policy.state_dict().keys()
    assert not any("base" in name or "velocity" in name for name in policy.state_dict())
    assert {path: path.read_bytes() for path in base.rglob("*") if path.is_file()} == before


def test_a_folder_holds_the_actor_and_finds_its_base(base: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    own = Path(shutil.copytree(base, tmp_path / "here" / "base"))
    policy = policy_of(own, repeat_noise=True)
    folder = tmp_path / "here" / "run" / "policy"
    policy.save_pretrained(folder)
    read = check_checkpoint(folder, overrides=checkpoint_overrides(folder, SimpleNamespace())).load_policy()
    assert read.spec == policy.spec and read.spec.reads_images, "the flow policy sees the cameras"
    expected = policy.act(*observations(policy), noise=draws(policy)).actions
    assert np.array_equal(read.act(*observations(read), noise=draws(read)).actions, expected)
    (tmp_path / "here").rename(tmp_path / "there")  # moved together
    read = check_checkpoint(tmp_path / "there" / "run" / "policy").load_policy()
    assert np.array_equal(read.act(*observations(read), noise=draws(read)).actions, expected)
    described = describe(tmp_path / "there" / "run" / "policy")
    assert described.loadable and str(tmp_path / "there" / "base") in described.facts["base"]


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    policy_of(write_flow(tmp_path / "base"), repeat_noise=True).save_pretrained(tmp_path / "actor")
    return tmp_path / "actor"


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(actor: Path) -> None:
        content = json.loads((actor / "config.json").read_text())
        (actor / "config.json").write_text(json.dumps(content | changes))

    return edit


def retrained(actor: Path) -> None:
    weights = actor.parent / "base" / "model.safetensors"
    state = load_file(weights)
    state["velocity_network.output.bias"] += 0.1
    save_file(state, weights)


DAMAGES = {
    "gone": (lambda actor: shutil.rmtree(actor.parent / "base"), "is missing.*write its new path into `base`"),
    "changed": (retrained, "model.safetensors changed"),
    "other statistics": (
        lambda actor: (actor.parent / "base" / "dataset_statistics.json").write_text("{}"),
        "dataset_statistics.json changed",
    ),
    "itself": (edited(base=["."]), "is a DSRL actor itself"),
    "no place": (edited(base=[]), "base has 0 entries; it must name 1 to 16 folders"),
    "no name": (edited(base=["a\0b", "x" * 5000]), "is missing"),
    "settings": (edited(base_settings={"custom_module": "x.py"}), "base_settings has custom_module"),
    "kind of setting": (edited(base_settings={"flow_steps": "4"}), "flow_steps"),
    "range": (edited(noise_range=0), "noise_range 0 must be above 0"),
    "width": (edited(hidden_sizes=[8]), "has shape"),
    "sizes": (edited(action_chunk_len=3), "sizes that .* does not have"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_base_that_is_not_the_same_is_refused(damage: str, actor: Path) -> None:
    change, excerpt = DAMAGES[damage]
    check_checkpoint(actor)
    change(actor)
    with pytest.raises(ConfigError, match=excerpt) as caught:
        check_checkpoint(actor)
    assert damage == "width" or len(caught.value.problems) == 1


def test_a_base_elsewhere_is_named_in_the_file(actor: Path) -> None:
    shutil.copytree(actor.parent / "base", actor / ".." / "moved" / "base")
    shutil.rmtree(actor.parent / "base")
    other = write_flow(actor.parent / "other", flow_steps=3)
    edited(base=["nowhere", str(other), os.path.join("..", "moved", "base")])(actor)
    assert check_checkpoint(actor).base.folder == actor.parent / "moved" / "base"


@pytest.mark.parametrize("head", ["tokens", "gaussian"])
def test_policies_that_do_not_denoise_are_refused(head: str, tmp_path: Path) -> None:
    config = CompactConfig(16, 1, 0, 2, 2, head)
    folder = build_compact(tmp_path / "other", config, {"toy": {"action": TWO}})
    with pytest.raises(ConfigError, match="samples its actions directly"):
        new(folder)
