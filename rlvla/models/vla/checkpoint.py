"""Reading checkpoint folders in the public OpenVLA format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor

from rlvla.models.dataset_statistics import STATISTICS_FILE
from rlvla.models.finite_weights import check_finite
from rlvla.models.vla.checkpoint_files import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    INDEX_FILE,
    PROPRIO_PREFIX,
    FolderTensors,
    Stored,
    action_heads,
    find_file,
    find_tensors,
    lineage,
)
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.head_files import add_head
from rlvla.models.vla.platforms import with_platform
from rlvla.models.vla.variants import detect_variant
from rlvla.utils.data_files import check_types, read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import no_folder

# Small files copied along with a checkpoint; code files are neither copied nor run.
COMPANION_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".md")
_MANY_LAYERS = 1000
# Variant of the backbone for a network without a policy head (critic, reward model).
BODY_OF = {"oft_regression": "oft"}
NOT_COMPANIONS = {CONFIG_FILE, INDEX_FILE, STATISTICS_FILE, EVALUATION_FILE, ADAPTER_CONFIG_FILE}


@dataclass
class CheckpointFolder:
    """Contents of a loaded folder besides configuration and weights, so that saving it again loses nothing.

    Attributes:
        source: the folder, absolute.
        raw_config: config.json as read.
        companions: tokenizer and processor files by name.
        names: names of tensors in the main files, where they differ from the names in the model.
        separate: separate file -> name in the model -> name in the file.
        separate_adapters: separate file -> name in the file -> part of an adapter without effect, in files that had
            adapters: OpenVLA-OFT reads such a file only with the adapters to which its names refer.
        shadowed: tensors of the main files that a separate file overrides, by their names there.
        statistics: content of dataset_statistics.json, None if there was none.
        action_heads: regression heads by file name; they belong to the loaded weights, not to ones trained from them.
        variant_reason: how the model variant was determined.
    """

    source: str | None = None
    raw_config: dict[str, Any] = field(default_factory=dict)
    companions: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    separate: dict[str, dict[str, str]] = field(default_factory=dict)
    separate_adapters: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    shadowed: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Any] | None = None
    action_heads: dict[str, bytes] = field(default_factory=dict)
    variant_reason: str = ""


class CheckpointModel(Protocol):
    """What loading and saving require of a model: an `nn.Module` built from its configuration alone."""

    config: OpenVLAConfig
    folder: CheckpointFolder | None
    dataset_statistics: dict[str, Any]

    def __init__(self, config: OpenVLAConfig): ...

    def state_dict(self) -> dict[str, Tensor]: ...  # noqa: D102

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, assign: bool = False) -> Any: ...  # noqa: D102

    def eval(self) -> Any: ...  # noqa: D102


Model = TypeVar("Model", bound=CheckpointModel)


def load_folder(
    model_class: type[Model],
    folder: str | Path,
    *,
    dtype: torch.dtype | None,
    device: str | torch.device,
    overrides: dict[str, Any],
) -> Model:
    """Build `model_class` from a folder; see `OpenVLAForActionPrediction.from_pretrained`."""
    folder = Path(folder)
    raw = read_config(folder)
    found = find_tensors(folder)
    statistics = read_statistics(folder, raw)
    config, reason = complete_config(folder, raw, found, overrides)
    complete_tensors(folder, config, found, overrides)
    with torch.device("meta"):
        model = model_class(config)
    check_tensors(str(folder), shapes_of(model.state_dict()), found.shapes)
    # One tensor at a time, so that at most one is in memory twice.
    tensors = {}
    for name in model.state_dict():
        tensor = found.read(name)
        tensors[name] = tensor.to(device=device, dtype=dtype if dtype and tensor.is_floating_point() else None)
    model.load_state_dict(tensors, assign=True)
    model.dataset_statistics = statistics
    model.folder = _describe_folder(folder, raw, found, reason)
    if config.has_regression_head:  # it is part of the model
        model.folder.action_heads.clear()
    return model.eval()


def _describe_folder(folder: Path, raw: dict[str, Any], found: FolderTensors, reason: str) -> CheckpointFolder:
    in_separate = {name for names in found.separate.values() for name in names}
    companions: dict[str, bytes] = {}
    for place in reversed(lineage(folder)):
        companions |= _read_companions(place)
    path = folder / STATISTICS_FILE
    return CheckpointFolder(
        source=str(folder.resolve()),
        raw_config=raw,
        companions=companions,
        names={n: s.key for n, s in found.tensors.items() if n not in in_separate and n != s.key},
        separate=found.separate,
        separate_adapters={file: _without_effect(parts) for file, parts in found.separate_adapters.items()},
        shadowed={stored.key: stored.read() for stored in found.shadowed.values()},
        statistics=read_json(path, allow_nan=True) if path.is_file() else None,
        action_heads={path.name: path.read_bytes() for path in action_heads(folder)},
        variant_reason=reason,
    )


def _without_effect(parts: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Adapters as before training: `lora_A` as it is, `lora_B` zero."""
    tensors = {key: stored.read() for key, stored in parts.items()}
    return {key: torch.zeros_like(tensor) if ".lora_B." in key else tensor for key, tensor in tensors.items()}


