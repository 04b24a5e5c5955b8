"""Flags in a YAML file: `--config run.yaml` reads it, `write_config_file` writes the resolved flags of a run."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rlvla.utils.errors import ConfigError
from rlvla.utils.runs import write_atomic
from rlvla.version import __version__

CONFIG_FILE = "config.yaml"
# The launcher sets them anew each time.
_OF_THE_LAUNCH = {"local_rank"}
_LEADING = ("advantage_estimator", "policy_loss", "reward", "actor_learning_rate", "learning_rate", "seed")
_PLACES = {"pretrain", "save_path", "demos", "load_checkpoint"}


def words_of_config_file(words: Sequence[str], repeated: Collection[str] = ()) -> list[str]:
    """The flags of the file that `--config` names on a command line, as if they had been typed; [] without one.

    In the file a flag is `name: value` without dashes: a list for several values, true and false for switches; null
    stands for the default.

    Args:
        words: of the command line.
        repeated: names of flags that are given once for each of their values.

    Raises:
        ConfigError: the file is missing, is no YAML, or holds something else than flags with values.
    """
    path = config_file_of(words)
    if path is None:
        return []
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold lines 'flag: value', e.g. seed: 3")
    found: list[str] = []
    problems = []
    for name, value in content.items():
        if str(name).lstrip("-") == "config":
            problems.append(f"--config {path} names another file; one file is read")
        elif isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value)):
            problems.append(f"--config {path}: {name} must be a value or a list of values")
        else:
            name = str(name).lstrip("-")
            several = value if name in repeated and isinstance(value, list) else [value]
            found += [word for one in several for word in _as_words(name, one)]
    if problems:
        raise ConfigError(problems)
    return found


def config_file_of(words: Sequence[str]) -> str | None:
    """What `--config` names on a command line; None without one."""
    for index, word in enumerate(words):
        if word == "--config" and index + 1 < len(words):
            return words[index + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _as_words(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def resolved_flags(parts: Sequence[Any]) -> dict[str, Any]:
    """Flag -> value of configuration dataclasses; what is left to the checkpoint or the suite (None) is left out."""
    found: dict[str, Any] = {}
    for part in parts:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value is None or field.name in _OF_THE_LAUNCH or (value == () and field.default == ()):
                continue
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def telling_flags(parts: Sequence[Any]) -> list[str]:
    """Flags that tell runs apart: algorithm, learning rates, seed, and what is not at its default, except for paths."""
    flags = resolved_flags(parts)
    defaults = resolved_flags([type(part)() for part in parts])
    changed = [name for name, value in flags.items() if name not in defaults or value != defaults[name]]
    leading = [name for name in _LEADING if name in flags]
    # Paths are different in every run, and wide.
    return list(dict.fromkeys([*leading, *(name for name in changed if name not in _PLACES)]))


def write_config_file(folder: Path, parts: Sequence[Any]) -> Path:
    """Write `config.yaml`, with which `--config` repeats the run; the command that was typed stands in its head."""
    import yaml

    flags = resolved_flags(parts)
    head = f"# rlvla {__version__}\n# {command_line()}\n"
    write_atomic(folder / CONFIG_FILE, (head + yaml.safe_dump(flags, sort_keys=False)).encode())
    return folder / CONFIG_FILE


def command_line() -> str:
    """The command as it was typed, ready for a shell; without what the launcher has added."""
    typed = [word for word in sys.argv if not word.startswith("--local_rank=")]
    return shlex.join(["python", *typed])
