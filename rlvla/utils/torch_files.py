"""Reading files of `torch.save` without running code in them.

A pickle may call any function of the machine. Allowed here: torch's own list, numpy arrays of numbers, bytes, frozen
sets, and classes that a caller adds, with their members if they are enumerations. A `--custom_module` adds its classes
with `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import enum
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
)

from rlvla.utils.errors import ConfigError

_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch reads it at each load; also for loads in other libraries
_NUMBERS = [np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"]


class RefusedFileError(ConfigError):
    """A file holds, or seems to hold, more than tensors and plain values; nothing in it was run."""


def _dtype_of_numbers(code: Any, *more: Any) -> np.dtype:
    """Stands in for `numpy.dtype`: a dtype of objects or fields could turn bytes into pointers."""
    dtype: np.dtype = np.dtype(code)
    if dtype not in _NUMBERS:
        raise ValueError(f"an array of {dtype} is not one of numbers")
    return np.dtype(dtype, *more)


def _member(kind: Any, name: Any) -> enum.Enum:
    """A member of an enumeration, which Python 3.11 up to 3.11.3 pickles as `getattr(class, name)`."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise ValueError(f"{name!r} is not a member of an enumeration")
    return kind[name]


def _numpy_names() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Functions and classes that pickled arrays of numbers refer to, under their names in numpy 1 and 2."""
    array: Any = np.zeros(1).__reduce__()
    function, args, _ = array
    scalar = np.float64(0).__reduce__()[0]
    names: list[Any] = [args[0], (_dtype_of_numbers, "numpy.dtype"), *{type(dtype) for dtype in _NUMBERS}]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names += [(function, f"{module}._reconstruct"), (scalar, f"{module}.scalar")]
    return names


@contextmanager
def restricted_loading(classes: Sequence[type] = ()) -> Iterator[None]:
    """Inside the block every `torch.load` of this process is restricted to the classes of this module.

    Args:
        classes: further classes that a file may hold; they are created without their constructor.
    """
    forced, listed = os.environ.get(_FORCED), get_safe_globals()
    os.environ[_FORCED] = "1"
    add_safe_globals([*_numpy_names(), bytes, frozenset, (_member, "builtins.getattr"), *classes])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            yield
    finally:
        clear_safe_globals()
        add_safe_globals(listed)
        if forced is None:
            del os.environ[_FORCED]
        else:
            os.environ[_FORCED] = forced


def read_torch_file(path: Path, *, classes: Sequence[type] = (), mmap: bool = False) -> Any:
    """The content of a file, with its tensors on the host.

    Args:
        path: the file.
        classes: see `restricted_loading`.
        mmap: map the tensors into memory instead of reading them, where the format of the file allows it.

    Raises:
        RefusedFileError: it refers to anything else, or is not such a file; the message names it.
        OSError: it cannot be opened.
    """
    with restricted_loading(classes):
        try:
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            except RuntimeError:
                if not mmap:
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)  # the legacy format cannot be mapped
        except OSError:
            raise
        except Exception as error:  # pickle raises many kinds of errors on invalid bytes
            raise RefusedFileError.of(None, "invalid_file", f"{path} {_reason(path, error)}") from error


def refusal(path: Path, classes: Sequence[type] = ()) -> str | None:
    """Why `read_torch_file` would not read a file, or None; its tensors are mapped, not read."""
    try:
        read_torch_file(path, classes=classes, mmap=True)
    except RefusedFileError as error:
        return str(error)
    return None


def _reason(path: Path, error: Exception) -> str:
    named = re.findall(r"GLOBAL (\S+)", str(error))
    with suppress(Exception):  # another format, or one that cannot be read as far as that
        named = sorted(get_unsafe_globals_in_checkpoint(str(path))) or named
    if named:
        return (
            f"is refused: it names {', '.join(named)}, while tensors and plain values are all it may hold; nothing in "
            "it was run. Use a copy from a source you trust"
        )
    first = next(iter(str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()), type(error).__name__)
    return f"is not a readable file of tensors and plain values ({first[:200]}); copy it again"
