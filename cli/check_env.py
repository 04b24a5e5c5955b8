"""Build, reset, step and look at every task of a suite: a table, and a contact sheet of what the cameras see.

Launch: python cli/check_env.py robosuite
The exit status is 0 if every task works, 1 if one does not, 2 for a mistake in the flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.envs.config import EnvConfig, without_checkpoint
from rlvla.envs.pool import EnvWorkerError
from rlvla.envs.suite_check import CheckConfig, run_check
from rlvla.envs.worker_config import WorkerConfig
from rlvla.trainer.custom_modules import CustomConfig, modules_with_suites, parse_command_line
from rlvla.utils.arguments import Parser, add_arguments, fail, from_namespace
from rlvla.utils.commands import command
from rlvla.utils.errors import ConfigError, MissingExtraError


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    parser.usage = "%(prog)s SUITE [--flag VALUE ...]"
    parser.add_argument(
        "task_suite_name",
        metavar="SUITE",
        nargs="?",
        default=argparse.SUPPRESS,  # what --task_suite_name says stands
        help="the suite, e.g. robosuite; the same as --task_suite_name",
    )
    add_arguments(parser, EnvConfig, "environment", reword=without_checkpoint)
    add_arguments(parser, CheckConfig, "check")
    add_arguments(parser, WorkerConfig, "environment workers")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with status 1 where a task does not work."""
    parser, namespace = parse_command_line(build_parser, argv)
    kinds = (EnvConfig, CheckConfig, WorkerConfig, CustomConfig)
    env, config, workers, custom = (from_namespace(kind, namespace) for kind in kinds)
    try:
        checks = run_check(env, config, workers, modules_with_suites(custom))
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)
    except EnvWorkerError as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    failed = [check.task.name for check in checks if check.problem]
    print(f"pictures: {config.output}")
    if failed:
        raise SystemExit(f"{len(failed)} of {len(checks)} tasks do not work here: {', '.join(failed)}")


if __name__ == "__main__":
    main()
