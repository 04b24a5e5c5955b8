"""config.json of a pi0 or pi0.5 policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlvla.models.lerobot.config import LARGEST, MEAN_STD_MODES, LeRobotConfig
from rlvla.models.pi0.sizes import VARIANTS
from rlvla.utils.errors import ConfigError

PI0, PI05 = "pi0", "pi05"
NAMES = {PI0: "pi0", PI05: "pi0.5"}
# What LeRobot takes if config.json does not say it, where the two differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    PI0: {"tokenizer_max_length": 48, "normalization_mapping": MEAN_STD_MODES},
    PI05: {
        "tokenizer_max_length": 200,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    },
}


@dataclass(frozen=True, kw_only=True)
class Pi0Config(LeRobotConfig):
    """Further settings of pi0 and pi0.5.

    Attributes:
        type: "pi0" or "pi05".
        paligemma_variant: sizes of the vision-language model's decoder; a key of `VARIANTS`.
        action_expert_variant: sizes of the action expert.
        image_resolution: height and width of the images that the network sees.
        num_inference_steps: denoising steps.
    """

    steps_name: ClassVar[str] = "num_inference_steps"
    ranges: ClassVar = {"num_inference_steps": (1, LARGEST)}

    type: str
    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    image_resolution: tuple[int, ...] = (224, 224)
    num_inference_steps: int = 10
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> Pi0Config:
        """See `LeRobotConfig.from_json`."""
        kind = raw.get("type")
        if not isinstance(kind, str) or kind not in _DEFAULTS:
            raise ConfigError.of(None, "mismatch", f"{where}: type is {kind!r}, not {PI0!r} or {PI05!r}")
        if "proj_width" in raw:
            text = f"{where} was written before LeRobot 0.4, which changed {NAMES[kind]}; start from a newer folder"
            raise ConfigError.of(None, "mismatch", text)
        return cls.read(raw, where, defaults=_DEFAULTS[kind])

    def own_problems(self) -> Iterator[str]:
        """See `LeRobotConfig.own_problems`."""
        size = self.image_resolution
        if len(size) != 2 or size[0] != size[1] or not 1 <= size[0] <= 2**14:
            yield f"image_resolution is {list(size)}; a height and an equal width are needed"
        known = {"paligemma_variant": ["gemma_2b"], "action_expert_variant": sorted(VARIANTS)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                yield f"{name} is {getattr(self, name)!r}; known: {', '.join(values)}"

    @property
    def state_in_prompt(self) -> bool:
        """Whether the state is written into the prompt, and the time conditions the norms (pi0.5)."""
        return self.type == PI05

    @property
    def image_size(self) -> int:
        """Side of the images that the network sees."""
        return self.image_resolution[0]
