"""Small pi0 and pi0.5 policies with fixed weights, and their outputs in rlvla.

`benchmarks/lerobot_agreement.py --family pi0` compares that with LeRobot and records LeRobot's side in tests/data/pi0.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from rlvla.models.lerobot.config import Feature, Features
from rlvla.models.lerobot.processors import RELATIVE
from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.models.pi0.checkpoint import HEAD, INPUTS, Pi0Files, check_pi0, file_shapes
from rlvla.models.pi0.config import PALIGEMMA, PI0, PI05, SIZES_FILE, GemmaSizes, Pi0Config, Sizes, VisionSizes
from rlvla.models.pi0.network import VLM
from tests.support.fixed_numbers import numbers
from tests.support.lerobot_cases import SENTENCES, Case, euler, observations, padded, with_missing_cameras
from tests.support.tiny_pi0 import tokenizer_files

VECTORS = Path(__file__).resolve().parents[1] / "data" / "pi0"
VECTORS_06 = VECTORS.with_name("pi0_06")
check = check_pi0
# LeRobot has eight heads written in its training pass.
_SIZES = Sizes(
    vlm=GemmaSizes(width=48, depth=3, mlp_width=80, heads=8, head_dim=8),
    expert=GemmaSizes(width=32, depth=3, mlp_width=64, heads=8, head_dim=8),
    vision=VisionSizes(width=32, depth=2, mlp_width=48, heads=4, patch_size=14),
    vocabulary=640,
)
_GROUPED = Sizes(
    vlm=GemmaSizes(width=32, depth=2, mlp_width=80, heads=8, kv_heads=2, head_dim=4),
    expert=GemmaSizes(width=40, depth=2, mlp_width=64, heads=8, kv_heads=2, head_dim=4),
    vision=VisionSizes(width=24, depth=1, mlp_width=48, heads=2, patch_size=16),
    vocabulary=600,
)


def _case(
    family: str,
    settings: dict[str, object],
    modes: str,
    cameras: dict[str, tuple[int, int] | None],
    sizes: Sizes,
    seed: int,
) -> Case:
    return Case(settings, modes, cameras, sizes, family=family, seed=seed, asked={"sizes": asdict(sizes)})


CASES = {
    "pi0": _case(
        PI0,
        {"chunk_size": 6, "n_action_steps": 6, "num_inference_steps": 5, "image_resolution": [56, 56]}
        | {"empty_cameras": 1},
        "MEAN_STD",
        {"top": (60, 81), "wrist": (35, 20), "empty_camera_0": None},
        _SIZES,
        3,
    ),
    "pi0_quantiles": _case(
        PI0,
        {"chunk_size": 4, "n_action_steps": 2, "num_inference_steps": 3, "image_resolution": [48, 48]}
        | {"max_state_dim": 9, "max_action_dim": 6, "tokenizer_max_length": 7},
        "QUANTILES",
        {"front": (120, 91)},
        _GROUPED,
        4,
    ),
    "pi05": _case(
        PI05,
        {"chunk_size": 5, "n_action_steps": 5, "num_inference_steps": 4, "image_resolution": [56, 56]},
        "QUANTILES",
        {"top": (31, 64), "wrist": (56, 56)},
        _SIZES,
        5,
    ),
    "pi05_mean_std": _case(
        PI05,
        {"chunk_size": 3, "n_action_steps": 3, "num_inference_steps": 2, "image_resolution": [48, 48]}
        | {"max_state_dim": 7, "max_action_dim": 4, "tokenizer_max_length": 40, "empty_cameras": 1},
        "MEAN_STD",
        {"a": (48, 48), "empty_camera_0": None},
        _GROUPED,
        6,
    ),
}


def prepare(case: Case, folder: Path) -> None:
    """Write the tokenizer and the sizes into a policy's folder."""
    place = folder / PALIGEMMA
    place.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(SENTENCES).items():
        (place / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / SIZES_FILE).write_text(json.dumps(asdict(case.sizes)), encoding="utf-8")


