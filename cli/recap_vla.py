"""RECAP: a policy records its own episodes, a return model judges them, and training continues on the condition.

All flags of train_sft_vla.py apply to the training of every round. The best policy is in `policy/` of --save_path. The
same command continues after an interruption.

Example:
  python cli/recap_vla.py --pretrain runs/sft/policy --demos runs/demos/demos.hdf5 --save_path runs/recap
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
from rlvla.commands.recap import CONDITIONING, OUTPUT, REPLACED, RecapConfig, RoundCommands, run_recap
from rlvla.commands.sft_rounds import RoundFlags, programs_of, rounds_parser
from rlvla.commands.sft_runs import check_command, without_flags
from rlvla.trainer.supervised.config import SFTRunConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, from_namespace, range_problems
from rlvla.utils.errors import ConfigError

_GROUPS = {"rounds": RecapConfig}


def build_parser() -> Parser:
    """The command line: that of the training, with the rounds."""
    return rounds_parser(__package__, __doc__ or "", OUTPUT, _GROUPS)


@command(after_interrupt="the same command continues")
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    argv = sys.argv[1:] if argv is None else list(argv)
    namespace, parser = parse_command_line(build_parser, argv), build_parser()
    config, run = from_namespace(RecapConfig, namespace), from_namespace(SFTRunConfig, namespace)
    flags = RoundFlags(parser, argv, namespace, tuple(_GROUPS.values()))
    problems = [*range_problems(config), *range_problems(run)]
    problems += flags.problems(run.pretrain, "records its own episodes", REPLACED)
    if problems:
        raise ConfigError(problems)
    with heavy_imports():
        from rlvla.commands.run_policies import policy_folder
        from rlvla.commands.train_sft import unconditionable
        from rlvla.models.families import check_checkpoint, recorded_guidance
    policy = Path(policy_folder(run.pretrain, env_python=namespace.env_python))
    if recorded_guidance(policy) is not None:
        text = "is advantage-conditioned, and each round starts from the initial policy; give the policy that it was"
        text = f"--pretrain {policy} {text} trained from, and its recorded episodes by --demos"
        raise ConfigError.of("pretrain", "conditioned", text)
    if text := unconditionable(policy, run.unnorm_key):
        raise ConfigError.of("pretrain", "mismatch", f"--pretrain: {text}")
    data = ["--cameras", *run.cameras] if run.cameras else []
    data += [*run.words(), *(["--use_proprio"] if check_checkpoint(policy, run.unnorm_key).spec.proprio_dim else [])]
    commands = RoundCommands(
        programs_of(__package__, __file__, "train_value_vla"),
        flags.training,
        [*data, f"--seed={run.seed}", f"--save_steps={namespace.save_steps}", "--no-use_tensorboard"],
        flags.common,
    )
    folder = Path(run.save_path)
    trial = commands.train(config, policy, run.demos, None, folder / "round_1" / "trial")
    check_command([*without_flags(parser, trial, CONDITIONING)], quiet=not namespace.dry_run)
    if not namespace.dry_run:
        run_recap(config, policy, run.demos, folder, commands, run.seed)


if __name__ == "__main__":
    main()
