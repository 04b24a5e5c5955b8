"""Reading recipes: YAML with its line numbers, variants, changes on the command line, and all problems at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvla.commands.problem_texts import problem
from rlvla.data.lerobot_cache import cached_dataset, is_repo_id
from rlvla.envs.registry import get_suite
from rlvla.recipes.stages import (
    BEFORE_DEMOS,
    COMMANDS,
    KINDS,
    OUTPUT,
    REPORT,
    Settings,
    inputs_of,
    with_references,
    written_by,
)
from rlvla.utils.cli.config_file import words_of_flag
from rlvla.utils.cli.flags import Parser
from rlvla.utils.data_files import read_yaml_with_lines
from rlvla.utils.errors import ConfigError, Problem

ALL = "all"  # beside the stages: settings of each stage that knows them
MINUTES, PROCESSES = "minutes", "processes"  # settings of a stage that are no flags of its command
_OWN = (MINUTES, PROCESSES)
_TOP = ("about", "output", ALL, "stages", "variants")
# A stage that only looks would leave nothing for the next one; a file of flags would escape the checks made here.
_WITHHELD = ("dry_run", "config", "local_rank", "help", "version")
Parsers = Mapping[str, Parser]  # command -> its command line


@dataclass(frozen=True)
class Source:
    """Settings from one place.

    Attributes:
        stages: stage or `all` -> setting -> value.
        lines: stage -> setting -> line of the file; empty for settings from the command line.
        label: what messages call the place.
    """

    stages: Mapping[str, Mapping[str, Any]]
    lines: Mapping[tuple[str, str], int]
    label: str

    def where(self, stage: str, name: str) -> str:
        """The place of a setting, for messages."""
        line = self.lines.get((stage, name))
        return f"{self.label}{'' if line is None else f', line {line}'}: {stage}.{name}"


@dataclass(frozen=True)
class Recipe:
    """A recipe as its file has it.

    Attributes:
        path: the file.
        about: what it is for, in a sentence.
        output: its default of --output.
        stages: names of its stages, in the order in which they run.
        base: the settings of all stages.
        variants: name -> settings that differ.
        problems: parts that are not of the form of a recipe, and were left out; `plan` refuses them.
    """

    path: Path
    about: str
    output: str | None
    stages: tuple[str, ...]
    base: Source
    variants: Mapping[str, Source]
    problems: tuple[Problem, ...] = ()

    def custom_modules(self, sources: Sequence[Source]) -> list[str]:
        """The user's modules that stages name, in order and without duplicates."""
        values = [s.get("custom_module") for source in (self.base, *sources) for s in source.stages.values()]
        several = [one for value in values for one in (value if isinstance(value, list) else [value])]
        return list(dict.fromkeys(str(one) for one in several if one is not None))


@dataclass(frozen=True)
class Stage:
    """A stage that can be run.

    Attributes:
        name: its name.
        settings: flags of its command, those taken over from earlier stages included.
        words: the same as words of a command line.
        output: the file or folder that it writes.
        processes: ranks; 1 is plain Python.
        minutes: how long it was measured to take, or None.
    """

    name: str
    settings: Settings
    words: tuple[str, ...]
    output: Path
    processes: int = 1
    minutes: float | None = None


