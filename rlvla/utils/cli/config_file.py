"""Flags from a YAML file (`--config run.yaml`), and the file with the resolved flags that each run writes."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlvla.options import registered_options
from rlvla.utils.cli.programs import command_line
from rlvla.utils.data_files import read_settings
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_atomic
from rlvla.version import __version__

RUN_CONFIG_FILE = "config.yaml"
_ROOT = Path(__file__).resolve().parents[3]
_SET_BY_LAUNCHER = {"local_rank"}
_LEADING = ("advantage_estimator", "policy_loss", "reward", "actor_learning_rate", "learning_rate", "seed")
_PATHS = {"pretrain", "save_path", "demos", "load_checkpoint"}


def config_file_arguments(argv: Sequence[str], repeated: Collection[str] = ()) -> list[str]:
    """The flags in the file of `--config`, as arguments of a command line; [] without `--config`.

    In the file a flag is written `name: value`, without dashes: a list for several values, true or false for a switch,
    null for the default.

    Args:
        argv: the command line.
        repeated: names of flags that are repeated for each value.

    Raises:
        ConfigError: the file is missing, is not valid YAML, or contains anything but flags with values.
    """
    path = config_file_of(argv)
    if path is None:
        return []
    try:
        content, _ = read_settings(Path(path))
    except ConfigError as error:
        raise ConfigError(problem.of_flag("config") for problem in error.problems) from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold lines 'flag: value', e.g. seed: 3")
    flags: list[str] = []
    problems = []
    for name, value in content.items():
        if str(name).lstrip("-") == "config":
            problems.append(f"--config {path} names another file; one file is read")
        elif isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value)):
            problems.append(f"--config {path}: {name} must be a value or a list of values")
        else:
            name = str(name).lstrip("-")
            flags += flag_arguments(name, value, repeated=name in repeated)
    if problems:
        raise ConfigError(problems)
    return flags


def config_file_of(argv: Sequence[str]) -> str | None:
    """The value of `--config` on a command line, or None; ConfigError if there are several."""
    paths = [after for word, after in pairwise([*argv, ""]) if word == "--config" and after]
    paths += [word.partition("=")[2] for word in argv if word.startswith("--config=")]
    if len(paths) > 1:
        raise ConfigError.of("config", "duplicate", f"--config {' and '.join(paths)}: one file is read; join them")
    return paths[0] if paths else None


def flag_arguments(name: str, value: Any, *, repeated: bool = False) -> list[str]:
    """A flag with its value, parsed or from YAML, as arguments of a command line.

    Args:
        name: name of the flag, without dashes.
        value: a list or tuple for several values, True or False for a switch, None for the default (no arguments).
        repeated: whether the flag is repeated for each value.
    """
    if repeated and isinstance(value, list):
        return [word for one in value for word in flag_arguments(name, one)]
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def resolved_flags(configs: Sequence[Any]) -> dict[str, Any]:
    """Flag -> value of configuration dataclasses; None (left to the checkpoint or suite) is omitted."""
    return {name: value for config in configs for name, value, _ in _resolved(config)}


def _resolved(config: Any) -> Iterator[tuple[str, Any, bool]]:
    """Name and value of each flag, and whether it has its default; None is omitted."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "registry" in field.metadata:
            continue
        suite_options = isinstance(value, Mapping)
        for name, one in (value if suite_options else {field.name: value}).items():
            if one is not None and name not in _SET_BY_LAUNCHER and not (one == () and field.default == ()):
                default = not suite_options and one == field.default
                yield name, list(one) if isinstance(one, tuple) else one, default
    for options in registered_options(config):
        yield from _resolved(options)


def telling_flags(configs: Sequence[Any]) -> list[str]:
    """Flags that distinguish runs: algorithm, learning rates, seed, and all non-default values except paths."""
    resolved = {name: default for config in configs for name, _, default in _resolved(config)}
    # Paths differ between any two runs, and are too wide for a table.
    changed = [name for name, default in resolved.items() if not default and name not in _PATHS]
    return list(dict.fromkeys([*(name for name in _LEADING if name in resolved), *changed]))


def write_config_file(folder: Path, configs: Sequence[Any]) -> Path:
    """Write `config.yaml`, which repeats the run with `--config`; its header quotes version and command line."""
    import yaml

    flags = resolved_flags(configs)
    head = f"# {source_words()}\n# {command_line()}\n"
    write_atomic(folder / RUN_CONFIG_FILE, (head + yaml.safe_dump(flags, sort_keys=False)).encode())
    return folder / RUN_CONFIG_FILE


def quoted_head(folder: Path) -> tuple[str, str]:
    """Version and command line in the header of `config.yaml`; ("", "") if there is no such file."""
    path = folder / RUN_CONFIG_FILE
    if not path.is_file():
        return "", ""
    with suppress(OSError, UnicodeDecodeError):
        version, command, *_ = [*path.read_text(encoding="utf-8").splitlines()[:2], "", ""]
        if version.startswith("# rlvla ") and command.startswith("# "):
            return version.removeprefix("# "), command.removeprefix("# ")
    return "", ""


@cache
def source_commit(root: Path = _ROOT) -> str | None:
    """The commit of the checkout in `root`, with "-dirty" if tracked files differ from it; None outside a checkout.

    An installed package is not in a checkout, even if a folder above it is.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def source_words() -> str:
    """Version and, in a checkout, commit: `rlvla 0.2.0, commit 1e3158d...`."""
    commit = source_commit()
    return f"rlvla {__version__}" + (f", commit {commit}" if commit else "")
