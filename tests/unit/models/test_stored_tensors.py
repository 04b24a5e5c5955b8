"""NaN and infinity in weights are found in every dtype, wherever they are, and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvla.models import describe
from rlvla.models.dataset_statistics import value_problems
from rlvla.models.families import check_checkpoint
from rlvla.models.stored_tensors import all_finite
from rlvla.utils.errors import ConfigError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1000, 70_003, 100_002])
def test_a_single_value_is_found(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.zeros(100_003, dtype=dtype)
    tensor[place] = value
    assert not all_finite(tensor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_numbers_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    numbers = [0.0, -0.0, limits.max, limits.min, limits.tiny, -limits.tiny, limits.smallest_normal / 2, 1.0]
    assert all_finite(torch.tensor(numbers, dtype=dtype)) and all_finite(torch.zeros(0, dtype=dtype))
    assert all_finite(torch.randn(4, 6).to(dtype).t())
    assert all_finite(torch.tensor([2**31 - 1])) and all_finite(torch.tensor(1.0, dtype=dtype))


@pytest.fixture
def copy(policy_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(policy_folder, tmp_path / "copy"))


def test_file_and_tensor_are_named(copy: Path) -> None:
    check_checkpoint(copy)
    path = next(copy.glob("model*.safetensors"))
    tensors = load_file(path)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[-1] = float("inf")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        check_checkpoint(copy)
    assert [p.reason for p in refused.value.problems] == ["invalid_file"]
    assert str(path) in str(refused.value) and name in str(refused.value)
    assert any(name in text for text in describe(copy).problems)


def test_heads_next_to_the_weights_are_looked_at(copy: Path) -> None:
    save_file({"head.weight": torch.full((1, 32), float("nan"))}, copy / "value_head.safetensors")
    with pytest.raises(ConfigError, match="value_head.safetensors: tensor head.weight"):
        check_checkpoint(copy)


@pytest.mark.parametrize(("part", "key"), [("action", "q01"), ("action", "max"), ("proprio", "q99"), ("action", "std")])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), None, "1", True])
def test_the_key_of_damaged_statistics_is_named(copy: Path, part: str, key: str, value: object) -> None:
    path = copy / "dataset_statistics.json"
    content = json.loads(path.read_text())
    content["toy_reach"][part][key][1] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        check_checkpoint(copy)
    assert f"{part}.{key}" in str(refused.value) and "toy_reach" in str(refused.value)
    assert any(f"{part}.{key}" in text for text in describe(copy).problems)


def test_ranges_of_zero_are_valid() -> None:
    zeros = {name: [0.0, 0.0] for name in ("mean", "std", "min", "max", "q01", "q99")}
    assert value_problems({"toy": {"action": zeros | {"mask": [True, False]}, "num_transitions": 5}}) == []
