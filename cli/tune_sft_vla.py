"""Compare values of a setting by short supervised runs, judged by success on held-out initial states.

All flags of train_sft_vla.py apply to every trial. The best setting is written to `choice.yaml` in --save_path, for
`train_sft_vla.py --config`.

Example:
  python cli/tune_sft_vla.py --candidates action_chunk_len=[2,5] --demos runs/demos/demos.hdf5 --pretrain compact
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import parse_command_line
from rlvla.commands.sft_runs import TRAINING, check_command, program_of, training_parser, without_flags
from rlvla.commands.tune_sft import (
    OUTPUT,
    OWN_FLAGS,
    TRIALS_FILE,
    TuneConfig,
    dry_trial,
    run_tuning,
    trial_command,
)
from rlvla.trainer.supervised.config import SFTRunConfig, ValidationConfig
from rlvla.utils.cli.command import command
from rlvla.utils.cli.config_file import config_file_arguments
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace, given_flags, range_problems
from rlvla.utils.errors import ConfigError, Problem, collected


def build_parser() -> Parser:
    """The command line: that of the training, with the values to compare."""
    parser = training_parser(__package__, without=OWN_FLAGS)
    parser.description = Parser(__doc__ or "").description
    add_arguments(parser, TuneConfig, "trials")
    parser.set_defaults(save_path=OUTPUT)
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    argv = sys.argv[1:] if argv is None else list(argv)
    namespace = parse_command_line(build_parser, argv)
    config, run = from_namespace(TuneConfig, namespace), from_namespace(SFTRunConfig, namespace)
    training = training_parser(__package__)
    tokens = [*config_file_arguments(argv, training.repeated_flags()), *argv]
    given = given_flags(build_parser(), tokens)
    problems = [*range_problems(config), *range_problems(run)]
    if "eval_epochs" in given and not from_namespace(ValidationConfig, namespace).eval_epochs:
        problems.append(Problem("eval_epochs", "contradiction", "--eval_epochs 0: trials are compared by episodes"))
    folder = Path(run.save_path)
    if (folder / TRIALS_FILE).exists() or any(folder.glob("steps_*")):
        text = f"--save_path {folder} holds trials; name another folder or remove it"
        problems.append(Problem("save_path", "folder_in_use", text))
    trials = collected(problems, lambda: config.combinations(training))
    if trials is None or problems:
        raise ConfigError(problems)
    withheld = (*OWN_FLAGS, "config", "dry_run", "load_checkpoint", "max_steps", "save_path", "save_steps")
    program = program_of(TRAINING, __package__, __file__)
    trial = trial_command(program, list(without_flags(build_parser(), tokens, withheld)), given)
    check_command(dry_trial(trials[0], folder, trial), quiet=not namespace.dry_run)
    if not namespace.dry_run:
        run_tuning(trials, config.trial_steps, namespace.max_steps, folder, trial, config.max_minutes)


if __name__ == "__main__":
    main()
