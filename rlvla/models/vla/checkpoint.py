"""Reading and writing checkpoint folders in the public OpenVLA format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlvla.models.dataset_statistics import STATISTICS_FILE
from rlvla.models.stored_tensors import check_finite
from rlvla.models.vla.checkpoint_files import (
    ACTION_STD_FILE,
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    EVALUATIONS,
    HEAD_PATTERNS,
    HEAD_PREFIX,
    INDEX_FILE,
    PROPRIO_PREFIX,
    STD_PREFIX,
    WEIGHTS_FILE,
    FolderTensors,
    Stored,
    action_heads,
    find_file,
    find_one,
    find_tensors,
    lineage,
    safetensors_header,
    torch_file,
)
from rlvla.models.vla.choices import REGRESSION, with_platform
from rlvla.models.vla.configuration_openvla import OpenVLAConfig, without_code
from rlvla.models.vla.regression_head import ActionStd, RegressionHead
from rlvla.utils.data_files import check_types, read_json, without_local_code
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import atomic_path, no_policy, write_atomic

# Small files copied along with a checkpoint; code files are neither copied nor run.
COMPANION_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".md")
_MANY_LAYERS = 1000
# A new regression head is saved here, with the prefix of OFT's distributed wrapper.
HEAD_FILE, HEAD_WRAPPER = "action_head--0_checkpoint.pt", "module."
# Writing needs memory for one shard besides the model: a twelfth of its size, less for the largest models. Small models
# go into one file.
MAX_SHARD_BYTES, SINGLE_FILE_BYTES, SHARE_OF_MODEL = 10**9, 64 * 2**20, 12
# Public folders include their training code. It is read as text, never run: parallel decoding mentions chunks.
CODE_FILE, CHUNK_MARK = "modeling_prismatic.py", "ACTIONS_CHUNK"
NOT_COMPANIONS = {CONFIG_FILE, INDEX_FILE, STATISTICS_FILE, ADAPTER_CONFIG_FILE}


@dataclass
class CheckpointFolder:
    """Contents of a loaded folder besides configuration and weights, so that saving it again loses nothing.

    Attributes:
        source: the folder, absolute.
        raw_config: config.json as read.
        companions: tokenizer and processor files by name.
        names: name in the model -> name in the main files, where they differ.
        separate: separate file -> name in the model -> name in the file.
        separate_adapters: separate file -> name in the file -> half of an adapter without effect. OpenVLA-OFT reads a
            file whose names refer to adapters only with them.
        shadowed: tensors of the main files that a separate file overrides, by name in the main files.
        statistics: content of dataset_statistics.json; None without the file.
        action_heads: regression heads by file name; they do not apply to weights trained from the loaded ones.
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
    """A model that can be loaded and saved: an `nn.Module` built from its configuration alone."""

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
    tensors = find_tensors(folder)
    statistics = read_statistics(folder, raw)
    config, reason = complete_config(folder, raw, tensors, overrides)
    complete_tensors(folder, config, tensors, overrides)
    with torch.device("meta"):
        model = model_class(config)
    check_tensors(str(folder), shapes_of(model.state_dict()), tensors.shapes)
    # One tensor at a time, so that at most one is in memory twice.
    state = {name: tensors.read(name, dtype).to(device) for name in model.state_dict()}
    model.load_state_dict(state, assign=True)
    model.dataset_statistics = statistics
    model.folder = _describe_folder(folder, raw, tensors, reason)
    if config.has_regression_head:  # it is part of the model
        model.folder.action_heads.clear()
    return model.eval()


def _describe_folder(folder: Path, raw: dict[str, Any], tensors: FolderTensors, reason: str) -> CheckpointFolder:
    in_separate = {name for names in tensors.separate.values() for name in names}
    companions = {
        path.name: path.read_bytes()
        for place in reversed(lineage(folder))
        for path in sorted(place.iterdir())
        if path.is_file() and path.suffix in COMPANION_SUFFIXES and path.name not in NOT_COMPANIONS
        if not EVALUATIONS.fullmatch(path.name)
    }
    path = folder / STATISTICS_FILE
    return CheckpointFolder(
        source=str(folder.resolve()),
        raw_config=raw,
        companions=companions,
        names={n: s.key for n, s in tensors.tensors.items() if n not in in_separate and n != s.key},
        separate=tensors.separate,
        separate_adapters={
            file: {key: _without_effect(stored) for key, stored in halves.items()}
            for file, halves in tensors.separate_adapters.items()
        },
        shadowed={stored.key: stored.read() for stored in tensors.shadowed.values()},
        statistics=read_json(path, allow_nan=True) if path.is_file() else None,
        action_heads={path.name: path.read_bytes() for path in action_heads(folder)},
        variant_reason=reason,
    )


