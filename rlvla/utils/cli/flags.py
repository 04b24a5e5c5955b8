"""Dataclasses as the single source of command-line flags: a default and a help text are written once.

A field made by `arg` becomes the flag of the same name; other fields have no flag. `bool` fields accept `--flag` and
`--no-flag`; tuples take several values; a default of `None` means "taken from the checkpoint" or "off", as the help
text says.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from rlvla.options import Registry, flag_values, from_values, registered_options, unmet_condition
from rlvla.options import arg as arg  # for suites and plug-ins
from rlvla.utils.cli.config_file import config_file_arguments, config_file_of
from rlvla.utils.cli.help import ShowHelp, everything
from rlvla.utils.cli.other_tools import OTHER_MEANING, OTHER_TOOLS, OTHER_VALUES, counterpart
from rlvla.utils.cli.programs import as_installed
from rlvla.utils.data_files import field_types
from rlvla.utils.errors import ChangedSetting, ConfigError, MissingExtraError, Problem
from rlvla.utils.files import target_problem
from rlvla.utils.signals import note_failure
from rlvla.utils.terminal import LOG_LEVELS, fit, set_output, table
from rlvla.version import __version__

LARGEST_INTEGER = 10**9  # where a flag declares no maximum; no count of a run comes near it
LARGEST, SMALLEST = 1e12, 1e-12  # likewise: magnitudes of numbers that are not 0
LONGEST_TEXT = 4096  # characters; no path is longer
_LONGEST_NAME = 255  # bytes; of a file or folder
_PATHS = ("FILE", "DIR", "PATH", "DIR_OR_FILE", "FILE.py:FUNCTION")  # metavars of paths
MAX_SEED = 2**32 - 1  # of numpy
_MAX_DIGITS = 15  # of an integer
NONE = "none"  # unsets a flag whose default is None, for example one set in a configuration file
_SUGGESTIONS = 3
_AS_CLOSE = 0.15  # a name is suggested beside the closest one if its similarity is at most this much lower
_SHOWN = 300  # characters of a rejected value in a message

C = TypeVar("C")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports all mistakes at once and suggests a flag for a mistyped one.

    Attributes:
        configs: the dataclasses whose fields are flags, each with the names of the fields that are not.
        common: the group of flags that every command has.
        kinds: title of a group -> (kind, names) where there are several groups of a kind ("policy loss").
        essential: names of the flags that `--help` shows first.
        aliases: second names of flags, with their dashes.
        owners: flag, with its dashes -> entry of a registry that has it as an option, e.g. "policy loss clip_cov".
    """

    def __init__(self, description: str):
        super().__init__(
            usage="%(prog)s [--flag VALUE ...]",  # the full list of flags would fill a screen and explain nothing
            description=description,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self._positionals.title = "arguments"
        self.configs: list[tuple[type, Collection[str]]] = []
        self.kinds: dict[str, tuple[str, Sequence[str]]] = {}
        self.essential: set[str] = {"config"}
        self.aliases: set[str] = set()
        self.owners: dict[str, str] = {}
        self.common = self.add_argument_group("terminal and configuration file")
        self.common.add_argument("-h", "--help", action=ShowHelp)
        self.common.add_argument(
            "--version", action="version", version=f"rlvla {__version__}", help="print the version of rlvla and exit"
        )
        self.common.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file of flags and values; flags on the command line take precedence, and "
            f"{NONE!r} unsets a value",
        )
        self.common.add_argument(
            "--log_level", choices=LOG_LEVELS, default="info", help="lowest level of messages shown"
        )
        self.common.add_argument(
            "--quiet",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="hide progress bars and per-iteration lines; results, warnings and errors are still shown",
        )
        # argparse in Python 3.11 mistakes -1e-3 for a flag.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-(inf|nan)$", re.IGNORECASE)

    @property
    def flags(self) -> list[argparse.Action]:
        """The actions with option strings, positionals excluded."""
        return [action for action in self._actions if action.option_strings]

    def format_help(self) -> str:
        """All flags."""
        return everything(self)

    def group(self, kind: str, names: Sequence[str]) -> Any:
        """The group of flags that belong to `names` of a kind, e.g. the policy losses clip_cov and kl_cov."""
        plural = (
            f"{kind}es" if kind.endswith("s") else f"{kind.removesuffix('y')}ies" if kind.endswith("y") else f"{kind}s"
        )
        title = f"{plural if len(names) > 1 else kind} {', '.join(names)}"
        existing = next((group for group in self._action_groups if group.title == title), None)
        self.kinds[title] = kind, names
        return existing or self.add_argument_group(title)

    def give_up_alias(self, option: str) -> None:
        """Leave a second name of a flag to another flag."""
        for name in (option, f"--no-{option[2:]}"):
            action = self._option_string_actions.pop(name, None) if name in self.aliases else None
            if action is not None:
                action.option_strings = [other for other in action.option_strings if other != name]
        self.aliases -= {option, f"--no-{option[2:]}"}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse `--config` and the command line; all mistakes, including values out of range, are reported at once.

        The result has the attribute `given`: names of the flags on the command line, not in the file, which may name
        every flag.
        """
        if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions, which ends the process: docs/commands.md
            import argcomplete

            argcomplete.autocomplete(self)
        argv = list(sys.argv[1:] if args is None else args)
        parsed = argparse.Namespace() if namespace is None else namespace
        from_file: list[str] = []
        problems: list[object] = []
        try:
            from_file = config_file_arguments(argv, self.repeated_flags())
        except ConfigError as error:
            problems += error.problems
        problems += [f"--config {config_file_of(argv)}: {problem}" for problem in self.read_flags(from_file, parsed)]
        problems += self.read_flags(argv, parsed)
        if problems:
            self.error("\n  ".join(map(str, [*problems, *self.value_problems(parsed)])))
        set_output(parsed.log_level, quiet=parsed.quiet)
        parsed.given = given_flags(self, argv)
        return parsed

    def repeated_flags(self) -> list[str]:
        """Names of the flags that are repeated for each of their values."""
        return [action.dest for action in self._actions if isinstance(action, argparse._AppendAction)]

    def read_flags(self, argv: Sequence[str], namespace: argparse.Namespace) -> list[str]:
        """Store all valid flags in the namespace and return the problems of the others.

        Flags are parsed one by one because argparse stops at the first mistake.
        """
        flags: list[list[str]] = [[]]  # each with its values
        for token in argv:
            if self._is_flag(token):
                flags.append([])
            flags[-1].append(token)
        problems = []
        if not flags[0]:
            self.parse_known_args(flags.pop(0), namespace)  # sets defaults
        for flag, *values in flags:
            if flag.endswith("=--"):  # argparse takes the dashes out and fails
                problems.append(f"{flag[:-3]}: '--' is not a value")
                continue
            name, _, value = flag.partition("=")
            try:
                _, rest = self.parse_known_args([flag, *values], namespace)
            except argparse.ArgumentError as error:
                value = value or (values[0] if values else "")
                action = self._option_string_actions.get(name)
                synonym = OTHER_VALUES.get(action.dest, {}).get(value) if action else None
                where = name if self._is_flag(flag) else error.argument_name
                problems.append(f"{where}: {_one_line(error.message)}" + (f"; here it is {synonym}" if synonym else ""))
                continue
            if rest and rest[0].startswith("-"):
                problems.append(self._unknown(rest[0]))
            elif rest:
                text = _one_line(" ".join(rest))
                place = f"{flag}: " if flag.startswith("-") else ""
                hint = ""
                if not place and len(rest) == 1 and "--pretrain" in self._option_string_actions:
                    is_policy = any((Path(text) / folder / "config.json").is_file() for folder in ("", "policy"))
                    hint = f"; did you mean --pretrain {text}?" if is_policy else ""
                problems.append(f"{place}unexpected value(s): {text}{hint}")
        return problems

    def _is_flag(self, token: str) -> bool:
        """As in argparse, a lone dash, a negative number and a text with a space are values."""
        number = self._negative_number_matcher.match(token)
        return len(token) > 1 and token.startswith("-") and not number and " " not in token.partition("=")[0]

    def _unknown(self, token: str) -> str:
        """Message for an unknown flag, with a similar flag of this command or the counterpart of another tool's."""
        typed = token.partition("=")[0]
        negative = typed.startswith("--no-")
        name = typed.lstrip("-")
        flag, difference = counterpart(name.removeprefix("no-"), self._first_names)
        if difference:
            return f"unknown flag {_one_line(token)}; similar is {flag}: {difference}"
        if flag and negative:
            flag = f"--no-{flag[2:]}" if f"--no-{flag[2:]}" in self._option_string_actions else flag
        guess = not flag and "." not in name and name.removeprefix("no-") not in OTHER_TOOLS
        near = self._similar(f"--{name}", negative=negative) if guess else [flag] if flag else []
        return f"unknown flag {_one_line(token)}" + (f"; did you mean {' or '.join(near)}?" if near else "")

    @property
    def _first_names(self) -> dict[str, str]:
        return {option: action.option_strings[0] for option, action in self._option_string_actions.items()}

    def _similar(self, typed: str, *, negative: bool) -> list[str]:
        """Flags that start with a mistyped name, contain it or resemble it; aliases stand for their flags."""
        meant = {option: self._option_string_actions[option].option_strings[0] for option in self.aliases}
        if typed in meant:
            return [meant[typed]]
        names = [o for o in self._option_string_actions if o not in self.aliases and (negative or o[:5] != "--no-")]
        near = [option for option in names if option.startswith(typed)]
        near = near or [option for option in names if len(typed) > len("--x") and typed[2:] in option]
        if not near:
            theirs = {f"--{name}": counterpart(name, self._first_names)[0] for name in OTHER_TOOLS if "." not in name}
            meant |= {name: flag for name, flag in theirs.items() if flag}
            matches = difflib.get_close_matches(typed, [*names, *meant], n=_SUGGESTIONS)
            ratios = [difflib.SequenceMatcher(None, option, typed).ratio() for option in matches]
            matches = [option for option, ratio in zip(matches, ratios) if ratio > max(ratios) - _AS_CLOSE]
            near = list(dict.fromkeys(meant.get(option, option) for option in matches))
            near.sort(key=lambda option: self._option_string_actions[option].dest not in self.essential)
        return near[:_SUGGESTIONS]

    def value_problems(self, namespace: argparse.Namespace) -> list[Problem]:
        """Problems with the values of the flags that could be parsed."""
        problems: list[Problem] = []
        for config, without in self.configs:
            try:
                problems += range_problems(from_namespace(config, namespace, without))
            except ConfigError as error:
                problems += error.problems
        return problems

    def error(self, message: str) -> NoReturn:
        """Print the message alone (no usage wall) and exit with status 2."""
        text = f"{self.prog}: error: {message}\n(run with --help for the flags)"
        self.exit(2, f"{fit(text, sys.stderr)}\n" if _is_first_on_machine() else None)