# ---------------------------------------------------------------------------------------------------------- the file
def read_recipe(path: Path) -> Recipe:
    """Read a recipe; its flags and their values are checked by `plan`.

    Raises:
        ConfigError: the file is no valid YAML, or has no stages.
    """
    content, lines = read_yaml_with_lines(path)
    content = _with_text_as_keys(content)
    if not isinstance(content, dict):
        raise ConfigError(_problem("recipe", "no_recipe", where=path))
    problems: list[Problem] = []

    def refuse(reason: str, *keys: str, **values: object) -> None:
        place = f"{path}, line {lines.get(keys, 1)}: {'.'.join(keys)}"
        problems.append(_problem(".".join(keys), reason, where=place, **values))

    def mapping(*keys: str) -> dict[Any, Any]:
        value: Any = content
        for key in keys:
            value = value.get(key)
        if value is not None and not isinstance(value, dict):
            refuse("no_mapping", *keys)
        return value if isinstance(value, dict) else {}

    def source(places: Sequence[tuple[str, ...]]) -> Source:
        """The settings of stages at these places of the file."""
        stages: dict[str, Mapping[str, Any]] = {}
        where: dict[tuple[str, str], int] = {}
        for keys in places:
            name = keys[-1]
            if name not in KINDS and not (name == ALL and keys[0] != "stages"):
                refuse("unknown_stage", *keys, known=", ".join(KINDS))
                continue
            stages[name] = mapping(*keys)
            where |= {(name, key): lines.get((*keys, key), 1) for key in stages[name]}
        return Source(stages, where, str(path))

    for key in content:
        if key not in _TOP:
            refuse("unknown_part", key, known=", ".join(_TOP))
    for key in ("about", "output"):
        if not isinstance(content.get(key, ""), str):
            refuse("no_word", key)
    common = [(ALL,)] if ALL in content else []
    base = source([*common, *(("stages", name) for name in mapping("stages"))])
    variants = {
        name: source([("variants", name, stage) for stage in mapping("variants", name)]) for name in mapping("variants")
    }
    stages = tuple(name for name in KINDS if name in base.stages and name != REPORT)
    if not stages:
        raise ConfigError(problems or [_problem("recipe", "no_recipe", where=path)])
    about, output = (word if isinstance(word := content.get(key), str) else None for key in ("about", "output"))
    return Recipe(path, about or "", output, stages, base, variants, tuple(problems))


def _with_text_as_keys(content: Any) -> Any:
    """YAML reads `1:` as a number and `on:` as true; names are texts."""
    if not isinstance(content, dict):
        return content
    words = {None: "null", True: "true", False: "false"}
    return {
        words[key] if isinstance(key, (bool, type(None))) else str(key): _with_text_as_keys(value)
        for key, value in content.items()
    }


def _problem(flag: str, reason: str, **values: object) -> Problem:
    """A problem of a recipe; `flag` is the place to change, such as `sft.seed`."""
    return replace(problem("recipe", reason, **values), flag=flag)


# -------------------------------------------------------------------------------------------------- the command line
def chosen_variants(recipe: Recipe, names: Sequence[str]) -> list[Source]:
    """The variants of these names; ConfigError for unknown ones."""
    unknown = [name for name in names if name not in recipe.variants]
    if unknown:
        known = ", ".join(recipe.variants) or "none"
        raise ConfigError(_problem("variant", "unknown_variant", value=unknown[0], path=recipe.path, known=known))
    return [recipe.variants[name] for name in names]


def changes(assignments: Sequence[str]) -> Source:
    """The settings of `--set STAGE.FLAG=VALUE ...`; values are YAML.

    Raises:
        ConfigError: an assignment is not of this form; all that are not.
    """
    import yaml

    stages: dict[str, dict[str, Any]] = {}
    problems = []
    for text in assignments:
        place, equals, typed = text.partition("=")
        stage, dot, name = place.partition(".")
        if not (equals and dot and name):
            problems.append(_problem("set", "no_assignment", value=text))
        elif stage not in KINDS and stage != ALL:
            problems.append(_problem("set", "unknown_stage", where=f"--set {text}", known=", ".join((ALL, *KINDS))))
        else:
            try:
                stages.setdefault(stage, {})[name] = yaml.safe_load(typed)
            except yaml.YAMLError:
                stages.setdefault(stage, {})[name] = typed
    if problems:
        raise ConfigError(problems)
    return Source(stages, {}, "--set")


def flags_of_stage(stage: str, words: Sequence[str]) -> Source:
    """Settings of one stage from words of a command line, e.g. what follows `--`."""
    settings: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            negative = name.startswith("no-")
            name = name.removeprefix("no-")
            settings[name] = value if equals else not negative
        elif isinstance(settings.get(name), bool):
            settings[name] = word
        else:
            before = settings.get(name, [])
            settings[name] = [*(before if isinstance(before, list) else [before]), word]
    return Source({stage: settings}, {}, "behind --")