def check_weights(
    model_class: type[CheckpointModel],
    folder: Path,
    raw: dict[str, Any],
    overrides: dict[str, Any] | None = None,
) -> OpenVLAConfig:
    """Check that `load_folder` would find its tensors, and that they are finite; returns the configuration.

    Raises:
        ConfigError: a missing or unreadable file, tensors that do not match config.json, or NaN or infinity in them.
    """
    found = find_tensors(folder)
    config, _ = complete_config(folder, raw, found, overrides or {})
    complete_tensors(folder, config, found, overrides or {})
    with torch.device("meta"):
        model = model_class(config)
    check_tensors(str(folder), shapes_of(model.state_dict()), found.shapes)
    check_finite(folder, found)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json, from the folder or from its adapter's base model.

    Raises:
        ConfigError: the folder or file is missing, or the file is not JSON or belongs to another kind of model.
    """
    if not folder.is_dir():
        raise ConfigError(f"{no_folder(folder)}; name the folder of a policy ({CONFIG_FILE}) or of a run")
    path = find_file(folder, CONFIG_FILE)
    raw = read_json(path, allow_nan=True)  # statistics of other datasets; those in use are checked
    if raw.get("model_type") != "openvla":
        raise ConfigError(f"{path}: model_type is {raw.get('model_type')!r}; only 'openvla' checkpoints can be loaded")
    return raw


def complete_config(
    folder: Path, raw: dict[str, Any], found: FolderTensors, overrides: dict[str, Any]
) -> tuple[OpenVLAConfig, str]:
    """The configuration of a folder, and how its variant was determined.

    Settings missing from config.json come from the caller, then from the tensors and files. Two of the caller's
    settings are not config.json settings: `new_head` creates a regression head if the folder has none, `body_only`
    leaves it out.

    Raises:
        ConfigError: contradictory settings.
    """
    overrides = {k: v for k, v in overrides.items() if v is not None}
    platform, asked = overrides.pop("platform", None), overrides.pop("model_variant", None)
    overrides.pop("new_head", None)
    body_only = overrides.pop("body_only", False)
    hints = get_type_hints(OpenVLAConfig.__init__) | {"auto_map": dict | None, "return": Any}
    check_types(raw, hints, folder / CONFIG_FILE)
    settings = {k: v for k, v in raw.items() if k not in ("model_type", "torch_dtype")} | overrides
    settings["model_variant"], reason = detect_variant(folder, raw, found, asked)
    if body_only:
        settings["model_variant"] = BODY_OF.get(settings["model_variant"], settings["model_variant"])
        settings.pop("action_std", None), settings.pop("action_std_init", None)
    if platform is not None:
        settings = with_platform(settings, platform, model_variant=settings["model_variant"])
    weight = found.shapes.get(PROPRIO_PREFIX + "fc1.weight")
    if settings.get("use_proprio") is None:
        settings["use_proprio"] = weight is not None
    if settings["use_proprio"] and settings.get("proprio_dim") is None and weight is not None:
        settings["proprio_dim"] = weight[1]
    if settings.get("use_film") is None and any(name.endswith(".blocks.0.scale.weight") for name in found.tensors):
        settings["use_film"] = True
    config = OpenVLAConfig(**settings)
    _check_depth(folder, config, len(found.tensors))
    return config, reason


def _check_depth(folder: Path, config: OpenVLAConfig, tensors: int) -> None:
    """Refuse absurdly many layers, far more than there are tensors, before they are built."""
    deepest = max(config.text_config.num_hidden_layers, *(tower.depth for tower in config.tower_configs()))
    if deepest > max(tensors, _MANY_LAYERS):
        raise ConfigError(f"{folder / CONFIG_FILE} has {deepest} layers, and the folder {tensors} tensors")


def complete_tensors(folder: Path, config: OpenVLAConfig, found: FolderTensors, overrides: dict[str, Any]) -> None:
    """Add the tensors that the variant needs besides the backbone; arguments and errors as in `complete_config`."""
    if config.has_regression_head:
        reset = overrides.get("action_std_init") is not None
        add_head(found, folder, config, create=bool(overrides.get("new_head")), reset_std=reset)


def read_statistics(folder: Path, raw_config: dict[str, Any]) -> dict[str, Any]:
    """Dataset statistics by key: `norm_stats` of config.json, updated with dataset_statistics.json."""
    path = find_file(folder, STATISTICS_FILE)
    return {**(raw_config.get("norm_stats") or {}), **(read_json(path, allow_nan=True) if path.is_file() else {})}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a state dict."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_tensors(where: str, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the given shapes of tensors with those a model expects.

    Raises:
        ConfigError: lists every tensor that is missing, unexpected or of the wrong shape.
    """
    misshapen = [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape in sorted(tensors.items())
        if name in expected and tuple(shape) != tuple(expected[name])
    ]
    listings = {
        "tensors missing": sorted(set(expected) - set(tensors)),
        "tensors unexpected": sorted(set(tensors) - set(expected)),
        "tensors of the wrong shape": misshapen,
    }
    problems = [f"{where}: {len(names)} {title}: {', '.join(names)}" for title, names in listings.items() if names]
    if problems:
        problems.append("the weights do not belong to this config.json; check that the folder is one checkpoint")
        raise ConfigError(problems)


def _read_companions(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in COMPANION_SUFFIXES and path.name not in NOT_COMPANIONS
    }
