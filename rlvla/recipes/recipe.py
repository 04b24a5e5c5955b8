"""Recipes: YAML files with stages and their flags, variants, overrides, and validation of everything at once."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from rlvla.commands.dagger import RL, RL_TRAINING
from rlvla.commands.sft_runs import VERDICT_FILE
from rlvla.commands.tune_sft import CHOICE_FILE, TuneConfig
from rlvla.data.lerobot_cache import cached_dataset
from rlvla.envs.config import SplitConfig
from rlvla.envs.experts import ExpertConfig
from rlvla.envs.registry import get_suite, trust_suite
from rlvla.utils.cli.config_file import flag_arguments
from rlvla.utils.cli.flags import Parser, arg
from rlvla.utils.data_files import parse_yaml, read_settings
from rlvla.utils.errors import ConfigError, Problem, collected
from rlvla.utils.files import is_repo_id

Settings = dict[str, Any]  # flag, without dashes -> value as YAML has it; None for the default
Parsers = Mapping[str, Parser]  # command -> its command line
DEMOS_FILE = "demos.hdf5"
POLICY_FOLDER = "policy"
OUTPUT = "$output"  # in values of a recipe: the folder of --output
ALL = "all"  # beside the stages: settings for every stage that has such a flag
MINUTES, PROCESSES = "minutes", "processes"  # settings of a stage that are not flags of its command
_STAGE_SETTINGS = (MINUTES, PROCESSES)
MAX_MINUTES = "max_minutes"  # flag of commands that can end early
# Settings that do not apply to the stage `tune`.
_SFT_ONLY = (*_STAGE_SETTINGS, MAX_MINUTES, "save_path", "fallback_path", "save_steps", "load_checkpoint")
# Settings of the stage `rl` that do not apply to rounds of it, which measure their success themselves.
_RL_ONLY = (
    *(*_STAGE_SETTINGS, MAX_MINUTES, "save_path", "fallback_path", "pretrain", "load_checkpoint", "val_before_train"),
    *("early_stopping", "early_stop_success", "early_stop_evaluations", "early_stop_by", "eval_steps", "eval_episodes"),
)
# Stage -> its settings that apply to `dagger`, too.
_DAGGER_INHERITS = {
    "demos": frozenset(field.name for kind in (ExpertConfig, SplitConfig) for field in fields(kind)),
    "sft": frozenset(
        [
            *("sft_loss", "train_batch_size", "micro_train_batch_size", "bf16", "zero_stage", "adam_offload"),
            *("param_offload", "gradient_checkpointing", "lora_rank", "lora_alpha", "lora_targets"),
        ]
    ),
}
_TOP = ("about", "output", ALL, "stages", "variants")
# A dry run would leave no output for the next stage; a file of flags would bypass the checks made here.
_WITHHELD = ("dry_run", "config", "local_rank", "help", "version")


# -------------------------------------------------------------------------------------------------------- the stages
@dataclass(frozen=True)
class StageKind:
    """A stage of any recipe.

    Attributes:
        name: its name in recipes.
        command: the file in `cli/` that it runs, without suffix; "" for the report, made in the process of the recipe.
        writes: the flag that names its output.
        resumes: whether the command continues its unfinished work; otherwise the output of an interrupted attempt is
            removed, unless the stage has --load_checkpoint.
        takes_ranks: whether the command can be launched on several ranks.
        last_file: written by the command in its output when it has finished; it then refuses to resume.
        reads: flag -> kind of its input, "demonstrations", "policy" or "choice" (of the stage `tune`).
        optional_inputs: flags of `reads` that may stay unset.
    """

    name: str
    command: str
    writes: str | None = None
    resumes: bool = False
    takes_ranks: bool = True
    last_file: str | None = None
    reads: Mapping[str, str] | None = None
    optional_inputs: tuple[str, ...] = ()


DEMONSTRATIONS, POLICY, CHOICE = "demonstrations", "policy", "choice"
REPORT = "report"
NOT_WITH_DEMOS = ("sac", "demos", "dagger")  # stages that --demos leaves out; it may stand for a missing expert
KINDS = {
    kind.name: kind
    for kind in (
        StageKind("sac", "train_sac_vla", "save_path", resumes=True),
        StageKind(
            "demos", "collect_demos", "output", takes_ranks=False, reads={"policy": POLICY}, optional_inputs=("policy",)
        ),
        StageKind("check", "check_demos", "output", takes_ranks=False, reads={"demos": DEMONSTRATIONS}),
        StageKind("tune", "tune_sft_vla", "save_path", takes_ranks=False, reads={"demos": DEMONSTRATIONS}),
        StageKind(
            "sft",
            "train_sft_vla",
            "save_path",
            last_file=VERDICT_FILE,
            reads={"demos": DEMONSTRATIONS, "config": CHOICE},
            optional_inputs=("config",),
        ),
        StageKind(
            "dagger",
            "dagger_vla",
            "save_path",
            takes_ranks=False,
            reads={"demos": DEMONSTRATIONS, "pretrain": POLICY},
        ),
        StageKind("eval_sft", "eval_vla", "output", resumes=True, reads={"pretrain": POLICY}),
        StageKind(
            "recap",
            "recap_vla",
            "save_path",
            resumes=True,
            takes_ranks=False,
            reads={"demos": DEMONSTRATIONS, "pretrain": POLICY},
        ),
        StageKind("rl", "train_ppo_vla", "save_path", resumes=True, reads={"pretrain": POLICY}),
        StageKind("eval_rl", "eval_vla", "output", resumes=True, reads={"pretrain": POLICY}),
        StageKind(REPORT, ""),
    )
}
# Stage -> the stages that may write its initial policy, the first that the recipe has.
_POLICY_SOURCES = {
    "demos": ("sac",),
    "dagger": ("sft",),
    "eval_sft": ("dagger", "sft"),
    "recap": ("dagger", "sft"),
    "rl": ("dagger", "sft"),
    "eval_rl": ("rl", "recap"),
}


def output_of(name: str, settings: Settings, folder: Path) -> Path:
    """The file or folder that a stage writes; by default in `folder`, that of --output."""
    kind = KINDS[name]
    configured = settings.get(kind.writes) if kind.writes else None
    if configured is not None:
        return Path(str(configured))
    return folder / (f"{name}.json" if kind.command == "eval_vla" else name)


def with_references(name: str, settings: Settings, earlier: Mapping[str, Settings], folder: Path) -> Settings:
    """Complete the settings of a stage by its output and by inputs that earlier stages write.

    Args:
        name: the stage.
        settings: settings of the recipe, which take precedence.
        earlier: completed settings of the stages before it.
        folder: folder of --output.
    """
    kind, completed = KINDS[name], dict(settings)
    if kind.writes and completed.get(kind.writes) is None:
        completed[kind.writes] = str(output_of(name, settings, folder))
    resumes = name in ("sac", "rl") or (name == "sft" and completed.get("save_steps"))
    if resumes and completed.get("load_checkpoint") is None:
        completed["load_checkpoint"] = True
    for flag, what in (kind.reads or {}).items():
        if completed.get(flag) is not None:
            continue
        source: Any = None
        if what == POLICY:
            writers = [stage for stage in _POLICY_SOURCES[name] if stage in earlier]
            source = str(output_of(writers[0], earlier[writers[0]], folder) / POLICY_FOLDER) if writers else None
        elif what == DEMONSTRATIONS and "demos" in earlier:
            source = str(output_of("demos", earlier["demos"], folder) / DEMOS_FILE)
        elif what == DEMONSTRATIONS:
            source = earlier.get("check", {}).get("demos")
        elif what == CHOICE and "tune" in earlier:
            source = str(output_of("tune", earlier["tune"], folder) / CHOICE_FILE)
        if source is not None:
            completed[flag] = source
    return completed


def inputs_of(name: str, settings: Settings) -> list[Path]:
    """The files and folders that a stage reads, from its completed settings."""
    values = [settings.get(flag) for flag in KINDS[name].reads or {}]
    paths = [path for value in values for path in (value if isinstance(value, list) else [value])]
    return [Path(str(path)) for path in paths if path is not None]


# -------------------------------------------------------------------------------------------------------- the recipe
@dataclass(frozen=True)
class Source:
    """Settings from one place: the file, a variant, or the command line.

    Attributes:
        stages: stage or `all` -> setting -> value.
        lines: (stage, setting) -> line of the file; empty for settings from the command line.
        label: name of the place in messages.
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
    """A recipe as written in its file.

    Attributes:
        path: the file.
        about: its purpose in a sentence.
        output: its default of --output.
        stages: names of its stages, in order of execution.
        base: settings of all stages.
        variants: name -> settings that differ.
        problems: malformed entries, which were left out; `plan` reports them.
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
        modules = [one for value in values for one in (value if isinstance(value, list) else [value])]
        return list(dict.fromkeys(str(one) for one in modules if one is not None))


@dataclass(frozen=True)
class Stage:
    """A stage that can be run.

    Attributes:
        name: its name.
        settings: flags of its command, including inputs from earlier stages.
        argv: the same as command-line arguments.
        output: the file or folder that it writes.
        processes: number of ranks; 1 is plain Python.
        minutes: measured duration, or None.
        time_limited: whether its command has the flag --max_minutes.
    """

    name: str
    settings: Settings
    argv: tuple[str, ...]
    output: Path
    processes: int = 1
    minutes: float | None = None
    time_limited: bool = False


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with rlvla, by name: beside the code where it is installed, else recipes/ of a checkout."""
    installed, checkout = Path(__file__).parent / "files", Path(__file__).parents[2] / "recipes"
    return {path.stem: path for path in sorted((installed if installed.is_dir() else checkout).glob("*.yaml"))}


