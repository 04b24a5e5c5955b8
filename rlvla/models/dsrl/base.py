"""The frozen flow policy under a DSRL actor: lookup of its folder, and check of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlvla.models.dsrl.config import MODEL_TYPE, DSRLConfig
from rlvla.models.families import CONFIG_FILE, Checkpoint, check_checkpoint, checkpoint_overrides, type_of
from rlvla.models.policy import PolicySpec
from rlvla.utils.errors import ConfigError

_SUFFIXES = (".safetensors", ".bin", ".pt")  # of files with weights
_SETTINGS_FILES = (CONFIG_FILE, "dataset_statistics.json", "rlvla_policy.json")


def not_steerable(spec: PolicySpec, folder: Path) -> str | None:
    """Reason why a policy's initial noise cannot be selected, or None."""
    if spec.start_shape and spec.summary_dim:
        return None
    kind = type_of(folder)
    text = "this one samples its actions directly" if not spec.start_shape else "this family gives no summary"
    return f"{folder}: DSRL chooses where the denoising of a flow policy begins; {text} (type {kind})"


def fingerprint(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 of a policy's weights and of the settings that its actions depend on."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    kept = [path for path in files if path.suffix in _SUFFIXES or path.name in _SETTINGS_FILES]
    return {path.name: _digest(path, path.stat().st_size, path.stat().st_mtime_ns) for path in kept}


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def places_of(base: Path, folder: Path) -> tuple[str, ...]:
    """`DSRLConfig.base` for an actor in `folder`: relative, for folders that are moved together, then absolute."""
    absolute = base.resolve()
    return os.path.relpath(absolute, folder.resolve()), str(absolute)


def read_base(folder: Path, config: DSRLConfig, cameras: Sequence[str] = ()) -> Checkpoint:
    """The checked base of an actor.

    Args:
        folder: of the actor.
        config: its configuration.
        cameras: of the environment; (): as in training.

    Raises:
        ConfigError: the base is missing, has changed, is not a flow policy, or has other sizes.
    """
    places = _existing(folder, config.base)
    if not places:
        text = (
            f"the base policy of {folder} is missing: {', '.join(config.base)}; write its new path into `base` of "
            f"{folder / CONFIG_FILE}, absolute or relative to {folder}"
        )
        raise ConfigError.of(None, "missing_file", text)
    base = next((place for place in places if not _changed(place, config)), places[0])
    if type_of(base) == MODEL_TYPE:
        text = f"{folder / CONFIG_FILE}: base is {base}, which is a DSRL actor itself"
        raise ConfigError.of(None, "invalid_file", text)
    changed = _changed(base, config)
    if changed:
        text = (
            f"{base} is not the policy that {folder} was trained with: {', '.join(changed)} changed; use the original "
            f"copy, and write its path into `base` of {folder / CONFIG_FILE}"
        )
        raise ConfigError.of(None, "mismatch", text)
    settings: dict[str, Any] = dict(config.base_settings)
    base_cameras = tuple(cameras) or tuple(settings.pop("cameras", ()))
    overrides = checkpoint_overrides(base, SimpleNamespace(**settings), base_cameras)
    checkpoint = check_checkpoint(base, config.unnorm_key or None, overrides=overrides)
    spec, problem = checkpoint.spec, not_steerable(checkpoint.spec, base)
    sizes = (spec.action_dim, spec.action_chunk_len, spec.summary_dim + spec.proprio_dim)
    if problem is None and sizes != (config.action_dim, config.action_chunk_len, config.state_dim):
        problem = f"{folder / CONFIG_FILE}: sizes that {base} does not have; use another copy"
    if problem is not None:
        raise ConfigError.of(None, "mismatch", problem)
    return checkpoint


def _existing(folder: Path, places: Sequence[str]) -> list[Path]:
    existing = []
    for place in places:
        with suppress(OSError, ValueError):  # not a valid path
            path = Path(os.path.normpath(folder.resolve() / place))
            existing += [path] if (path / CONFIG_FILE).is_file() else []
    return existing


def _changed(base: Path, config: DSRLConfig) -> list[str]:
    """Names of the files that have changed since the actor was trained."""
    return sorted({name for name, _ in fingerprint(base).items() ^ config.base_files.items()})
