"""Suites by name. A suite says which tasks it has and builds an environment for one of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvla.envs.base import Env, TaskSpec
from rlvla.utils.errors import ConfigError
from rlvla.utils.modules import load_file

if TYPE_CHECKING:
    from rlvla.envs.experts.base import Expert, ExpertConfig


@dataclass(frozen=True)
class Suite:
    """How a suite is reached.

    Attributes:
        list_tasks: `(**kw) -> list[TaskSpec]`, cheap: no simulator is started.
        make: `(task_id, **kw) -> Env`.
        cameras: camera names that may be asked for; the first is the default.
        image_size: side of the images where none is asked for, in pixels.
        requires: modules that its simulator needs, named by what `import` calls them.
        default_tasks: the tasks that are meant where none are named; empty: all.
        expert: `(task, config) -> Expert`, a scripted expert for `cli/collect_demos.py`; None: there is none.
    """

    list_tasks: Callable[..., list[TaskSpec]]
    make: Callable[..., Env]
    cameras: tuple[str, ...]
    default_tasks: tuple[int, ...] = ()
    image_size: int = 64
    requires: tuple[str, ...] = ()
    expert: Callable[[TaskSpec, ExpertConfig], Expert] | None = None


_SUITES: dict[str, Suite] = {}
# Suites that ship with rlvla, imported when first asked for.
_BUILTIN = {
    "toy_reach": "rlvla.envs.toy_reach",
    "robosuite": "rlvla.envs.robosuite_env",
    "robotwin": "rlvla.envs.robotwin",
    **{f"libero_{name}": "rlvla.envs.libero_env" for name in ("spatial", "object", "goal", "10", "90")},
}


def register_suite(name: str, suite: Suite) -> None:
    """Make a suite known under `name`; a later registration replaces an earlier one."""
    _SUITES[name] = suite


def ships_with_rlvla(name: str) -> bool:
    """Whether the suite is known without a user's own module."""
    return name in _BUILTIN


def suite_names() -> list[str]:
    """All names that `get_suite` accepts, sorted."""
    return sorted({*_SUITES, *_BUILTIN})


def registered_suites() -> dict[str, Suite]:
    """What has been registered so far, those that ship with rlvla once they were asked for."""
    return dict(_SUITES)


def get_suite(name: str) -> Suite:
    """The suite of that name; ConfigError listing the known ones otherwise."""
    if name not in _SUITES and name in _BUILTIN:
        importlib.import_module(_BUILTIN[name])
    if name not in _SUITES:
        raise ConfigError(
            f"unknown task suite '{name}'; known suites: {', '.join(suite_names())}; one of your own is known once its "
            "module is named with --custom_module FILE.py"
        )
    return _SUITES[name]


def list_tasks(suite: str, **kw) -> list[TaskSpec]:
    """The tasks of a suite, without starting a simulator. `kw` are those of `make_env`."""
    return _call_with_options(suite, get_suite(suite).list_tasks, **kw)


def make_env(suite: str, task_id: int, **kw) -> Env:
    """Build the environment of one task.

    Keyword arguments common to all suites: `cameras` (names), `image_size` (pixels, square), `use_proprio`,
    `max_steps`, `render_quality` ("fast" or "full").

    Raises:
        ConfigError: unknown suite, task, camera or option, or no working GL.
    """
    return _call_with_options(suite, get_suite(suite).make, task_id, **kw)


def load_custom_module(source: str) -> None:
    """Import a user's module, so that what it registers becomes known.

    Args:
        source: path of a `.py` file, or a dotted module name.

    Raises:
        ConfigError: no such file or module.
    """
    if not source.endswith(".py"):
        try:
            importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ConfigError(f"cannot import custom module '{source}': {error}") from error
        return
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"custom module '{source}' does not exist")
    load_file(path)


def _call_with_options(suite: str, function: Callable[..., Any], *args, **kw) -> Any:
    """Call `function`; options that it does not take are a mistake in the configuration, not a TypeError."""
    parameters = inspect.signature(function).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        unknown = sorted(set(kw) - set(known))
        if unknown:
            raise ConfigError(f"{suite} has no option {', '.join(unknown)}; known options: {', '.join(known)}")
    return function(*args, **kw)
