"""Registry of task suites."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlvla.envs.base import BatchedEnv, Env, TaskSpec
from rlvla.envs.options import SuiteOptions
from rlvla.envs.pictures import IMAGE_FITS, FittedEnv, ImageFit
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.modules import load_file

if TYPE_CHECKING:
    from rlvla.envs.experts.base import Expert, ExpertConfig


@dataclass(frozen=True)
class Suite:
    """A task suite: lists its tasks and builds environments for them.

    Attributes:
        list_tasks: `(**kw) -> list[TaskSpec]`; must not start a simulator. `kw` are the non-default options.
        make: `(task_id, **kw) -> Env`.
        cameras: available camera names; see `default_cameras`.
        options: dataclass of the options in `kw`; fields created with `arg` become flags. None: the options are the
            keyword arguments of the two functions, without flags.
        image_size: default image size in pixels if there are no `options`.
        requires: importable names of the modules that the simulator needs.
        default_tasks: tasks used if none are selected; empty means all.
        expert: `(task, config) -> Expert`, a scripted expert for `cli/collect_demos.py`, or None.
        task_problems: `(tasks, options) -> problems` of options that some of the selected tasks do not support.
        groups: group name -> task names, for `--task_names`.
        kept: number of earlier environments that a slot caches (one simulator each) for its return to their tasks, or
            fewer if the memory is too small for them; for simulators that are slow to build.
        env_mb: `options -> MB`, measured memory of one environment with these non-default options; 0: not measured.
        make_batched: `(task_id, num_slots, **kw) -> BatchedEnv`, one simulator for several episodes, used by workers
            with several slots (`--envs_per_worker`); None builds one environment per slot.
        batched_if: `options -> bool`, whether to use `make_batched` with these non-default options; by default always.
        chunk: default action chunk length of a new model for its demonstrations.
    """

    list_tasks: Callable[..., list[TaskSpec]]
    make: Callable[..., Env]
    cameras: tuple[str, ...]
    default_tasks: tuple[int, ...] = ()
    image_size: int = 64
    requires: tuple[str, ...] = ()
    expert: Callable[[TaskSpec, ExpertConfig], Expert] | None = None
    options: type[SuiteOptions] | None = None
    make_batched: Callable[..., BatchedEnv] | None = None
    batched_if: Callable[[Mapping[str, Any]], bool] = lambda options: True
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kept: int = 0
    env_mb: Callable[[Mapping[str, Any]], int] = lambda options: 0
    chunk: int = 8
    task_problems: Callable[[Sequence[TaskSpec], Mapping[str, Any]], list[Problem]] = lambda tasks, options: []

    def offers_batch(self, options: Mapping[str, Any]) -> bool:
        """Whether the slots of a worker share one environment with these options."""
        return self.make_batched is not None and self.batched_if(options)

    @property
    def default_cameras(self) -> tuple[str, ...]:
        """Cameras of an environment made without `cameras`: the default of `options`, else the first camera."""
        return self._default("cameras") or self.cameras[:1]

    @property
    def default_image_size(self) -> int:
        """Image size in pixels: the default of `options`, else `image_size`."""
        return self._default("image_size") or self.image_size

    def _default(self, name: str) -> Any:
        fields = {} if self.options is None else {field.name: field for field in dataclasses.fields(self.options)}
        default = fields[name].default if name in fields else None
        return None if default is dataclasses.MISSING else default


_SUITES: dict[str, Suite] = {}
_REPLACED: dict[str, Suite] = {}  # see `replaces_builtin`
GYM = "gym:"  # prefix of a Gymnasium environment id
_GYM_MODULES: dict[str, None] = {}  # see `gym_modules`
_TRUSTED: dict[str, None] = {}  # see `trust_suite`
# Suites that ship with rlvla, imported on first use.
_BUILTIN = {
    "toy_reach": "rlvla.envs.toy_reach",
    "toy_push": "rlvla.envs.toy_push",
    "robosuite": "rlvla.envs.robosuite",
    "robotwin": "rlvla.envs.robotwin",
    "metaworld": "rlvla.envs.metaworld",
    "maniskill": "rlvla.envs.maniskill",
    "gym:ENV_ID": "rlvla.envs.gymnasium",
    **{f"libero_{name}": "rlvla.envs.libero" for name in ("spatial", "object", "goal", "10", "90")},
    **{
        f"libero_{base}_{axis}": "rlvla.envs.libero"  # LIBERO-PRO
        for base in ("spatial", "object", "goal", "10")
        for axis in ("object", "swap", "lan", "task")
    },
    **{f"libero_plus_{name}": "rlvla.envs.libero" for name in ("spatial", "object", "goal", "10")},
}


def register_suite(name: str, suite: Suite) -> None:
    """Register a suite under `name`, replacing any earlier one."""
    if name in _BUILTIN and _BUILTIN[name] not in sys.modules:
        importlib.import_module(_BUILTIN[name])  # a later import would take the replacement's place
    if name in _BUILTIN and name in _SUITES:
        _REPLACED[name] = suite
    _SUITES[name] = suite


def replaces_builtin(name: str) -> bool:
    """Whether a suite of the user's own has taken the place of the built-in one."""
    return name in _REPLACED and _SUITES.get(name) is _REPLACED[name]


