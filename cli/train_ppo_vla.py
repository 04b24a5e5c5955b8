"""Reinforcement-learning post-training of a VLA policy in a simulator (PPO, GRPO and their relatives).

Example:
  python cli/train_ppo_vla.py --pretrain runs/sft/policy --advantage_estimator grpo --n_samples_per_prompt 8
with two ranks:
  deepspeed -q --num_accelerators 2 cli/train_ppo_vla.py --pretrain runs/sft/policy --save_path runs/ppo
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.runs.flags import NOTHING_LOST, flags_of, training_parser
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser


def build_parser() -> Parser:
    """The command line."""
    return training_parser(__doc__ or "", PPORun)


@command(after_interrupt=NOTHING_LOST)
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    with flags_of(PPORun, build_parser, argv) as flags:
        with heavy_imports():
            from rlvla.commands.train_ppo import run_ppo

        run_ppo(flags)


if __name__ == "__main__":
    main()
