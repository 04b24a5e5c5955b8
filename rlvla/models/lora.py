"""LoRA adapters on an OpenVLA policy (Hu et al. 2021, arXiv 2106.09685): selecting layers, merging and saving."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from rlvla.models.vla.checkpoint_files import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, HEAD_PREFIX, merged_weight
from rlvla.utils.errors import ConfigError, Problem, require
from rlvla.utils.files import write_atomic

if TYPE_CHECKING:
    from rlvla.models.vla.openvla import OpenVLAForActionPrediction

LANGUAGE, ALL_LINEAR = "language", "all-linear"
# Fields of adapter_config.json in every version of peft.
ADAPTER_FIELDS = (
    *("base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_alpha"),
    *("lora_dropout", "modules_to_save", "peft_type", "r", "target_modules", "task_type"),
)
_PREFIX = "base_model.model."  # peft's wrappers around the model
_HEAD = "language_model.lm_head"  # only some of its rows are used; not adapted, as in OpenVLA


def lora_layers(vla: OpenVLAForActionPrediction, targets: Sequence[str], *, vision: bool = True) -> list[str]:
    """Names of the linear layers that get adapters; layers unused in the forward pass get none.

    Args:
        vla: the model.
        targets: "language", "all-linear" or suffixes of layer names, in any combination.
        vision: whether layers of the vision towers may be included.

    Raises:
        ConfigError: as in `matching_layers`.
    """
    linear = [
        name
        for name, module in vla.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith((_HEAD, HEAD_PREFIX)) and not _unused(vla, name)
    ]
    if not vision:
        linear = [name for name in linear if not name.startswith("vision_backbone.")]
    language = [name for name in linear if name.startswith("language_model.")]
    return matching_layers(linear, targets, {LANGUAGE: language, ALL_LINEAR: linear})


def matching_layers(linear: Sequence[str], targets: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Select the layers that get adapters.

    Args:
        linear: names of the linear layers that may have adapters.
        targets: names of groups, or suffixes of layer names.
        groups: layers of each group.

    Raises:
        ConfigError: lists every target that matches no layer.
    """
    chosen: dict[str, None] = {}
    problems = []
    for target in targets:
        by_suffix = [name for name in linear if f".{name}".endswith(f".{target}")]
        matching = groups.get(target, by_suffix)
        if not matching:
            suffixes = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
            text = f"--lora_targets {target} matches no layer; use {', '.join(groups)} or some of {suffixes}"
            problems.append(Problem("lora_targets", "unknown_name", text))
        chosen |= dict.fromkeys(matching)
    if problems:
        raise ConfigError(problems)
    return list(chosen)


def _unused(vla: OpenVLAForActionPrediction, name: str) -> bool:
    """Whether a layer belongs to a tower's last block or pooling head."""
    match = re.match(r"vision_backbone\.(\w+)\.(?:blocks\.(\d+)|attn_pool)\.", name)
    if match is None:
        return False
    return match[2] is None or int(match[2]) == getattr(vla.vision_backbone, match[1]).config.depth - 1


def add_adapters(
    vla: OpenVLAForActionPrediction, layers: Sequence[str], rank: int, alpha: int, dropout: float = 0.0
) -> Any:
    """Wrap `vla` in a peft model that trains adapters on `layers`, and a regression head and its deviation in full.

    At first the adapters do not change the output. In training mode `dropout` applies to their inputs.
    """
    peft = require("peft", extra="all")
    targets = "|".join(re.escape(name) for name in layers)  # full names: "proj" alone would also match "q_proj"
    adapted = peft.get_peft_model(
        vla, peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=f"({targets})")
    )
    fuse_adapters(adapted)
    for module in (vla.action_head, vla.action_std):
        if module is not None:
            module.requires_grad_(True)
    adapted.peft_config["default"].base_model_name_or_path = vla.folder.source if vla.folder else None
    return adapted


def fuse_adapters(model: nn.Module) -> None:
    """Replace peft's LoRA linear layers by a version with fewer kernels on a GPU."""
    for module in model.modules():
        if type(module) is _peft_linear():
            module.__class__ = _fused_linear()


def _peft_linear() -> Any:
    return require("peft", extra="all").tuners.lora.Linear