def _without_effect(stored: Stored) -> Tensor:
    """Half of an adapter as before training: `lora_A` unchanged, `lora_B` zero."""
    return torch.zeros_like(stored.read()) if ".lora_B." in stored.key else stored.read()


def check_weights(
    model_class: type[CheckpointModel],
    folder: Path,
    raw: dict[str, Any],
    overrides: dict[str, Any] | None = None,
) -> OpenVLAConfig:
    """Check that all tensors for `load_folder` exist and are finite; returns the configuration.

    Raises:
        ConfigError: a missing or unreadable file, tensors that do not match config.json, or NaN or infinity in them.
    """
    tensors = find_tensors(folder)
    config, _ = complete_config(folder, raw, tensors, overrides or {})
    complete_tensors(folder, config, tensors, overrides or {})
    with torch.device("meta"):
        model = model_class(config)
    check_tensors(str(folder), shapes_of(model.state_dict()), tensors.shapes)
    check_finite(folder, tensors)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """Content of config.json, from the folder or from its adapter's base model.

    Raises:
        ConfigError: the folder or file is missing, or the file is not JSON or belongs to another kind of model.
    """
    if not folder.is_dir():
        raise ConfigError(no_policy(folder))
    path = find_file(folder, CONFIG_FILE)
    raw = read_json(path, allow_nan=True)  # statistics of other datasets; those in use are checked
    if raw.get("model_type") != "openvla":
        raise ConfigError(f"{path}: model_type is {raw.get('model_type')!r}; only 'openvla' checkpoints can be loaded")
    return raw


def complete_config(
    folder: Path, raw: dict[str, Any], tensors: FolderTensors, overrides: dict[str, Any]
) -> tuple[OpenVLAConfig, str]:
    """The configuration of a folder, and how its variant was determined.

    Settings missing from config.json come from `overrides`, then from the tensors and files. Two overrides are not
    settings of config.json: `new_head` creates a regression head if the folder has none, `body_only` leaves it out.

    Raises:
        ConfigError: contradictory settings.
    """
    overrides = {k: v for k, v in overrides.items() if v is not None}
    platform, variant = overrides.pop("platform", None), overrides.pop("model_variant", None)
    overrides.pop("new_head", None)
    body_only = overrides.pop("body_only", False)
    hints = get_type_hints(OpenVLAConfig.__init__) | {"auto_map": dict | None, "return": Any}
    check_types(raw, hints, folder / CONFIG_FILE)
    settings = {k: v for k, v in without_code(raw).items() if k not in ("model_type", "torch_dtype")} | overrides
    settings["model_variant"], reason = detect_variant(folder, raw, tensors, variant)
    if body_only:
        if settings["model_variant"] == REGRESSION:
            settings["model_variant"] = "oft"
        for name in ("action_std", "action_std_init", "action_noise_correlation"):
            settings.pop(name, None)
    if platform is not None:
        settings = with_platform(settings, platform, model_variant=settings["model_variant"])
    weight = tensors.shapes.get(PROPRIO_PREFIX + "fc1.weight")
    if settings.get("use_proprio") is None:
        settings["use_proprio"] = weight is not None
    if settings["use_proprio"] and settings.get("proprio_dim") is None and weight is not None:
        settings["proprio_dim"] = weight[1]
    if settings.get("use_film") is None and any(name.endswith(".blocks.0.scale.weight") for name in tensors.tensors):
        settings["use_film"] = True
    config = OpenVLAConfig(**settings)
    # Reject absurd depths before the layers are built.
    depth = max(config.text_config.num_hidden_layers, *(tower.depth for tower in config.tower_configs()))
    if depth > max(len(tensors.tensors), _MANY_LAYERS):
        raise ConfigError(f"{folder / CONFIG_FILE} has {depth} layers, and the folder {len(tensors.tensors)} tensors")
    return config, reason


