"""Heads in small files beside a policy's weights: read and checked."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlvla.models.finite_weights import all_finite
from rlvla.utils.errors import ConfigError, Problem


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
