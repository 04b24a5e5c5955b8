"""Suites by name. A suite says which tasks it has and builds an environment for one of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from rlvla.envs.base import Env, TaskSpec
from rlvla.utils.errors import ConfigError


@dataclass(frozen=True)
class Suite:
    """How a suite is reached.

    Attributes:
        list_tasks: `(**kw) -> list[TaskSpec]`, cheap: no simulator is started.
        make: `(task_id, **kw) -> Env`.
        cameras: camera names that may be asked for; the first is the default.
    """

    list_tasks: Callable[..., list[TaskSpec]]
    make: Callable[..., Env]
    cameras: tuple[str, ...]


_SUITES: dict[str, Suite] = {}
# Suites that ship with rlvla, imported when first asked for.
_BUILTIN = {"toy_reach": "rlvla.envs.toy_reach", "robosuite": "rlvla.envs.robosuite_env"}


def register_suite(name: str, suite: Suite) -> None:
    """Make a suite known under `name`; a later registration replaces an earlier one."""
    _SUITES[name] = suite


def suite_names() -> list[str]:
    """All names that `get_suite` accepts, sorted."""
    return sorted({*_SUITES, *_BUILTIN})


def get_suite(name: str) -> Suite:
    """The suite of that name; ConfigError listing the known ones otherwise."""
    if name not in _SUITES and name in _BUILTIN:
        importlib.import_module(_BUILTIN[name])
    if name not in _SUITES:
        raise ConfigError(f"unknown task suite '{name}'; known suites: {', '.join(suite_names())}")
    return _SUITES[name]


def list_tasks(suite: str, **kw) -> list[TaskSpec]:
    """The tasks of a suite, without starting a simulator. `kw` are those of `make_env`."""
    return get_suite(suite).list_tasks(**kw)


def make_env(suite: str, task_id: int, **kw) -> Env:
    """Build the environment of one task.

    Keyword arguments common to all suites: `cameras` (names), `image_size` (pixels, square), `use_proprio`,
    `max_steps`, `render_quality` ("fast" or "full").

    Raises:
        ConfigError: unknown suite, task, camera or option, or no working GL.
    """
    return get_suite(suite).make(task_id, **kw)
