"""Reinforcement-learning post-training of a VLA policy in a simulator (PPO, GRPO and their relatives).

Launch: deepspeed -q --num_accelerators 2 cli/train_ppo_vla.py --pretrain runs/sft/policy --save_path runs/ppo
or without a launcher: python cli/train_ppo_vla.py ...
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
from rlvla.models.config import ActorConfig, PolicyConfig
from rlvla.rewards.config import RewardConfig
from rlvla.rewards.success_source import SuccessConfig
from rlvla.rollout.config import RolloutConfig
from rlvla.trainer.algorithm_config import AlgorithmConfig, CorrectionConfig, FilterConfig
from rlvla.trainer.config import BatchConfig, GuardConfig, OptimizationConfig, RunConfig, ScheduleConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, fail, from_namespace
from rlvla.utils.deepspeed.config import StrategyConfig, launched_rank
from rlvla.utils.errors import ConfigError, MissingExtraError
from rlvla.utils.stopping import StopRequested, resume_command
from rlvla.utils.terminal import log

# In the order of --help: what is trained and where, how it learns, how it runs.
GROUPS = {
    "run": (RunConfig, "run"),
    "policy": (PolicyConfig, "policy"),
    "env": (EnvConfig, "environment"),
    "split": (SplitConfig, "initial states"),
    "rewards": (RewardConfig, "rewards"),
    "success": (SuccessConfig, "what counts as success"),
    "batch": (BatchConfig, "batch sizes"),
    "algorithm": (AlgorithmConfig, "algorithm"),
    "filters": (FilterConfig, "group filters (dynamic sampling)"),
    "correction": (CorrectionConfig, "correction of the mismatch between rollout and training"),
    "optimization": (OptimizationConfig, "optimization"),
    "actor": (ActorConfig, "adapters and memory"),
    "strategy": (StrategyConfig, "DeepSpeed"),
    "schedule": (ScheduleConfig, "evaluation, checkpoints, logging (in iterations)"),
    "guards": (GuardConfig, "early termination of failing runs"),
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
        from rlvla.commands.ppo_flags import PPORun
        from rlvla.commands.train_ppo import run_ppo

    try:
        run_ppo(PPORun(**groups, given=namespace.given))
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)
    except StopRequested as stop:
        if launched_rank() == 0:
            again = resume_command(sys.argv, stop.ckpt_path, trains=not groups["schedule"].val_only)
            log.info(f"continue with: {again}")
        raise


if __name__ == "__main__":
    main()
