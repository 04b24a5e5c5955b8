"""Write the policy of a training checkpoint as a policy folder, with its record, without resuming the run.

Example:
  python cli/export_policy.py runs/ppo --load_checkpoint iteration_000010 --output runs/ppo_10
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import CustomConfig, parse_command_line, words_for_later_commands
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, arg, from_namespace, range_problems
from rlvla.utils.cli.positional import add_positional
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import show, suggest


@dataclass(frozen=True)
class ExportConfig:
    """Checkpoint of a run, and folder of its policy."""

    run: str = arg("runs/ppo", "folder of a run of train_ppo_vla.py, which may still be going on", metavar="DIR")
    load_checkpoint: str | None = arg(
        None, "name of the checkpoint, such as iteration_000010 (default: the newest intact one)", metavar="NAME"
    )
    env_python: str | None = arg(
        None, "Python interpreter with the simulator, as for the run (default: that of this process)", metavar="PATH"
    )
    output: str | None = arg(
        None, "folder of the policy (default: exported/NAME in the folder of the run)", metavar="DIR", writes="folder"
    )


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(parser, "run", "RUN", "the folder of the run", several=False)
    add_arguments(parser, ExportConfig, "export")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    namespace = parse_command_line(build_parser, argv)
    config = from_namespace(ExportConfig, namespace)
    with heavy_imports():
        from rlvla.commands.run_policies import export_checkpoint
    problems = range_problems(config)
    if problems:
        raise ConfigError(problems)
    checkpoint, output = export_checkpoint(Path(config.run), config.output, config.load_checkpoint, config.env_python)
    show(f"policy of {checkpoint}: {output}")
    more = words_for_later_commands(config.env_python)
    suggest(f"python cli/eval_vla.py --pretrain {shlex.quote(str(output))}{more}")


if __name__ == "__main__":
    main()
