"""Untrusted records of environments in policy folders and data sets: types are checked, machine settings dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from rlvla.envs.config import RECORDED_FLAGS, EnvConfig
from rlvla.envs.suite_flags import suite_flags
from rlvla.utils.data_files import check_types, field_types, fits
from rlvla.utils.deepspeed.config import launched_rank
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import log

LEARNED_FROM = "learned_from"
_STATES = {"suite": str, "task_id": int | None, "start": int, "stop": int}


def checked_record(content: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Validate a record and drop its machine-dependent settings with one warning.

    Settings that select a program to run or a folder to read (fields made with `arg(..., recorded=False)`) come from
    flags and environment variables only, never from a folder of unknown origin.

    Args:
        content: result of `EnvConfig.as_dict`, possibly with other entries.
        source: its file.

    Raises:
        ConfigError: values of the wrong type; reports all problems.
    """
    flags = suite_flags()
    common = {f.name for f in fields(EnvConfig) if "help" in f.metadata}
    local = common.difference(RECORDED_FLAGS) | {name for name, flag in flags.items() if not flag.recorded}
    ignored = tuple(sorted(name for name in local if content.get(name) is not None))
    if ignored:
        _warn(str(source), ignored)
    record = {name: value for name, value in content.items() if name not in local}
    hints = {name: hint for name, hint in field_types(EnvConfig).items() if name in RECORDED_FLAGS}
    hints |= {name: flags[name].hint for name in flags if name in record}
    check_types(record, {name: hint | None for name, hint in hints.items()}, source)
    learned = record.get(LEARNED_FROM) or []
    if not isinstance(learned, list) or not all(map(_is_states, learned)):
        text = f"{source}: {LEARNED_FROM} does not list initial states (suite, task_id, start, stop)"
        raise ConfigError.of(None, "invalid_file", text)
    return record


def _is_states(entry: Any) -> bool:
    """Whether an entry holds the fields of `LearnedStates`, or a pair [start, stop) as in early records."""
    if isinstance(entry, Mapping):
        return set(entry) == set(_STATES) and all(fits(entry[name], hint) for name, hint in _STATES.items())
    return fits(entry, list[int]) and len(entry) == 2


@cache  # a record is read several times in a run
def _warn(source: str, names: tuple[str, ...]) -> None:
    if launched_rank() == 0:
        flags = " ".join(f"--{name}" for name in names)
        log.warning(
            f"{source}: ignoring the recorded {', '.join(names)}; programs and folders of this machine are set only "
            f"by the flags {flags}"
        )
