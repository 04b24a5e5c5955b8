"""config.json of a pi0 or pi0.5 policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rlvla.models.lerobot.config_json import read_settings
from rlvla.models.lerobot.features import Features, mode_problems, read_features
from rlvla.models.pi0.sizes import VARIANTS
from rlvla.utils.errors import ConfigError, Problem

PI0, PI05 = "pi0", "pi05"
NAMES = {PI0: "pi0", PI05: "pi0.5"}
# What LeRobot takes if config.json does not say it, where the two differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    PI0: {
        "tokenizer_max_length": 48,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    },
    PI05: {
        "tokenizer_max_length": 200,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    },
}
_LARGEST = 2**20
_RANGES = {
    "chunk_size": (1, _LARGEST),
    "n_action_steps": (1, _LARGEST),
    "max_state_dim": (1, _LARGEST),
    "max_action_dim": (1, _LARGEST),
    "empty_cameras": (0, 64),
    "tokenizer_max_length": (1, _LARGEST),
    "num_inference_steps": (1, _LARGEST),
    "min_period": (1e-12, 1e12),
    "max_period": (1e-12, 1e12),
}


@dataclass(frozen=True)
class Pi0Config:
    """The settings that this program reads; names, meanings and defaults are LeRobot's.

    Attributes:
        type: "pi0" or "pi05".
        features: `input_features` and `output_features`.
        tokenizer_max_length: longest prompt in tokens.
        normalization_mapping: kind of feature -> normalization mode.
        paligemma_variant: sizes of the vision-language model's decoder; a key of `VARIANTS`.
        action_expert_variant: sizes of the action expert.
        chunk_size: C, actions that are denoised together.
        n_action_steps: how many of them are executed before the next decision.
        max_state_dim: states are padded to this length.
        max_action_dim: actions are padded to this length.
        image_resolution: height and width of the images that the network sees.
        empty_cameras: image features that may be missing.
        num_inference_steps: denoising steps.
        freeze_vision_encoder: whether the vision tower stays as it is.
        train_expert_only: whether the whole vision-language model stays as it is.
        min_period: shortest period of the time embedding.
        max_period: longest period of the time embedding.
        raw: the whole content of the file.
    """

    type: str
    features: Features
    tokenizer_max_length: int
    normalization_mapping: Mapping[str, str]
    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    chunk_size: int = 50
    n_action_steps: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    image_resolution: tuple[int, ...] = (224, 224)
    empty_cameras: int = 0
    num_inference_steps: int = 10
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False
    min_period: float = 4e-3
    max_period: float = 4.0
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> Pi0Config:
        """Read config.json; entries that this program does not know are kept in `raw`.

        Raises:
            ConfigError: lists everything that is missing, of another type or impossible.
        """
        kind = raw.get("type")
        if not isinstance(kind, str) or kind not in _DEFAULTS:
            raise ConfigError.of(None, "mismatch", f"{where}: type is {kind!r}, not {PI0!r} or {PI05!r}")
        if "proj_width" in raw:
            text = f"{where} was written before LeRobot 0.4, which changed {NAMES[kind]}; start from a newer folder"
            raise ConfigError.of(None, "mismatch", text)
        given, texts = read_settings(cls, raw)
        features, wrong = read_features(raw)
        texts += wrong
        config = cls(**{**_DEFAULTS[kind], **given, "features": features, "raw": dict(raw)})
        texts += config._value_problems(complete=not texts)
        if texts:
            raise ConfigError(Problem(None, "invalid_file", f"{where}: {text}") for text in texts)
        return config

    def _value_problems(self, *, complete: bool) -> list[str]:
        """Values that no policy can have; `complete`: the features are known."""
        texts = [
            f"{name} is {getattr(self, name)}; it must be between {least} and {most}"
            for name, (least, most) in _RANGES.items()
            if not least <= getattr(self, name) <= most
        ]
        if self.n_action_steps > self.chunk_size:
            texts.append(f"n_action_steps is {self.n_action_steps}, but chunk_size is {self.chunk_size}")
        if self.min_period >= self.max_period:
            texts.append(f"min_period is {self.min_period:g}; it must be below max_period {self.max_period:g}")
        size = self.image_resolution
        if len(size) != 2 or size[0] != size[1] or not 1 <= size[0] <= 2**14:
            texts.append(f"image_resolution is {list(size)}; a height and an equal width are needed")
        known = {"paligemma_variant": ["gemma_2b"], "action_expert_variant": sorted(VARIANTS)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                texts.append(f"{name} is {getattr(self, name)!r}; known: {', '.join(values)}")
        texts += mode_problems(self.normalization_mapping, "normalization_mapping")
        if complete:
            dims = ("state", self.features.state_dim, self.max_state_dim)
            for part, dim, most in (dims, ("action", self.features.action_dim, self.max_action_dim)):
                if dim > most:
                    texts.append(f"the {part} has {dim} numbers, but max_{part}_dim is {most}")
        return texts

    @property
    def state_in_prompt(self) -> bool:
        """Whether the state is written into the prompt, and the time conditions the norms (pi0.5)."""
        return self.type == PI05

    @property
    def image_size(self) -> int:
        """Side of the images that the network sees."""
        return self.image_resolution[0]

    def to_json(self) -> dict[str, Any]:
        """The content of config.json: what was read, with the values of this object where they differ from it."""
        read = type(self).from_json(self.raw, Path("config.json"))
        names = [entry.name for entry in fields(self) if entry.name not in ("features", "raw")]
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(read, name)}
        return {**self.raw, **{name: list(v) if isinstance(v, tuple) else v for name, v in changed.items()}}
