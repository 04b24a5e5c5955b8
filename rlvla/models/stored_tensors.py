"""Tensors of checkpoint files: reading them, and checking names, shapes and values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlvla.models.vla.checkpoint_files import FolderTensors, Stored
from rlvla.utils.errors import ConfigError, Problem, collected

# Most tensors in an error message.
_MAX_PROBLEMS, _MAX_NAMES = 8, 5


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor on the host has neither NaN nor infinity; allocates nothing of its size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    bounds = tensor.detach().aminmax()  # NaN if any number is; many times faster than `isfinite` of all
    return all(math.isfinite(bound) for bound in bounds)


def read_tensors(path: Path, *, remedy: str = "use another copy") -> dict[str, Tensor]:
    """Read a safetensors file; ConfigError if it is missing, or damaged (then with the `remedy`)."""
    if not path.is_file():
        raise ConfigError.of(None, "missing_file", f"{path} is missing; give a complete policy folder")
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ConfigError.of(None, "invalid_file", f"{path}: {error}; {remedy}") from None


def tensor_problems(stored: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], kind: str) -> list[str]:
    """Missing and surplus tensors, wrong shapes, NaN and infinity; only the first few.

    Args:
        stored: the tensors.
        expected: shape of each tensor of the network.
        kind: of policy, for the message.
    """
    problems = [f"tensor {name} is missing" for name in sorted(expected.keys() - stored.keys())]
    surplus = sorted(stored.keys() - expected.keys())
    problems += [f"tensor {name} is not part of a {kind} policy of these sizes" for name in surplus]
    for name in sorted(expected.keys() & stored.keys()):
        if tuple(stored[name].shape) != expected[name]:
            problems.append(f"{name} has shape {list(stored[name].shape)}, not {list(expected[name])}")
        elif not all_finite(stored[name]):
            problems.append(f"tensor {name}: NaN or infinity; use an earlier checkpoint")
    more = len(problems) - _MAX_PROBLEMS
    if more <= 0:
        return problems
    return [*problems[:_MAX_PROBLEMS], f"{more} more tensors are missing, surplus or damaged"]


def check_tensors(path: Path, expected: Mapping[str, tuple[int, ...]], kind: str) -> None:
    """Check a safetensors file; ConfigError as in `read_tensors`, or listing `tensor_problems`."""
    problems = tensor_problems(read_tensors(path), expected, kind)
    if problems:
        raise ConfigError([Problem(None, "invalid_file", f"{path}: {text}") for text in problems])


def read_head(path: Path, *, remedy: str = "use another copy") -> dict[str, Tensor]:
    """Read the file of a head; ConfigError as in `read_tensors`, or for NaN or infinity."""
    stored = read_tensors(path, remedy=remedy)
    problems = _nonfinite_problems(path, [name for name, tensor in sorted(stored.items()) if not all_finite(tensor)])
    if problems:
        raise ConfigError(problems)
    return stored


def stored_head_problems(folder: Path) -> list[Problem]:
    """Unreadable files and nonfinite values of critic and reward heads in a folder."""
    problems: list[Problem] = []
    for path in sorted(folder.glob("*_head.safetensors")):
        collected(problems, partial(read_head, path))
    return problems


def check_finite(folder: Path, tensors: FolderTensors) -> None:
    """Check the tensors of a folder, and critic and reward heads next to them.

    Raises:
        ConfigError: a tensor has NaN or infinity; lists files and tensors.
    """
    by_file: defaultdict[Path, list[Stored]] = defaultdict(list)
    adapters = [adapter for chain in tensors.adapters.values() for adapter in chain]
    for tensor in [*tensors.tensors.values(), *(half for adapter in adapters for half in (adapter.down, adapter.up))]:
        by_file[tensor.path].append(tensor)
    problems: list[Problem] = []
    for path, held in sorted(by_file.items()):
        bad = [tensor.key for tensor in held if tensor.content is not None and not all_finite(tensor.content)]
        on_disk = [tensor.key for tensor in held if tensor.content is None]
        if on_disk:
            facts = path.stat()
            nonfinite = _nonfinite_keys(path, facts.st_size, facts.st_mtime_ns)
            bad += [key for key in on_disk if key in nonfinite]
        problems += _nonfinite_problems(path, bad)
    problems += stored_head_problems(folder)
    if problems:
        raise ConfigError(problems)


def _nonfinite_problems(path: Path, keys: Sequence[str]) -> list[Problem]:
    if not keys:
        return []
    more = f" and {len(keys) - _MAX_NAMES} more" if len(keys) > _MAX_NAMES else ""
    names = f"{'tensors' if len(keys) > 1 else 'tensor'} {', '.join(keys[:_MAX_NAMES])}{more}"
    return [Problem(None, "invalid_file", f"{path}: {names}: NaN or infinity; use an earlier checkpoint")]


@lru_cache(maxsize=64)  # one command checks the same folder several times
def _nonfinite_keys(path: Path, size: int, modified_ns: int) -> frozenset[str]:
    """Names of the tensors with NaN or infinity in a safetensors file of this size and modification time."""
    with safe_open(path, framework="pt") as file:
        return frozenset(key for key in file.keys() if not all_finite(file.get_tensor(key)))  # noqa: SIM118
