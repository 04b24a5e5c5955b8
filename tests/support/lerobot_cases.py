"""Small policies of LeRobot's families with fixed weights and observations, and how two sides of them are compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SENTENCES = ("pick up the red cube", "open the drawer of the cabinet", "push the plate")
TASKS = ("pick up the red cube", "open the drawer of the cabinet, then close it again\n", "grüße")


@dataclass(frozen=True)
class Case:
    """Settings that differ from LeRobot's defaults, and the sizes around them."""

    settings: dict[str, Any]
    modes: str
    cameras: dict[str, tuple[int, int] | None]  # -> height and width of the environment's images; None: missing
    sizes: Any  # of the network, as the family's module takes them
    family: str = "smolvla"
    state_dim: int = 5
    action_dim: int = 4
    seed: int = 0
    asked: dict[str, Any] = field(default_factory=dict)  # further entries of the request

    def request(self) -> dict[str, Any]:
        """The request to LeRobot for this policy."""
        rng = np.random.default_rng(self.seed + 100)
        statistics = {}
        for key, size in (("observation.state", self.state_dim), ("action", self.action_dim)):
            low, width = rng.normal(size=size), rng.uniform(0.5, 2.0, size)
            values = {"min": low, "q01": low + 0.05 * width, "q10": low + 0.2 * width, "mean": low + 0.5 * width}
            values |= {"q90": low + 0.8 * width, "q99": low + 0.95 * width, "max": low + width, "std": 0.3 * width}
            values["max"][0] = values["q99"][0] = values["min"][0] = values["q01"][0]  # a joint that never moves
            statistics[key] = {name: numbers.tolist() for name, numbers in values.items()}
        inputs: dict[str, Any] = {"observation.state": ["STATE", [self.state_dim]]}
        inputs |= {f"observation.images.{name}": ["VISUAL", [3, 64, 64]] for name in self.cameras}
        return {
            "family": self.family,
            "input_features": inputs,
            "output_features": {"action": ["ACTION", [self.action_dim]]},
            "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": self.modes, "ACTION": self.modes},
            "settings": self.settings,
            "statistics": statistics,
            "seed": self.seed,
            **self.asked,
        }


class Network(Protocol):
    """A network with a velocity."""

    def velocity(self, prefix: Any, x: Tensor, t: Tensor) -> Tensor:
        """Velocities [B, R, C, D]."""
        ...


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


def padded(vectors: np.ndarray, size: int) -> np.ndarray:
    """[..., n] -> [..., size], with zeros at the end."""
    return np.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(0, size - vectors.shape[-1])])


def with_missing_cameras(images: Tensor, missing: int) -> tuple[Tensor, Tensor]:
    """Images [B, N, ...] followed by `missing` black ones, and the mask [B, N + missing]."""
    present = images.shape[1]
    images = torch.cat([images, -torch.ones_like(images[:, :1]).expand(-1, missing, -1, -1, -1)], dim=1)
    mask = torch.zeros(images.shape[:2], dtype=torch.bool)
    mask[:, :present] = True
    return images, mask


def euler(network: Network, prefix: Any, noise: Tensor, steps: int) -> Tensor:
    """Actions [B, C, D] from noise by `steps` steps along the velocity."""
    x = noise
    for index in range(steps):
        t = torch.full((len(x), 1), 1 - index / steps)
        x = x - network.velocity(prefix, x[:, None], t)[:, 0] / steps
    return x


def differences(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Largest difference of each output, relative to its largest number if that is above 1; infinite for another shape.

    Not relative to single numbers: denoising amplifies rounding, which differs between CPUs, all over the chunk.
    Keys and values of padding differ, and nothing reads them; LeRobot's prefix may have more padding at its end.
    """
    largest = {}
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
            largest[name] = float("inf")
            continue
        gaps = np.abs(mine.astype(float) - other.astype(float))
        largest[name] = float(gaps.max() / max(1.0, np.abs(other.astype(float)).max()))
    return largest


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def resave(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change a file of tensors."""
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
