"""Off-policy reinforcement learning in a simulator: soft actor-critic with prioritised replay.

Launch: deepspeed -q --num_accelerators 2 cli/train_sac_vla.py --task_suite_name robosuite --save_path runs/sac
or without a launcher: python cli/train_sac_vla.py ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.ending import begin
from rlvla.utils.threads import limit_threads

begin(__name__)
limit_threads()

from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.suite_flags import add_suite_flags
from rlvla.envs.workers.config import WorkerConfig
from rlvla.rewards.config import RewardConfig
from rlvla.rewards.success_source import SuccessConfig
from rlvla.rollout.config import RolloutConfig
from rlvla.trainer.config import ScheduleConfig
from rlvla.trainer.off_policy.config import (
    NoiseConfig,
    ReplayConfig,
    SACBatchConfig,
    SACConfig,
    SACGuardConfig,
    SACRunConfig,
    SACStrategyConfig,
)
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, fail, from_namespace
from rlvla.utils.deepspeed.config import launched_rank
from rlvla.utils.errors import ConfigError, MissingExtraError
from rlvla.utils.stopping import StopRequested, resume_command
from rlvla.utils.terminal import log

# In the order of --help: what is trained and where, how it learns, how it runs.
GROUPS = {
    "run": (SACRunConfig, "run"),
    "env": (EnvConfig, "environment"),
    "split": (SplitConfig, "initial states"),
    "rewards": (RewardConfig, "rewards"),
    "success": (SuccessConfig, "what counts as success"),
    "batch": (SACBatchConfig, "batch sizes"),
    "sac": (SACConfig, "soft actor-critic"),
    "noise": (NoiseConfig, "noise of a flow policy"),
    "replay": (ReplayConfig, "replay"),
    "strategy": (SACStrategyConfig, "DeepSpeed"),
    "schedule": (ScheduleConfig, "evaluation, checkpoints, logging (in iterations)"),
    "guards": (SACGuardConfig, "early termination of failing runs"),
    "rollout": (RolloutConfig, "rollout engine"),
    "workers": (WorkerConfig, "environment workers"),
    "custom": (CustomConfig, "own code"),
}


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    for config, title in GROUPS.values():
        add_arguments(parser, config, title)
    add_suite_flags(parser)
    return parser


@command(after_interrupt="no training was under way, and no iteration is lost")
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser, namespace = parse_command_line(build_parser, argv)
    groups = {name: from_namespace(config, namespace) for name, (config, _) in GROUPS.items()}
    groups["env"] = groups["env"].with_suite_flags(namespace)
    with heavy_imports():
        from rlvla.commands.off_policy.flags import SACRun
        from rlvla.commands.off_policy.train import run_sac

    try:
        run_sac(SACRun(**groups, given=namespace.given))
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)
    except StopRequested as stop:
        if launched_rank() == 0:
            again = resume_command(sys.argv, stop.ckpt_path, trains=not groups["schedule"].val_only)
            log.info(f"continue with: {again}")
        raise


if __name__ == "__main__":
    main()