def complete_tensors(folder: Path, config: OpenVLAConfig, tensors: FolderTensors, overrides: dict[str, Any]) -> None:
    """Add the tensors of a regression head, if the variant has one; arguments and errors as in `complete_config`."""
    if config.has_regression_head:
        reset = overrides.get("action_std_init") is not None
        add_head(tensors, folder, config, create=bool(overrides.get("new_head")), reset_std=reset)


def read_statistics(folder: Path, raw_config: dict[str, Any]) -> dict[str, Any]:
    """Dataset statistics by key: `norm_stats` of config.json, updated with dataset_statistics.json."""
    path = find_file(folder, STATISTICS_FILE)
    return {**(raw_config.get("norm_stats") or {}), **(read_json(path, allow_nan=True) if path.is_file() else {})}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a state dict."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_tensors(where: str, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the names and shapes of tensors with the model's.

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


def detect_variant(folder: Path, raw: dict[str, Any], tensors: FolderTensors, variant: str | None) -> tuple[str, str]:
    """The model variant and the evidence for it.

    Args:
        folder: the checkpoint.
        raw: content of its config.json.
        tensors: its tensors.
        variant: the variant requested by the caller, or None.

    Raises:
        ConfigError: the caller contradicts config.json.
    """
    recorded = raw.get("model_variant")
    if recorded == "oft" and variant == REGRESSION:  # another head on the same backbone; its files are checked later
        return variant, "given by the caller"
    if recorded is not None and variant not in (None, recorded):
        raise ConfigError(f"model_variant {variant!r} contradicts {folder / 'config.json'}, which says {recorded!r}")
    if recorded is not None:
        return recorded, "config.json says so"
    if variant is not None:
        return variant, "given by the caller"
    separate = [*tensors.separate, *(path.name for path in action_heads(folder))]
    if separate:
        return "oft", f"the folder holds {separate[0]}"
    if any(name.startswith(PROPRIO_PREFIX) for name in tensors.tensors):
        return "oft", "the weights hold a proprio projector"
    code = folder / CODE_FILE
    if code.is_file():
        if CHUNK_MARK in code.read_text(encoding="utf-8", errors="replace"):
            return "oft", f"{CODE_FILE} in the folder decodes chunks"
        return "autoregressive", f"{CODE_FILE} in the folder does not decode chunks"
    if any(str(value).startswith("openvla/openvla-") for value in (raw.get("auto_map") or {}).values()):
        return "autoregressive", "auto_map points to the code of plain OpenVLA"
    return "oft", "assumed, as no file of the folder implies it; set model_variant if it is wrong"


def add_head(
    tensors: FolderTensors, folder: Path, config: OpenVLAConfig, *, create: bool = False, reset_std: bool = False
) -> None:
    """Add the regression head and its standard deviation to the tensors of a folder, in place.

    Args:
        tensors: the other tensors.
        folder: the checkpoint.
        config: its configuration.
        create: create a new head if there is none.
        reset_std: start at `action_std_init` even if the folder has a standard deviation.

    Raises:
        ConfigError: no head, several heads, a diffusion head, or an unreadable file.
    """
    path = head_file(folder)
    if path is not None:
        head = _stored_head(path)
    elif create:
        network = RegressionHead(config.text_config.hidden_size, config.action_dim)
        network.initialize(torch.Generator().manual_seed(0))
        head = {HEAD_PREFIX + key: _new(HEAD_WRAPPER + key, value) for key, value in network.state_dict().items()}
    else:
        raise ConfigError(
            f"{folder} has no regression head ({HEAD_PATTERNS[0]}), which --model_variant {config.model_variant} "
            "needs; fine-tune it first (cli/train_sft_vla.py makes a new head) or choose another variant"
        )
    files = {path.name if path else HEAD_FILE: head, ACTION_STD_FILE: _action_std(folder, config, reset_std)}
    for file, stored in files.items():
        tensors.tensors.update(stored)
        tensors.separate[file] = {name: tensor.key for name, tensor in stored.items()}