class _SwitchWithValue(argparse.Action):
    """`--flag` (True), `--no-flag` (False) or `--flag VALUE` (the text)."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        both = [*option_strings, *(f"--no-{option[2:]}" for option in option_strings)]
        super().__init__(both, dest, nargs="?", **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        negative = option_string is not None and option_string.startswith("--no-")
        if negative and values is not None:
            raise argparse.ArgumentError(self, f"{option_string} takes no value")
        setattr(namespace, self.dest, not negative if values is None else values)

    def format_usage(self) -> str:
        """The flag as the usage shows it."""
        return " | ".join(self.option_strings)


def _base_type(annotation: Any) -> tuple[type, bool]:
    """(element type, is a tuple) of a field annotation such as `int`, `float | None`, `tuple[int, ...]`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return text if text == NONE else kind(text)

    convert.__name__ = getattr(kind, "__name__", "value")  # named in argparse's message about an invalid value
    return convert


def _reader(kind: type, metadata: Mapping[str, Any]) -> Callable[[str], Any]:
    """Conversion of a value that rejects unusable texts and integers, so that later checks need not."""

    def convert(text: str) -> Any:
        problem = text_problem(text, metadata) if kind is str else None
        if kind is int and len(text) > _MAX_DIGITS and text.strip().lstrip("+-").isdecimal():
            problem = f"must have at most {_MAX_DIGITS} digits"
        if problem:
            raise argparse.ArgumentTypeError(problem)
        return kind(text[:LONGEST_TEXT])

    convert.__name__ = kind.__name__  # named in argparse's message about an invalid value
    return convert


