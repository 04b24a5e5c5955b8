"""Off-policy reinforcement learning in a simulator: soft actor-critic with prioritised replay.

Example:
  python cli/train_sac_vla.py --task_suite_name robosuite --use_proprio --save_path runs/sac
with two ranks:
  deepspeed -q --num_accelerators 2 cli/train_sac_vla.py --task_suite_name robosuite --use_proprio --save_path runs/sac
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.off_policy.flags import SACRun
from rlvla.commands.runs.flags import NOTHING_LOST, flags_of, training_parser
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser


def build_parser() -> Parser:
    """The command line."""
    return training_parser(__doc__ or "", SACRun)


@command(after_interrupt=NOTHING_LOST)
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    with flags_of(SACRun, build_parser, argv) as flags:
        with heavy_imports():
            from rlvla.commands.off_policy.train import run_sac

        run_sac(flags)


if __name__ == "__main__":
    main()
