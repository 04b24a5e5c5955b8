"""config.json of a SmolVLA policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlvla.models.lerobot.config_json import read_settings
from rlvla.models.lerobot.features import Features, mode_problems, read_features
from rlvla.utils.errors import ConfigError, Problem

MODEL_TYPE = "smolvla"
_MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
_LARGEST = 2**20
_RANGES = {
    "chunk_size": (1, _LARGEST),
    "n_action_steps": (1, _LARGEST),
    "max_state_dim": (1, _LARGEST),
    "max_action_dim": (1, _LARGEST),
    "empty_cameras": (0, 64),
    "tokenizer_max_length": (1, _LARGEST),
    "num_steps": (1, _LARGEST),
    "expert_width_multiplier": (1e-6, 1e3),
    "min_period": (1e-12, 1e12),
    "max_period": (1e-12, 1e12),
}


@dataclass(frozen=True)
class SmolVLAConfig:
    """The settings that this program reads; names, meanings and defaults are LeRobot's.

    Attributes:
        vlm_model_name: folder or public name of the vision-language model; see `rlvla.models.smolvla.vlm`.
        features: `input_features` and `output_features`.
        chunk_size: C, actions that are denoised together.
        n_action_steps: how many of them are executed before the next decision.
        normalization_mapping: kind of feature -> normalization mode.
        max_state_dim: states are padded to this length.
        max_action_dim: actions are padded to this length.
        resize_imgs_with_padding: width and height of the images that the network sees; None: as they come.
        empty_cameras: image features that may be missing.
        tokenizer_max_length: longest prompt in tokens.
        pad_language_to: "longest" of the batch, or "max_length".
        num_steps: denoising steps.
        freeze_vision_encoder: whether the vision tower stays as it is.
        train_expert_only: whether the whole vision-language model stays as it is.
        train_state_proj: whether the projection of the state is trained.
        attention_mode: "cross_attn" (layers of the expert attend to the prefix alone, but for every n-th) or
            "self_attn" (all attend to prefix and actions).
        num_expert_layers: layers of the expert; 0 or less: as many as the vision-language model's.
        num_vlm_layers: how many of the vision-language model's first layers are used; 0 or less: all.
        self_attn_every_n_layers: n for `attention_mode`; 0 or less: none attends to the actions.
        expert_width_multiplier: width of the expert relative to the vision-language model.
        min_period: shortest period of the time embedding.
        max_period: longest period of the time embedding.
        add_image_special_tokens: must be False.
        adapt_to_pi_aloha: must be False.
        raw: the whole content of the file.
    """

    vlm_model_name: str
    features: Features
    chunk_size: int = 50
    n_action_steps: int = 50
    normalization_mapping: Mapping[str, str] = field(default_factory=lambda: dict(_MODES))
    max_state_dim: int = 32
    max_action_dim: int = 32
    resize_imgs_with_padding: tuple[int, ...] | None = (512, 512)
    empty_cameras: int = 0
    tokenizer_max_length: int = 48
    pad_language_to: str = "longest"
    num_steps: int = 10
    freeze_vision_encoder: bool = True
    train_expert_only: bool = True
    train_state_proj: bool = True
    attention_mode: str = "cross_attn"
    num_expert_layers: int = -1
    num_vlm_layers: int = 16
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75
    min_period: float = 4e-3
    max_period: float = 4.0
    add_image_special_tokens: bool = False
    adapt_to_pi_aloha: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> SmolVLAConfig:
        """Read config.json; entries that this program does not know are kept in `raw`.

        Raises:
            ConfigError: lists everything that is missing, of another type or impossible.
        """
        if raw.get("type") != MODEL_TYPE:
            text = f"{where}: type is {raw.get('type')!r}, not {MODEL_TYPE!r}"
            raise ConfigError.of(None, "mismatch", text)
        given, texts = read_settings(cls, raw)
        texts += [] if "vlm_model_name" in raw else ["vlm_model_name is missing"]
        features, wrong = read_features(raw)
        texts += wrong
        config = cls(**{"vlm_model_name": "", **given, "features": features, "raw": dict(raw)})
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
        size = self.resize_imgs_with_padding
        if size is not None and (len(size) != 2 or size[0] != size[1] or size[0] < 1):
            texts.append(f"resize_imgs_with_padding is {list(size)}; a width and an equal height are needed")
        if self.attention_mode not in ("cross_attn", "self_attn"):
            texts.append(f"attention_mode is {self.attention_mode!r}; known are cross_attn and self_attn")
        if self.pad_language_to not in ("longest", "max_length"):
            texts.append(f"pad_language_to is {self.pad_language_to!r}; known are longest and max_length")
        for name in ("add_image_special_tokens", "adapt_to_pi_aloha"):
            if getattr(self, name):
                texts.append(f"{name} is true, which is not supported")
        texts += mode_problems(self.normalization_mapping, "normalization_mapping")
        if complete:
            dims = ("state", self.features.state_dim, self.max_state_dim)
            for part, dim, most in (dims, ("action", self.features.action_dim, self.max_action_dim)):
                if dim > most:
                    texts.append(f"the {part} has {dim} numbers, but max_{part}_dim is {most}")
        return texts

    @property
    def image_size(self) -> int | None:
        """Side of the images that the network sees; None: as they come."""
        return self.resize_imgs_with_padding[0] if self.resize_imgs_with_padding else None

    def to_json(self) -> dict[str, Any]:
        """The content of config.json: what was read, with the values of this object."""
        names = [entry.name for entry in fields(self) if entry.name not in ("features", "raw")]
        values = {name: getattr(self, name) for name in names}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        changed = {name: value for name, value in values.items() if self.raw.get(name) != value}
        return {**self.raw, **{name: changed[name] for name in changed if name in self.raw or not self._default(name)}}

    def _default(self, name: str) -> bool:
        entry = next(entry for entry in fields(self) if entry.name == name)
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        return bool(getattr(self, name) == default)


@dataclass(frozen=True)
class ExpertLayer:
    """How a layer of the expert works together with the vision-language model.

    Attributes:
        vlm_layer: index of the layer of the vision-language model whose keys and values it reads.
        attends_to_actions: whether it attends to prefix and actions (with positions after the prefix), or to the prefix
            alone (through projections of its own).
    """

    vlm_layer: int
    attends_to_actions: bool


def expert_layers(config: SmolVLAConfig, vlm_layers: int) -> tuple[ExpertLayer, ...]:
    """The layers of the expert beside `vlm_layers` layers of the vision-language model.

    Raises:
        ConfigError: numbers of layers that do not fit together; LeRobot cannot run such a policy either.
    """
    count = config.num_expert_layers if config.num_expert_layers > 0 else vlm_layers
    if count > vlm_layers or vlm_layers % count:
        text = f"num_expert_layers is {count}; it must divide the {vlm_layers} layers of the vision-language model"
        raise ConfigError.of(None, "invalid_file", text)
    every, step = config.self_attn_every_n_layers, vlm_layers // count

    def attends(index: int) -> bool:
        return config.attention_mode == "self_attn" or (every > 0 and index % every == 0)

    layers = tuple(ExpertLayer(step * index, attends(index)) for index in range(count))
    # The projections are shaped by the layer's number in the expert, and used by its number in the other model; layers
    # of the latter alone cannot attend to actions.
    wrong = [index for index in range(vlm_layers) if index % step and attends(index)]
    wrong += [layer.vlm_layer for layer in layers if attends(layer.vlm_layer) != layer.attends_to_actions]
    if wrong:
        text = (
            f"num_expert_layers {count} of {vlm_layers} layers does not fit attention_mode {config.attention_mode} "
            f"with self_attn_every_n_layers {every} (layer {min(wrong)}); use as many expert layers as others"
        )
        raise ConfigError.of(None, "invalid_file", text)
    return layers
