"""Dataclasses as the single source of command-line flags: a default and a help text are written once.

A field made by `arg` becomes the flag of the same name. `bool` fields accept `--flag` and `--no-flag`; tuples take
several values; `None` defaults mean "taken from the checkpoint" or "off", as the help says.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from rlvla.utils.config_file import words_of_config_file
from rlvla.utils.errors import ConfigError, MissingExtraError
from rlvla.utils.logging import LEVELS, set_output


def arg(default: Any, help: str | Callable[[], str], **metadata: Any) -> Any:
    """A dataclass field that is also a flag.

    Args:
        default: the default value; a tuple makes a flag with several values.
        help: one sentence with the unit; the default is appended by the parser. A function is called when a parser is
            built, for texts that list what is registered.
        metadata: `choices` (or a function that returns them when a parser is built), `metavar`, `nargs`, `action` as
            in argparse; `minimum`, `maximum` (inclusive) and `above`, `below` (exclusive bounds) are checked by
            `range_problems`.
    """
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Appends a default the way it would be typed; where there is none, the help text itself says what happens."""

    def _get_help_string(self, action: argparse.Action) -> str:
        help_text, default = action.help or "", action.default
        if default in (None, (), argparse.SUPPRESS):
            return help_text
        if isinstance(default, bool):
            default = "on" if default else "off"
        elif isinstance(default, tuple):
            default = " ".join(map(str, default))
        return f"{help_text} (default: {str(default).replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest flag for a mistyped one."""

    def __init__(self, description: str):
        super().__init__(
            usage="%(prog)s [--flag VALUE ...]",  # all flags in brackets would fill a screen and explain nothing
            description=description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        terminal = self.add_argument_group("terminal and configuration file")
        terminal.add_argument(
            "--config", metavar="FILE", help="YAML file of flags and values; flags of the command line win over it"
        )
        terminal.add_argument(
            "--log_level", choices=LEVELS, default="info", help="messages of this level and above are shown"
        )
        terminal.add_argument(
            "--quiet",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="no progress bars and no line per iteration; results, warnings and errors are shown",
        )
        # argparse of Python 3.11 takes -1e-3 for a flag.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-(inf|nan)$", re.IGNORECASE)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """Parse, naming every unknown flag with its nearest known neighbour; flags of `--config` come first."""
        given = list(sys.argv[1:] if args is None else args)
        try:
            repeated = [a.dest for a in self._actions if isinstance(a, argparse._AppendAction)]
            args = words_of_config_file(given, repeated) + given
        except ConfigError as error:
            self.error("\n  ".join(error.problems))
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            self.error(
                "\n  ".join(self._unknown(word, known) for word in unknown if word.startswith("-"))
                or f"unexpected value(s): {' '.join(unknown)}"
            )
        set_output(parsed.log_level, quiet=parsed.quiet)
        return parsed

    @staticmethod
    def _unknown(word: str, known: list[str]) -> str:
        near = difflib.get_close_matches(word.split("=")[0], known, n=1)
        return f"unknown flag {word}" + (f"; did you mean {near[0]}?" if near else "")

    def error(self, message: str) -> NoReturn:
        """Print the message alone (no usage wall) and exit with status 2."""
        told = f"{self.prog}: error: {message}\n(run with --help for all flags)\n"
        self.exit(2, told if _tells_for_its_machine() else None)


def _base_type(annotation: Any) -> tuple[type, bool]:
    """(element type, is a tuple) of a field annotation such as `int`, `float | None`, `tuple[int, ...]`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def add_arguments(parser: argparse.ArgumentParser, config: type, title: str, without: Collection[str] = ()) -> None:
    """Add one flag per field of the dataclass `config`, except `without`, under a group heading `title`."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in without:
            continue
        kind, several = _base_type(hints[field.name])
        text = field.metadata["help"]
        text = text() if callable(text) else text
        options: dict[str, Any] = {"default": field.default, "help": text.replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["metavar"] = field.metadata.get("metavar", kind.__name__.upper())
            if "choices" in field.metadata:
                choices = field.metadata["choices"]
                options["choices"] = choices() if callable(choices) else choices
                del options["metavar"]
            if "action" in field.metadata:
                options["action"], options["default"] = field.metadata["action"], None
            elif several:
                options["nargs"] = field.metadata.get("nargs", "*")
        group.add_argument(f"--{field.name}", **options)


def from_namespace(config: type, namespace: argparse.Namespace, without: Collection[str] = ()) -> Any:
    """Build the dataclass from the parsed flags of the same names; fields `without` a flag keep their defaults."""
    values = {}
    for field in dataclasses.fields(config):
        if field.name in without:
            continue
        value = getattr(namespace, field.name)
        if value is None:  # a repeatable flag that was not given
            value = field.default
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return config(**values)


def given_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> frozenset[str]:
    """Names of the flags that stand on a command line, whatever their values."""
    words = {word.split("=")[0] for word in argv if word.startswith("--")}
    return frozenset(action.dest for action in parser._actions if words & set(action.option_strings))


def range_problems(config: Any) -> list[str]:
    """Every numeric field that is NaN, infinite or outside its declared range, one sentence each."""
    problems = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            problem = _out_of_range(number, field.metadata)
            if problem:
                problems.append(f"--{field.name} {number}: {problem}")
    return problems


def _out_of_range(number: float, metadata: Any) -> str | None:
    if not math.isfinite(number):
        return "must be a finite number"
    if "above" in metadata and not number > metadata["above"]:
        return f"must be greater than {metadata['above']}"
    if "below" in metadata and not number < metadata["below"]:
        return f"must be less than {metadata['below']}"
    if "minimum" in metadata and number < metadata["minimum"]:
        return f"must be at least {metadata['minimum']}"
    if "maximum" in metadata and number > metadata["maximum"]:
        return f"must be at most {metadata['maximum']}"
    return None


def fail(prog: str, error: ConfigError | MissingExtraError) -> NoReturn:
    """Print every problem of a configuration, or the extra that is missing, on its own line; exit with status 2.

    What all ranks of a machine have found is printed by the first of them.
    """
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    if _tells_for_its_machine() or getattr(error, "one_rank", False):
        lines = "\n".join(f"  - {problem}" for problem in problems)
        print(f"{prog}: the configuration cannot be used:\n{lines}", file=sys.stderr)
    raise SystemExit(2)


def _tells_for_its_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
