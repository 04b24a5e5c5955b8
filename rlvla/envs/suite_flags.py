"""Flags of suite-specific options, grouped by suite in `--help`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlvla.envs.options import own_flags
from rlvla.envs.registry import get_suite, is_known, known_options, ships_with_rlvla, suite_names
from rlvla.utils.cli.flags import NONE, Parser, argument
from rlvla.utils.data_files import field_types
from rlvla.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class SuiteFlag:
    """A flag of one or more suites.

    Attributes:
        name: name of the flag and of the option.
        hint: type annotation of the option.
        fields: suite -> dataclass field of the option.
    """

    name: str
    hint: Any
    fields: Mapping[str, dataclasses.Field]

    @property
    def field(self) -> dataclasses.Field:
        """The field of the first suite; the others have the same type and choices."""
        return next(iter(self.fields.values()))

    @property
    def recorded(self) -> bool:
        """Whether the value is saved with demonstrations and checkpoints; machine-dependent ones are not."""
        return all(field.metadata.get("recorded", True) for field in self.fields.values())

    def help(self) -> str:
        """The help text, including the default."""
        text = self.field.metadata["help"]
        text = text() if callable(text) else text
        suites_of: dict[str, list[str]] = {}
        for suite, field in self.fields.items():
            if field.default not in (None, ()):
                suites_of.setdefault(_as_text(field.default), []).append(suite)
        if not suites_of:
            return text  # the text describes the default
        several = len(suites_of) > 1
        defaults = [f"{value} ({', '.join(names)})" if several else value for value, names in suites_of.items()]
        first = "the checkpoint's, else " if self.recorded else ""
        return f"{text} (default: {first}{', '.join(defaults)})"


def _without_variants(suites: Collection[str]) -> list[str]:
    """The suites without variants of others, such as libero_goal_swap of libero_goal."""
    return [suite for suite in suites if suite.rpartition("_")[0] not in suites]


def _as_text(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def suite_flags() -> dict[str, SuiteFlag]:
    """Flags of all registered suites by name, including suites of custom modules.

    Raises:
        ConfigError: two suites have options of the same name but different types or choices.
    """
    flags: dict[str, SuiteFlag] = {}
    for suite in suite_names():
        options = get_suite(suite).options
        if options is None:
            continue
        hints = field_types(options)
        for name, field in own_flags(options).items():
            flag = flags.get(name, SuiteFlag(name, hints[name], {}))
            if flag.hint != hints[name] or (flag.fields and _form(flag.field) != _form(field)):
                others = ", ".join(flag.fields)
                raise ConfigError(
                    f"suite {suite} has an option {name} with another type or other choices than {others}; rename it"
                )
            flags[name] = dataclasses.replace(flag, fields={**flag.fields, suite: field})
    return flags


def _form(field: dataclasses.Field) -> list[Any]:
    return [field.metadata.get(name) for name in ("choices", "nargs", "action")]


def add_suite_flags(parser: Parser, reword: Callable[[str], str] = str) -> None:
    """Add the flags of all suites, grouped by suite.

    Args:
        parser: parser with all other flags of the command.
        reword: adapts help texts to the command.

    Raises:
        ConfigError: an option has the name of another flag of the command.
    """
    taken = {option for action in parser.flags for option in action.option_strings} - parser.aliases
    flags = suite_flags()
    groups = dict.fromkeys(tuple(flag.fields) for flag in flags.values())
    problems = [
        f"suite {', '.join(flag.fields)}: the option {name} has the name of another flag of this command; rename it"
        for name, flag in flags.items()
        if f"--{name}" in taken
    ]
    if problems:
        raise ConfigError(problems)
    for suites in groups:
        shown = _without_variants(suites)
        group = parser.group("suite", shown)
        for name, flag in flags.items():
            if tuple(flag.fields) == suites:
                parser.give_up_alias(f"--{name}")
                if not all(map(ships_with_rlvla, suites)):
                    parser.essential.add(name)
                group.add_argument(f"--{name}", **argument(flag.field, flag.hint, reword(flag.help()), default=None))


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Option -> value of all suite flags given on the command line."""
    given = {}
    for name in suite_flags():
        value = getattr(namespace, name)
        if value not in (None, NONE):
            value = tuple(value) if isinstance(value, list) else value
            given[name] = () if value == (NONE,) else value  # () overrides the checkpoint's record
    return given


def option_problems(suite: str, options: Mapping[str, Any]) -> list[Problem]:
    """Options that the suite does not have ("no_effect")."""
    accepted, flags, problems = known_options(suite), suite_flags(), []
    for name in options:
        if accepted is not None and name not in accepted:
            owners = f", it belongs to {', '.join(_without_variants(flags[name].fields))}" if name in flags else ""
            text = f"--{name}: {suite} has no option {name}{owners}; leave it out"
            problems.append(Problem(name, "no_effect", text))
    return problems


def recorded_options(suite: str | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """The suite's options saved with demonstrations or a checkpoint; None if an option is not recorded.

    Args:
        suite: name of the suite. If it is not registered (its `--custom_module` is not loaded), all values that may be
            options are kept for the next record.
        record: result of `EnvConfig.as_dict`, possibly with other entries.
    """
    if suite is None:
        return {}
    if not is_known(suite):
        simple, flags = (bool, int, float, str), suite_flags()
        kept = {name: value for name, value in record.items() if isinstance(value, simple)}
        return {name: value for name, value in kept.items() if name not in flags or flags[name].recorded}
    accepted = known_options(suite)
    names = [name for name, flag in suite_flags().items() if flag.recorded and (accepted is None or name in accepted)]
    values = {name: record.get(name) for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
