"""From the flags of `cli/train_rm_vla.py` to a reward model folder: checks, model, trainer, closing words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvla.envs.config import EnvConfig
from rlvla.models.value_models import RewardModel
from rlvla.trainer.demonstrations import Demonstrations
from rlvla.trainer.model_checks import mismatch_with_policy
from rlvla.trainer.policy_export import PolicyRecord
from rlvla.trainer.reward_model_config import RewardModelConfig, RewardRunConfig
from rlvla.trainer.reward_model_data import read_outcomes
from rlvla.trainer.reward_model_trainer import RewardModelTrainer, split_episodes
from rlvla.trainer.setup import check_checkpoint
from rlvla.trainer.sft_config import TinyConfig
from rlvla.trainer.sft_run import new_tiny
from rlvla.utils.arguments import range_problems
from rlvla.utils.config_file import write_config_file
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.logging import quiet_libraries, table
from rlvla.utils.run_folder import claimed_run_folder, run_folder_problem
from rlvla.utils.runs import write_json
from rlvla.utils.seeding import seed_everything
from rlvla.utils.strategy import DeepspeedStrategy
from rlvla.utils.strategy_config import StrategyConfig, launched_world_size


def run_reward_model(
    run: RewardRunConfig, tiny: TinyConfig, config: RewardModelConfig, strategy_config: StrategyConfig
) -> Path:
    """Train and return the folder of the reward model. Configuration problems are raised before anything is started."""
    parts = (run, tiny, config, strategy_config)
    problems = [p for part in parts for p in range_problems(part)]
    problems += strategy_config.problems()
    folder = run_folder_problem(run.save_path)
    problems += [f"--save_path: {folder}"] if folder else []
    if config.train_batch_size % launched_world_size():
        problems.append(
            f"--train_batch_size {config.train_batch_size} must be divisible by {launched_world_size()} ranks"
        )
    demos = None
    try:
        demos = read_outcomes(run.demos, run.cameras or None)
        problems += _data_problems(demos, config, run)
        if run.pretrain != "tiny":
            model, _ = check_checkpoint(Path(run.pretrain), run.unnorm_key)
            problems += mismatch_with_policy(demos, " ".join(run.demos), model, run.pretrain, None)
    except ConfigError as error:
        problems += error.problems
    if problems or demos is None:
        raise ConfigError(problems)
    if config.use_wandb:
        require("wandb", extra="wandb")
    quiet_libraries()
    strategy = DeepspeedStrategy(strategy_config, seed=run.seed)
    seed_everything(run.seed)
    with claimed_run_folder(Path(run.save_path), is_main=strategy.is_main):
        return _train(run, tiny, config, strategy, demos, parts)


def _train(
    run: RewardRunConfig,
    tiny: TinyConfig,
    config: RewardModelConfig,
    strategy: DeepspeedStrategy,
    demos: Demonstrations,
    parts: Sequence[Any],
) -> Path:
    """Of a configuration that has been checked; `parts` are all groups of flags."""
    save_path, pretrain = Path(run.save_path), Path(run.pretrain)
    if strategy.is_main:
        write_config_file(save_path, parts)
    if run.pretrain == "tiny":
        pretrain = save_path / "start"
        if strategy.is_main:
            new_tiny(pretrain, demos, run, tiny)
        strategy.barrier()
    model = RewardModel.from_policy(pretrain, run.unnorm_key)
    env = EnvConfig().completed(demos.env_args | {"cameras": list(run.cameras or demos.env_args["cameras"])})
    record = PolicyRecord(env, tuple(demos.states_learned_from))
    trainer = RewardModelTrainer(model, demos, strategy, config, save_path, record)
    trainer.logger.describe(parts, outcomes=("reward_model/auroc",))
    metrics = trainer.fit()
    result = save_path / "reward_model"
    if strategy.is_main:
        write_json(save_path / "metrics.json", metrics)
        print(table(("held-out episodes", "value"), [(n.split("/")[1], f"{v:.4g}") for n, v in metrics.items()]))
        print(f"{result}\nnext: python cli/train_ppo_vla.py --reward_pretrain {result} ...")
    return result


def _data_problems(demos: Demonstrations, config: RewardModelConfig, run: RewardRunConfig) -> list[str]:
    """Outcomes that are all alike teach nothing, and each rank needs a frame."""
    train, heldout = split_episodes(demos, config.heldout_share, run.seed)
    frames, world = sum(len(demos.images[i]) for i in train), launched_world_size()
    too_few = f"--demos {' '.join(run.demos)}: {frames} training frames cannot be shared by {world} ranks"
    problems = [] if frames >= world else [f"{too_few}; use fewer ranks or more episodes"]
    return problems + [
        f"--demos {' '.join(run.demos)}: the {name} episodes hold {sum(demos.success[i] for i in part)} successes "
        f"among {len(part)}; both outcomes are needed: record with --keep all and an expert that errs"
        for name, part in (("training", train), ("held-out", heldout))
        if len({demos.success[i] for i in part}) < 2
    ]