def recorded_folder(name: str, folder: Path, vectors: Path = VECTORS) -> Path:
    """The folder that LeRobot 0.4.4, or 0.6.1 (`VECTORS_06`), wrote for a case, with its weights drawn again."""
    case = CASES[name]
    shutil.copytree(vectors / name, folder, ignore=shutil.ignore_patterns("outputs.npz"))
    prepare(case, folder)
    mark_inputs(folder)
    config = folder / "config.json"
    shapes = file_shapes(Pi0Config.from_json(json.loads(config.read_text()), config), case.sizes)
    rng = np.random.default_rng(case.seed)
    state = {name: torch.from_numpy(numbers(name, shapes[name], rng)) for name in sorted(shapes)}
    metadata = {"format": "pt"}
    if vectors == VECTORS:
        # The two share their weights; LeRobot 0.4 sets the head last, and writes it alone.
        embedding = f"{VLM}model.language_model.embed_tokens.weight"
        state.pop(embedding)
        metadata[embedding] = HEAD
    save_file(state, folder / "model.safetensors", metadata=metadata)
    return folder


def mark_inputs(folder: Path) -> None:
    """Record the inputs of LeRobot 0.4, whose folders do not tell them; later ones have relative actions."""
    if RELATIVE not in (folder / "policy_preprocessor.json").read_text(encoding="utf-8"):
        (folder / SETTINGS_FILE).write_text(json.dumps({INPUTS: "0.4"}), encoding="utf-8")


def full_shapes(family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of lerobot/pi0_base or lerobot/pi05_base."""
    features = Features({"observation.state": Feature("STATE", (32,))}, {"action": Feature("ACTION", (32,))})
    return file_shapes(Pi0Config(type=family, features=features), Sizes())


@torch.no_grad()
def computed_like(checkpoint: Pi0Files, case: Case, theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs for the observations, under the names of LeRobot's record."""
    given, config = observations(case), checkpoint.config
    network = checkpoint.load_network()
    keys = [key for key in config.features.cameras if key in given]
    pixels = torch.stack([checkpoint.pixels(torch.from_numpy(given[key])) for key in keys], dim=1)
    images, image_mask = with_missing_cameras(pixels, len(config.features.cameras) - len(keys))
    normalized = checkpoint.processors.state.normalize(given["observation.state"])
    state = torch.from_numpy(padded(normalized, config.max_state_dim))
    tokens, token_mask = checkpoint.prompts([str(task) for task in given["tasks"]], state[:, : case.state_dim])
    if config.state_in_prompt:  # LeRobot pads it in the prompt alone
        state = state[:, : case.state_dim]
    prefix = network.prefix(images, image_mask, tokens, token_mask, state)
    # LeRobot encodes the state together with the actions.
    length = prefix.mask.shape[1] - (0 if config.state_in_prompt else 1)
    record = {"tokens": tokens, "token_mask": token_mask, "images": images, "image_mask": image_mask, "state": state}
    record["prefix_mask"] = prefix.mask[:, :length]
    for index, (key, value) in enumerate(zip(prefix.keys, prefix.values)):
        record |= {f"keys/{index}": key[:, :, :length], f"values/{index}": value[:, :, :length]}
    record["velocity"] = network.velocity(prefix, torch.from_numpy(given["x"]), torch.from_numpy(given["t"]))
    sampled = euler(network, prefix, torch.from_numpy(given["noise"]), checkpoint.config.steps)
    record["sampled"] = sampled
    action = checkpoint.processors.action
    record["actions"] = torch.from_numpy(action.unnormalize(sampled.numpy()[..., : case.action_dim]))
    record["normalized_actions"] = torch.from_numpy(action.normalize(given["actions"]))
    return {name: value.numpy() for name, value in record.items()}
