"""Sizes in a policy's files: refused before anything of that size is allocated, with the number."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvla.models import describe
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact
from rlvla.models.config import ActorConfig
from rlvla.models.dsrl.family import new_dsrl
from rlvla.models.families import check_checkpoint
from rlvla.models.footprint import LiveBytes, decision_bytes
from rlvla.models.smolvla.tiny import TinyVlm, build_tiny_smolvla
from rlvla.models.soft_actor.config import SoftActorConfig
from rlvla.models.soft_actor.policy import SoftActorPolicy
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils import budgets
from rlvla.utils.errors import ConfigError
from tests.support.tiny_pi0 import build_tiny_pi0

WORDS = ["reach the red disc"]
ACTION = {"mean": [0.0] * 7, "std": [1.0] * 7, "min": [-1.0] * 7, "max": [1.0] * 7, "q01": [-1.0] * 7, "q99": [1.0] * 7}
STATISTICS = {"observation.state": {"mean": [0.0] * 8, "std": [1.0] * 8}, "action": ACTION}


def write_compact(folder: Path) -> Path:
    return build_compact(folder, CompactConfig(32, 1, 0, 7, 4, kernels=(1, 1, 1)), {"toy": {"action": ACTION}})


def write_soft_actor(folder: Path) -> Path:
    SoftActorPolicy(SoftActorConfig(7, 4, 5, 1, 32, (16, 16))).save_pretrained(folder)
    return folder


def write_dsrl(folder: Path) -> Path:
    base = check_checkpoint(
        build_compact(folder / "base", CompactConfig(32, 1, 0, 7, 4, "flow"), {"toy": {"action": ACTION}})
    )
    options = {"hidden_sizes": (16,), "noise_range": 0.7, "repeat_noise": False, "base_settings": {}}
    new_dsrl(folder / "dsrl", base, **options).load_policy().save_pretrained(folder / "dsrl")  # type: ignore[attr-defined]
    return folder / "dsrl"


def write_smolvla(folder: Path) -> Path:
    vlm = TinyVlm(image_size=16, patch_size=8, vision_dim=32, vision_depth=1, dim=32, layers=2)
    return build_tiny_smolvla(folder, sentences=WORDS, statistics=STATISTICS, vlm=vlm, chunk_size=3)


def write_pi0(folder: Path) -> Path:
    return build_tiny_pi0(folder, sentences=WORDS, statistics=STATISTICS, image_size=32)


def write_openvla(folder: Path) -> Path:
    return build_tiny(
        folder, sentences=WORDS, dataset_statistics={"toy": {"action": ACTION}}, vision_dim=16, llm_dim=32
    )


WRITERS: dict[str, Callable[[Path], Path]] = {
    "compact": write_compact,
    "soft_actor": write_soft_actor,
    "dsrl": write_dsrl,
    "smolvla": write_smolvla,
    "pi0": write_pi0,
    "openvla": write_openvla,
}
ABSURD = [
    ("smolvla", {"chunk_size": 32768}, "a decision for one observation would take"),
    ("smolvla", {"chunk_size": 2**20}, "a decision for one observation would take"),
    ("smolvla", {"resize_imgs_with_padding": [2**20, 2**20]}, "a decision for one observation would take"),
    ("smolvla", {"num_steps": 2**20}, "num_steps is 1048576; it must be between 1 and"),
    ("pi0", {"chunk_size": 32768}, "a decision for one observation would take"),
    ("pi0", {"image_resolution": [2**14, 2**14]}, "has shape"),
    ("compact", {"image_size": 4096, "channels": [4096, 64, 64]}, "has shape"),
    ("compact", {"image_size": 4096, "num_images_in_input": 64}, "is missing"),
    ("soft_actor", {"hidden_sizes": [16] * 100_000}, "hidden_sizes has 100,000 layers; it must have 1..64"),
    ("soft_actor", {"primitives": ["a", "b"], "primitive_sizes": [-5, 5]}, "primitive_sizes must be 0..65536 each"),
    ("soft_actor", {"image_size": 4096, "num_images_in_input": 64}, "is missing"),
    ("dsrl", {"base": ["x"] * 1_000_000}, "base has 1,000,000 entries; it must name 1 to 16 folders"),
    ("openvla", {"action_chunk_len": 32768}, "a decision for one observation would take"),
]


NOT_COUNTABLE = [-1, 0, 2**31, 2**62]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def write(kind: str) -> Path:
        if kind not in made:
            made[kind] = WRITERS[kind](tmp_path_factory.mktemp(kind) / kind)
        return made[kind]

    return write


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 GiB."""
    for module in ("rlvla.utils.budgets", "rlvla.models.families"):
        monkeypatch.setattr(f"{module}.memory_bytes", lambda: 2**31)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(("kind", "changes", "text"), ABSURD, ids=lambda value: str(value)[:60])
