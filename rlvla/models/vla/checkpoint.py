"""Reading and writing checkpoint folders in the public OpenVLA format."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.models.vla.openvla import OpenVLAForActionPrediction

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STATISTICS_FILE = "dataset_statistics.json"
PROPRIO_PREFIX = "proprio_projector."
# Small files that travel with a checkpoint unchanged; code files are left behind, nothing of them is ever run.
COMPANION_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".md")
WRITTEN_FILES = {CONFIG_FILE, INDEX_FILE, STATISTICS_FILE}
# Figures of the weights in the folder: they say nothing of the weights that are made from them.
EVALUATION_FILE = "eval.json"
MAX_LISTED = 20


@dataclass
class CheckpointFolder:
    """What a loaded folder held beside configuration and weights, so that saving it again loses nothing.

    Attributes:
        raw_config: config.json as read.
        companions: tokenizer and processor files by name.
        proprio_file: name of the separate proprio projector file, if the folder had one.
    """

    raw_config: dict[str, Any] = field(default_factory=dict)
    companions: dict[str, bytes] = field(default_factory=dict)
    proprio_file: str | None = None


def load_folder(
    model_class: type[OpenVLAForActionPrediction],
    folder: str | Path,
    *,
    dtype: torch.dtype | None,
    device: str | torch.device,
    overrides: dict[str, Any],
) -> OpenVLAForActionPrediction:
    """Build `model_class` from a folder; see `OpenVLAForActionPrediction.from_pretrained`."""
    folder = Path(folder)
    raw = read_config(folder)
    tensors, proprio_file = read_tensors(folder)
    statistics = read_statistics(folder, raw)
    config = OpenVLAConfig(**_complete({**raw, **overrides}, tensors))
    with torch.device("meta"):
        model = model_class(config)
    _check_tensors(folder, {k: tuple(v.shape) for k, v in model.state_dict().items()}, tensors)
    tensors = {k: v.to(device=device, dtype=dtype or v.dtype) for k, v in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    # The decoder computes its rotary tables itself; transformers' own module would stay behind on the meta device.
    model.language_model.model.rotary_emb = None
    model.dataset_statistics = statistics
    model.folder = CheckpointFolder(raw, _read_companions(folder), proprio_file)
    return model.eval()


def save_folder(
    model: OpenVLAForActionPrediction, folder: str | Path, *, state_dict: dict[str, Tensor] | None = None
) -> None:
    """Write a folder that `load_folder` reads back bit for bit.

    Raises:
        ConfigError: `state_dict` lacks tensors of the model or has others.
    """
    folder = Path(folder)
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    tensors = dict(model.state_dict() if state_dict is None else state_dict)
    _check_tensors(folder, expected, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    held = model.folder or CheckpointFolder()
    for name, content in held.companions.items():
        _replace(folder / name, lambda path, content=content: path.write_bytes(content))
    _write_json(folder / CONFIG_FILE, config_to_public(model.config, held.raw_config))
    if model.dataset_statistics:
        _write_json(folder / STATISTICS_FILE, model.dataset_statistics)
    tensors = {k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}
    if held.proprio_file is not None:
        proprio = {k.removeprefix(PROPRIO_PREFIX): v for k, v in tensors.items() if k.startswith(PROPRIO_PREFIX)}
        tensors = {k: v for k, v in tensors.items() if not k.startswith(PROPRIO_PREFIX)}
        _replace(folder / held.proprio_file, lambda path: torch.save(proprio, path))
    _replace(folder / WEIGHTS_FILE, lambda path: save_file(tensors, str(path), metadata={"format": "pt"}))
    # An index left from a sharded checkpoint in the same folder would point to the old weights.
    (folder / INDEX_FILE).unlink(missing_ok=True)


def check_weights(model_class: type[OpenVLAForActionPrediction], folder: Path, raw: dict[str, Any]) -> OpenVLAConfig:
    """Whether `load_folder` would find its tensors, judged from the files' headers; returns the configuration.

    Raises:
        ConfigError: a missing or unreadable file, or tensors that do not belong to config.json.
    """
    tensors = read_tensors(folder, shapes_only=True)[0]
    config = OpenVLAConfig(**_complete(raw, tensors))
    with torch.device("meta"):
        model = model_class(config)
    _check_tensors(folder, {k: tuple(v.shape) for k, v in model.state_dict().items()}, tensors)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        ConfigError: the folder or the file is missing, is not JSON or belongs to another kind of model.
    """
    if not folder.is_dir():
        raise ConfigError(f"checkpoint folder {str(folder)!r} does not exist; give a folder with {CONFIG_FILE}")
    raw = _read_json(folder / CONFIG_FILE)
    if raw.get("model_type") != "openvla":
        raise ConfigError(
            f"{folder / CONFIG_FILE}: model_type is {raw.get('model_type')!r}; only 'openvla' checkpoints can be loaded"
        )
    return raw


