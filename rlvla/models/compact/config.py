"""Sizes and conventions of a compact policy, as recorded in its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlvla.models.flow.settings import ASKED_SCORES, FLOW_SETTINGS, PREFIX, FlowSettings
from rlvla.models.vla.choices import ACTION_STD_KINDS, MAX_NOISE_CORRELATION, MAX_STD, MIN_STD
from rlvla.options import Registry
from rlvla.utils.cli.flags import options_problems
from rlvla.utils.data_files import check_types, read_dataclass
from rlvla.utils.errors import ConfigError, Problem

MODEL_TYPE = "compact"
# Heads by name, for --compact_head; a --custom_module may register more (`rlvla.models.compact.heads`).
HEADS: Registry = Registry(
    "policy head",
    flag="compact_head",
    modules={"rlvla.models.compact.heads": ("tokens", "gaussian", "flow")},
    defaults={"settings": ()},
    selection=lambda flags: {flags["compact_head"]} if flags["pretrain"] == MODEL_TYPE else set(),
)
_WIDEST, _MOST_LAYERS, _MOST_COLUMNS = 4096, 16, 65_536
_RANGES = {
    "image_size": (1, 4096),
    "num_images_in_input": (1, 64),
    "proprio_dim": (0, _WIDEST),
    "action_dim": (1, _WIDEST),
    "action_chunk_len": (1, _WIDEST),
    "n_action_bins": (2, _WIDEST),
    "width": (1, _WIDEST),
    "column_width": (1, _WIDEST),
    "text_width": (4, _WIDEST),
    "text_buckets": (2, 2**20),
    "action_std_init": (MIN_STD, MAX_STD),
    "action_noise_correlation": (0, MAX_NOISE_CORRELATION),
}


@dataclass(frozen=True)
class CompactConfig:
    """The fields of config.json besides `model_type`, and `flow_asked_scores`, a setting of the run.

    Attributes:
        image_size: side of the square images in pixels.
        num_images_in_input: N, cameras per observation, with an encoder each.
        proprio_dim: P, length of the proprio vector; 0: no proprio.
        action_dim: D, dimensions of an action.
        action_chunk_len: A, actions per decision.
        action_head: "tokens" (a categorical over `n_action_bins` bins per number), "gaussian", "flow", or another of
            `HEADS`.
        head: options of the head; None if it has none. In config.json `head_options`.
        n_action_bins: bins of the token head.
        action_std: standard deviation of the Gaussian head: "learned", "features" or "fixed", as in OpenVLA's.
        action_std_init: its initial value, in units of normalized actions.
        action_noise_correlation: AR(1) coefficient of the Gaussian head's noise over a chunk.
        action_normalization: range that is mapped to [-1, 1]: "q99" (q01 to q99) or "bounds" (min to max).
        channels, kernels, strides: of the convolutions, first to last.
        width: of the trunk.
        column_width: d, width of the vector of each column.
        text_width: width of the instruction's vector.
        text_buckets: rows of the table of hashed words and trigrams.
        advantage_condition: whether instructions may carry the condition of advantage-conditioned training, for which
            there is an embedding.
        flow_method, flow_noise_level, flow_steps, flow_noisy_steps, flow_eval_noise: of the flow head, see
            `FlowSettings`.
        flow_asked_scores: see `FlowSettings`.
    """

    image_size: int
    num_images_in_input: int
    proprio_dim: int
    action_dim: int
    action_chunk_len: int
    action_head: str = "tokens"
    n_action_bins: int = 256
    action_std: str = "learned"
    action_std_init: float = 0.1
    action_noise_correlation: float = 0.0
    action_normalization: str = "q99"
    channels: tuple[int, ...] = (32, 64, 64)
    kernels: tuple[int, ...] = (8, 3, 3)
    strides: tuple[int, ...] = (4, 2, 1)
    width: int = 256
    column_width: int = 64
    text_width: int = 64
    text_buckets: int = 2048
    advantage_condition: bool = False
    flow_method: str = FlowSettings.method
    flow_noise_level: float = FlowSettings.noise_level
    flow_steps: int = FlowSettings.steps
    flow_noisy_steps: str = FlowSettings.noisy_steps
    flow_eval_noise: str = FlowSettings.eval_noise
    flow_asked_scores: str = FlowSettings.asked_scores
    head: Any = None

    def __post_init__(self) -> None:
        kind = HEADS.options(self.action_head) if self.action_head in HEADS.names() else None
        if self.head is None and kind is not None:
            object.__setattr__(self, "head", kind())

    @property
    def columns(self) -> int:
        """A * D, numbers per decision."""
        return self.action_chunk_len * self.action_dim

    @property
    def flow(self) -> FlowSettings:
        """The settings of the flow head."""
        return FlowSettings.of(asdict(self))

    def to_json(self) -> dict[str, Any]:
        """The content of config.json."""
        unused = [ASKED_SCORES, "head", *(() if self.action_head == "flow" else FLOW_SETTINGS)]
        unused += [name for name in ("advantage_condition", "action_noise_correlation") if not getattr(self, name)]
        values = {name: value for name, value in asdict(self).items() if name not in unused}
        options = {} if self.head is None else {"head_options": asdict(self.head)}
        return {"model_type": MODEL_TYPE, **values, **options}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> CompactConfig:
        """Read config.json; unknown entries, e.g. of later versions, are ignored.

        Raises:
            ConfigError: lists missing entries, wrong types and values out of range.
        """
        config = read_dataclass(cls, raw, where, without=(ASKED_SCORES, "head"))
        if config.head is not None:
            check_types(raw, {"head_options": dict}, where)
            given = raw.get("head_options", {})
            config = replace(config, head=read_dataclass(type(config.head), given, f"{where}: head_options"))
        problems = [Problem(None, "invalid_file", f"{where}: {text}") for text in config.problems()]
        if problems:
            raise ConfigError(problems)
        return config

    def problems(self) -> list[str]:
        """Invalid values."""
        problems = []
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                problems.append(f"{name} is {getattr(self, name):g}; it must be between {least:g} and {most:g}")
        if self.text_width % 4:
            problems.append(f"text_width is {self.text_width}; it must be a multiple of 4")
        choices: dict[str, Sequence[str]] = {
            "action_head": HEADS.names(),
            "action_std": ACTION_STD_KINDS,
            "action_normalization": ("q99", "bounds"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                problems.append(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        problems += [str(problem) for problem in options_problems(self.head)] if self.head is not None else []
        problems += [f"{PREFIX}{name} {text}" for name, text in self.flow.problems()]
        layers = {name: getattr(self, name) for name in ("channels", "kernels", "strides")}
        if len({len(values) for values in layers.values()}) != 1 or not 1 <= len(self.channels) <= _MOST_LAYERS:
            problems.append(f"channels, kernels and strides must have one entry per convolution, 1 to {_MOST_LAYERS}")
        elif any(not 1 <= value <= _WIDEST for values in layers.values() for value in values):
            problems.append(f"channels, kernels and strides must be between 1 and {_WIDEST}")
        elif self.map_sides()[-1] < 1:
            problems.append(f"images of {self.image_size} pixels are too small for kernels {self.kernels}")
        if not problems and self.columns > _MOST_COLUMNS:
            problems.append(f"a decision has {self.columns} numbers; {_MOST_COLUMNS} are the most")
        return problems

    @property
    def largest_activation(self) -> int:
        """See `Checkpoint.largest_activation`: pixels, a map of a convolution, or the logits."""
        maps = (channels * side**2 for channels, side in zip(self.channels, self.map_sides()))
        bins = self.n_action_bins if self.action_head == "tokens" else self.column_width
        return max(self.num_images_in_input * max(3 * self.image_size**2, *maps), self.columns * bins)

    def map_sides(self) -> list[int]:
        """Side of the maps after each convolution."""
        sides, side = [], self.image_size
        for kernel, stride in zip(self.kernels, self.strides):
            side = (side + 2 * padding(kernel, stride) - kernel) // stride + 1
            sides.append(side)
        return sides


def padding(kernel: int, stride: int) -> int:
    """Padding of a convolution: half the overlap of kernels, 0 if they cut the image into patches."""
    return max(0, (kernel - stride + 1) // 2)


def layers_for(image_size: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kernels and strides of `count` convolutions that reduce the image to about 8 x 8, large strides first."""
    kernels, strides, side = [], [], image_size
    for index in range(count):
        stride = 4 if side >= 48 else 2 if side >= 12 else 1
        kernels.append(2 * stride if index == 0 and stride > 1 else max(3, stride + 1))
        strides.append(stride)
        side //= stride
    return tuple(kernels), tuple(strides)