# ------------------------------------------------------------------------------------------------------------ checks
def plan(
    recipe: Recipe, parsers: Parsers, folder: Path, sources: Sequence[Source] = (), demos: Sequence[str] = ()
) -> list[Stage]:
    """The stages to run, completed and checked.

    Args:
        recipe: the recipe.
        parsers: command -> its parser.
        folder: of --output.
        sources: further settings; later ones take precedence.
        demos: demonstrations to use instead of recording some: the stages before `check` are left out.

    Raises:
        ConfigError: with all problems of all stages, variants that are not chosen included.
    """
    names = [name for name in recipe.stages if not (demos and name in BEFORE_DEMOS)]
    everything = [recipe.base, *recipe.variants.values()]
    everything += [source for source in sources if not any(source is known for known in everything)]
    problems = [*recipe.problems, *(p for source in everything for p in _problems_of(source, parsers, recipe.stages))]
    earlier: dict[str, Settings] = {}
    stages = []
    for name in names:
        own = _merged(name, [recipe.base, *sources], parsers)
        given = [str(path) for path in demos]
        own |= {"demos": given} if given and "demos" in (KINDS[name].reads or {}) else {}
        minutes, processes = own.pop(MINUTES, None), own.pop(PROCESSES, None)
        own = {flag: _placed(value, folder) for flag, value in own.items()}
        settings = with_references(name, own, earlier, folder)
        problems += _missing_inputs(name, settings, recipe, stages)
        earlier[name] = settings
        output, words = written_by(name, settings, folder), _words(name, settings, parsers)
        stages.append(Stage(name, settings, words, output, processes or 1, minutes))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return stages


def _merged(stage: str, sources: Sequence[Source], parsers: Parsers) -> Settings:
    """The settings of a stage; of one place, those of the stage itself take precedence over those of all."""
    settings: Settings = {}
    for source in sources:
        common = source.stages.get(ALL, {})
        given = {name: value for name, value in common.items() if _takes(stage, name, parsers)}
        given |= source.stages.get(stage, {})
        settings |= {_first_name(stage, name, parsers): value for name, value in given.items()}
    return settings


def _first_name(stage: str, name: str, parsers: Parsers) -> str:
    """The name of a flag of which another tool's name may be given."""
    command = KINDS[stage].command
    action = _action(parsers[command], name) if command in parsers else None
    return name if action is None else action.option_strings[0].removeprefix("--")


def _takes(stage: str, name: str, parsers: Parsers) -> bool:
    """Whether a setting means something to a stage."""
    kind = KINDS[stage]
    if name in _OWN:
        return name == MINUTES or kind.takes_ranks
    return kind.command in parsers and _action(parsers[kind.command], name) is not None


def _action(parser: Parser, name: str) -> argparse.Action | None:
    named = (action for action in parser._actions if f"--{name}" in action.option_strings)
    return None if name.startswith("no-") else next(named, None)


def _problems_of(source: Source, parsers: Parsers, known: Sequence[str]) -> Iterator[Problem]:
    """Stages that the recipe does not have, unknown flags, and values that they do not take."""
    for stage, settings in source.stages.items():
        if settings and stage not in (*known, ALL, REPORT):
            name = next(iter(settings))
            yield _problem(f"{stage}.{name}", "no_stage", where=source.where(stage, name), known=", ".join(known))
            continue
        for name, value in settings.items():
            readers = [stage] if stage != ALL else [other for other in KINDS if _takes(other, name, parsers)]
            if stage == ALL and not readers:
                readers = ["rl"]  # the command with the most flags, for its suggestions
            for reader in readers[:1] if name in _OWN else readers:
                found = list(_problems_of_setting(source, stage, reader, name, value, parsers))
                yield from found
                if found:
                    break