def add_arguments(
    parser: Parser,
    config: type,
    title: str,
    without: Collection[str] = (),
    reword: Callable[[str], str] = str,
    essential: Collection[str] = (),
) -> None:
    """Add one flag per field of the dataclass `config`, except `without`, to a group titled `title`.

    `reword` adapts help texts to a command for which they would be inaccurate; `essential` are flags that matter to
    this command beside those that matter everywhere.
    """
    group = parser.add_argument_group(title)
    parser.configs.append((config, without))
    hints = field_types(config)
    for field in dataclasses.fields(config):
        if "registry" in field.metadata:
            _add_registered_options(parser, field.metadata["registry"], reword)
        elif "help" in field.metadata and field.name not in without:
            kind, *owners = field.metadata.get("of", (None,))
            place = group if kind is None else parser.group(kind, owners)
            _add_flag(parser, place, field, hints[field.name], reword)
            if field.name in essential:
                parser.essential.add(field.name)


def _add_flag(
    parser: Parser,
    group: Any,
    field: dataclasses.Field,
    hint: Any,
    reword: Callable[[str], str],
    owner: str | None = None,
) -> None:
    """Add one flag; the name of a flag takes precedence over the alias of another one.

    Raises:
        ConfigError: two flags have the same name, one of them an option of a registered entry.
    """
    metadata, text = field.metadata, field.metadata["help"]
    flag, *aliases = (f"--{name}" for name in (metadata.get("flag", field.name), *metadata.get("aliases", ())))
    if owner is not None:
        parser.give_up_alias(flag)
    if flag in parser._option_string_actions and (option_of := owner or parser.owners.get(flag)):
        raise ConfigError(f"{option_of}: the option {flag[2:]} has the name of another flag of this command; rename it")
    names = [flag, *(alias for alias in aliases if alias not in parser.owners)]
    options = argument(field, hint, reword(text() if callable(text) else text), field.default)
    action = group.add_argument(*names, dest=field.name, **options)
    parser.aliases.update(name for name in action.option_strings if re.sub("^--no-", "--", name) != flag)
    if metadata.get("essential"):
        parser.essential.add(field.name)
    if owner is not None:
        parser.owners[flag] = owner


