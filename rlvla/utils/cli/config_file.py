"""Flags from a YAML file (`--config run.yaml`), and the file with the resolved flags that each run writes."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlvla.utils.cli.programs import typed_command
from rlvla.utils.data_files import read_yaml
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_atomic
from rlvla.utils.provenance import source_words

RUN_CONFIG_FILE = "config.yaml"
# Set by the launcher for each launch.
_OF_THE_LAUNCH = {"local_rank"}
_LEADING = ("advantage_estimator", "policy_loss", "reward", "actor_learning_rate", "learning_rate", "seed")
_PLACES = {"pretrain", "save_path", "demos", "load_checkpoint"}


def words_of_config_file(words: Sequence[str], repeated: Collection[str] = ()) -> list[str]:
    """The flags of the file that `--config` names, as words of a command line; [] without `--config`.

    In the file a flag is written `name: value`, without dashes: a list for several values, true or false for a switch,
    null for the default.

    Args:
        words: the command line.
        repeated: names of flags that are repeated for each of their values.

    Raises:
        ConfigError: the file is missing, is not valid YAML, or contains anything but flags with values.
    """
    path = config_file_of(words)
    if path is None:
        return []
    try:
        content = read_yaml(Path(path))
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
            flags += words_of_flag(name, value, repeated=name in repeated)
    if problems:
        raise ConfigError(problems)
    return flags


def config_file_of(words: Sequence[str]) -> str | None:
    """The value of `--config` on a command line, or None."""
    for index, word in enumerate(words):
        if word == "--config" and index + 1 < len(words):
            return words[index + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def words_of_flag(name: str, value: Any, *, repeated: bool = False) -> list[str]:
    """A flag and its value, as a YAML file has it, as words of a command line.

    Args:
        name: name of the flag, without dashes.
        value: a list for several values, True or False for a switch, None for the default (no words).
        repeated: whether the flag is repeated for each of its values.
    """
    if repeated and isinstance(value, list):
        return [word for one in value for word in words_of_flag(name, one)]
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def resolved_flags(parts: Sequence[Any]) -> dict[str, Any]:
    """Flags of configuration dataclasses with their values, without those left to the checkpoint or suite (None)."""
    resolved: dict[str, Any] = {}
    for part in parts:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            flags = value if isinstance(value, Mapping) else {field.name: value}  # a mapping: options of a suite
            for name, value in flags.items():
                if value is None or name in _OF_THE_LAUNCH or (value == () and field.default == ()):
                    continue
                resolved[name] = list(value) if isinstance(value, tuple) else value
    return resolved


def telling_flags(parts: Sequence[Any]) -> list[str]:
    """Flags that distinguish runs: algorithm, learning rates, seed, and all non-default values except paths."""
    flags = resolved_flags(parts)
    defaults = resolved_flags([type(part)() for part in parts])
    changed = [name for name, value in flags.items() if name not in defaults or value != defaults[name]]
    leading = [name for name in _LEADING if name in flags]
    # Paths differ between any two runs, and are too wide for a table.
    return list(dict.fromkeys([*leading, *(name for name in changed if name not in _PLACES)]))


def write_config_file(folder: Path, parts: Sequence[Any]) -> Path:
    """Write `config.yaml`, from which `--config` repeats the run; its header quotes the command line."""
    import yaml

    flags = resolved_flags(parts)
    head = f"# {source_words()}\n# {command_line()}\n"
    write_atomic(folder / RUN_CONFIG_FILE, (head + yaml.safe_dump(flags, sort_keys=False)).encode())
    return folder / RUN_CONFIG_FILE


def quoted_head(folder: Path) -> tuple[str, str]:
    """Version and command line that `write_config_file` quoted; empty if the folder holds no such file."""
    path = folder / RUN_CONFIG_FILE
    with suppress(OSError, UnicodeDecodeError):
        version, command, *_ = [*path.read_text(encoding="utf-8").splitlines()[:2], "", ""]
        if version.startswith("# rlvla ") and command.startswith("# "):
            return version.removeprefix("# "), command.removeprefix("# ")
    return "", ""


def command_line() -> str:
    """The command as typed, quoted for a shell, without the launcher's additions."""
    typed = [word for word in sys.argv if not word.startswith("--local_rank=")]
    return shlex.join(typed_command(typed))