@dataclass(frozen=True)
class RecipeConfig:
    """Recipe, overrides and output; each field is a flag of `cli/run_recipe.py`."""

    recipe: str | None = arg(
        None, lambda: f"YAML file with the stages and their flags, or {', '.join(shipped_recipes())}", metavar="FILE"
    )
    output: str | None = arg(None, "folder of all stages (default: from the recipe)", metavar="DIR", writes="folder")
    assignments: tuple[str, ...] = arg(
        (),
        "settings that take precedence over the recipe's, e.g. sft.max_epochs=5 rl.eps_clip_low_high=[0.2,0.3] "
        "all.seed=1; may be repeated",
        flag="set",
        action="extend",
        metavar="STAGE.FLAG=VALUE",
    )
    variant: tuple[str, ...] = arg((), "variants of the recipe to use, by their names in it", metavar="NAME")
    task_suite_name: str | None = arg(None, "the suite of all stages (default: the recipe's)", metavar="SUITE")
    demos: tuple[str, ...] = arg(
        (),
        "existing demonstrations, which replace the stages that record some: files or folders",
        metavar="DIR_OR_FILE",
    )
    first: str | None = arg(
        None,
        "repeat this stage and all later ones (default: only unfinished stages run); earlier outputs are kept as "
        "superseded_NAME",
        flag="from",
        metavar="STAGE",
    )
    minutes: float | None = arg(
        None,
        "time budget of the recipe: stages whose commands have --max_minutes share the time that the others are not "
        "expected to need",
        above=0,
    )
    dry_run: bool = arg(False, "check the whole recipe, print the commands, and start nothing")

    @property
    def path(self) -> Path:
        """The recipe: a file, else one that comes with rlvla, by its name; ConfigError if none is given."""
        shipped = shipped_recipes()
        if self.recipe is None:
            text = f"no recipe is given; name a file or one of {', '.join(shipped)}"
            raise ConfigError.of("recipe", "needs_flag", text)
        path = Path(self.recipe)
        by_name = path.parent in (Path(), Path("recipes")) and path.suffix in ("", ".yaml")
        if not by_name or path.exists():
            return path
        if path.stem not in shipped:
            text = f"--recipe {path}: there is no such file, and the recipes of rlvla are {', '.join(shipped)}"
            raise ConfigError.of("recipe", "missing_file", text)
        return shipped[path.stem]

    def folder(self, recipe: Recipe) -> Path:
        """The folder of all stages."""
        return Path(self.output or recipe.output or Path("runs") / recipe.path.stem)


