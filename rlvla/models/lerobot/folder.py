"""The files of a policy folder in LeRobot's layout: reading, checks, lossless writing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlvla.models.vla.checkpoint_files import EVALUATIONS
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import atomic_path, write_atomic

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
TRAIN_CONFIG_FILE = "train_config.json"  # written by LeRobot's training
_LISTED = 8  # tensors in an error
_LARGEST_COMPANION = 64 * 2**20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".h5", ".msgpack", ".onnx", ".gguf"}
_LEFT_OUT = _OTHER_WEIGHTS | {".py"}


@dataclass(frozen=True)
class LeRobotFolder:
    """A policy folder.

    Attributes:
        path: of the folder.
        config: content of its config.json.
        shapes: name -> shape of every tensor in model.safetensors.
        dtypes: name -> dtype of every tensor.
        companions: content of every other file, by its path in the folder; neither code nor other weights, except the
            tensors of the pipelines.
        metadata: of model.safetensors.
    """

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    companions: dict[str, bytes] = field(repr=False)
    metadata: dict[str, str]

    def other_tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """All tensors except these; errors as in `read_tensors`."""
        excluded = set(names)
        return self.read_tensors([name for name in self.shapes if name not in excluded])

    def read_tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Some or all tensors on the host, in the dtypes of the file.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            with safe_open(self.path / WEIGHTS_FILE, framework="pt") as file:
                return {name: file.get_tensor(name) for name in (self.shapes if names is None else names)}
        except (SafetensorError, OSError) as error:
            raise _unreadable(self.path / WEIGHTS_FILE, error) from None


def read_folder(path: Path, *, state_files: Iterable[str] = (), subfolders: Iterable[str] = ()) -> LeRobotFolder:
    """Read a folder's configuration, the names of its tensors, and its small files.

    Args:
        path: the folder.
        state_files: files with the tensors of the pipelines, by their paths in the folder.
        subfolders: folders inside it whose files belong to it, except weights and code.

    Raises:
        ConfigError: config.json or model.safetensors is missing or unreadable.
    """
    config = read_json(path / CONFIG_FILE)
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        text = f"{weights} is missing; give a complete policy folder (LeRobot writes it as .../pretrained_model)"
        if (path / INDEX_FILE).is_file():
            text = (
                f"{path} has weights in several files ({INDEX_FILE}), a layout that is not supported; write them as one"
            )
        raise ConfigError.of(None, "missing_file", text)
    try:
        with safe_open(weights, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
            kinds = {name: tensor.get_dtype() for name, tensor in slices.items()}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _unreadable(weights, error) from None
    unread = [name for name, kind in kinds.items() if kind not in _DTYPES]
    if unread:
        where = f"{weights}: tensor {unread[0]} ({len(unread)} in all) is of type {kinds[unread[0]]}"
        text = f"{where}; {', '.join(_DTYPES)} can be read, so convert it, or use an unquantized copy"
        raise ConfigError.of(None, "invalid_file", text)
    dtypes = {name: _DTYPES[kind] for name, kind in kinds.items()}
    return LeRobotFolder(path, config, shapes, dtypes, _companions(path, state_files, subfolders), metadata)


def _companions(path: Path, state_files: Iterable[str], subfolders: Iterable[str]) -> dict[str, bytes]:
    folders = [path, *(path / name for name in subfolders)]
    files = [file for folder in folders for file in folder.iterdir() if file.suffix.lower() not in _LEFT_OUT]
    files = [file for file in files if not EVALUATIONS.fullmatch(file.name)]
    files += [path / name for name in state_files]
    belonging = {
        str(file.relative_to(path)): file
        for file in files
        if file.is_file() and not file.name.startswith(".") and file.stat().st_size <= _LARGEST_COMPANION
    }
    return {name: belonging[name].read_bytes() for name in sorted(belonging)}


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError.of(None, "invalid_file", f"{path}: {error}; use another copy")


def tensor_problems(
    where: Path, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> list[Problem]:
    """Tensors that are missing, unexpected or of another shape than expected."""
    texts = [f"tensor {name} is missing" for name in sorted(expected.keys() - stored.keys())]
    texts += [f"tensor {name} does not belong to such a policy" for name in sorted(stored.keys() - expected.keys())]
    texts += [
        f"{name} has shape {list(stored[name])}, not {list(expected[name])}"
        for name in sorted(expected.keys() & stored.keys())
        if stored[name] != expected[name]
    ]
    more = len(texts) - _LISTED
    texts = texts if more <= 0 else [*texts[:_LISTED], f"{more} more tensors are missing, unexpected or misshapen"]
    return [Problem(None, "invalid_file", f"{where}: {text}") for text in texts]


def lossless(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor on the host, converted to `dtype` if that loses nothing."""
    tensor = tensor.detach().to("cpu").contiguous()
    narrow = tensor.to(dtype or tensor.dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def write_folder(
    target: Path,
    tensors: Mapping[str, Tensor],
    *,
    companions: Mapping[str, bytes],
    contents: Mapping[str, Mapping[str, Any]] | None = None,
    states: Mapping[str, Mapping[str, Tensor]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a policy folder.

    Args:
        target: created if absent; files of the same names are replaced.
        tensors: of model.safetensors, on the host.
        companions: further files, written byte for byte unless their content has changed.
        contents: JSON files by name; equal content keeps the bytes of the companion.
        states: files with tensors by name, which replace companions.
        metadata: of model.safetensors.
    """
    files = dict(companions)
    for name, content in (contents or {}).items():
        if name not in files or json.loads(files[name]) != content:
            files[name] = (json.dumps(content, indent=4) + "\n").encode()
    target.mkdir(parents=True, exist_ok=True)
    for name, state in (states or {}).items():
        files.pop(name, None)
        with atomic_path(target / name) as temporary:
            save_file(dict(state), temporary)
    for name, data in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target / name, data)
    with atomic_path(target / WEIGHTS_FILE) as temporary:
        save_file(dict(tensors), temporary, metadata=dict(metadata or {"format": "pt"}))
