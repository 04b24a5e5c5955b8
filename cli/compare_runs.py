"""Compare training runs: seeds of the same settings are one group, and groups are compared with 95 % intervals.

Example:
  python cli/compare_runs.py runs/ppo_0 runs/ppo_1 runs/grpo_0 runs/grpo_1 --report runs/compared
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.runs.compare import CompareConfig, run_compare
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace
from rlvla.utils.cli.positional import add_positional


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(parser, "runs", "RUN", "folders of runs")
    add_arguments(parser, CompareConfig, "comparison")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_compare(from_namespace(CompareConfig, build_parser().parse_args(argv)))


if __name__ == "__main__":
    main()
