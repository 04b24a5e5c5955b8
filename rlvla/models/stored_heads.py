"""Tensors of small policies, and of heads beside a policy's weights: read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlvla.models.finite_weights import all_finite
from rlvla.utils.errors import ConfigError, Problem

_LISTED = 8  # tensors in an error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; ConfigError if there is none, or it is damaged."""
    if not path.is_file():
        raise ConfigError.of(None, "missing_file", f"{path} is missing; give a complete policy folder")
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ConfigError.of(None, "invalid_file", f"{path}: {error}; use another copy") from None


def tensor_problems(stored: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], kind: str) -> list[str]:
    """What is wrong with names, shapes and values of tensors, in words, the first few.

    Args:
        stored: the tensors.
        wanted: shape of each that a policy of these sizes has.
        kind: of policy, for the message.
    """
    problems = [f"tensor {name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    surplus = sorted(stored.keys() - wanted.keys())
    problems += [f"tensor {name} is not part of a {kind} policy of these sizes" for name in surplus]
    for name in sorted(wanted.keys() & stored.keys()):
        if tuple(stored[name].shape) != wanted[name]:
            problems.append(f"{name} has shape {list(stored[name].shape)}, not {list(wanted[name])}")
        elif not all_finite(stored[name]):
            problems.append(f"tensor {name}: NaN or infinity; use an earlier checkpoint")
    more = len(problems) - _LISTED
    return problems if more <= 0 else [*problems[:_LISTED], f"{more} more tensors are missing, surplus or damaged"]


def check_tensors(path: Path, wanted: Mapping[str, tuple[int, ...]], kind: str) -> None:
    """Check a file of tensors; ConfigError as in `read_tensors`, or listing `tensor_problems`."""
    problems = tensor_problems(read_tensors(path), wanted, kind)
    if problems:
        raise ConfigError([Problem(None, "invalid_file", f"{path}: {text}") for text in problems])


def read_head(path: Path, *, remedy: str = "use another copy") -> dict[str, Tensor]:
    """The tensors of a head's file.

    Args:
        path: the file.
        remedy: what to do if it is damaged.

    Raises:
        ConfigError: the file cannot be read, or a tensor holds NaN or infinity; lists all that do.
    """
    try:
        stored = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ConfigError.of(None, "invalid_file", f"{path}: {error}; {remedy}") from None
    problems = [
        Problem(None, "invalid_file", f"{path}: tensor {name}: NaN or infinity; use an earlier checkpoint")
        for name, tensor in sorted(stored.items())
        if not all_finite(tensor)
    ]
    if problems:
        raise ConfigError(problems)
    return stored


def stored_head_problems(folder: Path) -> list[Problem]:
    """What is wrong with the values of the heads of critics and reward models in a folder."""
    problems: list[Problem] = []
    for path in sorted(folder.glob("*_head.safetensors")):
        try:
            read_head(path)
        except ConfigError as error:
            problems += error.problems
    return problems
