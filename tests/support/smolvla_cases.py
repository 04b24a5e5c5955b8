"""Small SmolVLA policies with fixed weights and observations, and what this program computes for them.

`benchmarks/lerobot_agreement.py` compares that with LeRobot and records LeRobot's side in tests/data/smolvla.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlvla.models.lerobot.images import to_network_range
from rlvla.models.smolvla.checkpoint import SmolVLACheckpoint
from rlvla.models.smolvla.network import SmolVLANetwork
from rlvla.models.smolvla.tiny import TinyVlm, tiny_vlm_files
from rlvla.models.smolvla.vlm import VlmConfig
from tests.support.fixed_numbers import numbers

VECTORS = Path(__file__).resolve().parents[1] / "data" / "smolvla"
SENTENCES = ("pick up the red cube", "open the drawer of the cabinet", "push the plate")
TASKS = ("pick up the red cube", "open the drawer of the cabinet, then close it again\n", "grüße")


@dataclass(frozen=True)
class Case:
    """Settings that differ from LeRobot's defaults, and the sizes around them."""

    settings: dict[str, Any]
    modes: str
    cameras: dict[str, tuple[int, int] | None]  # -> height and width of the environment's images; None: missing
    vlm: TinyVlm
    state_dim: int = 5
    action_dim: int = 4
    seed: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        """What LeRobot is asked to build."""
        rng = np.random.default_rng(self.seed + 100)
        statistics = {}
        for key, size in (("observation.state", self.state_dim), ("action", self.action_dim)):
            low, width = rng.normal(size=size), rng.uniform(0.5, 2.0, size)
            parts = {"min": low, "q01": low + 0.05 * width, "q10": low + 0.2 * width, "mean": low + 0.5 * width}
            parts |= {"q90": low + 0.8 * width, "q99": low + 0.95 * width, "max": low + width, "std": 0.3 * width}
            parts["max"][0] = parts["q99"][0] = parts["min"][0] = parts["q01"][0]  # a joint that never moves
            statistics[key] = {name: values.tolist() for name, values in parts.items()}
        inputs: dict[str, Any] = {"observation.state": ["STATE", [self.state_dim]]}
        inputs |= {f"observation.images.{name}": ["VISUAL", [3, 64, 64]] for name in self.cameras}
        return {
            "input_features": inputs,
            "output_features": {"action": ["ACTION", [self.action_dim]]},
            "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": self.modes, "ACTION": self.modes},
            "settings": {"vlm_model_name": "vlm", **self.settings},
            "statistics": statistics,
            "seed": self.seed,
        }


