"""A user's own estimators, losses, rewards and environments: `--custom_module`, loaded before the flags are read.

What a module registers is then selectable like what ships with rlvla, and stands in `--help`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvla.envs.registry import load_custom_module, registered_suites, ships_with_rlvla
from rlvla.utils.arguments import Parser, arg, fail, given_flags
from rlvla.utils.config_file import words_of_config_file
from rlvla.utils.errors import ConfigError


@dataclass(frozen=True)
class CustomConfig:
    """Code of the user's own."""

    custom_module: tuple[str, ...] = arg(
        (),
        "Python file (or module on PYTHONPATH) that registers estimators, losses, rewards or environments of your own; "
        "may be repeated",
        action="append",
        metavar="FILE",
    )


def parse_command_line(
    build_parser: Callable[[], Parser], argv: Sequence[str] | None
) -> tuple[Parser, argparse.Namespace]:
    """Load the user's modules, then build the parser, whose choices they may have extended, and parse.

    Returns:
        The parser, and the flags with `given`, the names of those that stood on the command line.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        words = words_of_config_file(argv, ["custom_module"]) + argv
    except ConfigError:
        words = argv  # the parser says what is wrong with the file
    try:
        load_custom_modules(words)
    except ConfigError as error:
        fail(Path(sys.argv[0]).name, error)
    parser = build_parser()
    namespace = parser.parse_args(argv)
    namespace.given = given_flags(parser, argv)  # a configuration file may name every flag
    return parser, namespace


_with_suites: dict[str, str] = {}  # modules whose import made or changed a suite, as they were given


def load_custom_modules(argv: Sequence[str]) -> None:
    """Import every `--custom_module` of a command line, in order; every rank of a launch does so by itself.

    Raises:
        ConfigError: what cannot be found or imported, all at once.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--custom_module", action="append", default=[])
    try:
        sources = parser.parse_known_args(list(argv))[0].custom_module
    except argparse.ArgumentError:
        return  # the flag stands last, without a value: the command's own parser says so
    problems = []
    for source in sources:
        before = registered_suites()
        try:
            load_custom_module(source)
        except ConfigError as error:
            problems += [f"--custom_module: {problem}" for problem in error.problems]
        except Exception as error:
            problems.append(f"--custom_module {source}: {_where(error)}{type(error).__name__}: {error}")
        made = [name for name, suite in registered_suites().items() if before.get(name) is not suite]
        if any(name in before or not ships_with_rlvla(name) for name in made):  # or it has only asked for one of ours
            _with_suites[_key(source)] = source
    if problems:
        raise ConfigError(problems)


def modules_with_suites(config: CustomConfig) -> list[str]:
    """Those modules that environment workers must import as well; the others would only cost them torch."""
    return [source for source in config.custom_module if _key(source) in _with_suites]


def words_for_later_commands() -> str:
    """What a printed command needs so that it knows the suites of the user's own: flags with a space before, or ""."""
    return "".join(f" --custom_module {shlex.quote(source)}" for source in _with_suites.values())


def _key(source: str) -> str:
    return str(Path(source).resolve()) if source.endswith(".py") else source


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"line {frames[-1].lineno} of {Path(frames[-1].filename).name}, " if frames else ""
