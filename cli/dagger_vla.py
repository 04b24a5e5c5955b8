"""DAgger: a supervised policy plays, the scripted expert takes over at random steps, and training continues on both.

With --round_sources, rounds of more demonstrations or of reinforcement learning are tried, too; the one that gains the
most per minute goes on.

All flags of train_sft_vla.py apply to the training of every round. The best policy is in `policy/` of --save_path.

Example:
  python cli/dagger_vla.py --pretrain runs/sft/policy --demos runs/demos/demos.hdf5 --save_path runs/dagger
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import parse_command_line, words_for_later_commands
from rlvla.commands.dagger import OUTPUT, REPLACED, RL, RL_TRAINING, DaggerConfig, RLRun, RoundCommands, run_dagger
from rlvla.commands.demos.config import CollectConfig
from rlvla.commands.sft_rounds import RoundFlags, programs_of, rounds_parser
from rlvla.commands.sft_runs import check_command
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.experts import ExpertConfig
from rlvla.envs.workers.config import WorkerConfig
from rlvla.models.config import PolicyConfig
from rlvla.trainer.supervised.config import SFTRunConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.config_file import flag_arguments
from rlvla.utils.cli.flags import Parser, from_namespace, no_effect_problems, range_problems
from rlvla.utils.errors import ConfigError, Problem, collected
from rlvla.utils.files import output_folder_problem, unused_folder
from rlvla.utils.terminal import suggest

_GROUPS = {"rounds": DaggerConfig, "expert": ExpertConfig}


def build_parser() -> Parser:
    """The command line: that of the training, with the rounds."""
    return rounds_parser(__package__, __doc__ or "", OUTPUT, _GROUPS)


@command(after_interrupt="remove --save_path, or name another, to start over")
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    argv = sys.argv[1:] if argv is None else list(argv)
    namespace, parser = parse_command_line(build_parser, argv), build_parser()
    config, run = from_namespace(DaggerConfig, namespace), from_namespace(SFTRunConfig, namespace)
    split = from_namespace(SplitConfig, namespace)
    flags = RoundFlags(parser, argv, namespace, tuple(_GROUPS.values()))
    problems = [*range_problems(config), *range_problems(run)]
    problems += no_effect_problems([config], {}, flags.given)
    problems += flags.problems(run.pretrain, "is corrected", REPLACED)
    if text := output_folder_problem(run.save_path):
        problems.append(Problem("save_path", "folder_in_use", f"--save_path: {text}"))
    if problems:
        raise ConfigError(problems)
    with heavy_imports():
        from rlvla.commands.demos.players import checked_player
        from rlvla.commands.run_policies import policy_folder
    folder, policy = Path(run.save_path), policy_folder(run.pretrain, env_python=namespace.env_python)
    recording = CollectConfig(
        output=str(folder / "round_1"),
        policy=policy,
        temperature=1.0,
        corrections=config.takeover == "random",
        intervene=None if config.takeover == "random" else "expert",
        num_demos=config.round_demos,
    )
    player = collected(
        problems,
        lambda: checked_player(
            EnvConfig(env_python=namespace.env_python, max_steps=config.round_max_steps),
            recording,
            split,
            WorkerConfig(),
            PolicyConfig(),
            lambda: from_namespace(ExpertConfig, namespace),
        ),
    )
    if problems or player is None:
        raise ConfigError([p.of_flag("pretrain", run.pretrain) if p.flag == "policy" else p for p in problems])

    programs = programs_of(__package__, __file__, RL_TRAINING)
    environment = [word for name, value in player.env.as_dict().items() for word in flag_arguments(name, value)]
    commands = RoundCommands(programs, flags.training, flags.of(ExpertConfig), flags.common, environment)
    trial = commands.train(config, Path(policy), run.demos, folder / "round_1" / "sft")
    check_command(trial, quiet=not namespace.dry_run)
    if RL in config.round_sources:
        single = replace(config, round_rl_processes=1)
        first = RLRun(Path(policy), folder / "round_1" / RL, run.seed)
        check_command(commands.reinforce(single, first, config.round_rl_minutes), quiet=not namespace.dry_run)
    if namespace.dry_run:
        return
    best = run_dagger(config, Path(policy), run.demos, folder, commands, run.seed)
    next_flags = shlex.join(["--pretrain", str(best), "--save_path", str(unused_folder(Path(f"{folder}_ppo")))])
    suggest(f"python cli/train_ppo_vla.py {next_flags}{words_for_later_commands(namespace.env_python)}")


if __name__ == "__main__":
    main()
