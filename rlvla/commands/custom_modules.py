"""User-defined estimators, losses, rewards, environments and more (`--custom_module`), loaded before flags are parsed.

What a module registers can then be selected like a built-in, and appears in `--help`, as do the flags of its suites.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvla.envs.registry import (
    gym_modules,
    load_custom_module,
    located,
    registered_suites,
    replaces_builtin,
    ships_with_rlvla,
    trust_suite,
    trusted_modules,
)
from rlvla.utils.cli.config_file import config_file_arguments
from rlvla.utils.cli.flags import Parser, arg
from rlvla.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class CustomConfig:
    """Modules of the user."""

    custom_module: tuple[str, ...] = arg(
        (),
        "Python file (or module on PYTHONPATH) that registers estimators, losses, rewards or environments of your own; "
        "may be repeated",
        action="append",
        metavar="FILE",
    )


def parse_command_line(build_parser: Callable[[], Parser], argv: Sequence[str] | None) -> argparse.Namespace:
    """Load the user's modules, build the parser, whose choices they may extend, parse, trust the suites of flags."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        from_file = config_file_arguments(argv, ["custom_module"])
    except ConfigError:
        from_file = []  # the parser reports what is wrong with the file
    load_custom_modules(from_file + argv)
    namespace = build_parser().parse_args(argv)
    suites = getattr(namespace, "task_suite_name", None) or ()
    for suite in (suites,) if isinstance(suites, str) else suites:
        trust_suite(suite)
    return namespace


# Modules that registered or changed a suite, a policy family or a head of compact policies, as given.
_with_suites: dict[str, str] = {}
_with_policies: dict[str, str] = {}


def load_custom_modules(argv: Sequence[str]) -> None:
    """Import each `--custom_module` of a command line, in order; done on every rank.

    Raises:
        ConfigError: modules cannot be found or imported; all problems are reported at once.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--custom_module", action="append", default=[])
    try:
        sources = parser.parse_known_args(list(argv))[0].custom_module
    except argparse.ArgumentError:
        return  # the flag has no value, which the command's parser reports
    problems = []
    for source in sources:
        before, policies = registered_suites(), _types_of_policies()
        try:
            load_custom_module(source)
        except ConfigError as error:
            problems += [problem.of_flag("custom_module") for problem in error.problems]
        except Exception as error:
            text = f"--custom_module {source}: {_where(error)}{type(error).__name__}: {error}"
            problems.append(Problem("custom_module", "invalid_file", text))
        made = [name for name, suite in registered_suites().items() if before.get(name) is not suite]
        # Not if it has merely loaded a built-in suite.
        new = any(replaces_builtin(name) or not ships_with_rlvla(name) for name in made)
        if new or located(source) in gym_modules():
            _with_suites[located(source)] = source
        if _types_of_policies() != policies:
            _with_policies[located(source)] = source
    if problems:
        raise ConfigError(problems)


def _types_of_policies() -> set[str]:
    from rlvla.models.compact.config import HEADS
    from rlvla.models.families import policy_families  # these imports take time, and few commands have a module

    return {*policy_families(), *HEADS.names()}


def modules_with_suites(config: CustomConfig) -> list[str]:
    """The modules that environment workers must import as well; the others would only make them load torch."""
    return [source for source in config.custom_module if located(source) in _with_suites]


def words_for_later_commands(env_python: str | None = None) -> str:
    """Flags to append to a printed command, with a leading space: modules of suites and policies, `--env_python`."""
    sources = dict.fromkeys([*_with_suites.values(), *_with_policies.values(), *trusted_modules()])
    argv = [word for source in sources for word in ("--custom_module", source)]
    argv += [] if env_python is None else ["--env_python", env_python]
    return "".join(f" {shlex.quote(word)}" for word in argv)


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"line {frames[-1].lineno} of {Path(frames[-1].filename).name}, " if frames else ""