@cache
def _fused_linear() -> Any:
    class FusedLoraLinear(_peft_linear()):  # type: ignore[misc]  # peft is imported at first use
        """A linear layer with a LoRA adapter; the second product of the adapter adds its scaled result to the output.

        This saves a pass over the output to scale it, another to add it, and both again in the backward pass.
        """

        def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
            """As peft's, which is called where this does not apply."""
            if not x.is_cuda or args or options or self.disable_adapters or self.merged:
                return super().forward(x, *args, **options)
            return self.fused(x) if self.can_fuse(x) else super().forward(x)

        def can_fuse(self, x: Tensor) -> bool:
            """Whether there is a single plain adapter, of the dtype of x, without dropout, and not sharded."""
            names = [name for name in self.active_adapters if name in self.lora_A]
            if len(names) != 1 or names[0] in getattr(self, "lora_variant", {}):
                return False
            weights = self.lora_A[names[0]].weight, self.lora_B[names[0]].weight
            dropout = self.lora_dropout[names[0]]
            if self.lora_B[names[0]].bias is not None or (not isinstance(dropout, nn.Identity) and dropout.training):
                return False
            return all(w.dtype == x.dtype and not hasattr(w, "ds_id") for w in weights)

        def fused(self, x: Tensor) -> Tensor:
            """[..., in] -> [..., out]."""
            name = next(name for name in self.active_adapters if name in self.lora_A)
            output: Tensor = self.base_layer(x)
            down = F.linear(x, self.lora_A[name].weight).flatten(0, -2)
            output.view(-1, output.shape[-1]).addmm_(down, self.lora_B[name].weight.t(), alpha=self.scaling[name])
            return output

    return FusedLoraLinear


class MergedWeights(Mapping[str, Tensor]):
    """The tensors of a peft state dict under the model's names; adapters are merged on access.

    Args:
        state: a state dict of a model made by `add_adapters`.
        scale: lora_alpha / rank.
    """

    def __init__(self, state: Mapping[str, Tensor], scale: float):
        self._state, self._scale = state, scale
        stripped = {name: name.removeprefix(_PREFIX) for name in state}
        self._keys = {new.replace(".base_layer.", "."): old for old, new in stripped.items() if ".lora_" not in new}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, without merging any."""
        return {name: tuple(self._state[key].shape) for name, key in self._keys.items()}

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, with its adapter merged."""
        key = self._keys[name]
        weight = self._state[key]
        stem = key.removesuffix("base_layer.weight")
        down = self._state.get(f"{stem}lora_A.default.weight")
        if stem == key or down is None:
            return weight
        return merged_weight(weight.detach(), down.detach(), self._state[f"{stem}lora_B.default.weight"], self._scale)

    def __iter__(self) -> Iterator[str]:
        """Iterate over names."""
        return iter(self._keys)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._keys)


def save_adapter(folder: Path, state: Mapping[str, Tensor], config: Any) -> None:
    """Save the adapters of a peft state dict in peft's format, with the fields known to every version of peft."""
    folder.mkdir(parents=True, exist_ok=True)
    adapters = {
        name.replace(".default.weight", ".weight"): tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
        if ".lora_" in name
    }
    save_file(adapters, str(folder / ADAPTER_WEIGHTS_FILE), metadata={"format": "pt"})
    fields = {name: value for name, value in config.to_dict().items() if name in ADAPTER_FIELDS}
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    write_atomic(folder / ADAPTER_CONFIG_FILE, text.encode())


class InitialModules:
    """Frozen copies of small modules that are trained in full beside adapters, e.g. a regression head.

    They stay outside the module tree and are replicated on every rank.

    Args:
        model: has the modules as attributes.
        names: of the attributes.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]):
        self._copies = {name: copy.deepcopy(getattr(model, name)).requires_grad_(False) for name in names}

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Context in which the model uses the copies."""
        trained, like = {name: getattr(model, name) for name in self._copies}, next(model.parameters())
        try:
            for name, module in self._copies.items():
                setattr(model, name, module.to(device=like.device, dtype=like.dtype))
            yield
        finally:
            for name, module in trained.items():
                setattr(model, name, module)
