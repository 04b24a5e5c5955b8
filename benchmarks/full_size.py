"""Checkpoint folders of the published policies' sizes: their configuration, and weights that take no room on disk.

`openvla`, `smolvla` and `pi0` write such a folder; the numbers in it are all zero. `randomize` gives the loaded policy
random weights, on its device.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlvla.models.lerobot.config import Feature, Features
from rlvla.models.lerobot.files import on_meta, tensor_shapes
from rlvla.models.pi0.checkpoint import file_shapes
from rlvla.models.pi0.config import PI0, SIZES_FILE, Pi0Config, Sizes
from rlvla.models.smolvla.config import SmolVLAConfig
from rlvla.models.smolvla.network import SmolVLANetwork
from rlvla.models.smolvla.tiny import VLM_FOLDER, TinyVlm, build_tiny_smolvla
from rlvla.models.smolvla.vlm import VlmConfig
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny
from tests.support.tiny_pi0 import build_tiny_pi0

SENTENCE = "pick up the black bowl between the plate and the ramekin and place it on the plate"
STATE, ACTION = 8, 7  # numbers of LIBERO's proprioception and actions
CAMERAS = ("image", "image2")
# The vision-language model of lerobot/smolvla_base, HuggingFaceTB/SmolVLM2-500M-Video-Instruct.
SMOLVLM2_500M = {
    "model_type": "smolvlm",
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 49280,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


def bounds(size: int) -> dict[str, list[Any]]:
    """OpenVLA's statistics of `size` numbers that all lie in [-1, 1]."""
    low, high = [-1.0] * size, [1.0] * size
    return {"q01": low, "q99": high, "min": low, "max": high, "mask": [True] * size}


def unit_statistics(state_dim: int = STATE, action_dim: int = ACTION) -> dict[str, dict[str, list[float]]]:
    """LeRobot's statistics of mean 0 and standard deviation 1."""
    sizes = {"observation.state": state_dim, "action": action_dim}
    return {key: {"mean": [0.0] * size, "std": [1.0] * size} for key, size in sizes.items()}


def openvla(folder: Path, *, images: int = 1, proprio: bool = False, tiny: bool = False) -> Path:
    """openvla-7b as OpenVLA-OFT decodes it on LIBERO; `tiny`: the layout with a small network and small images."""
    statistics = {"libero_spatial": {"action": bounds(ACTION), "proprio": bounds(STATE)}}
    options: dict[str, Any] = {"num_images_in_input": images}
    if proprio:
        options |= {"use_proprio": True, "proprio_dim": STATE}
    build_tiny(folder, sentences=[SENTENCE], dataset_statistics=statistics, action_chunk_len=8, **options)
    raw = json.loads((folder / "config.json").read_text())
    unset = ("image_preprocessing", "action_normalization", "gripper_convention", "model_variant", "action_chunk_len")
    (folder / "config.json").write_text(json.dumps({name: raw[name] for name in raw if name not in unset}))
    if tiny:
        return folder
    full = OpenVLAConfig().to_dict()
    names = ("text_config", "timm_model_ids", "image_sizes", "timm_model_kwargs", "pad_to_multiple_of")
    update_config(folder / "config.json", {name: full[name] for name in names})
    with torch.device("meta"):
        model = OpenVLAForActionPrediction(OpenVLAConfig(**options))
    write_sparse_safetensors(
        folder / "model.safetensors", {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    )
    return folder


def smolvla(
    folder: Path,
    *,
    cameras: tuple[str, ...] = CAMERAS,
    state_dim: int = STATE,
    action_dim: int = ACTION,
    tiny: bool = False,
) -> Path:
    """lerobot/smolvla_base, by default with LIBERO's features."""
    vlm_sizes = TinyVlm() if tiny else TinyVlm(image_size=512)
    sizes = {"vlm": vlm_sizes, "cameras": cameras, "state_dim": state_dim, "action_dim": action_dim, "chunk_size": 50}
    build_tiny_smolvla(folder, sentences=[SENTENCE], statistics=unit_statistics(state_dim, action_dim), **sizes)
    if tiny:
        return folder
    vlm = {**json.loads((folder / VLM_FOLDER / "config.json").read_text()), **SMOLVLM2_500M}
    update_config(folder / VLM_FOLDER / "config.json", vlm)
    update_config(folder / "config.json", {"max_state_dim": 32, "max_action_dim": 32, "num_vlm_layers": 16})
    path = folder / "config.json"
    config = SmolVLAConfig.from_json(json.loads(path.read_text()), path)
    network = on_meta(SmolVLANetwork, config, VlmConfig.from_json(vlm, path))
    write_sparse_safetensors(folder / "model.safetensors", tensor_shapes(network))
    return folder


def pi0(folder: Path, *, tiny: bool = False) -> Path:
    """lerobot/pi0_base with LIBERO's features."""
    build_tiny_pi0(folder, sentences=[SENTENCE], statistics=unit_statistics(), cameras=CAMERAS, chunk_size=50)
    if tiny:
        return folder
    (folder / SIZES_FILE).unlink()
    features = json.loads((folder / "config.json").read_text())["input_features"]
    for name, feature in features.items():
        if ".images." in name:
            feature["shape"] = [3, 224, 224]
    sizes = {"max_state_dim": 32, "max_action_dim": 32, "image_resolution": [224, 224], "input_features": features}
    update_config(folder / "config.json", sizes)
    base = Features({"observation.state": Feature("STATE", (32,))}, {"action": Feature("ACTION", (32,))})
    write_sparse_safetensors(folder / "model.safetensors", file_shapes(Pi0Config(type=PI0, features=base), Sizes()))
    return folder


def write_sparse_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of these shapes in bfloat16, whose numbers take no room on a file system with sparse files."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def update_config(path: Path, settings: dict[str, Any]) -> None:
    """Replace settings of a config.json."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@torch.no_grad()
def randomize(policy: nn.Module, seed: int = 0) -> None:
    """Random weights in place: matrices normal with deviation 0.02 (the head over tokens 0.1), norms 1, biases 0.

    Adapters keep theirs. A policy whose tokens are as good as uniform would be refused, hence the head.
    """
    device = next(policy.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            continue
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.1 if "lm_head" in name else 0.02, generator=generator)
        elif "scale" in name or ("norm" in name and name.endswith("weight")):
            parameter.fill_(1.0)
        else:
            parameter.zero_()