# ---------------------------------------------------------------------------------------------------------- the file
def read_recipe(path: Path) -> Recipe:
    """Read a recipe; its flags and their values are checked by `plan`.

    Raises:
        ConfigError: the file is not valid YAML, or has no stages.
    """
    content, lines = read_settings(path)
    content = _with_text_keys(content)
    not_a_recipe = Problem(
        "recipe",
        "no_recipe",
        f"{path} is not a recipe: it needs the key 'stages' with at least one stage and its settings",
    )
    if not isinstance(content, dict):
        raise ConfigError([not_a_recipe])
    problems: list[Problem] = []

    def report(reason: str, text: str, *keys: str) -> None:
        place = ".".join(keys)
        problems.append(Problem(place, reason, f"{path}, line {lines.get(keys, 1)}: {place}{text}"))

    def mapping(*keys: str) -> dict[Any, Any]:
        value: Any = content
        for key in keys:
            value = value.get(key)
        if value is not None and not isinstance(value, dict):
            report("no_mapping", " must hold lines 'name: value'", *keys)
        return value if isinstance(value, dict) else {}

    def source(places: Sequence[tuple[str, ...]]) -> Source:
        """The settings of stages at these places of the file."""
        stages: dict[str, Mapping[str, Any]] = {}
        where: dict[tuple[str, str], int] = {}
        for keys in places:
            name = keys[-1]
            if name not in KINDS and not (name == ALL and keys[0] != "stages"):
                report("unknown_stage", f": there is no such stage; the stages are {', '.join(KINDS)}", *keys)
                continue
            stages[name] = mapping(*keys)
            where |= {(name, key): lines.get((*keys, key), 1) for key in stages[name]}
        return Source(stages, where, str(path))

    for key in content:
        if key not in _TOP:
            report("unknown_part", f": a recipe has no such key; it has {', '.join(_TOP)}", key)
    for key in ("about", "output"):
        if not isinstance(content.get(key, ""), str):
            report("no_word", " must be a text", key)
    common = [(ALL,)] if ALL in content else []
    base = source([*common, *(("stages", name) for name in mapping("stages"))])
    variants = {
        name: source([("variants", name, stage) for stage in mapping("variants", name)]) for name in mapping("variants")
    }
    stages = tuple(name for name in KINDS if name in base.stages and name != REPORT)
    if not stages:
        raise ConfigError(problems or [not_a_recipe])
    about, output = (text if isinstance(text := content.get(key), str) else None for key in ("about", "output"))
    return Recipe(path, about or "", output, stages, base, variants, tuple(problems))


