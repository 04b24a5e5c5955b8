"""Writing checkpoint folders in the public OpenVLA format, one shard at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlvla.models.dataset_statistics import STATISTICS_FILE
from rlvla.models.vla.checkpoint import CheckpointFolder, CheckpointModel, check_tensors, shapes_of
from rlvla.models.vla.checkpoint_files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.head_files import with_head_files
from rlvla.utils.files import atomic_path, write_atomic

# Writing needs memory for one shard besides the model: a twelfth of its size, less for the largest models. Small models
# go into one file.
MAX_SHARD_BYTES, SINGLE_FILE_BYTES, SHARE_OF_MODEL = 10**9, 64 * 2**20, 12


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
    own = model.state_dict()
    tensors = own if state_dict is None else state_dict
    shapes = getattr(tensors, "shapes", None) or shapes_of(tensors)  # `MergedWeights` knows them without merging
    check_tensors(str(folder), shapes_of(own), shapes)
    folder.mkdir(parents=True, exist_ok=True)
    held = model.folder or CheckpointFolder()
    for name, content in {**held.companions, **held.action_heads}.items():
        write_atomic(folder / name, content)
    dtype = tensors["language_model.lm_head.weight"].dtype
    _write_json(folder / CONFIG_FILE, config_to_public(model.config, held.raw_config, dtype))
    _write_statistics(folder / STATISTICS_FILE, model.dataset_statistics, held)
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
    """Write `tensors` under their names in the files, then delete weight files left by an earlier checkpoint."""
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
        # An index left from a sharded checkpoint in the same folder would point to the old weights.
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
    """Content of config.json: the fields as read, updated with the values of `config`."""
    values = config.to_dict()
    values.pop("dtype", None)
    merged = {**raw, **{k: v for k, v in values.items() if v is not None or k in raw}}
    name = str(dtype).removeprefix("torch.")
    # Readers older than transformers 5 do not know "dtype".
    for key in [key for key in ("torch_dtype", "dtype") if key in raw] or ["torch_dtype"]:
        merged[key] = name
    # The public code reads these, although sizes of towers and decoder are in the other fields.
    merged |= {key: value for key, value in _public_names(config).items() if merged.get(key) is None}
    merged["text_config"] = _merge_text_config(config, raw.get("text_config") or {})
    merged["architectures"] = raw.get("architectures") or ["OpenVLAForActionPrediction"]
    merged["model_type"] = "openvla"
    return merged


def _public_names(config: OpenVLAConfig) -> dict[str, Any]:
    vicuna = config.prompt_style == "vicuna"
    return {
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "llm_backbone_id": "vicuna-v15-7b" if vicuna else "llama2-7b-pure",
        "timm_override_act_layers": [None, None],
    }


def _merge_text_config(config: OpenVLAConfig, raw: dict[str, Any]) -> dict[str, Any]:
    values = config.text_config.to_dict()
    if raw:
        return {**raw, **{k: values[k] for k in raw if k in values and k not in ("torch_dtype", "dtype")}}
    # Also write rope_theta at the top level, where transformers before version 5 reads it.
    theta = (values.get("rope_parameters") or {}).get("rope_theta")
    return {**values, **({"rope_theta": theta} if theta is not None else {})}


def _write_statistics(path: Path, statistics: dict[str, Any], held: CheckpointFolder) -> None:
    """Write the keys that were in the file and those missing from config.json or changed."""
    in_config, in_file = held.raw_config.get("norm_stats") or {}, held.statistics or {}
    own = {k: v for k, v in statistics.items() if k in in_file or in_config.get(k) != v}
    if own:
        _write_json(path, own)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_atomic(path, text.encode())
