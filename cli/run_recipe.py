"""Run a recipe: demonstrations, supervised training, reinforcement learning and evaluations, from one YAML file.

The same command continues after an interrupt and skips finished stages. Arguments after `--` are flags of the stage rl.

Example:
  python cli/run_recipe.py recipes/toy_reach.yaml
in a custom environment:
  python cli/run_recipe.py recipes/own_task.yaml --task_suite_name NAME --custom_module FILE.py --output runs/NAME
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import CustomConfig, load_custom_modules, parse_command_line
from rlvla.recipes.recipe import (
    RecipeConfig,
    Settings,
    Source,
    changes,
    chosen_variants,
    flags_of_stage,
    parsers_needed,
    plan,
    read_recipe,
)
from rlvla.recipes.runner import describe_plan, run_recipe
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace, range_problems
from rlvla.utils.cli.positional import add_positional
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import show

_COMMANDS = __package__ or "cli"  # `rlvla.cli` where it is installed


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(
        parser,
        "recipe",
        "RECIPE.yaml",
        "the recipe",
        several=False,
        usage="[--flag VALUE ...] [-- --FLAG_OF_RL VALUE ...]",
    )
    add_arguments(parser, RecipeConfig, "recipe")
    add_arguments(parser, CustomConfig, "own code")
    return parser


def program(name: str) -> list[str]:
    """How a command is called: its file, or its module where it is installed."""
    if _COMMANDS != "cli":
        return ["-m", f"{_COMMANDS}.{name}"]
    path = Path(__file__).resolve().with_name(f"{name}.py")
    return [str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)]


def sources_of(config: RecipeConfig, custom: CustomConfig, further: Sequence[str]) -> list[Source]:
    """The settings that the command line adds to the recipe; later ones take precedence."""
    common: Settings = {}
    if config.task_suite_name:
        common["task_suite_name"] = config.task_suite_name
    if custom.custom_module:
        common["custom_module"] = list(custom.custom_module)
    sources = [Source({"all": common}, {}, "command line"), changes(config.assignments)]
    return [*sources, flags_of_stage("rl", further)] if further else sources


@command(after_interrupt="the same command continues")
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    tokens = sys.argv[1:] if argv is None else list(argv)
    at = tokens.index("--") if "--" in tokens else len(tokens)
    namespace = parse_command_line(build_parser, tokens[:at])
    config, custom = from_namespace(RecipeConfig, namespace), from_namespace(CustomConfig, namespace)
    if problems := range_problems(config):
        raise ConfigError(problems)
    recipe = read_recipe(config.path)
    sources = [*chosen_variants(recipe, config.variant), *sources_of(config, custom, tokens[at + 1 :])]
    modules = recipe.custom_modules(sources)
    load_custom_modules([f"--custom_module={path}" for path in modules if path not in custom.custom_module])
    parsers = {name: importlib.import_module(f"{_COMMANDS}.{name}").build_parser() for name in parsers_needed(recipe)}
    folder = config.folder(recipe)
    stages = plan(recipe, parsers, folder, sources, config.demos)
    with heavy_imports():
        from rlvla.recipes.training_checks import require_extras, training_problems
    if problems := training_problems(stages, parsers):
        raise ConfigError(problems)
    require_extras(stages)
    if config.dry_run:
        show(describe_plan(stages, folder, program, config.first))
        return
    run_recipe(stages, folder, program, config.first, config.minutes)


if __name__ == "__main__":
    main()