def _add_registered_options(parser: Parser, registry: Registry, reword: Callable[[str], str]) -> None:
    """Add the options of all entries of a registry, grouped by the entries that share them.

    Raises:
        ConfigError: an option has the name of another flag, or another type or default than in another entry.
    """
    for name, fields in registry.option_owners().items():
        entries, field = list(fields), next(iter(fields.values()))
        kinds: list[Any] = [registry.options(entry) for entry in entries]
        hints = [field_types(kind)[name] for kind in kinds]
        for entry, hint in zip(entries, hints):
            if (hint, fields[entry].default) != (hints[0], field.default):
                raise ConfigError(
                    f"{registry.kind} {entry}: the option {name} has another type or default than that of "
                    f"{registry.kind} {entries[0]}; rename it"
                )
        owner = f"{registry.kind} {entries[0]}"
        _add_flag(parser, parser.group(registry.kind, entries), field, hints[0], reword, owner)
        if not all(kind.__module__.startswith("rlvla.") for kind in kinds):
            parser.essential.add(name)


def argument(field: dataclasses.Field, hint: Any, text: str, default: Any) -> dict[str, Any]:
    """Keyword arguments of argparse's `add_argument` for a field made by `arg`.

    Args:
        field: the field; its metadata define what the flag accepts.
        hint: its resolved type annotation.
        text: the help text.
        default: the default of the flag; if None, `none` is accepted as a value.
    """
    kind, several = _base_type(hint)
    options: dict[str, Any] = {"default": default, "help": text.replace("%", "%%")}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
        if "value" in field.metadata:
            options["action"], options["metavar"] = _SwitchWithValue, field.metadata["value"]
            options["type"] = _reader(str, field.metadata)
        return options
    optional = default is None and not several
    typed = _reader(kind, field.metadata)
    options["type"] = _or_none(typed) if optional else typed
    options["metavar"] = field.metadata.get("metavar", kind.__name__.upper())
    if "choices" in field.metadata:
        choices = field.metadata["choices"]
        choices = tuple(choices() if callable(choices) else choices)
        options["metavar"] = "{" + ",".join(map(str, choices)) + "}"
        options["choices"] = (*choices, NONE) if optional else choices
    if "action" in field.metadata:
        options["action"], options["default"] = field.metadata["action"], None
    if several and options.get("action") != "append":
        options["nargs"] = field.metadata.get("nargs", "*")
    return options


def flag_fields(config: type) -> dict[str, dataclasses.Field]:
    """The flags of a configuration by name, including all registered options."""
    fields: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(config):
        if "registry" in field.metadata:
            options = field.metadata["registry"].option_owners()
            fields |= {name: next(iter(owners.values())) for name, owners in options.items()}
        elif "help" in field.metadata:
            fields[field.name] = field
    return fields


