"""config.json of a LeRobot policy: its features, and the settings common to all families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from rlvla.models.sizes import LARGEST
from rlvla.utils.data_files import field_types, fits, without_local_code
from rlvla.utils.errors import ConfigError, Problem

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
EMPTY_CAMERA = IMAGES + "empty_camera_"


def image_feature(name: str) -> str:
    """The key of an image feature, from which `observation.images.` may be left out."""
    return name if "." in name else IMAGES + name


# The statistics that each normalization mode needs, as named in LeRobot's data sets.
STATISTICS: dict[str, tuple[str, ...]] = {
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


@dataclass(frozen=True)
class Feature:
    """An entry of `input_features` or `output_features`.

    Attributes:
        kind: "STATE", "VISUAL", "ACTION", ...
        shape: of one observation or action, without batch.
    """

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Features:
    """Features of a policy by key, in the order of its config.json."""

    inputs: Mapping[str, Feature]
    outputs: Mapping[str, Feature]

    @property
    def state_dim(self) -> int:
        """Length of the state vector before padding."""
        return self.inputs[STATE].shape[0]

    @property
    def action_dim(self) -> int:
        """D, dimensions of an action before padding."""
        return self.outputs[ACTION].shape[0]

    @property
    def cameras(self) -> list[str]:
        """Keys of the images, in the order in which the network reads them."""
        return [key for key, feature in self.inputs.items() if feature.kind == "VISUAL"]

    @property
    def all(self) -> dict[str, Feature]:
        """Inputs, then outputs."""
        return {**self.inputs, **self.outputs}

    @classmethod
    def of(cls, images: Iterable[str], size: tuple[int, int], state_dim: int, action_dim: int) -> Features:
        """Features of a policy with a state and images of `size` (height, width), whose keys are `images`."""
        shape = (3, *size)
        inputs = {STATE: Feature("STATE", (state_dim,)), **{key: Feature("VISUAL", shape) for key in images}}
        return cls(inputs, {ACTION: Feature("ACTION", (action_dim,))})


def features_json(features: Mapping[str, Feature]) -> dict[str, Any]:
    """`input_features` or `output_features` as in config.json."""
    return {key: {"type": feature.kind, "shape": list(feature.shape)} for key, feature in features.items()}


def read_features(raw: Mapping[str, Any]) -> tuple[Features, list[str]]:
    """The features in a config.json, and the problems with them."""
    sides: list[dict[str, Feature]] = []
    problems = []
    for name in ("input_features", "output_features"):
        side = {}
        entries = raw.get(name)
        if not isinstance(entries, Mapping):
            problems.append(f"{name} is missing; it lists the inputs or outputs of the policy")
            entries = {}
        for key, entry in entries.items():
            kind, shape = (entry.get("type"), entry.get("shape")) if isinstance(entry, Mapping) else (None, None)
            sizes: list[Any] = shape if isinstance(shape, list) else [None]
            if not isinstance(kind, str) or not all(type(size) is int and size > 0 for size in sizes):
                problems.append(f"{name}[{key!r}] needs a type and a shape of positive whole numbers")
                continue
            side[key] = Feature(kind, tuple(sizes))
        sides.append(side)
    features = Features(*sides)
    if not problems:
        for key, required in ((STATE, features.inputs), (ACTION, features.outputs)):
            if key not in required or len(required[key].shape) != 1:
                problems.append(f"{key} must be one of its features, as a vector")
        if not features.cameras:
            problems.append("no input feature has type VISUAL; the policy needs a camera")
    return features, problems


def mode_problems(modes: Mapping[str, Any], where: str) -> list[str]:
    """Problems of a map from kinds of features to normalization modes."""
    problems = [
        f"{where}[{kind!r}] is {mode!r}; known are {', '.join(STATISTICS)}"
        for kind, mode in modes.items()
        if not isinstance(mode, str) or mode not in STATISTICS
    ]
    if not problems and modes.get("VISUAL", "IDENTITY") != "IDENTITY":
        problems.append(f"{where}['VISUAL'] is {modes['VISUAL']}; images are supported with IDENTITY alone")
    return problems


MEAN_STD_MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
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
    """The settings that rlvla reads; names, meanings and defaults are LeRobot's.

    Attributes:
        features: `input_features` and `output_features`.
        chunk_size: C, actions that are denoised together.
        n_action_steps: number of actions executed before the next decision.
        normalization_mapping: kind of feature -> normalization mode.
        max_state_dim: states are padded to this length.
        max_action_dim: actions are padded to this length.
        empty_cameras: image features that may be missing.
        tokenizer_max_length: longest prompt in tokens.
        freeze_vision_encoder: whether the vision tower is frozen.
        train_expert_only: whether the whole vision-language model is frozen.
        min_period: shortest period of the time embedding.
        max_period: longest period of the time embedding.
        raw: the whole content of the file.
        steps_name: the family's name for the number of denoising steps.
        ranges: least and largest values of the family's settings.
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
        """Read config.json; unknown entries are kept in `raw`.

        Raises:
            ConfigError: lists all settings that are missing, of another type or impossible.
        """

    @abstractmethod
    def family_problems(self) -> Iterable[str]:
        """Impossible values of the family's settings."""

    @property
    @abstractmethod
    def text_step(self) -> str:
        """Name of the pipeline step that prepares the prompt."""

    @property
    @abstractmethod
    def tokenizer_name(self) -> str:
        """Folder or public name of the tokenizer if the pipeline names none."""

    @property
    def state_in_prompt(self) -> bool:
        """Whether the prompt contains the normalized state, which otherwise is a token of the prefix."""
        return False

    @classmethod
    def read(
        cls,
        raw: Mapping[str, Any],
        where: Path,
        *,
        defaults: Mapping[str, Any] | None = None,
        required: Iterable[str] = (),
    ) -> Self:
        """`from_json` for a file of the family's type.

        Args:
            raw: content of the file.
            where: its path.
            defaults: in place of the defaults of the class.
            required: settings that the file must have.
        """
        given, texts = _typed_values(cls, raw)
        texts += [f"{name} is missing" for name in required if name not in raw]
        features, wrong = read_features(raw)
        texts += wrong
        config = cls(**{**(defaults or {}), **given, "features": features, "raw": dict(raw)})
        texts += config._value_problems(complete=not texts)
        if texts:
            raise ConfigError(Problem(None, "invalid_file", f"{where}: {text}") for text in texts)
        return config

    def _value_problems(self, *, complete: bool) -> list[str]:
        """Impossible values; `complete`: the features are known."""
        texts = [
            f"{name} is {getattr(self, name)}; it must be between {least} and {most}"
            for name, (least, most) in {**_RANGES, **self.ranges}.items()
            if not least <= getattr(self, name) <= most
        ]
        if self.n_action_steps > self.chunk_size:
            texts.append(f"n_action_steps is {self.n_action_steps}, but chunk_size is {self.chunk_size}")
        if self.min_period >= self.max_period:
            texts.append(f"min_period is {self.min_period:g}; it must be below max_period {self.max_period:g}")
        texts += self.family_problems()
        texts += mode_problems(self.normalization_mapping, "normalization_mapping")
        if complete:
            dims = {"state": self.features.state_dim, "action": self.features.action_dim}
            for name, dim in dims.items():
                if dim > (most := getattr(self, f"max_{name}_dim")):
                    texts.append(f"the {name} has {dim} numbers, but max_{name}_dim is {most}")
        return texts

    @property
    def steps(self) -> int:
        """Denoising steps."""
        steps: int = getattr(self, self.steps_name)
        return steps

    def to_json(self) -> dict[str, Any]:
        """The content of config.json: `raw` without local code, updated with the values that have changed since."""
        read = self.from_json(self.raw, Path("config.json"))
        names = [entry.name for entry in fields(self) if entry.name not in ("features", "raw")]
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(read, name)}
        raw = without_local_code(self.raw)
        return {**raw, **{name: list(v) if isinstance(v, tuple) else v for name, v in changed.items()}}


def _typed_values(cls: type[LeRobotConfig], raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values in a file for the fields of a class, and the problems with their types."""
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
