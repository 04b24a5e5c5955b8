"""The record of an environment in a policy folder or a data set: never about this machine, and of unknown origin."""

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
    """A record without what depends on the machine, which is named in one warning.

    What decides which program runs or which folder is read (fields made with `arg(..., recorded=False)`) comes from
    flags and the environment alone: a folder from elsewhere must not choose it.

    Args:
        content: what was written by `EnvConfig.as_dict`, possibly with other entries.
        source: the file it is from.

    Raises:
        ConfigError: values of the wrong type; all problems are reported at once.
    """
    flags = suite_flags()
    common = {f.name for f in fields(EnvConfig) if "help" in f.metadata}
    ours = common.difference(RECORDED_FLAGS) | {name for name, flag in flags.items() if not flag.recorded}
    ignored = tuple(sorted(name for name in ours if content.get(name) is not None))
    if ignored:
        _warn(str(source), ignored)
    record = {name: value for name, value in content.items() if name not in ours}
    hints = {name: hint for name, hint in field_types(EnvConfig).items() if name in RECORDED_FLAGS}
    hints |= {name: flags[name].hint for name in flags if name in record}
    check_types(record, {name: hint | None for name, hint in hints.items()}, source)
    learned = record.get(LEARNED_FROM) or []
    if not isinstance(learned, list) or not all(map(_is_states, learned)):
        text = f"{source}: {LEARNED_FROM} does not list initial states (suite, task_id, start, stop)"
        raise ConfigError.of(None, "invalid_file", text)
    return record


def _is_states(entry: Any) -> bool:
    """Whether an entry is one of `LearnedStates`, or a pair [start, stop) as in early records."""
    if isinstance(entry, Mapping):
        return set(entry) == set(_STATES) and all(fits(entry[name], hint) for name, hint in _STATES.items())
    return fits(entry, list[int]) and len(entry) == 2


@cache  # a record is read several times in a run
def _warn(source: str, names: tuple[str, ...]) -> None:
    if launched_rank() == 0:
        flags = " ".join(f"--{name}" for name in names)
        log.warning(
            f"{source} names {', '.join(names)}, which is ignored: what runs and is read on this machine is named by "
            f"{flags} alone"
        )
