"""Pickles that would create a file if anything ran what they name, in the forms that torch and Python read."""

from __future__ import annotations

import builtins
import functools
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvla.experience import Sample
from rlvla.utils.files import manifest_entry, write_manifest


class _Calls:
    """Pickled as the call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class _SampleWith(Sample):
    """A `Sample` whose state is whatever was given."""

    def __init__(self, state: Any):
        self._state = state

    def __reduce__(self) -> Any:
        return object.__new__, (Sample,), self._state


def _zipped(path: Path, pickled: bytes) -> None:
    """A file of today's format around a pickle that torch would not write."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)


def payloads(mark: Path) -> dict[str, Callable[[Path], None]]:
    """Name -> writes a file whose reading would create `mark`, if it ran anything."""
    touch = f"touch {mark}"
    write = f"open({str(mark)!r}, 'w').close()"
    inner = torch.zeros(2)
    calls = {
        "os.system": _Calls(os.system, touch),
        "eval": _Calls(eval, write),
        "exec": _Calls(exec, write),
        "subprocess": _Calls(subprocess.check_call, ["touch", str(mark)]),
        "open": _Calls(open, str(mark), "w"),
        "getattr": _Calls(getattr, _Calls(builtins.__import__, "os"), "system"),
        "partial": _Calls(functools.partial, os.system, touch),
        "torch.load": _Calls(torch.load, str(mark)),
        "torch.hub": _Calls(torch.hub.load, str(mark.parent), "model", "local"),
        "Path.touch": _Calls(Path.touch, mark),
        "beside tensors": {"weights": inner, "more": [(_Calls(os.system, touch),)]},
        "in a sample": _SampleWith({"executed": inner, "uid": _Calls(os.system, touch)}),
        "in an array": {"a": np.array([_Calls(os.system, touch)], dtype=object)},
        "as a dtype": _Calls(np.dtype, _Calls(os.system, touch)),
    }
    forms: dict[str, Callable[[Path], None]] = {
        name: functools.partial(torch.save, content) for name, content in calls.items()
    }
    plain = calls["os.system"]
    forms["the old format"] = lambda path: torch.save(plain, path, _use_new_zipfile_serialization=False)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(plain, protocol=protocol)
        forms[f"a bare pickle {protocol}"] = functools.partial(_write_bytes, pickled)
        forms[f"a zipped pickle {protocol}"] = functools.partial(_write_zipped, pickled)
    return forms


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _write_zipped(content: bytes, path: Path) -> None:
    _zipped(path, content)


def sign(checkpoint: Path) -> None:
    """Write the manifest anew, as anyone can who changes a file."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    write_manifest(checkpoint, {path: manifest_entry(path) for path in files})
