"""config.json of a pi0 or pi0.5 policy, and the sizes of its networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from rlvla.models.flow.settings import MAX_STEPS
from rlvla.models.lerobot.config import MEAN_STD_MODES, LeRobotConfig
from rlvla.models.sizes import size_problems
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem

PI0, PI05 = "pi0", "pi05"
NAMES = {PI0: "pi0", PI05: "pi0.5"}
PALIGEMMA = "google/paligemma-3b-pt-224"  # its tokenizer; the weights are not needed
# LeRobot's defaults where the two differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    PI0: {"tokenizer_max_length": 48, "normalization_mapping": MEAN_STD_MODES},
    PI05: {
        "tokenizer_max_length": 200,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    },
}
SIZES_FILE = "sizes.json"
EPSILON = 1e-6  # of every norm


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
    """Sizes of a SigLIP tower, by default So400m with patches of 14 pixels.

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
        """Read a sizes.json: vlm, expert and vision with the fields of their classes, and vocabulary.

        Raises:
            ConfigError: lists all missing, impossible or inconsistent sizes.
        """
        kinds = {"vlm": GemmaSizes, "expert": GemmaSizes, "vision": VisionSizes}
        texts = []
        for part, kind in kinds.items():
            given, names = raw.get(part), {entry.name for entry in fields(kind)}
            if not isinstance(given, Mapping) or set(given) != names:
                texts.append(f"{part} needs positive whole numbers {', '.join(sorted(names))}")
            else:
                texts += [f"{part}: {text}" for text in size_problems(given, layers="depth")]
        texts += size_problems({"vocabulary": raw.get("vocabulary")}, layers="depth")
        if not texts:
            sizes = cls(**{part: kind(**raw[part]) for part, kind in kinds.items()}, vocabulary=raw["vocabulary"])
            texts = sizes.problems()
        if texts:
            raise ConfigError(Problem(None, "invalid_file", f"{where}: {text}") for text in texts)
        return sizes

    def problems(self) -> list[str]:
        """Inconsistencies between the parts."""
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


def read_sizes(folder: Path, vlm_variant: str, expert_variant: str) -> Sizes:
    """Sizes of the variants that a config.json names, unless the folder has a sizes.json, as small policies do.

    Raises:
        ConfigError: see `Sizes.from_json`.
    """
    if (folder / SIZES_FILE).is_file():
        return Sizes.from_json(read_json(folder / SIZES_FILE), folder / SIZES_FILE)
    return Sizes(VARIANTS[vlm_variant], VARIANTS[expert_variant])


@dataclass(frozen=True, kw_only=True)
class Pi0Config(LeRobotConfig):
    """Further settings of pi0 and pi0.5.

    Attributes:
        type: "pi0" or "pi05".
        paligemma_variant: sizes of the vision-language model's decoder; a key of `VARIANTS`.
        action_expert_variant: sizes of the action expert.
        image_resolution: height and width of the network's images.
        num_inference_steps: denoising steps.
        use_relative_actions: actions relative to the state, which are not supported.
    """

    steps_name: ClassVar[str] = "num_inference_steps"
    ranges: ClassVar = {"num_inference_steps": (1, MAX_STEPS)}

    type: str
    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    image_resolution: tuple[int, ...] = (224, 224)
    num_inference_steps: int = 10
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False
    use_relative_actions: bool = False

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

    def family_problems(self) -> Iterator[str]:
        """See `LeRobotConfig.family_problems`."""
        size = self.image_resolution
        if len(size) != 2 or size[0] != size[1] or not 1 <= size[0] <= 2**14:
            yield f"image_resolution is {list(size)}; a height and an equal width are needed"
        variants = {"paligemma_variant": ["gemma_2b"], "action_expert_variant": sorted(VARIANTS)}
        for name, values in variants.items():
            if getattr(self, name) not in values:
                yield f"{name} is {getattr(self, name)!r}; known: {', '.join(values)}"
        if self.use_relative_actions:
            yield "use_relative_actions is true, which is not supported; use a policy trained on absolute actions"

    @property
    def text_step(self) -> str:
        """See `LeRobotConfig.text_step`."""
        return {PI0: "pi0_new_line_processor", PI05: "pi05_prepare_state_tokenizer_processor_step"}[self.type]

    @property
    def tokenizer_name(self) -> str:
        """See `LeRobotConfig.tokenizer_name`."""
        return PALIGEMMA

    @property
    def state_in_prompt(self) -> bool:
        """Whether the prompt contains the state, and the time conditions the norms (pi0.5)."""
        return self.type == PI05

    @property
    def image_size(self) -> int:
        """Side of the network's images."""
        return self.image_resolution[0]