def head_file(folder: Path) -> Path | None:
    """The regression head file of the folder or of its base model; None if there is none.

    Raises:
        ConfigError: there are several, or it is a diffusion head.
    """
    folders = lineage(folder)
    for place in folders:
        diffusion = sorted(place.glob(HEAD_PATTERNS[1]))
        if diffusion:
            raise ConfigError(
                f"{diffusion[0]}: the actions of this checkpoint come from a diffusion head, not from L1 regression; "
                "only regression heads can be trained here"
            )
        if (path := find_one([place], HEAD_PATTERNS[0], "regression heads")) is not None:
            return path
    return None


def _stored_head(path: Path) -> dict[str, Stored]:
    content = torch_file(path)
    stored = {
        HEAD_PREFIX + key.removeprefix(HEAD_WRAPPER): Stored(path, key, tuple(value.shape), value)
        for key, value in content.items()
    }
    if f"{HEAD_PREFIX}model.fc1.weight" not in stored:
        raise ConfigError(
            f"{path} is not an L1 regression head of OpenVLA-OFT: it has no model.fc1.weight but {sorted(content)[:3]}"
        )
    return stored


def _action_std(folder: Path, config: OpenVLAConfig, reset: bool) -> dict[str, Stored]:
    """The stored standard deviation, or a new one at `action_std_init`; tensors missing from the file are new."""
    initial = ActionStd(config.action_std, config.text_config.hidden_size, config.action_dim, config.action_std_init)
    path = next((p / ACTION_STD_FILE for p in lineage(folder) if (p / ACTION_STD_FILE).is_file()), None)
    kept = {} if path is None or reset else {key: Stored(path, key, s) for key, s in safetensors_header(path)}
    return {STD_PREFIX + key: kept.get(key) or _new(key, value) for key, value in initial.state_dict().items()}


def _new(key: str, value: Tensor) -> Stored:
    return Stored(Path("(new)"), key, tuple(value.shape), value)