def ships_with_rlvla(name: str) -> bool:
    """Whether the suite is available without a custom module."""
    return name in _BUILTIN or name.startswith(GYM)


def is_known(name: str) -> bool:
    """Whether `get_suite` accepts the name."""
    return (name in _SUITES or ships_with_rlvla(name)) and untrusted_module(name) is None


def trust_suite(name: str) -> None:
    """Permit a suite `gym:...` that the user named, by a flag or in own code, to import the module of its environment.

    Suites named by a record (a policy folder, a data set) are not trusted: they import nothing.
    """
    if name.startswith(GYM):
        _TRUSTED[name] = None


def is_trusted(name: str) -> bool:
    """Whether the user named a suite `gym:...`, see `trust_suite`."""
    return name in _TRUSTED


def trusted_modules() -> list[str]:
    """The modules in the suites `gym:MODULE:ENV_ID` that the user named, if this process has imported them."""
    return [module for name in _TRUSTED if (module := _module_of(name)) in sys.modules]


def untrusted_module(name: str) -> str | None:
    """The module that a suite `gym:MODULE:ENV_ID` would import without permission; None if it needs none.

    Permitted are suites that the user named, and modules that are already imported, such as by `--custom_module`.
    """
    module = _module_of(name)
    return None if not module or name in _TRUSTED or module in sys.modules else module


def _module_of(suite: str) -> str:
    """MODULE of `gym:MODULE:ENV_ID`; "" without one."""
    return suite.removeprefix(GYM).rpartition(":")[0] if suite.startswith(GYM) else ""


def refuse_module(suite: str, module: str) -> NoReturn:
    """Raise the ConfigError of a suite `gym:...` that may not import a module; see `trust_suite`."""
    text = (
        f"task suite '{suite}' imports the module {module}, which no flag names: what a policy or data set records is "
        f"not run; if you trust that module, give --custom_module {module}, or to a command that takes it "
        f"--task_suite_name {suite}"
    )
    raise ConfigError.of("task_suite_name", "untrusted_module", text)


def suite_names() -> list[str]:
    """All names that `get_suite` accepts, sorted; "gym:ENV_ID" stands for any Gymnasium environment."""
    return sorted({*_SUITES, *_BUILTIN})


def suite_names_in_short() -> str:
    """All names for a help text, variants of a suite abbreviated as in libero_10[_lan|_swap]."""
    names = suite_names()
    base = {name: name.rpartition("_")[0] for name in names}
    variants = {name: [other for other in names if base[other] == name] for name in names}
    shown = [
        name + (f"[{'|'.join(other.removeprefix(name) for other in variants[name])}]" if variants[name] else "")
        for name in names
        if base[name] not in names
    ]
    return ", ".join(shown)


def registered_suites() -> dict[str, Suite]:
    """Suites registered so far; built-in suites register on first use."""
    return dict(_SUITES)