def _with_text_keys(content: Any) -> Any:
    """Turn keys into text: YAML reads `1:` as a number and `on:` as true."""
    if not isinstance(content, dict):
        return content
    names = {None: "null", True: "true", False: "false"}
    return {
        names[key] if isinstance(key, (bool, type(None))) else str(key): _with_text_keys(value)
        for key, value in content.items()
    }


# -------------------------------------------------------------------------------------------------- the command line
def chosen_variants(recipe: Recipe, names: Sequence[str]) -> list[Source]:
    """The variants of these names; ConfigError for unknown ones."""
    for name in names:
        if name not in recipe.variants:
            text = f"{recipe.path} has no such variant; it has {', '.join(recipe.variants) or 'none'}"
            raise ConfigError.of("variant", "unknown_variant", f"--variant {name}: {text}")
    return [recipe.variants[name] for name in names]


def changes(assignments: Sequence[str]) -> Source:
    """The settings of `--set STAGE.FLAG=VALUE ...`; values are YAML.

    Raises:
        ConfigError: malformed assignments, all of them.
    """
    import yaml

    stages: dict[str, dict[str, Any]] = {}
    problems = []
    for text in assignments:
        place, equals, value = text.partition("=")
        stage, dot, name = place.partition(".")
        if not (equals and dot and name):
            usage = f"--set {text}: write STAGE.FLAG=VALUE, e.g. sft.max_epochs=5"
            problems.append(Problem("set", "no_assignment", usage))
        elif stage not in KINDS and stage != ALL:
            names = ", ".join((ALL, *KINDS))
            problems.append(
                Problem("set", "unknown_stage", f"--set {text}: there is no such stage; the stages are {names}")
            )
        else:
            try:
                stages.setdefault(stage, {})[name] = parse_yaml(value, "its value")
            except ConfigError as error:
                if isinstance(error.__cause__, yaml.YAMLError):  # a text, such as *.hdf5
                    stages.setdefault(stage, {})[name] = value
                else:
                    problems += [problem.of_flag("set", place) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return Source(stages, {}, "--set")


def flags_of_stage(stage: str, argv: Sequence[str]) -> Source:
    """Settings of one stage from command-line arguments, e.g. those after `--`."""
    settings: dict[str, Any] = {}
    name = ""
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token[2:].partition("=")
            negative = name.startswith("no-")
            name = name.removeprefix("no-")
            settings[name] = value if equals else not negative
        elif isinstance(settings.get(name), bool):
            settings[name] = token
        else:
            before = settings.get(name, [])
            settings[name] = [*(before if isinstance(before, list) else [before]), token]
    return Source({stage: settings}, {}, "behind --")


# ------------------------------------------------------------------------------------------------------------ checks
def plan(
    recipe: Recipe, parsers: Parsers, folder: Path, sources: Sequence[Source] = (), demos: Sequence[str] = ()
) -> list[Stage]:
    """The stages to run, completed and validated.

    Args:
        recipe: the recipe.
        parsers: command -> its parser.
        folder: folder of --output.
        sources: further settings; later ones take precedence.
        demos: existing demonstrations, which replace the stages before `check`.

    Raises:
        ConfigError: with all problems of all stages and of all variants, chosen or not.
    """
    names = [name for name in recipe.stages if not (demos and name in NOT_WITH_DEMOS)]
    all_sources = [recipe.base, *recipe.variants.values()]
    all_sources += [source for source in sources if not any(source is other for other in all_sources)]
    problems = [*recipe.problems, *(p for source in all_sources for p in _problems_of(source, parsers, recipe.stages))]
    earlier: dict[str, Settings] = {}
    stages: list[Stage] = []
    for name in names:
        settings = _merged(name, [recipe.base, *sources], parsers)
        if name == "tune":  # its trials are short runs of the stage sft
            training = _merged("sft", [recipe.base, *sources], parsers)
            candidates = settings.get("candidates") or ()
            compared = TuneConfig((candidates,) if isinstance(candidates, str) else tuple(map(str, candidates)))
            if compared.compared and all(training.get(flag) is not None for flag in compared.compared):
                continue  # nothing is left to choose
            collected(problems, partial(compared.combinations, parsers["train_sft_vla"]))
            settings = {flag: value for flag, value in training.items() if flag not in _SFT_ONLY} | settings
        if name == "dagger":  # the same expert and states, the same training
            for stage, flags in _DAGGER_INHERITS.items():
                others = _merged(stage, [recipe.base, *sources], parsers)
                settings = {flag: value for flag, value in others.items() if flag in flags} | settings
            if "rl" in names and RL in (settings.get("round_sources") or ()):
                settings = _rounds_of_rl(_merged("rl", [recipe.base, *sources], parsers), parsers) | settings
        if demos and "demos" in (KINDS[name].reads or {}):
            settings["demos"] = [str(path) for path in demos]
        minutes, processes = settings.pop(MINUTES, None), settings.pop(PROCESSES, None)
        settings = {flag: _with_folder(value, folder) for flag, value in settings.items()}
        settings = with_references(name, settings, earlier, folder)
        problems += _missing_inputs(name, settings, recipe, stages)
        earlier[name] = settings
        command = KINDS[name].command
        repeated = parsers[command].repeated_flags() if command in parsers else []
        argv = tuple(w for n, value in settings.items() for w in flag_arguments(n, value, repeated=n in repeated))
        limited = _takes(name, MAX_MINUTES, parsers)
        output = output_of(name, settings, folder)
        stages.append(Stage(name, settings, argv, output, processes or 1, minutes, limited))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return stages


def _rounds_of_rl(training: Settings, parsers: Parsers) -> Settings:
    """Settings of `dagger` for rounds of reinforcement learning: those of the stage `rl`."""
    repeated = parsers[RL_TRAINING].repeated_flags()
    flags = {name: value for name, value in training.items() if name not in _RL_ONLY}
    argv = [token for name, value in flags.items() for token in flag_arguments(name, value, repeated=name in repeated)]
    return {"round_rl_flags": shlex.join(argv), "round_rl_processes": training.get(PROCESSES)}


def _merged(stage: str, sources: Sequence[Source], parsers: Parsers) -> Settings:
    """Merge the settings of a stage; within a source, the stage takes precedence over `all`."""
    command, settings = KINDS[stage].command, Settings()
    for source in sources:
        values = {name: v for name, v in source.stages.get(ALL, {}).items() if _takes(stage, name, parsers)}
        for name, value in (values | dict(source.stages.get(stage, {}))).items():
            action = _action(parsers[command], name) if command in parsers else None
            # A flag may be given by an alias, such as the name in another tool.
            settings[name if action is None else action.option_strings[0].removeprefix("--")] = value
    return settings


def _takes(stage: str, name: str, parsers: Parsers) -> bool:
    """Whether a stage has such a setting."""
    kind = KINDS[stage]
    if name in _STAGE_SETTINGS:
        return name == MINUTES or kind.takes_ranks
    return kind.command in parsers and _action(parsers[kind.command], name) is not None


def _action(parser: Parser, name: str) -> argparse.Action | None:
    matches = (action for action in parser._actions if f"--{name}" in action.option_strings)
    return None if name.startswith("no-") else next(matches, None)


def _problems_of(source: Source, parsers: Parsers, stages: Sequence[str]) -> Iterator[Problem]:
    """Stages missing from the recipe, unknown flags, and invalid values."""
    for stage, settings in source.stages.items():
        if settings and stage not in (*stages, ALL, REPORT):
            name = next(iter(settings))
            text = f"{source.where(stage, name)}: the recipe does not have this stage; it has {', '.join(stages)}"
            yield Problem(f"{stage}.{name}", "no_stage", text)
            continue
        for name, value in settings.items():
            readers = [stage] if stage != ALL else [other for other in KINDS if _takes(other, name, parsers)]
            if stage == ALL and not readers:
                readers = ["rl"]  # the command with the most flags, for its suggestions
            for reader in readers[:1] if name in _STAGE_SETTINGS else readers:
                problems = list(_problems_of_setting(source, stage, reader, name, value, parsers))
                yield from problems
                if problems:
                    break


def _problems_of_setting(
    source: Source, stage: str, reader: str, name: str, value: Any, parsers: Parsers
) -> Iterator[Problem]:
    where, flag, kind = source.where(stage, name), f"{stage}.{name}", KINDS[reader]
    values = value if isinstance(value, list) else [value]
    if name in _STAGE_SETTINGS:
        number = isinstance(value, (int, float) if name == MINUTES else int) and not isinstance(value, bool)
        if not kind.takes_ranks and name == PROCESSES:
            yield Problem(flag, "one_process", f"{where}: this command runs in one process; leave it out")
        elif value is not None and not (number and 0 < value < 1e6):
            text = f"{where}: {value!r} must be a number greater than 0 (processes: an integer)"
            yield Problem(flag, "no_amount", text)
    elif name in _WITHHELD:
        yield Problem(flag, "withheld", f"{where}: a recipe does not set this flag; leave it out")
    elif any(isinstance(one, (dict, list)) for one in values):
        yield Problem(flag, "no_value", f"{where} must be a value or a list of values")
    elif not kind.command:
        yield Problem(flag, "no_flags", f"{where}: this stage has no settings; leave it out")
    elif kind.command in parsers:
        parser, namespace = parsers[kind.command], argparse.Namespace()
        action = _action(parser, name)
        if action is None and name.startswith("no-"):
            yield Problem(flag, "write_false", f"{where}: write {name[3:]}: false")
            return
        if isinstance(value, bool) and action is not None and f"--no-{name}" not in action.option_strings:
            text = f"{where}: {str(value).lower()} is for switches; give this flag a value"
            yield Problem(flag, "no_switch", text)
            return
        argv = flag_arguments(name, value, repeated=name in parser.repeated_flags())
        errors = parser.read_flags([f"--{name}"] if action is None else argv, namespace)
        reason = "unknown_name" if action is None else "invalid_value"
        yield from (Problem(flag, reason, f"{where}: {text}") for text in errors)
        if errors:
            return
        dest = action.dest if action is not None else name
        ranges = [p for p in parser.value_problems(namespace) if p.flag == dest and p.reason != "not_writable"]
        yield from (Problem(flag, p.reason, f"{where}: {p}") for p in ranges)
        for suite in values if name == "task_suite_name" else ():
            try:
                if suite is not None:
                    trust_suite(str(suite))
                    get_suite(str(suite))
            except ConfigError as error:
                yield from (Problem(flag, p.reason or "unknown_name", f"{where}: {p}") for p in error.problems)


def _missing_inputs(name: str, settings: Settings, recipe: Recipe, before: Sequence[Stage]) -> Iterator[Problem]:
    """Inputs that neither exist nor are written by an earlier stage."""
    if name == "demos" and all(settings.get(flag) is None for flag in ("task_suite_name", "policy")):
        yield Problem(
            "demos.task_suite_name",
            "no_suite",
            f"{recipe.path} does not say in which environment to record demonstrations; give --task_suite_name (and "
            "--custom_module, if it is a custom one), or recorded ones with --demos",
        )
    for flag, what in (KINDS[name].reads or {}).items():
        place = f"{name}.{flag}"
        if settings.get(flag) is None:
            if flag not in KINDS[name].optional_inputs:
                text = f"{recipe.path}: stage {name} needs {what}, and no earlier stage writes any; add such a stage "
                yield Problem(place, "no_input", f"{text}or give {place}")
            continue
        outputs = [stage.output for stage in before]
        for path in inputs_of(name, {flag: settings[flag]}):
            if not _exists(path) and not any(path == output or output in path.parents for output in outputs):
                text = f"stage {name} needs {what}, and {path} does not exist; give an existing one"
                yield Problem(place, "missing_input", text)


def _exists(path: Path) -> bool:
    try:
        return path.exists() or (is_repo_id(path) and cached_dataset(str(path)) is not None)
    except (OSError, ValueError):  # not a possible file name
        return False


def _with_folder(value: Any, folder: Path) -> Any:
    """Replace `$output` in a value by the folder of --output."""
    if isinstance(value, list):
        return [_with_folder(one, folder) for one in value]
    return value.replace(OUTPUT, str(folder)) if isinstance(value, str) else value


def parsers_needed(recipe: Recipe) -> list[str]:
    """The commands whose flags a recipe, with its variants, may set."""
    stages = {stage for source in (recipe.base, *recipe.variants.values()) for stage in source.stages}
    commands = dict.fromkeys(kind.command for kind in KINDS.values() if kind.command)
    return [command for command in commands if any(KINDS[s].command == command for s in stages if s in KINDS)]