def with_head_files(separate: dict[str, dict[str, str]], names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Separate file -> name in the model -> name in the file, including the files of a new head.

    Args:
        separate: the existing files.
        names: names of all tensors of the model.
    """
    assigned = {name for files in separate.values() for name in files}
    head = {name: HEAD_WRAPPER + name.removeprefix(HEAD_PREFIX) for name in names if name.startswith(HEAD_PREFIX)}
    std = {name: name.removeprefix(STD_PREFIX) for name in names if name.startswith(STD_PREFIX)}
    new = {HEAD_FILE: head, ACTION_STD_FILE: std}
    return separate | {file: files for file, files in new.items() if files and not files.keys() & assigned}


def save_folder(
    model: CheckpointModel,
    folder: str | Path,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a folder that `load_folder` reads back bit for bit.

    Each tensor is read from `state_dict` once, in order, with at most one shard in memory at a time.

    Args:
        model: provides configuration, statistics and companion files.
        folder: created if absent.
        state_dict: tensors to write instead of those of the model.
        max_shard_bytes: size of a shard; None gives a twelfth of the model, between 64 MiB and 1 GB.

    Raises:
        ConfigError: `state_dict` does not match the tensors of the model.
    """
    folder = Path(folder)
    state = model.state_dict()
    tensors = state if state_dict is None else state_dict
    shapes = getattr(tensors, "shapes", None) or shapes_of(tensors)  # `MergedWeights.shapes` merges nothing
    check_tensors(str(folder), shapes_of(state), shapes)
    folder.mkdir(parents=True, exist_ok=True)
    held = model.folder or CheckpointFolder()
    for name, content in {**held.companions, **held.action_heads}.items():
        write_atomic(folder / name, content)
    dtype = tensors["language_model.lm_head.weight"].dtype
    _write_json(folder / CONFIG_FILE, config_to_public(model.config, held.raw_config, dtype))
    # Statistics from dataset_statistics.json, and those missing from config.json or changed.
    in_config, in_file = held.raw_config.get("norm_stats") or {}, held.statistics or {}
    statistics = {k: v for k, v in model.dataset_statistics.items() if k in in_file or in_config.get(k) != v}
    if statistics:
        _write_json(folder / STATISTICS_FILE, statistics)
    separate = with_head_files(held.separate, list(shapes))
    elsewhere = {name for names in separate.values() for name in names}
    for file, names in separate.items():
        part = {key: _on_host(tensors[name]) for name, key in names.items()} | held.separate_adapters.get(file, {})
        write = save_file if file.endswith(".safetensors") else torch.save
        with atomic_path(folder / file) as temporary:
            write(part, temporary)
        del part
    if max_shard_bytes is None:
        size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        max_shard_bytes = min(MAX_SHARD_BYTES, max(SINGLE_FILE_BYTES, size // SHARE_OF_MODEL))
    main = {name: held.names.get(name, name) for name in shapes if name not in elsewhere}
    _write_shards(folder, tensors, main, held.shadowed, max_shard_bytes)


def _write_shards(
    folder: Path, tensors: Mapping[str, Tensor], names: dict[str, str], shadowed: dict[str, Tensor], limit: int
) -> None:
    """Write `tensors` under their names in the files, then delete weight files of an earlier checkpoint."""
    old = set(folder.glob("model*.safetensors"))
    written: list[tuple[Path, list[str], int]] = []
    for shard in _shards(tensors, names, shadowed, limit):
        path = folder / f".shard{len(written)}.safetensors"
        with atomic_path(path) as temporary:
            save_file(shard, temporary, metadata={"format": "pt"})
        written.append((path, list(shard), sum(t.nbytes for t in shard.values())))
        del shard
    count = len(written)
    finals = [
        folder / (WEIGHTS_FILE if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors") for i in range(count)
    ]
    for (path, _, _), final in zip(written, finals):
        path.replace(final)
    for path in old - set(finals):
        path.unlink()
    if count == 1:
        # The index of an earlier sharded checkpoint would point to the old weights.
        (folder / INDEX_FILE).unlink(missing_ok=True)
        return
    weight_map = {key: final.name for (_, keys, _), final in zip(written, finals) for key in keys}
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(w[2] for w in written)}, "weight_map": weight_map})


def _shards(
    tensors: Mapping[str, Tensor], names: dict[str, str], shadowed: dict[str, Tensor], limit: int
) -> Iterator[dict[str, Tensor]]:
    """Shards of at most `limit` bytes (at least one tensor each), keyed by name in the files."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name in [*names, *shadowed]:
        tensor = _on_host(tensors[name] if name in names else shadowed[name])
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[names.get(name, name)] = tensor
        size += tensor.nbytes
    yield shard


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def config_to_public(config: OpenVLAConfig, raw: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Content of config.json: the fields that were read, except local code, updated with `config`."""
    values = config.to_dict()
    values.pop("dtype", None)
    merged = {**raw, **{k: v for k, v in values.items() if v is not None or k in raw}}
    name = str(dtype).removeprefix("torch.")
    # "torch_dtype" for transformers before version 5.
    for key in [key for key in ("torch_dtype", "dtype") if key in raw] or ["torch_dtype"]:
        merged[key] = name
    # Read by the public code, although other fields hold the sizes of towers and decoder.
    public = {
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "llm_backbone_id": "vicuna-v15-7b" if config.prompt_style == "vicuna" else "llama2-7b-pure",
        "timm_override_act_layers": [None, None],
    }
    merged |= {key: value for key, value in public.items() if merged.get(key) is None}
    merged["text_config"] = _merge_text_config(config, raw.get("text_config") or {})
    merged["architectures"] = raw.get("architectures") or ["OpenVLAForActionPrediction"]
    merged["model_type"] = "openvla"
    return without_local_code(merged)


def _merge_text_config(config: OpenVLAConfig, raw: dict[str, Any]) -> dict[str, Any]:
    values = config.text_config.to_dict()
    if raw:
        return {**raw, **{k: values[k] for k in raw if k in values and k not in ("torch_dtype", "dtype")}}
    # Also write rope_theta at the top level, where transformers before version 5 reads it.
    theta = (values.get("rope_parameters") or {}).get("rope_theta")
    return {**values, **({"rope_theta": theta} if theta is not None else {})}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