def get_suite(name: str) -> Suite:
    """The suite registered under `name`; ConfigError listing the available suites if there is none."""
    if name not in _SUITES and name in _BUILTIN:
        importlib.import_module(_BUILTIN[name])
    if module := untrusted_module(name):
        refuse_module(name, module)
    if name not in _SUITES and name.startswith(GYM):
        importlib.import_module(_BUILTIN["gym:ENV_ID"]).register_environment(name)
    if name not in _SUITES:
        near = get_close_matches(name, suite_names(), n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        text = (
            f"unknown task suite '{name}'{meant}; known suites: {suite_names_in_short()}; load the module of "
            "your own suite with --custom_module FILE.py"
        )
        raise ConfigError.of("task_suite_name", "unknown_name", text)
    return _SUITES[name]


def list_tasks(suite: str, **kw) -> list[TaskSpec]:
    """Tasks of a suite, without starting a simulator; `kw` as in `make_env`.

    Raises:
        ConfigError: unknown suite or option, or invalid tasks; reports all problems.
    """
    tasks = _call_with_options(suite, get_suite(suite).list_tasks, **kw)
    problems = [f"task {task.task_id}: {text}" for task in tasks for text in task.problems()]
    for task in tasks:
        if task.suite != suite and not is_known(task.suite):  # tasks of another registered suite may be listed
            problems.append(f"task {task.task_id}: suite must be {suite!r}, not {task.suite!r}")
    ids = [task.task_id for task in tasks]
    if len(set(ids)) < len(ids):
        problems.append(f"task_ids must be unique, not {ids}")
    if problems:
        raise ConfigError(Problem("task_suite_name", "invalid_task", f"suite {suite}, {text}") for text in problems)
    return tasks


def make_env(suite: str, task_id: int, **kw) -> Env:
    """Build the environment of one task.

    Keyword arguments common to all suites: `cameras` (names), `image_size` (pixels, square), `image_fit` (of images
    that the suite gives in another shape), `use_proprio`, `max_steps`, `render_quality` ("fast" or "full").

    Raises:
        ConfigError: unknown suite, task, camera or option, an invalid value, missing assets, or no working GL.
        MissingExtraError: the simulator is not installed.
    """
    env = _call_with_options(suite, get_suite(suite).make, task_id, **kw)
    if kw.get("image_fit") not in IMAGE_FITS:
        return env
    return FittedEnv(env, ImageFit(kw.get("image_size") or get_suite(suite).default_image_size, kw["image_fit"]))


def make_batched_env(suite: str, task_id: int, num_slots: int, **kw) -> BatchedEnv:
    """Build an environment that steps `num_slots` episodes of one task at once; `kw` as in `make_env`.

    Raises:
        ConfigError: as `make_env`, or the suite has no batched environment.
    """
    make = get_suite(suite).make_batched
    if make is None:
        raise ConfigError(f"suite '{suite}' offers no batched environment (make_batched of its `Suite`)")
    return _call_with_options(suite, make, task_id, num_slots, **kw)


def load_custom_module(source: str) -> None:
    """Import a custom module, which registers suites, rewards, losses or policies.

    Args:
        source: path of a `.py` file, or a dotted module name.

    Raises:
        ConfigError: no such file or module.
    """
    specs_before = _gymnasium_specs()
    if not source.endswith(".py"):
        try:
            importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ConfigError(f"cannot import custom module '{source}': {error}") from error
    elif Path(source).is_file():
        load_file(Path(source))
    else:
        raise ConfigError(f"custom module '{source}' does not exist")
    if any(specs_before.get(name) is not spec for name, spec in _gymnasium_specs().items()):
        _GYM_MODULES[located(source)] = None


def gym_modules() -> list[str]:
    """Custom modules that registered Gymnasium environments, for the suites `gym:ENV_ID`."""
    return list(_GYM_MODULES)


def _gymnasium_specs() -> dict[str, Any]:
    """Registered third-party Gymnasium environments; {} if Gymnasium is not imported."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return {}
    return {k: v for k, v in gymnasium.registry.items() if not str(v.entry_point).startswith("gymnasium.")}


def located(source: str) -> str:
    """Name of a custom module that is valid in any working directory: absolute path of a `.py` file."""
    return str(Path(source).resolve()) if source.endswith(".py") else source


def _call_with_options(suite: str, function: Callable[..., Any], *args, **kw) -> Any:
    """Call `function`; unknown options raise ConfigError instead of TypeError."""
    options = known_options(suite, function)
    if options is not None and "image_fit" not in options:  # of suites without declared options
        kw.pop("image_fit", None)
    if options is not None and (unknown := sorted(set(kw) - set(options))):
        raise ConfigError(f"{suite} has no option {', '.join(unknown)}; known options: {', '.join(options)}")
    return function(*args, **kw)


def known_options(suite: str, function: Callable[..., Any] | None = None) -> list[str] | None:
    """Names of the options of a suite; None if it accepts any.

    Args:
        suite: name of the suite.
        function: its `make` or `list_tasks`, whose keyword arguments are the options if the suite does not declare
            them; default `list_tasks`.
    """
    entry = get_suite(suite)
    if entry.options is not None:
        return [field.name for field in dataclasses.fields(entry.options)]
    parameters = inspect.signature(function or entry.list_tasks).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
