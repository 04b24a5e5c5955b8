"""Finds NaN and infinity in the weights of a checkpoint without loading the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from rlvla.models.vla.checkpoint_files import FolderTensors, Stored
from rlvla.utils.errors import ConfigError, Problem

_LISTED = 5


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor on the host holds neither NaN nor infinity; nothing of its size is allocated."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    bounds = tensor.detach().aminmax()  # NaN if any number is; many times faster than `isfinite` of all
    return all(math.isfinite(bound) for bound in bounds)


def check_finite(folder: Path, found: FolderTensors) -> None:
    """Check the tensors of a folder, and value or reward heads next to them.

    Raises:
        ConfigError: a tensor holds NaN or infinity; names file and tensors.
    """
    stored = list(found.tensors.values())
    chains = [adapter for chain in found.adapters.values() for adapter in chain]
    stored += [part for adapter in chains for part in (adapter.down, adapter.up)]
    problems = _problems(stored)
    for path in sorted(folder.glob("*_head.safetensors")):
        problems += _texts(path, sorted(_bad_keys(path, *_version(path))))
    if problems:
        raise ConfigError([Problem(None, "invalid_file", text) for text in problems])


def _problems(stored: Iterable[Stored]) -> list[str]:
    by_file: defaultdict[Path, list[Stored]] = defaultdict(list)
    for tensor in stored:
        by_file[tensor.path].append(tensor)
    problems = []
    for path, tensors in sorted(by_file.items()):
        held = [tensor.key for tensor in tensors if tensor.content is not None and not all_finite(tensor.content)]
        if any(tensor.content is None for tensor in tensors):
            bad = _bad_keys(path, *_version(path))
            held += [tensor.key for tensor in tensors if tensor.content is None and tensor.key in bad]
        problems += _texts(path, held)
    return problems


def _texts(path: Path, keys: list[str]) -> list[str]:
    if not keys:
        return []
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    noun = "tensors" if len(keys) > 1 else "tensor"
    return [f"{path}: {noun} {', '.join(keys[:_LISTED])}{more}: NaN or infinity; use an earlier checkpoint"]


def _version(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


@lru_cache(maxsize=64)  # one command checks the same folder several times
def _bad_keys(path: Path, size: int, modified_ns: int) -> frozenset[str]:
    """Names of the tensors with NaN or infinity in a safetensors file of this size and time of modification."""
    with safe_open(path, framework="pt") as file:
        return frozenset(key for key in file.keys() if not all_finite(file.get_tensor(key)))  # noqa: SIM118
