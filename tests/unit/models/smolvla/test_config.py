"""config.json: types, ranges, unknown keys, and how the layers of expert and vision-language model go together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvla.models.smolvla.config import ExpertLayer, SmolVLAConfig, expert_layers
from rlvla.utils.errors import ConfigError

WHERE = Path("policy/config.json")
RAW: dict[str, Any] = {
    "type": "smolvla",
    "vlm_model_name": "vlm",
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [3]},
        "observation.images.top": {"type": "VISUAL", "shape": [3, 64, 64]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    "repo_id": None,
    "some_later_setting": {"x": [1, 2.5]},
}


def test_defaults_and_unknown_keys() -> None:
    config = SmolVLAConfig.from_json(RAW, WHERE)
    assert (config.chunk_size, config.num_vlm_layers, config.image_size) == (50, 16, 512)
    assert config.to_json() == RAW
    assert replace(config, n_action_steps=5).to_json() == RAW | {"n_action_steps": 5}


@pytest.mark.parametrize(
    ("change", "excerpt"),
    [
        ({"chunk_size": "50"}, "chunk_size"),
        ({"num_steps": 0}, "num_steps"),
        ({"n_action_steps": 51}, "n_action_steps"),
        ({"resize_imgs_with_padding": [512, 256]}, "resize_imgs_with_padding"),
        ({"attention_mode": "cross"}, "attention_mode"),
        ({"pad_language_to": "shortest"}, "pad_language_to"),
        ({"min_period": 4.0}, "min_period"),
        ({"add_image_special_tokens": True}, "add_image_special_tokens"),
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha"),
        ({"max_action_dim": 1}, "max_action_dim"),
        ({"normalization_mapping": {"STATE": "MEAN"}}, "MEAN"),
        ({"normalization_mapping": {"VISUAL": "MEAN_STD"}}, "images"),
        ({"output_features": {}}, "action"),
        ({"output_features": {"action": {"type": "ACTION", "shape": ["2"]}}}, "shape"),
        ({"input_features": {"observation.state": {"type": "STATE", "shape": [3]}}}, "VISUAL"),
        ({"input_features": None}, "input_features"),
    ],
)
def test_one_problem(change: dict[str, Any], excerpt: str) -> None:
    with pytest.raises(ConfigError) as error:
        SmolVLAConfig.from_json(RAW | change, WHERE)
    assert len(error.value.problems) == 1, error.value
    assert excerpt in str(error.value)


def test_all_at_once() -> None:
    bad = {"chunk_size": -1, "num_steps": 0.5, "attention_mode": "none", "normalization_mapping": {"ACTION": "x"}}
    raw = {name: value for name, value in (RAW | bad).items() if name != "vlm_model_name"}
    with pytest.raises(ConfigError) as error:
        SmolVLAConfig.from_json(raw, WHERE)
    for name in ("vlm_model_name", *bad):
        assert name in str(error.value)


def test_layers() -> None:
    config = SmolVLAConfig.from_json(RAW, WHERE)
    assert expert_layers(config, 4) == tuple(ExpertLayer(i, i % 2 == 0) for i in range(4))
    assert all(layer.attends_to_actions for layer in expert_layers(replace(config, attention_mode="self_attn"), 3))
    fewer = replace(config, num_expert_layers=2, self_attn_every_n_layers=0)
    assert expert_layers(fewer, 6) == (ExpertLayer(0, False), ExpertLayer(3, False))


@pytest.mark.parametrize("change", [{"num_expert_layers": 3}, {"num_expert_layers": 8}, {"num_expert_layers": 2}])
def test_layers_that_do_not_fit(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="num_expert_layers"):
        expert_layers(replace(SmolVLAConfig.from_json(RAW, WHERE), **change), 4)
