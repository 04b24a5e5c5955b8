"""Another Python interpreter for the workers (`--env_python`): whether it will do, and the tasks of its simulator.

Its environment needs numpy and the simulator, nothing else: rlvla itself is found where this process has it. Run as a
module, this file is the other side of the question.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.envs.processes import worker_environment
from rlvla.envs.registry import get_suite, list_tasks
from rlvla.utils.errors import ConfigError, MissingExtraError

_OLDEST = (3, 10)
# Exit code by which an interpreter says that it is one, but too old; no error of Python's own ends with it.
_TOO_OLD = 86
# A first import of a simulator may compile a lot.
_TIMEOUT_SECONDS = 120.0


@functools.cache
def path_of_interpreter(python: str) -> str:
    """The absolute path of an interpreter given by path or by its name on PATH.

    Raises:
        ConfigError: there is no such executable, or it is no Python that can run rlvla.
    """
    found = shutil.which(python)
    if found is None:
        hint = "; name the bin/python in it" if os.path.isdir(python) else ""
        raise ConfigError(f"--env_python {python}: not an executable file{hint}")
    code = f"import sys; sys.exit(0 if sys.version_info >= {_OLDEST} else {_TOO_OLD})"
    ended = _run([found, "-c", code], python)
    if ended.returncode == _TOO_OLD:
        oldest = ".".join(map(str, _OLDEST))
        raise ConfigError(f"--env_python {python}: rlvla's workers need Python {oldest} or newer")
    if ended.returncode != 0:
        raise ConfigError(f"--env_python {python}: not a Python interpreter (it ended with {ended.returncode})")
    return os.path.abspath(found)  # links are kept: a virtual environment is known by where its python lies


def tasks_of_interpreter(python: str, suite: str, options: Mapping[str, Any]) -> list[TaskSpec]:
    """What `list_tasks` answers in another interpreter.

    Args:
        python: its path, or its name on PATH.
        suite: a suite that ships with rlvla.
        options: of `make_env`; strings, numbers, booleans and tuples of them.

    Raises:
        ConfigError: the interpreter cannot be used, misses numpy or the suite's simulator, or an option is wrong.
    """
    answer = _ask(path_of_interpreter(python), suite, repr(dict(options)))
    if "problems" in answer:
        raise ConfigError(answer["problems"])
    return [TaskSpec(**{**task, "propositions": tuple(task["propositions"])}) for task in answer["tasks"]]


def versions_of_interpreter(python: str, suite: str, options: Mapping[str, Any]) -> dict[str, str]:
    """`installed_versions` of the suite's simulator in another interpreter; arguments as in `tasks_of_interpreter`."""
    return dict(_ask(path_of_interpreter(python), suite, repr(dict(options))).get("versions", {}))


def installed_versions(modules: Iterable[str]) -> dict[str, str]:
    """Module -> version of the distribution that holds it; modules that are not installed are left out."""
    holders = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(holders[name][0]) for name in modules if name in holders}


@functools.cache
def _ask(python: str, suite: str, options: str) -> dict[str, Any]:
    ended = _run([python, "-m", "rlvla.envs.interpreter", suite, options], python)
    try:
        return json.loads(ended.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"problems": [f"--env_python {python}: {_reason(ended, python)}"]}


def _reason(ended: subprocess.CompletedProcess[str], python: str) -> str:
    missing = re.search(r"No module named '([\w.]+)'", ended.stderr)
    if missing:
        name = missing[1].partition(".")[0]
        return f"it has no {name}, which workers need; install it with: {python} -m pip install {name}"
    last = (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return f"it cannot run rlvla's workers: {last}"


def _run(command: list[str], python: str) -> subprocess.CompletedProcess[str]:
    environment = worker_environment({})
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--env_python {python}: it cannot be run: {error}") from error


def answer(suite: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The other side: the suite's tasks in this interpreter, or what is wrong."""
    known = get_suite(suite)
    missing = [name for name in known.requires if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        return {"problems": [f"--env_python {sys.executable}: it has no {', '.join(missing)}, which {suite} needs; "
                             f"install with: {sys.executable} -m pip install {names}"]}  # fmt: skip
    try:
        tasks = [dataclasses.asdict(task) for task in list_tasks(suite, **options)]
        return {"tasks": tasks, "versions": installed_versions(known.requires)}
    except ConfigError as error:
        return {"problems": error.problems}
    except MissingExtraError as error:
        return {"problems": [f"--env_python {sys.executable}: {error}"]}


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1], ast.literal_eval(sys.argv[2]))))