def from_namespace(config: type[C], namespace: argparse.Namespace, without: Collection[str] = ()) -> C:
    """Build the dataclass from the parsed flags; the fields in `without` keep their defaults."""
    fields = {name: field for name, field in flag_fields(config).items() if name not in without}
    return from_values(config, {name: _value(field, namespace) for name, field in fields.items()})


def _value(field: dataclasses.Field, namespace: argparse.Namespace) -> Any:
    value = getattr(namespace, field.name)
    if value is None or (value == NONE and field.default is None):  # None: a repeatable flag was not given
        return field.default
    return tuple(value) if isinstance(value, list) else value


def unselected_options(config: Any, namespace: argparse.Namespace) -> dict[str, Any]:
    """Values of the options of registered entries that `config`, built from the namespace, does not select."""
    selected = {field.name for field, _ in flag_values(config)}
    fields = flag_fields(type(config))
    return {name: _value(field, namespace) for name, field in fields.items() if name not in selected}


def no_effect_problems(configs: Iterable[Any], unselected: Mapping[str, Any], given: Collection[str]) -> list[Problem]:
    """Flags that are set and that nothing reads: `read_if` does not hold, or their owner is not selected.

    Args:
        configs: all configurations of a command.
        unselected: see `unselected_options`.
        given: names of the flags on the command line, which count as set even at their default value.
    """
    configs, problems = list(configs), []
    values = _all_values(configs, unselected)

    def check(field: dataclasses.Field, unused: str | None = None) -> None:
        if field.name in values and is_set(field, values[field.name], given):
            why = unused.format_map(values) if unused else unmet_condition(field, values)
            if why:
                problems.append(no_effect(field.name, values[field.name], why))

    for field in (field for config in configs for field in dataclasses.fields(config)):
        if "help" in field.metadata:
            check(field)
        elif (registry := field.metadata.get("registry")) is not None:
            for owners in registry.option_owners().values():
                used = [owners[entry] for entry in owners if entry in registry.selection(values)]
                check(used[0]) if used else check(next(iter(owners.values())), registry.unused(list(owners)))
    return problems


def unread_flags(configs: Iterable[Any], unselected: Mapping[str, Any]) -> set[str]:
    """Names of the flags that have no effect with these values; arguments as for `no_effect_problems`."""
    configs = list(configs)
    values, flags = _all_values(configs, unselected), (field for config in configs for field, _ in flag_values(config))
    return {field.name for field in flags if unmet_condition(field, values)}


def _all_values(configs: Iterable[Any], unselected: Mapping[str, Any]) -> dict[str, Any]:
    """Flag -> value in all configurations of a command."""
    return {**unselected, **{field.name: value for config in configs for field, value in flag_values(config)}}


def is_set(field: dataclasses.Field, value: Any, given: Collection[str]) -> bool:
    """Whether a flag has another value than its default, or was given."""
    return value != field.default or (field.name in given and value is not None)  # "--kl_target none" sets nothing


def no_effect(flag: str, value: Any, why: str) -> Problem:
    """The problem of a flag that is set and that nothing reads."""
    meant = OTHER_MEANING.get(flag)
    text = f"{as_typed(flag, value)}: {why}; leave it out" + (f" ({meant})" if meant else "")
    return Problem(flag, "no_effect", text)


def given_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> frozenset[str]:
    """Names of the flags present on a command line."""
    options = {token.split("=")[0] for token in argv if token.startswith("--")}
    return frozenset(action.dest for action in parser._actions if options & set(action.option_strings))


