"""Sizes of the networks inside pi0 and pi0.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlvla.utils.data_files import fits, read_json
from rlvla.utils.errors import ConfigError, Problem

SIZES_FILE = "sizes.json"
EPSILON = 1e-6  # of every norm
_MOST_LAYERS, _LARGEST = 2**10, 2**20


@dataclass(frozen=True)
class GemmaSizes:
    """Sizes of a Gemma decoder.

    Attributes:
        width: of the residual stream.
        depth: number of layers.
        mlp_width: of the hidden layers of the MLPs.
        heads: of the queries.
        kv_heads: of keys and values.
        head_dim: width of a head.
    """

    width: int
    depth: int
    mlp_width: int
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of a SigLIP tower; the defaults are those of So400m with patches of 14 pixels.

    Attributes:
        width: of the residual stream.
        depth: number of layers.
        mlp_width: of the hidden layers of the MLPs.
        heads: of the attention.
        patch_size: side of a patch in pixels.
    """

    width: int = 1152
    depth: int = 27
    mlp_width: int = 4304
    heads: int = 16
    patch_size: int = 14


VARIANTS = {"gemma_300m": GemmaSizes(1024, 18, 4096), "gemma_2b": GemmaSizes(2048, 18, 16384)}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the whole network.

    Attributes:
        vlm: of the vision-language model's decoder.
        expert: of the action expert.
        vision: of the vision tower.
        vocabulary: rows of the embedding.
    """

    vlm: GemmaSizes = VARIANTS["gemma_2b"]
    expert: GemmaSizes = VARIANTS["gemma_300m"]
    vision: VisionSizes = VisionSizes()
    vocabulary: int = 257_152

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> Sizes:
        """Read a sizes.json: vlm, expert and vision with the names of this file, and vocabulary.

        Raises:
            ConfigError: lists what is missing, or does not fit together.
        """
        kinds = {"vlm": GemmaSizes, "expert": GemmaSizes, "vision": VisionSizes}
        texts = []
        for part, kind in kinds.items():
            given, names = raw.get(part), {entry.name for entry in fields(kind)}
            if not isinstance(given, Mapping) or set(given) != names:
                texts.append(f"{part} needs positive whole numbers {', '.join(sorted(names))}")
            else:
                texts += [f"{part}: {text}" for text in _range_problems(given)]
        texts += _range_problems({"vocabulary": raw.get("vocabulary")})
        if not texts:
            sizes = cls(**{part: kind(**raw[part]) for part, kind in kinds.items()}, vocabulary=raw["vocabulary"])
            texts = sizes.problems()
        if texts:
            raise ConfigError(Problem(None, "invalid_file", f"{where}: {text}") for text in texts)
        return sizes

    def problems(self) -> list[str]:
        """Why the parts do not fit together, in words."""
        texts = [
            f"{name} is {ours} in the vision-language model and {theirs} in the action expert; they must be equal"
            for name in ("depth", "heads", "kv_heads", "head_dim")
            if (ours := getattr(self.vlm, name)) != (theirs := getattr(self.expert, name))
        ]
        if self.vlm.heads % self.vlm.kv_heads or self.vlm.head_dim % 2:
            texts.append(
                f"{self.vlm.heads} heads, {self.vlm.kv_heads} key-value heads of {self.vlm.head_dim} do not fit"
            )
        if self.vision.width % self.vision.heads:
            texts.append(f"vision width {self.vision.width} does not fit {self.vision.heads} heads")
        if self.expert.width % 2:
            texts.append(f"the expert's width {self.expert.width} is odd; the time embedding needs an even one")
        return texts


def _range_problems(sizes: Mapping[str, Any]) -> list[str]:
    """Sizes that no network can have; the largest ones keep everything countable before anything is allocated."""
    most = {name: _MOST_LAYERS if name == "depth" else _LARGEST for name in sizes}
    return [
        f"{name} is {value!r}, not a whole number from 1 to {most[name]}"
        for name, value in sizes.items()
        if not fits(value, int) or not 1 <= value <= most[name]
    ]


def read_sizes(folder: Path, vlm_variant: str, expert_variant: str) -> Sizes:
    """Sizes of the variants that a config.json names, unless the folder has a sizes.json, as small policies do.

    Raises:
        ConfigError: see `Sizes.from_json`.
    """
    if (folder / SIZES_FILE).is_file():
        return Sizes.from_json(read_json(folder / SIZES_FILE), folder / SIZES_FILE)
    return Sizes(VARIANTS[vlm_variant], VARIANTS[expert_variant])
