from __future__ import annotations

import pytest

from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.utils.errors import ConfigError

TOWER = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def test_defaults_are_the_public_seven_billion_model():
    config = OpenVLAConfig()
    dino, siglip = config.tower_configs()
    assert (dino.embed_dim, dino.depth, dino.num_prefix_tokens, dino.num_patches) == (1024, 24, 5, 256)
    assert (siglip.embed_dim, siglip.depth, siglip.num_prefix_tokens, siglip.num_patches) == (1152, 27, 0, 256)
    assert (config.base_vocab_size, config.num_action_tokens, config.pad_token_id) == (32000, 56, 32000)
    assert config.text_config.hidden_size == 4096


def test_unknown_keys_of_the_file_are_kept():
    assert OpenVLAConfig(llm_backbone_id="llama2-7b-pure").to_dict()["llm_backbone_id"] == "llama2-7b-pure"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_variant": "both"}, "model_variant 'both' is unknown"),
        ({"model_variant": "autoregressive", "action_chunk_len": 8}, "the autoregressive variant predicts one action"),
        ({"prompt_style": "chat"}, "prompt_style 'chat' is unknown"),
        ({"gripper_convention": "bridge"}, "gripper_convention 'bridge' is unknown"),
        ({"action_chunk_len": 0}, "action_chunk_len is 0"),
        ({"num_images_in_input": 0}, "num_images_in_input is 0"),
        ({"use_proprio": True}, "proprio_dim is None"),
        ({"arch_specifier": "no-align+linear"}, "'no-align\\+linear' is unknown"),
        ({"text_config": {"vocab_size": 200}}, "256 action bins do not fit into a vocabulary of 136"),
        ({"image_preprocessing": "bridge"}, "'bridge' is unknown"),
        ({"action_normalization": "minmax"}, "'minmax' is unknown"),
        ({"timm_model_ids": ["one"]}, "needs two vision towers"),
        ({"image_sizes": [224, 384]}, r"\[224, 384\]; give two equal sizes"),
        ({"timm_model_ids": ["resnet50", "resnet50"]}, "'resnet50' is unknown"),
        ({"timm_model_kwargs": [TOWER]}, "timm_model_kwargs has 1 entries"),
        ({"timm_model_kwargs": [{"windows": 3}, {}]}, r"unsupported entries \['windows'\]"),
        ({"timm_model_kwargs": [{"img_size": 64}, {}]}, "img_size 64 contradicts image_sizes 224"),
        ({"timm_model_kwargs": [{"patch_size": 13}, {}]}, "224 is not a multiple of patch 13"),
        ({"timm_model_kwargs": [{"patch_size": 16}, {}]}, "196 and 256 patches"),
        ({"timm_model_kwargs": [{"depth": 1}, {}]}, "depth 1"),
        ({"timm_override_act_layers": ["relu", None]}, "activation 'relu'"),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        OpenVLAConfig(**settings)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        OpenVLAConfig(action_dim=-1, model_variant="x", image_preprocessing="y")
    assert len(caught.value.problems) == 3