def read_tensors(folder: Path, *, shapes_only: bool = False) -> tuple[dict[str, Tensor], str | None]:
    """All tensors of the folder by name, and the name of the separate proprio projector file if there is one.

    Args:
        folder: checkpoint folder.
        shapes_only: read no more than the headers and return tensors without storage.

    Raises:
        ConfigError: no weights, or a file that cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    paths = weight_files(folder)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{folder}: {', '.join(missing)} is missing, although {INDEX_FILE} names it; copy the checkpoint again"
        )
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    if shapes_only:
                        tensors[key] = torch.empty(file.get_slice(key).get_shape(), device="meta")
                    else:  # cloned, because the file behind a memory map may be replaced while the model lives
                        tensors[key] = file.get_tensor(key).clone()
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} is not a readable safetensors file ({error}); copy the checkpoint again"
            ) from error
    separate = sorted(folder.glob("proprio_projector--*_checkpoint.pt"))
    if not separate:
        return tensors, None
    if len(separate) > 1:
        raise ConfigError(f"{folder} has several proprio projectors {[p.name for p in separate]}; keep one")
    try:
        content = torch.load(separate[0], map_location="cpu", weights_only=True)
    except Exception as error:  # pickle reports foreign bytes in many ways
        raise ConfigError(f"{separate[0]} is not a readable torch file; copy the checkpoint again") from error
    for key, value in content.items():
        # Saved from a distributed wrapper, the names begin with "module.".
        tensors[PROPRIO_PREFIX + key.removeprefix("module.")] = value
    return tensors, separate[0].name


def read_statistics(folder: Path, raw_config: dict[str, Any]) -> dict[str, Any]:
    """Dataset statistics by key: `norm_stats` of config.json, completed by dataset_statistics.json."""
    path = folder / STATISTICS_FILE
    return {**(raw_config.get("norm_stats") or {}), **(_read_json(path) if path.is_file() else {})}


def resolve_statistics_key(statistics: dict[str, Any], suite: str | None) -> str:
    """Key of the statistics to use: the suite's own name, else `{suite}_no_noops`; with one key none need be given.

    Raises:
        ConfigError: the key is not there or not determined; the message lists the keys.
    """
    if not statistics:
        raise ConfigError(f"the checkpoint has no action statistics; copy its {STATISTICS_FILE}")
    if suite is None:
        if len(statistics) == 1:
            return next(iter(statistics))
        raise ConfigError(f"the checkpoint has statistics for {sorted(statistics)}; say which one to use")
    for key in (suite, f"{suite}_no_noops"):
        if key in statistics:
            return key
    raise ConfigError(
        f"the checkpoint has no action statistics for {suite!r} (nor {suite + '_no_noops'!r}); "
        f"it has {sorted(statistics)}"
    )


def config_to_public(config: OpenVLAConfig, raw: dict[str, Any]) -> dict[str, Any]:
    """Content of config.json: the fields as read, with the values of `config` where they differ or are new."""
    values = config.to_dict()
    dtype = values.pop("dtype", None)
    merged = {**raw, **{k: v for k, v in values.items() if v is not None or k in raw}}
    if "torch_dtype" not in raw and dtype is not None:
        merged["torch_dtype"] = str(dtype).removeprefix("torch.")
    merged["text_config"] = _merge_text_config(config, raw.get("text_config") or {})
    merged["architectures"] = raw.get("architectures") or ["OpenVLAForActionPrediction"]
    merged["model_type"] = "openvla"
    return merged


def _merge_text_config(config: OpenVLAConfig, raw: dict[str, Any]) -> dict[str, Any]:
    values = config.text_config.to_dict()
    if raw:
        return {**raw, **{k: values[k] for k in raw if k in values}}
    # The rotary base goes under its plain name too: readers older than transformers 5 know no other.
    theta = (values.get("rope_parameters") or {}).get("rope_theta")
    return {**values, **({"rope_theta": theta} if theta is not None else {})}


def _complete(raw: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Settings that the tensors decide where the file is silent."""
    settings = {k: v for k, v in raw.items() if k not in ("model_type", "torch_dtype", "auto_map")}
    weight = tensors.get(PROPRIO_PREFIX + "fc1.weight")
    if settings.get("use_proprio") is None:
        settings["use_proprio"] = weight is not None
    if settings["use_proprio"] and settings.get("proprio_dim") is None and weight is not None:
        settings["proprio_dim"] = weight.shape[1]
    return settings


def _check_tensors(folder: Path, expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor]) -> None:
    problems = [
        _listing(f"{folder}: tensors missing", sorted(set(expected) - set(tensors))),
        _listing(f"{folder}: tensors unexpected", sorted(set(tensors) - set(expected))),
        _listing(
            f"{folder}: tensors of the wrong shape",
            [
                f"{k} is {list(v.shape)}, expected {list(expected[k])}"
                for k, v in sorted(tensors.items())
                if k in expected and tuple(v.shape) != expected[k]
            ],
        ),
    ]
    problems = [p for p in problems if p]
    if problems:
        problems.append("the weights do not belong to this config.json; check that the folder is one checkpoint")
        raise ConfigError(problems)


def _listing(title: str, names: list[str]) -> str | None:
    if not names:
        return None
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{title}: {', '.join(names[:MAX_LISTED])}{more}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: the shards its index names, or the single file.

    Raises:
        ConfigError: there are none, or it is not clear which one counts.
    """
    if (folder / INDEX_FILE).is_file():
        names = sorted(set(_read_json(folder / INDEX_FILE).get("weight_map", {}).values()))
        return [folder / name for name in names]
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return single
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    found = [p.name for p in single]
    raise ConfigError(f"{folder} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE} (safetensors found: {found})")


def _read_companions(folder: Path) -> dict[str, bytes]:
    skipped = {*WRITTEN_FILES, EVALUATION_FILE}
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in COMPANION_SUFFIXES and path.name not in skipped
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; a checkpoint folder needs {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}; a JSON object is needed")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    _replace(path, lambda target: target.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Any) -> None:
    """Write beside `path` and rename, so that a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    write(temporary)
    # safetensors makes files that only their owner may read; a checkpoint is to be shared.
    temporary.chmod(0o644)
    os.replace(temporary, path)
