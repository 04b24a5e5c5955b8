"""Saved states of a buffer: files of changed rows, and for each state a manifest that lists those it consists of.

    rows_000007.npz    arrays of numpy, never pickled
    state_000007.json  the files of the state in order, with size and SHA-256, and what the buffer adds; written last

Files are never changed once a state lists them, so a state is complete or does not exist.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvla.utils.data_files import check_types, inside, read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import flushed_file, fsync_entry, manifest_entry, remove_leftovers, write_json

FORMAT = 1
_STATE = re.compile(r"state_(\d+)\.json")
_ROWS = re.compile(r"rows_\d+\.npz")
_TYPES = {"format": int, "files": dict[str, dict], "mapped": dict[str, int], "buffer": dict[str, Any]}
Array = NDArray[Any]


def states(folder: Path) -> list[int]:
    """Numbers of the states in a folder, ascending."""
    found = (_STATE.fullmatch(path.name) for path in folder.glob("state_*.json"))
    return sorted(int(match[1]) for match in found if match)


def _state_path(folder: Path, number: int) -> Path:
    return folder / f"state_{number:06d}.json"


def write_rows(folder: Path, number: int, arrays: Iterable[tuple[str, Array]]) -> tuple[str, dict[str, Any]]:
    """Write arrays one after the other; returns the name of the file and its entry in a manifest.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    path = folder / f"rows_{number:06d}.npz"
    try:
        with flushed_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return path.name, manifest_entry(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_state(
    folder: Path,
    number: int,
    files: Mapping[str, dict[str, Any]],
    mapped: Mapping[str, int],
    buffer: Mapping[str, Any],
) -> None:
    """Complete a state: `files` and `mapped` files, which are on disk, and what `buffer` wants to know later.

    Raises:
        OSError: it could not be written; states before are untouched.
    """
    fsync_entry(folder)
    content = {"format": FORMAT, "files": dict(files), "mapped": dict(mapped), "buffer": dict(buffer)}
    write_json(_state_path(folder, number), content)
    fsync_entry(folder)


def read_state(folder: Path, number: int, expected: Mapping[str, Any], numbers: Mapping[str, type]) -> dict[str, Any]:
    """The manifest of a state, of whose files presence, sizes and checksums have been verified.

    Of mapped files, which go on changing outside of the rows of the state, the size is verified.

    Args:
        folder: the folder of the buffer.
        number: of the state.
        expected: what the buffer must have been like, name -> JSON.
        numbers: what else it must have noted, name -> type.

    Raises:
        ConfigError: it is missing, damaged, of another version of the format, or not as expected.
    """
    path = _state_path(folder, number)
    content = read_json(path)
    _check_entries(content, _TYPES, path)
    if content["format"] != FORMAT:
        raise ConfigError.of(None, "invalid_file", f"{path} has format {content['format']}; format {FORMAT} is known")
    for name, wanted in expected.items():
        if content["buffer"].get(name) != wanted:
            text = f"the replay buffer in {folder} has {name} {content['buffer'].get(name)}, not {wanted}"
            raise ConfigError.of(None, "mismatch", f"{text}; load it as it was saved, or name another folder")
    _check_entries(content["buffer"], numbers, path)
    for name, entry in content["files"].items():
        _require(folder, name, partial(_is_unchanged, entry=entry))
    for name, size in content["mapped"].items():
        _require(folder, name, partial(_is_long_enough, size=size))
    return content


def _check_entries(content: Mapping[str, Any], types: Mapping[str, Any], path: Path) -> None:
    missing = sorted(set(types) - set(content))
    if missing:
        raise ConfigError.of(None, "invalid_file", f"{path} does not have {', '.join(missing)}; it is damaged")
    check_types(content, types, path)


def _is_unchanged(path: Path, entry: dict[str, Any]) -> bool:
    return manifest_entry(path) == entry


def _is_long_enough(path: Path, size: int) -> bool:
    return path.stat().st_size >= size


def _require(folder: Path, name: str, holds: Callable[[Path], bool]) -> None:
    try:
        path = inside(folder, name)
        problem = None if path.is_file() and holds(path) else "is damaged" if path.exists() else "is missing"
    except (OSError, ValueError) as error:
        problem = f"cannot be used ({error})"
    if problem:
        text = f"{folder / name} {problem}; go back to a state before, or start with an empty buffer"
        raise ConfigError.of(None, "invalid_file", text)


def read_rows(folder: Path, name: str) -> dict[str, Array]:
    """The arrays of a file written by `write_rows`.

    Raises:
        ConfigError: it holds anything else.
    """
    try:
        with np.load(folder / name, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ConfigError.of(None, "invalid_file", f"{folder / name} cannot be read ({error})") from error


def keep_only(folder: Path, numbers: Iterable[int]) -> None:
    """Remove all other states, then the files that none of the remaining ones lists."""
    kept = set(numbers)
    for number in states(folder):
        if number not in kept:
            _state_path(folder, number).unlink()
    fsync_entry(folder)
    listed = {name for number in kept for name in read_json(_state_path(folder, number))["files"]}
    for path in folder.glob("rows_*.npz"):
        if _ROWS.fullmatch(path.name) and path.name not in listed:
            path.unlink()
    remove_leftovers(folder)
