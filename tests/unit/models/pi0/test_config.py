"""config.json and sizes.json: types, ranges, differences between the families, unknown keys."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rlvla.models.pi0.config import VARIANTS, Pi0Config, Sizes
from rlvla.utils.errors import ConfigError

from .conftest import SMALL

WHERE = Path("policy/config.json")
RAW: dict[str, Any] = {
    "type": "pi0",
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [3]},
        "observation.images.top": {"type": "VISUAL", "shape": [3, 64, 64]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    "dtype": "bfloat16",
    "some_later_setting": {"x": [1, 2.5]},
}


def test_defaults_and_unknown_keys() -> None:
    config = Pi0Config.from_json(RAW, WHERE)
    assert (config.chunk_size, config.tokenizer_max_length, config.image_size) == (50, 48, 224)
    assert config.normalization_mapping["STATE"] == "MEAN_STD" and not config.state_in_prompt
    assert config.to_json() == RAW
    assert replace(config, n_action_steps=5).to_json() == RAW | {"n_action_steps": 5}
    newer = Pi0Config.from_json(RAW | {"type": "pi05"}, WHERE)
    assert newer.tokenizer_max_length == 200 and newer.state_in_prompt
    assert newer.normalization_mapping["ACTION"] == "QUANTILES"


def test_code_of_the_folder_is_not_named_in_a_copy() -> None:
    """`*.py` files are not copied; code of another repository is not in the folder."""
    elsewhere = {"AutoModel": "owner/name--modeling.Model"}
    config = Pi0Config.from_json(RAW | {"auto_map": elsewhere | {"AutoConfig": "configuration.Config"}}, WHERE)
    assert config.to_json() == RAW | {"auto_map": elsewhere}
    assert Pi0Config.from_json(RAW | {"auto_map": {"AutoConfig": "a.B"}}, WHERE).to_json() == RAW


@pytest.mark.parametrize(
    ("change", "excerpt"),
    [
        ({"type": "pi0_fast"}, "pi0_fast"),
        ({"type": ["pi0"]}, "type"),
        ({"proj_width": 1024}, "LeRobot 0.4"),
        ({"chunk_size": "50"}, "chunk_size"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"n_action_steps": 51}, "n_action_steps"),
        ({"image_resolution": [224, 256]}, "image_resolution"),
        ({"paligemma_variant": "gemma_300m"}, "paligemma_variant"),
        ({"action_expert_variant": "gemma_7b"}, "action_expert_variant"),
        ({"min_period": 4.0}, "min_period"),
        ({"max_action_dim": 1}, "max_action_dim"),
        ({"normalization_mapping": {"STATE": "MEAN"}}, "MEAN"),
        ({"output_features": {}}, "action"),
    ],
)
def test_one_problem(change: dict[str, Any], excerpt: str) -> None:
    with pytest.raises(ConfigError) as error:
        Pi0Config.from_json(RAW | change, WHERE)
    assert len(error.value.problems) == 1, error.value
    assert excerpt in str(error.value)


def test_all_at_once() -> None:
    bad = {"chunk_size": -1, "num_inference_steps": 0.5, "paligemma_variant": "x", "normalization_mapping": {"A": "x"}}
    with pytest.raises(ConfigError) as error:
        Pi0Config.from_json(RAW | bad, WHERE)
    for name in bad:
        assert name in str(error.value)


def sizes(**changes: Any) -> dict[str, Any]:
    """A sizes.json with other values in some parts."""
    whole = asdict(SMALL)
    return {
        name: {**whole[name], **changes[name]}
        if isinstance(changes.get(name), dict)
        else changes.get(name, whole[name])
        for name in whole
    }


def test_sizes() -> None:
    assert Sizes.from_json(sizes(), WHERE) == SMALL
    assert Sizes().problems() == [] and Sizes().vlm == VARIANTS["gemma_2b"]


@pytest.mark.parametrize(
    ("changes", "excerpt"),
    [
        ({"vlm": {"depth": 4}}, "depth"),
        ({"expert": {"head_dim": 6}}, "head_dim"),
        ({"vlm": {"kv_heads": 3}, "expert": {"kv_heads": 3}}, "3 key-value heads"),
        ({"vision": {"heads": 3}}, "3 heads"),
        ({"vision": {"heads": 2.5}}, "vision"),
        ({"vision": None}, "vision"),
        ({"expert": {"width": 5}}, "odd"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"vlm": {"layers": 3}}, "vlm"),
        ({"vision": {"depth": 2**24}}, "vision: depth is 16777216, not a whole number from 1 to 1024"),
        ({"expert": {"mlp_width": 2**21}}, "from 1 to 1048576"),
        ({"vocabulary": True}, "vocabulary is True"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], excerpt: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sizes.from_json(sizes(**changes), WHERE)
    assert len(error.value.problems) == 1, error.value
    assert excerpt in str(error.value)