def _problems_of_setting(
    source: Source, stage: str, reader: str, name: str, value: Any, parsers: Parsers
) -> Iterator[Problem]:
    where, flag, kind = source.where(stage, name), f"{stage}.{name}", KINDS[reader]
    values = value if isinstance(value, list) else [value]
    if name in _OWN:
        number = isinstance(value, (int, float) if name == MINUTES else int) and not isinstance(value, bool)
        if not kind.takes_ranks and name == PROCESSES:
            yield _problem(flag, "one_process", where=where)
        elif value is not None and not (number and 0 < value < 1e6):
            yield _problem(flag, "no_amount", where=where, value=value)
    elif name in _WITHHELD:
        yield _problem(flag, "withheld", where=where)
    elif any(isinstance(one, (dict, list)) for one in values):
        yield _problem(flag, "no_value", where=where)
    elif kind.command is None:
        yield _problem(flag, "no_flags", where=where)
    elif kind.command in parsers:
        parser, namespace = parsers[kind.command], argparse.Namespace()
        action = _action(parser, name)
        if action is None and name.startswith("no-"):
            yield _problem(flag, "write_false", where=where, name=name[3:])
            return
        if isinstance(value, bool) and action is not None and f"--no-{name}" not in action.option_strings:
            yield _problem(flag, "no_switch", where=where, value=str(value).lower())
            return
        words = words_of_flag(name, value, repeated=name in parser.repeated_flags())
        if action is None:
            words = [f"--{name}"]
        wrong = parser.read_flags(words, namespace)
        reason = "unknown_name" if action is None else "invalid_value"
        yield from (Problem(flag, reason, f"{where}: {text}") for text in wrong)
        if not wrong:
            dest = action.dest if action is not None else name
            ranges = [p for p in parser.value_problems(namespace) if p.flag == dest and p.reason != "not_writable"]
            yield from (Problem(flag, p.reason, f"{where}: {p}") for p in ranges)
            yield from _unknown_suites(flag, where, name, values)


def _unknown_suites(flag: str, where: str, name: str, values: Sequence[Any]) -> Iterator[Problem]:
    for value in values if name == "task_suite_name" else ():
        try:
            if value is not None:
                get_suite(str(value))
        except ConfigError as error:
            yield from (Problem(flag, p.reason or "unknown_name", f"{where}: {p}") for p in error.problems)


def _missing_inputs(name: str, settings: Settings, recipe: Recipe, before: Sequence[Stage]) -> Iterator[Problem]:
    """Inputs that neither exist nor are written by an earlier stage."""
    if name == "demos" and all(settings.get(flag) is None for flag in ("task_suite_name", "policy")):
        yield _problem("demos.task_suite_name", "no_suite", path=recipe.path)
    for flag, what in (KINDS[name].reads or {}).items():
        if settings.get(flag) is None:
            if flag in KINDS[name].can_do_without:
                continue
            yield _problem(f"{name}.{flag}", "no_input", stage=name, what=what, name=flag, path=recipe.path)
            continue
        written = [stage.output for stage in before]
        for path in inputs_of(name, {flag: settings[flag]}):
            if not _exists(path) and not any(path == output or output in path.parents for output in written):
                yield _problem(f"{name}.{flag}", "missing_input", stage=name, what=what, value=path)


def _exists(path: Path) -> bool:
    try:
        return path.exists() or (is_repo_id(path) and cached_dataset(str(path)) is not None)
    except (OSError, ValueError):  # no file could have this name
        return False


def _placed(value: Any, folder: Path) -> Any:
    """A value with the folder of --output in place of `$output`."""
    if isinstance(value, list):
        return [_placed(one, folder) for one in value]
    return value.replace(OUTPUT, str(folder)) if isinstance(value, str) else value


def _words(stage: str, settings: Settings, parsers: Parsers) -> tuple[str, ...]:
    command = KINDS[stage].command
    repeated = parsers[command].repeated_flags() if command in parsers else []
    return tuple(w for n, value in settings.items() for w in words_of_flag(n, value, repeated=n in repeated))


def parsers_needed(recipe: Recipe) -> list[str]:
    """The commands whose flags a recipe, with its variants, may name."""
    named = {stage for source in (recipe.base, *recipe.variants.values()) for stage in source.stages}
    return [command for command in COMMANDS if any(KINDS[s].command == command for s in named if s in KINDS)]
