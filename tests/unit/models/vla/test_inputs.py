"""Prompts, images and actions on their way into and out of the model."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.image_processing import center_crop, libero_image
from rlvla.models.vla.inputs import VLAInputs, build_prompt
from rlvla.utils.errors import ConfigError


@pytest.fixture
def processor(tiny_folder):
    return VLAInputs.from_pretrained(tiny_folder)


class FixedTokenizer:
    """Gives chosen ids and remembers the text, standing in for a tokenizer that cannot be downloaded."""

    def __init__(self, ids):
        self.ids, self.text = ids, None

    def __call__(self, text):
        self.text = text
        return {"input_ids": self.ids}


def test_prompt_template():
    expected = "In: What action should the robot take to pick up the black bowl?\nOut:"
    assert build_prompt("Pick up the BLACK bowl") == expected


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 512, 29901], [1, 512, 29901, 29871]),
        ([1, 512, 29901, 29871], [1, 512, 29901, 29871]),
        ([512, 29901], [1, 512, 29901, 29871]),
    ],
)
def test_prompt_ends_with_the_trained_token_once(ids, expected):
    tokenizer = FixedTokenizer(ids)
    assert VLAInputs(OpenVLAConfig(), tokenizer).encode_prompt("Lift") == expected
    assert tokenizer.text == build_prompt("lift")


def test_collate_pads_on_the_left(processor):
    prompts = ["lift the red cube", "reach an unknown disc"]
    ids, mask = processor.collate_prompts(prompts)
    assert ids.shape == mask.shape and ids.dtype == torch.int64
    for row, prompt in enumerate(prompts):
        encoded = processor.encode_prompt(prompt)
        assert ids[row, mask[row].bool()].tolist() == encoded
        assert mask[row].tolist() == sorted(mask[row].tolist()), "padding comes first"
        assert (ids[row, mask[row] == 0] == processor.config.pad_token_id).all()
    assert mask.sum(1).unique().numel() == 2


def test_actions_round_trip_through_tokens(processor, statistics):
    stats = statistics["toy"]["action"]
    rng = np.random.default_rng(0)
    actions = rng.uniform(stats["q01"], stats["q99"], (4, 3, 7))
    actions[..., 6] = rng.integers(0, 2, (4, 3)) * 2 - 1
    columns = processor.encode_actions(actions)
    assert columns.shape == (4, 21) and columns.min() >= 0 and columns.max() < 256
    half_bin = (np.array(stats["q99"]) - np.array(stats["q01"])) / 2 / 255
    error = np.abs(processor.decode_actions(columns) - actions)
    assert (error[..., :6] <= half_bin[:6] + 1e-7).all()
    assert error[..., 6].max() <= 1 / 255 + 1e-7  # float32
    order = processor.encode_actions(np.tile(np.arange(7) * 0.01, (1, 3, 1)))
    assert np.array_equal(order[0, :7], order[0, 7:14]), "tokens run through the dimensions first"


def test_images_stay_uint8_and_follow_the_configuration(processor):
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    assert np.array_equal(processor.prepare(images, None)[0], images)
    processor.config.center_crop = True
    cropped = processor.prepare(images, None)[0]
    assert cropped.dtype == np.uint8 and np.array_equal(cropped, center_crop(images, 0.9, 32))
    processor.config.image_preprocessing = "libero"
    expected = center_crop(np.stack([libero_image(image, 32) for image in images]), 0.9, 32)
    assert np.array_equal(processor.prepare(images, None)[0], expected)
    assert processor.pixel_values(expected).shape == (12, 32, 32)


@pytest.mark.parametrize("preprocessing", ["none", "libero"])
def test_images_are_cropped_one_by_one(processor, monkeypatch, preprocessing):
    """All frames of a data set in float32 would not fit in memory."""
    processor.config.center_crop, processor.config.image_preprocessing = True, preprocessing
    images, shapes = np.random.default_rng(0).integers(0, 256, (5, 2, 32, 32, 3), dtype=np.uint8), []

    def crop(image, scale, size):
        shapes.append(image.shape)
        return center_crop(image, scale, size)

    monkeypatch.setattr("rlvla.models.vla.inputs.center_crop", crop)
    prepared = processor.prepare(images, None)[0]
    assert prepared.shape == images.shape and set(shapes) == {(32, 32, 3)}
    assert np.array_equal(prepared[3], processor.prepare(images[3], None)[0])
    assert processor.prepare(images[:0], None)[0].shape == (0, 2, 32, 32, 3)


def test_proprio_uses_the_statistics(processor, statistics):
    assert np.allclose(processor.normalize_proprio(statistics["toy"]["proprio"]["q01"]), -1.0)


def test_missing_parts_are_named(tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"no action statistics for 'lift' .*\['toy'\]"):
        VLAInputs.from_pretrained(tiny_folder, unnorm_key="lift")
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    (copy / "dataset_statistics.json").write_text(json.dumps({"toy": {"action": {}}}))
    with pytest.raises(ConfigError, match="no 'proprio' entry"):
        VLAInputs.from_pretrained(copy).normalize_proprio(np.zeros(6))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer.json is missing"):
        VLAInputs.from_pretrained(copy)


def test_prompt_of_openvla_v01():
    config = OpenVLAConfig(llm_backbone_id="vicuna-v15-7b", hf_llm_id="lmsys/vicuna-7b-v1.5")
    tokenizer = FixedTokenizer([1, 5])
    VLAInputs(config, tokenizer).encode_prompt("Lift the Cube")
    assert tokenizer.text == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. "
        "USER: What action should the robot take to lift the cube? ASSISTANT:"
    )
    assert OpenVLAConfig(hf_llm_id="meta-llama/Llama-2-7b-hf").prompt_style == "openvla"


def test_libero_gripper_in_actions_and_in_labels():
    """The checkpoint's gripper is 1 = open and not normalised; the simulator's is -1 = open."""
    stats = {"action": {"q01": [-1.0] * 2, "q99": [1.0] * 2, "mask": [True, False]}}
    config = OpenVLAConfig(action_chunk_len=1, action_dim=2, gripper_convention="libero")
    processor = VLAInputs(config, FixedTokenizer([1]), stats)
    tokenizer = processor.action_tokenizer
    opened, closed = (np.concatenate([tokenizer.encode([0.3, g])]) for g in (1.0, 0.0))
    opened, closed = (tokenizer.ids_to_columns(ids) for ids in (opened, closed))
    assert processor.decode_actions(opened)[0, 1] == -1.0 and processor.decode_actions(closed)[0, 1] == 1.0
    labels = processor.encode_actions(np.array([[[0.3, -1.0]], [[0.3, 1.0]]]))
    assert labels.tolist() == [opened.tolist(), closed.tolist()]
    plain = VLAInputs(OpenVLAConfig(action_chunk_len=1, action_dim=2), FixedTokenizer([1]), stats)
    assert plain.decode_actions(opened)[0, 1] == pytest.approx(1.0, abs=0.01)


def test_plain_openvla_unnormalises_without_the_small_number():
    stats = {"action": {"q01": [0.0] * 7, "q99": [1e-8] * 7}}
    columns = np.full(7, 31872 - 31744)  # the centre of the range
    middle = {}
    for variant in ("oft", "autoregressive"):
        config = OpenVLAConfig(model_variant=variant, action_chunk_len=1)
        middle[variant] = VLAInputs(config, FixedTokenizer([1]), stats).decode_actions(columns)[0, 0]
    assert middle["autoregressive"] == pytest.approx(0.5e-8, rel=1e-6)
    assert middle["oft"] == pytest.approx(1e-8, rel=1e-6)
