"""Record demonstrations of a scripted expert as robomimic-style HDF5 with dataset statistics."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.ending import begin
from rlvla.utils.threads import limit_threads

begin(__name__)
limit_threads()

from rlvla.commands.custom_modules import (
    CustomConfig,
    modules_with_suites,
    parse_command_line,
    words_for_later_commands,
)
from rlvla.commands.problem_texts import problem
from rlvla.envs.config import EnvConfig, SplitConfig, without_checkpoint
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.suite_flags import add_suite_flags
from rlvla.envs.workers.config import WorkerConfig
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import MAX_SEED, Parser, add_arguments, arg, fail, from_namespace, range_problems
from rlvla.utils.errors import ConfigError, MissingExtraError
from rlvla.utils.files import output_folder_problem


@dataclass(frozen=True)
class CollectConfig:
    """What is recorded, and where to."""

    output: str = arg("runs/demos", "folder for demos.hdf5 and dataset_statistics.json", metavar="DIR", writes="folder")
    num_demos: int = arg(200, "episodes to keep, per task", minimum=1)
    keep: str = arg("success", "keep successful episodes only, or all", choices=("success", "all"))
    max_attempts: int = arg(20, "give up after num_demos times this many episodes per task", minimum=1)
    num_envs: int = arg(2, "worker processes", minimum=1, maximum=10_000)
    seed: int = arg(0, "seed of the expert's noise and of the choice of states", minimum=0, maximum=MAX_SEED)


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, EnvConfig, "environment", reword=without_checkpoint)
    add_arguments(parser, CollectConfig, "recording")
    add_arguments(parser, SplitConfig, "initial states")
    add_arguments(parser, ExpertConfig, "expert")
    add_arguments(parser, WorkerConfig, "environment workers")
    add_arguments(parser, CustomConfig, "own code")
    add_suite_flags(parser, reword=without_checkpoint)
    return parser


def validate(env: EnvConfig, config: CollectConfig, split: SplitConfig, namespace: Namespace) -> ExpertConfig:
    """Raise all problems at once, before any process is started; returns the expert's settings."""
    workers = from_namespace(WorkerConfig, namespace)
    problems = [p for part in (env, config, split, workers) for p in range_problems(part)]
    problems += workers.problems(env.env_python)
    expert, tasks = ExpertConfig(), []
    try:
        expert = from_namespace(ExpertConfig, namespace)
    except ConfigError as error:
        problems += error.problems
    try:
        tasks = env.tasks()
    except ConfigError as error:
        problems += error.problems
    problems += split.problems(tasks, 1)
    for task in tasks:
        problems += [problem("task_suite_name", "primitives", task=task.name)] if task.primitives else []
        try:
            make_expert(env.suite, task.task_id, expert)
        except ConfigError as error:
            problems += error.problems
    folder = output_folder_problem(config.output)
    problems += [problem("output", "folder_in_use", why=folder)] if folder else []
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return expert


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser, namespace = parse_command_line(build_parser, argv)
    env = from_namespace(EnvConfig, namespace).with_suite_flags(namespace)
    config = from_namespace(CollectConfig, namespace)
    split = from_namespace(SplitConfig, namespace)
    from rlvla.commands.collect_demos import collect_demonstrations

    try:
        expert = validate(env, config, split, namespace)
        workers = from_namespace(WorkerConfig, namespace)
        modules = modules_with_suites(from_namespace(CustomConfig, namespace))
        path = collect_demonstrations(env, config, split, expert, workers, modules)
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)
    print(f"next: python cli/train_sft_vla.py --demos {path} --save_path runs/sft{words_for_later_commands()}")


if __name__ == "__main__":
    main()