def test_absurd_sizes_are_refused(
    kind: str, changes: dict[str, Any], text: str, written: Callable[[str], Path]
) -> None:
    path = written(kind) / "config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | changes))
    used, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        described = describe(path.parent)
        with pytest.raises(ConfigError):
            check_checkpoint(path.parent)
    finally:
        path.write_text(before)
    assert not described.loadable and any(text in problem for problem in described.problems), described.problems
    assert all(len(problem) < 1000 for problem in described.problems)
    assert time.process_time() - began < 20, "seconds, most of them for imports"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 500_000, "kilobytes"


@pytest.mark.parametrize("value", NOT_COUNTABLE)
@pytest.mark.parametrize(
    "name",
    [
        *("text_config.hidden_size", "text_config.intermediate_size", "text_config.num_key_value_heads"),
        *("text_config.head_dim", "text_config.vocab_size", "text_config.num_hidden_layers"),
        *("timm_model_kwargs.embed_dim", "timm_model_kwargs.num_heads", "timm_model_kwargs.patch_size"),
    ],
)
def test_sizes_of_openvla_are_in_range(name: str, value: int, written: Callable[[str], Path]) -> None:
    path = written("openvla") / "config.json"
    before = path.read_text()
    content = json.loads(before)
    part, size = name.split(".")
    for sizes in content[part] if isinstance(content[part], list) else [content[part]]:
        sizes[size] = value
    path.write_text(json.dumps(content))
    try:
        problems = describe(path.parent).problems
    finally:
        path.write_text(before)
    assert any(f"{size} is {value}, not a whole number from 1 to" in text for text in problems), problems


def pipeline(folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """The problem of a folder whose preprocessing pipeline is changed."""
    path = folder / "policy_preprocessor.json"
    before = path.read_text()
    content = json.loads(before)
    change(content)
    path.write_text(json.dumps(content))
    try:
        began = time.process_time()
        (problem,) = describe(folder).problems
        assert time.process_time() - began < 5
        return problem
    finally:
        path.write_text(before)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(("length", "text"), [(2**40, "name, length or padding"), (2**16, "would take")])
def test_long_prompts_are_refused(length: int, text: str, written: Callable[[str], Path]) -> None:
    def change(content: dict[str, Any]) -> None:
        for step in content["steps"]:
            if step["registry_name"] == "tokenizer_processor":
                step["config"] |= {"max_length": length, "padding": "max_length"}

    assert text in pipeline(written("smolvla"), change)


def test_pipelines_have_few_steps(written: Callable[[str], Path]) -> None:
    problem = pipeline(written("smolvla"), lambda content: content.update(steps=content["steps"] * 10_000))
    assert "steps; at most 64 are read" in problem


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("kind", WRITERS)
def test_weights_beyond_the_memory_are_not_read(kind: str, written: Callable[[str], Path]) -> None:
    folder = written(kind)
    assert describe(folder).problems == []
    file = folder / "more.safetensors"
    file.touch()
    os.truncate(file, 2**42)
    try:
        (problem,) = describe(folder).problems
        with pytest.raises(ConfigError, match="the weights in"):
            check_checkpoint(folder)
    finally:
        file.unlink()
    assert "would take 4,096.0 GiB, and this machine has 2.0 GiB of memory" in problem


@pytest.mark.parametrize("kind", ["compact", "smolvla", "pi0", "openvla"])
def test_the_memory_of_a_decision_is_that_of_the_policy(kind: str, written: Callable[[str], Path]) -> None:
    checkpoint = check_checkpoint(written(kind))
    row = checkpoint.row_shape(WORDS, 1)
    sketch = checkpoint.sketch(row, ActorConfig())
    assert sketch is not None
    policy, spec = checkpoint.load_policy().eval(), checkpoint.spec
    side = spec.image_size or 16
    images = np.zeros((1, 1, side, side, 3), np.uint8)
    proprio = np.zeros((1, spec.proprio_dim), np.float32) if spec.proprio_dim else None
    with LiveBytes() as live:
        live.count(list(policy.parameters()), list(policy.buffers()))  # type: ignore[attr-defined]
        noise = np.stack([spec.draw(np.random.default_rng(0))])
        policy.act(images, proprio, WORDS, noise=noise, temperature=1.0)
    assert 4 * checkpoint.largest_activation <= live.peak
    assert decision_bytes(sketch) == pytest.approx(live.peak, rel=0.25)


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("inactive_file 300\nactive_file 100\n")
    monkeypatch.setattr(budgets, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(budgets, "_OWN_GROUPS", tmp_path / "absent")
    machine = budgets.memory_bytes()
    limit.write_text("max\n")
    assert budgets.memory_bytes() == machine
    limit.write_text(f"{2**20}\n")
    assert budgets.memory_bytes() == 2**20
    assert "would take 1.0 GiB" in str(budgets.over_memory(2**30))
