"""config.json of a LeRobot policy: the settings that the families have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from rlvla.models.lerobot.features import Features, mode_problems, read_features
from rlvla.utils.data_files import field_types, fits
from rlvla.utils.errors import ConfigError, Problem

MEAN_STD_MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
LARGEST = 2**20  # of any size, so that nothing absurd is allocated
_RANGES: dict[str, tuple[float, float]] = {
    "chunk_size": (1, LARGEST),
    "n_action_steps": (1, LARGEST),
    "max_state_dim": (1, LARGEST),
    "max_action_dim": (1, LARGEST),
    "empty_cameras": (0, 64),
    "tokenizer_max_length": (1, LARGEST),
    "min_period": (1e-12, 1e12),
    "max_period": (1e-12, 1e12),
}


@dataclass(frozen=True, kw_only=True)
class LeRobotConfig(ABC):
    """The settings that this program reads; names, meanings and defaults are LeRobot's.

    Attributes:
        features: `input_features` and `output_features`.
        chunk_size: C, actions that are denoised together.
        n_action_steps: how many of them are executed before the next decision.
        normalization_mapping: kind of feature -> normalization mode.
        max_state_dim: states are padded to this length.
        max_action_dim: actions are padded to this length.
        empty_cameras: image features that may be missing.
        tokenizer_max_length: longest prompt in tokens.
        freeze_vision_encoder: whether the vision tower stays as it is.
        train_expert_only: whether the whole vision-language model stays as it is.
        min_period: shortest period of the time embedding.
        max_period: longest period of the time embedding.
        raw: the whole content of the file.
        steps_name: the family's name for the number of denoising steps.
        ranges: least and largest values of the family's own settings.
    """

    steps_name: ClassVar[str]
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}

    features: Features
    chunk_size: int = 50
    n_action_steps: int = 50
    normalization_mapping: Mapping[str, str] = field(default_factory=lambda: dict(MEAN_STD_MODES))
    max_state_dim: int = 32
    max_action_dim: int = 32
    empty_cameras: int = 0
    tokenizer_max_length: int = 48
    freeze_vision_encoder: bool
    train_expert_only: bool
    min_period: float = 4e-3
    max_period: float = 4.0
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    @abstractmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> Self:
        """Read config.json; entries that this program does not know are kept in `raw`.

        Raises:
            ConfigError: lists everything that is missing, of another type or impossible.
        """

    @abstractmethod
    def own_problems(self) -> Iterable[str]:
        """Values of the family's own settings that no policy can have."""

    @classmethod
    def read(
        cls,
        raw: Mapping[str, Any],
        where: Path,
        *,
        defaults: Mapping[str, Any] | None = None,
        required: Iterable[str] = (),
    ) -> Self:
        """`from_json` for a file of the right type.

        Args:
            raw: content of the file.
            where: its path.
            defaults: in place of those of the class.
            required: settings that the file must have.
        """
        given, texts = _given(cls, raw)
        texts += [f"{name} is missing" for name in required if name not in raw]
        features, wrong = read_features(raw)
        texts += wrong
        config = cls(**{**(defaults or {}), **given, "features": features, "raw": dict(raw)})
        texts += config._value_problems(complete=not texts)
        if texts:
            raise ConfigError(Problem(None, "invalid_file", f"{where}: {text}") for text in texts)
        return config

    def _value_problems(self, *, complete: bool) -> list[str]:
        """Values that no policy can have; `complete`: the features are known."""
        texts = [
            f"{name} is {getattr(self, name)}; it must be between {least} and {most}"
            for name, (least, most) in {**_RANGES, **self.ranges}.items()
            if not least <= getattr(self, name) <= most
        ]
        if self.n_action_steps > self.chunk_size:
            texts.append(f"n_action_steps is {self.n_action_steps}, but chunk_size is {self.chunk_size}")
        if self.min_period >= self.max_period:
            texts.append(f"min_period is {self.min_period:g}; it must be below max_period {self.max_period:g}")
        texts += self.own_problems()
        texts += mode_problems(self.normalization_mapping, "normalization_mapping")
        if complete:
            dims = ("state", self.features.state_dim, self.max_state_dim)
            for part, dim, most in (dims, ("action", self.features.action_dim, self.max_action_dim)):
                if dim > most:
                    texts.append(f"the {part} has {dim} numbers, but max_{part}_dim is {most}")
        return texts

    @property
    def steps(self) -> int:
        """Denoising steps."""
        steps: int = getattr(self, self.steps_name)
        return steps

    def to_json(self) -> dict[str, Any]:
        """The content of config.json: what was read, with the values of this object where they differ from it."""
        read = self.from_json(self.raw, Path("config.json"))
        names = [entry.name for entry in fields(self) if entry.name not in ("features", "raw")]
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(read, name)}
        return {**self.raw, **{name: list(v) if isinstance(v, tuple) else v for name, v in changed.items()}}


def _given(cls: type[LeRobotConfig], raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values that a file gives for the fields of a class, and which of them have another type, in words."""
    given: dict[str, Any] = {}
    texts = []
    hints = field_types(cls)
    for name in (entry.name for entry in fields(cls)):
        if name in ("features", "raw") or name not in raw:
            continue
        if fits(raw[name], hints[name]):
            given[name] = tuple(raw[name]) if isinstance(raw[name], list) else raw[name]
        else:
            wanted = getattr(hints[name], "__name__", str(hints[name]))
            texts.append(f"{name} is {str(raw[name])[:40]!r}, not {wanted}")
    return given, texts
