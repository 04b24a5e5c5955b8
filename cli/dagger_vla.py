"""DAgger: a supervised policy plays, the scripted expert takes over at random steps, and training continues on both.

All flags of train_sft_vla.py apply to the training of every round. The best policy is in `policy/` of --save_path.

Example:
  python cli/dagger_vla.py --pretrain runs/sft/policy --demos runs/demos/demos.hdf5 --save_path runs/dagger
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import CustomConfig, parse_command_line, words_for_later_commands
from rlvla.commands.dagger import (
    EXPERT_FLAGS,
    OUTPUT,
    WITHHELD,
    DaggerConfig,
    check_training,
    programs_of_rounds,
    run_dagger,
)
from rlvla.commands.demos.config import CollectConfig
from rlvla.commands.sft_runs import TRAINING, program_of, training_parser, without_flags
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.experts import ExpertConfig
from rlvla.envs.workers.config import WorkerConfig
from rlvla.models.config import PolicyConfig
from rlvla.trainer.supervised.config import SFTRunConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.config_file import config_file_arguments, flag_arguments
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace, given_flags, range_problems
from rlvla.utils.errors import ConfigError, collected
from rlvla.utils.terminal import suggest


def build_parser() -> Parser:
    """The command line: that of the training, with the rounds."""
    parser = training_parser(__package__)
    parser.description = Parser(__doc__ or "").description
    add_arguments(parser, DaggerConfig, "rounds")
    add_arguments(parser, ExpertConfig, "expert")
    parser.set_defaults(save_path=OUTPUT)
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    argv = sys.argv[1:] if argv is None else list(argv)
    namespace = parse_command_line(build_parser, argv)
    config, run = from_namespace(DaggerConfig, namespace), from_namespace(SFTRunConfig, namespace)
    modules = from_namespace(CustomConfig, namespace).custom_module
    folder = Path(run.save_path)
    problems = [*range_problems(config), *range_problems(run), *config.problems(run, folder)]
    if not problems:
        with heavy_imports():
            from rlvla.commands.demos.players import checked_player
        recording = CollectConfig(str(folder / "round_1"), run.pretrain, 1.0, corrections=True)
        player = EnvConfig(), recording, SplitConfig(), WorkerConfig(), PolicyConfig()
        collected(problems, lambda: checked_player(*player, lambda: from_namespace(ExpertConfig, namespace)))
    if problems:
        raise ConfigError([p.of_flag("pretrain", run.pretrain) if p.flag == "policy" else p for p in problems])
    tokens = [*config_file_arguments(argv, training_parser(__package__).repeated_flags()), *argv]
    given = given_flags(build_parser(), tokens)
    programs = programs_of_rounds(
        config,
        {name: program_of(name, __package__, __file__) for name in (TRAINING, "collect_demos", "eval_vla")},
        list(without_flags(tokens, WITHHELD)),
        [token for name in sorted(given & EXPERT_FLAGS) for token in flag_arguments(name, getattr(namespace, name))],
        [*flag_arguments("num_envs", namespace.num_envs), *flag_arguments("custom_module", modules or None)],
    )
    check_training(programs, run.pretrain, run.demos, folder, quiet=not namespace.dry_run)
    if namespace.dry_run:
        return
    policy = run_dagger(config, Path(run.pretrain), run.demos, folder, programs, run.seed)
    suggest(f"python cli/train_ppo_vla.py --pretrain {policy} --save_path {folder}_ppo{words_for_later_commands()}")


if __name__ == "__main__":
    main()