def as_typed(name: str, value: Any) -> str:
    """A flag with its value as typed, e.g. `--gamma 0.9`, `--no-quiet`."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if value is None:
        return f"--{name} {NONE}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def range_problems(config: Any) -> list[Problem]:
    """Problems with single values.

    Numbers out of their range ("out_of_range") or in the wrong order ("bounds_crossed"), blank or unprintable texts
    ("no_text"), and outputs that cannot be written ("not_writable"). Numbers must be finite; where a flag declares no
    bounds, their magnitude is limited.
    """
    problems: list[Problem] = []
    whole: list[Problem] = []  # with several values together
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.metadata.get("flag", field.name)
        if "check" in field.metadata and value != field.default:
            predicate, remedy = field.metadata["check"]
            if not predicate(value):
                whole.append(Problem(name, "out_of_range", f"{as_typed(name, value)}: {remedy}"))
        if "at_most" in field.metadata and value > (bound := getattr(config, field.metadata["at_most"])):
            text = f"--{name} {value} exceeds --{field.metadata['at_most']} {bound}; swap them"
            whole.append(Problem(name, "bounds_crossed", text))
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, bool) or not isinstance(one, (int, float, str)):
                continue
            if isinstance(one, str):
                problem, reason = text_problem(one, field.metadata), "no_text"
            else:
                problem, reason = _out_of_range(one, field.metadata), "out_of_range"
            if problem:
                shown = _one_line(repr(one) if reason == "no_text" else str(one))
                problems.append(Problem(name, reason, f"--{name} {shown}: {problem}"))
        if "writes" in field.metadata and isinstance(value, str) and not text_problem(value, field.metadata):
            problem = target_problem(value, folder=field.metadata["writes"] == "folder")
            if problem:
                problems.append(Problem(name, "not_writable", f"--{name} {value}: {problem}"))
    for options in registered_options(config):
        problems += options_problems(options)
    return problems + [problem for problem in whole if problem.flag not in {p.flag for p in problems}]


def options_problems(options: Any) -> list[Problem]:
    """Problems with the options of a registered entry: single values, or else `options.problems`."""
    return [*range_problems(options), *choice_problems(options)] or getattr(options, "problems", list)()


def choice_problems(config: Any) -> list[Problem]:
    """Values that are not among the `choices` of their fields ("unknown_name"); argparse has checked those of flags."""
    problems = []
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), field.metadata.get("choices")
        if choices is None or value is None or value == field.default:
            continue
        allowed = tuple(choices() if callable(choices) else choices)
        if not set(value if isinstance(value, tuple) else (value,)) <= set(allowed):
            text = f"{as_typed(field.name, value)}: must be one of {', '.join(map(str, allowed))}"
            problems.append(Problem(field.name, "unknown_name", text))
    return problems


def _out_of_range(number: float, metadata: Mapping[str, Any]) -> str | None:
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
    largest = LARGEST_INTEGER if isinstance(number, int) else LARGEST
    if "maximum" not in metadata and number > largest:
        return f"must be at most {largest}"
    if "minimum" not in metadata and number < -largest:
        return f"must be at least {-largest}"
    if 0 < abs(number) < SMALLEST:
        return f"must be 0 or at least {SMALLEST} in magnitude"
    return None


def text_problem(text: str, metadata: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """Why a text is not a valid value, or None; `metadata` as in `arg`."""
    if not text.strip():
        return "must not be blank"
    if len(text) > LONGEST_TEXT:
        return f"must be at most {LONGEST_TEXT} characters long"
    shown = text.replace("\n", "").replace("\t", "") if metadata.get("lines") else text
    if not shown.isprintable():
        return "must not hold line breaks or other characters that cannot be printed"
    if metadata.get("metavar") in _PATHS and any(len(name.encode()) > _LONGEST_NAME for name in text.split("/")):
        return f"must not hold names of more than {_LONGEST_NAME} bytes"
    return None


def _one_line(text: str) -> str:
    """A value for a message: printable and not too long."""
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return text if text.isprintable() else repr(text)[1:-1]


def fail(prog: str, error: ConfigError | MissingExtraError) -> NoReturn:
    """Print the problems of a configuration, or the missing extra, one per line, and exit with status 2.

    Problems common to all ranks are printed once per machine.
    """
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    one_rank = getattr(error, "one_rank", False)
    if one_rank:
        note_failure()
    if _is_first_on_machine() or one_rank:
        head = f"{prog}: the configuration cannot be used:"
        text = "\n".join([head, *(f"  - {problem}" for problem in with_table(problems))])
        print(fit(as_installed(text), sys.stderr), file=sys.stderr)
    raise SystemExit(2)


def with_table(problems: Sequence[object]) -> list[object]:
    """The problems with several changed settings of a run as a single one, a sentence above a table."""
    changed = [problem for problem in problems if isinstance(problem, ChangedSetting)]
    if len(changed) < 2:
        return list(problems)
    settings = table(("setting", "there", "now"), [(f"--{p.flag}", p.there, p.now) for p in changed])
    sentence = f"--save_path {changed[0].run}: the run there has other settings; repeat them, or name another folder:"
    others = [problem for problem in problems if not isinstance(problem, ChangedSetting)]
    return [f"{sentence}\n{textwrap.indent(settings, 4 * ' ')}", *others]


def _is_first_on_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