CASES = {
    "cross": Case(
        {
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


def write_vlm(case: Case, folder: Path) -> None:
    """Write the folder of the case's vision-language model, without weights, into a policy's."""
    (folder / "vlm").mkdir(parents=True, exist_ok=True)
    for name, content in tiny_vlm_files(SENTENCES, case.vlm).items():
        (folder / "vlm" / name).write_text(json.dumps(content), encoding="utf-8")


def write_weights(checkpoint_config: Any, case: Case, folder: Path) -> None:
    """Write model.safetensors with the numbers that LeRobot was given."""
    vlm = VlmConfig.from_json(tiny_vlm_files(SENTENCES, case.vlm)["config.json"], folder)
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in SmolVLANetwork(checkpoint_config, vlm).state_dict().items()}
    rng = np.random.default_rng(case.seed)
    state = {name: torch.from_numpy(numbers(name, shapes[name], rng)) for name in sorted(shapes)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def recorded_folder(name: str, folder: Path) -> Path:
    """The folder that LeRobot wrote for a case, with its weights drawn anew."""
    from rlvla.models.smolvla.config import SmolVLAConfig

    case = CASES[name]
    shutil.copytree(VECTORS / name, folder, ignore=shutil.ignore_patterns("outputs.npz"))
    write_vlm(case, folder)
    config = folder / "config.json"
    write_weights(SmolVLAConfig.from_json(json.loads(config.read_text()), config), case, folder)
    return folder


def observations(case: Case) -> dict[str, np.ndarray]:
    """Inputs by name: images of odd sizes, states, tasks, noise, noisy actions, times, actions."""
    rng = np.random.default_rng(case.seed + 200)
    rows, width = len(TASKS), case.settings.get("max_action_dim", 32)
    chunk = case.settings["chunk_size"]
    given: dict[str, np.ndarray] = {
        f"observation.images.{name}": rng.integers(0, 256, (rows, *size, 3), dtype=np.uint8)
        for name, size in case.cameras.items()
        if size is not None
    }
    given["observation.state"] = rng.normal(size=(rows, case.state_dim)).astype(np.float32)
    given["tasks"] = np.array(TASKS)
    given["noise"] = rng.normal(size=(rows, chunk, width)).astype(np.float32)
    given["x"] = rng.normal(size=(rows, 3, chunk, width)).astype(np.float32)
    given["t"] = rng.uniform(0.01, 1.0, (rows, 3)).astype(np.float32)
    given["actions"] = rng.normal(size=(rows, chunk, case.action_dim)).astype(np.float32)
    return given


def euler(network: SmolVLANetwork, prefix: Any, noise: Tensor, steps: int) -> Tensor:
    """Actions [B, C, D] from noise by `steps` steps along the velocity."""
    x = noise
    for index in range(steps):
        t = torch.full((len(x), 1), 1 - index / steps)
        x = x - network.velocity(prefix, x[:, None], t)[:, 0] / steps
    return x


def record_positions(network: SmolVLANetwork) -> list[Tensor]:
    """A list that receives the positions of the patches whenever images are read."""
    positions: list[Tensor] = []
    embedding = network.model.vlm_with_expert.vlm.model.vision_model.embeddings.position_embedding
    embedding.register_forward_hook(lambda module, args, output: positions.append(args[0]))
    return positions


def computed_like(checkpoint: SmolVLACheckpoint, case: Case, theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `computed` gives with the positions of image patches that LeRobot used, if those can be had."""
    ours = computed(checkpoint, case)
    if np.array_equal(ours["positions"], theirs["positions"]):
        return ours
    return computed(checkpoint, case, shifted_positions=True)


@torch.no_grad()
def computed(checkpoint: SmolVLACheckpoint, case: Case, *, shifted_positions: bool = False) -> dict[str, np.ndarray]:
    """What this program makes of the observations, under the names of LeRobot's record."""
    given, config = observations(case), checkpoint.config
    network = checkpoint.load_network(shifted_positions=shifted_positions)
    positions = record_positions(network)
    keys = [key for key in config.features.cameras if key in given]
    size = config.image_size or 0
    images = torch.stack([to_network_range(torch.from_numpy(given[key]), size, size) for key in keys], dim=1)
    missing = min(config.empty_cameras, len(config.features.cameras) - len(keys))
    images = torch.cat([images, -torch.ones_like(images[:, :1]).expand(-1, missing, -1, -1, -1)], dim=1)
    image_mask = torch.zeros(images.shape[:2], dtype=torch.bool)
    image_mask[:, : len(keys)] = True
    tokens, token_mask = checkpoint.tokenizer([str(task) for task in given["tasks"]])
    state = torch.from_numpy(checkpoint.padded_state(given["observation.state"]))
    prefix = network.prefix(images, image_mask, tokens, token_mask, state)
    record = {"tokens": tokens, "token_mask": token_mask, "images": images, "image_mask": image_mask, "state": state}
    record |= {"prefix_mask": prefix.mask, "positions": positions[0]}
    for index, (key, value) in enumerate(zip(prefix.keys, prefix.values)):
        record |= {f"keys/{index}": key, f"values/{index}": value}
    record["velocity"] = network.velocity(prefix, torch.from_numpy(given["x"]), torch.from_numpy(given["t"]))
    sampled = euler(network, prefix, torch.from_numpy(given["noise"]), config.num_steps)
    record["sampled"] = sampled
    record["actions"] = torch.from_numpy(checkpoint.real_actions(sampled.numpy()))
    normalized = checkpoint.padded_actions(given["actions"])[..., : case.action_dim]
    record["normalized_actions"] = torch.from_numpy(normalized)
    return {name: value.numpy() for name, value in record.items()}


def differences(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest difference of each output, relative to numbers above 1; infinite for another shape.

    Keys and values of padding differ, and nothing reads them; LeRobot's prefix may have more padding at its end.
    """
    found = {}
    mask = ours["prefix_mask"]
    for name in sorted(theirs):
        mine, other = ours[name], theirs[name]
        if name == "prefix_mask":
            extra = other.shape[1] - mask.shape[1]
            other, mine = other.astype(float), np.pad(mask, ((0, 0), (0, max(0, extra)))).astype(float)
        elif name.startswith(("keys/", "values/")):
            mine, other = (part.swapaxes(1, 2)[:, : mask.shape[1]] for part in (mine, other))
            mine, other = mine[mask], other[mask]
        if mine.shape != other.shape:
            found[name] = float("inf")
            continue
        gaps = np.abs(mine.astype(float) - other.astype(float)) / np.maximum(1.0, np.abs(other.astype(float)))
        found[name] = float(gaps.max())
    return found
