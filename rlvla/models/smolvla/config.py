"""config.json of a SmolVLA policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlvla.models.flow.settings import MAX_STEPS
from rlvla.models.lerobot.config import LeRobotConfig
from rlvla.utils.errors import ConfigError

MODEL_TYPE = "smolvla"


@dataclass(frozen=True, kw_only=True)
class SmolVLAConfig(LeRobotConfig):
    """Further settings of SmolVLA.

    Attributes:
        vlm_model_name: folder or public name of the vision-language model; see `rlvla.models.smolvla.vlm`.
        resize_imgs_with_padding: width and height of the network's images; None: they are not resized.
        pad_language_to: "longest" of the batch, or "max_length".
        num_steps: denoising steps.
        train_state_proj: whether the projection of the state is trained.
        attention_mode: "cross_attn" (layers of the expert attend to the prefix alone, except every n-th) or
            "self_attn" (all attend to prefix and actions).
        num_expert_layers: layers of the expert; 0 or less: as many as the vision-language model's.
        num_vlm_layers: number of the vision-language model's first layers in use; 0 or less: all.
        self_attn_every_n_layers: n for `attention_mode`; 0 or less: none attends to the actions.
        expert_width_multiplier: width of the expert relative to the vision-language model.
        add_image_special_tokens: must be False.
        adapt_to_pi_aloha: must be False.
    """

    steps_name: ClassVar[str] = "num_steps"
    ranges: ClassVar = {"num_steps": (1, MAX_STEPS), "expert_width_multiplier": (1e-6, 1e3)}

    vlm_model_name: str = ""
    resize_imgs_with_padding: tuple[int, ...] | None = (512, 512)
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
    add_image_special_tokens: bool = False
    adapt_to_pi_aloha: bool = False

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> SmolVLAConfig:
        """See `LeRobotConfig.from_json`."""
        if raw.get("type") != MODEL_TYPE:
            text = f"{where}: type is {raw.get('type')!r}, not {MODEL_TYPE!r}"
            raise ConfigError.of(None, "mismatch", text)
        return cls.read(raw, where, required=["vlm_model_name"])

    def family_problems(self) -> Iterator[str]:
        """See `LeRobotConfig.family_problems`."""
        size = self.resize_imgs_with_padding
        if size is not None and (len(size) != 2 or size[0] != size[1] or size[0] < 1):
            yield f"resize_imgs_with_padding is {list(size)}; a width and an equal height are needed"
        if self.attention_mode not in ("cross_attn", "self_attn"):
            yield f"attention_mode is {self.attention_mode!r}; known are cross_attn and self_attn"
        if self.pad_language_to not in ("longest", "max_length"):
            yield f"pad_language_to is {self.pad_language_to!r}; known are longest and max_length"
        for name in ("add_image_special_tokens", "adapt_to_pi_aloha"):
            if getattr(self, name):
                yield f"{name} is true, which is not supported"

    @property
    def text_step(self) -> str:
        """See `LeRobotConfig.text_step`."""
        return "smolvla_new_line_processor"

    @property
    def tokenizer_name(self) -> str:
        """See `LeRobotConfig.tokenizer_name`."""
        return self.vlm_model_name

    @property
    def image_size(self) -> int | None:
        """Side of the network's images; None: the size of the camera's."""
        return self.resize_imgs_with_padding[0] if self.resize_imgs_with_padding else None


@dataclass(frozen=True)
class ExpertLayer:
    """Attention of a layer of the expert.

    Attributes:
        vlm_layer: index of the layer of the vision-language model whose keys and values it reads.
        attends_to_actions: whether it attends to prefix and actions (with positions after the prefix), or to the prefix
            alone (through additional projections).
    """

    vlm_layer: int
    attends_to_actions: bool


def expert_layers(config: SmolVLAConfig, vlm_layers: int) -> tuple[ExpertLayer, ...]:
    """The layers of the expert beside `vlm_layers` layers of the vision-language model.

    Raises:
        ConfigError: incompatible numbers of layers; LeRobot cannot run such a policy either.
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
