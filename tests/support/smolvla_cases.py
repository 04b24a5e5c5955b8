"""Small SmolVLA policies with fixed weights, and their outputs in rlvla.

`benchmarks/lerobot_agreement.py` compares that with LeRobot and records LeRobot's side in tests/data/smolvla.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlvla.models.lerobot.images import to_network_range
from rlvla.models.smolvla.checkpoint import SmolVLAFiles, check_smolvla
from rlvla.models.smolvla.network import SmolVLANetwork
from rlvla.models.smolvla.tiny import TinyVlm, tiny_vlm_files
from rlvla.models.smolvla.vlm import VlmConfig
from tests.support.fixed_numbers import numbers
from tests.support.lerobot_cases import SENTENCES, Case, euler, observations, padded, with_missing_cameras

VECTORS = Path(__file__).resolve().parents[1] / "data" / "smolvla"
check = check_smolvla
CASES = {
    "cross": Case(
        {
            "vlm_model_name": "vlm",
            "chunk_size": 6,
            "n_action_steps": 6,
            "resize_imgs_with_padding": [64, 64],
            "num_vlm_layers": 3,
            "num_steps": 5,
        }
        | {"empty_cameras": 1, "tokenizer_max_length": 20},
        "MEAN_STD",
        {"top": (60, 81), "wrist": (35, 20), "empty_camera_0": None},
        TinyVlm(image_size=64, patch_size=16, vision_dim=32, dim=96, layers=4),
    ),
    "self": Case(
        {
            "vlm_model_name": "vlm",
            "chunk_size": 4,
            "n_action_steps": 2,
            "resize_imgs_with_padding": [48, 48],
            "num_vlm_layers": 2,
            "num_steps": 3,
        }
        | {"attention_mode": "self_attn", "pad_language_to": "max_length", "tokenizer_max_length": 7}
        | {"max_state_dim": 9, "max_action_dim": 6, "expert_width_multiplier": 0.5, "prefix_length": 40},
        "QUANTILES",
        {"front": (120, 90)},
        TinyVlm(image_size=64, patch_size=8, vision_dim=32, dim=64, layers=2),
        seed=1,
    ),
    "all_cross": Case(
        {
            "vlm_model_name": "vlm",
            "chunk_size": 3,
            "n_action_steps": 3,
            "resize_imgs_with_padding": [64, 64],
            "num_vlm_layers": 4,
            "num_steps": 2,
        }
        | {"num_expert_layers": 2, "self_attn_every_n_layers": 0, "tokenizer_max_length": 48},
        "MIN_MAX",
        {"a": (64, 64)},
        TinyVlm(image_size=64, patch_size=16, scale_factor=1, vision_dim=32, dim=64, layers=4),
        seed=2,
    ),
}


def prepare(case: Case, folder: Path) -> None:
    """Write the folder of the case's vision-language model, without weights, into a policy's."""
    (folder / "vlm").mkdir(parents=True, exist_ok=True)
    for name, content in tiny_vlm_files(SENTENCES, case.sizes).items():
        (folder / "vlm" / name).write_text(json.dumps(content), encoding="utf-8")


def write_weights(checkpoint_config: Any, case: Case, folder: Path) -> None:
    """Write model.safetensors with the numbers that LeRobot was given."""
    vlm = VlmConfig.from_json(tiny_vlm_files(SENTENCES, case.sizes)["config.json"], folder)
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in SmolVLANetwork(checkpoint_config, vlm).state_dict().items()}
    rng = np.random.default_rng(case.seed)
    state = {name: torch.from_numpy(numbers(name, shapes[name], rng)) for name in sorted(shapes)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def recorded_folder(name: str, folder: Path) -> Path:
    """The folder that LeRobot wrote for a case, with its weights drawn again."""
    from rlvla.models.smolvla.config import SmolVLAConfig

    case = CASES[name]
    shutil.copytree(VECTORS / name, folder, ignore=shutil.ignore_patterns("outputs.npz"))
    prepare(case, folder)
    config = folder / "config.json"
    write_weights(SmolVLAConfig.from_json(json.loads(config.read_text()), config), case, folder)
    return folder


def record_positions(network: SmolVLANetwork) -> list[Tensor]:
    """A list that receives the positions of the patches whenever images are read."""
    positions: list[Tensor] = []
    embedding = network.model.vlm_with_expert.vlm.model.vision_model.embeddings.position_embedding
    embedding.register_forward_hook(lambda module, args, output: positions.append(args[0]))
    return positions


def computed_like(checkpoint: SmolVLAFiles, case: Case, theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`computed` with the positions of image patches that LeRobot used, if available."""
    ours = computed(checkpoint, case)
    if np.array_equal(ours["positions"], theirs["positions"]):
        return ours
    return computed(checkpoint, case, shifted_positions=True)


@torch.no_grad()
def computed(checkpoint: SmolVLAFiles, case: Case, *, shifted_positions: bool = False) -> dict[str, np.ndarray]:
    """Outputs for the observations, under the names of LeRobot's record."""
    given, config = observations(case), checkpoint.config
    network = checkpoint.load_network(shifted_positions=shifted_positions)
    positions = record_positions(network)
    keys = [key for key in config.features.cameras if key in given]
    size = config.image_size or 0
    pixels = torch.stack([to_network_range(torch.from_numpy(given[key]), size) for key in keys], dim=1)
    images, image_mask = with_missing_cameras(
        pixels, min(config.empty_cameras, len(config.features.cameras) - len(keys))
    )
    tokens, token_mask = checkpoint.tokenizer([str(task) for task in given["tasks"]])
    normalized = checkpoint.processors.state.normalize(given["observation.state"])
    state = torch.from_numpy(padded(normalized, config.max_state_dim))
    prefix = network.prefix(images, image_mask, tokens, token_mask, state)
    record = {"tokens": tokens, "token_mask": token_mask, "images": images, "image_mask": image_mask, "state": state}
    record |= {"prefix_mask": prefix.mask, "positions": positions[0]}
    for index, (key, value) in enumerate(zip(prefix.keys, prefix.values)):
        record |= {f"keys/{index}": key, f"values/{index}": value}
    record["velocity"] = network.velocity(prefix, torch.from_numpy(given["x"]), torch.from_numpy(given["t"]))
    sampled = euler(network, prefix, torch.from_numpy(given["noise"]), config.num_steps)
    record["sampled"] = sampled
    action = checkpoint.processors.action
    record["actions"] = torch.from_numpy(action.unnormalize(sampled.numpy()[..., : case.action_dim]))
    record["normalized_actions"] = torch.from_numpy(action.normalize(given["actions"]))
    return {name: value.numpy() for name, value in record.items()}
