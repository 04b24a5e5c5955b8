"""Checks, start and header common to supervised fine-tuning, reward model and return model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from rlvla.checkpoints.run_folder import CHECKPOINTS, claimed_run_folder, run_folder_problem
from rlvla.checkpoints.training import list_checkpoints
from rlvla.commands.model_checks import mismatch_with_policy
from rlvla.commands.new_models import is_new, new_model, new_model_problems
from rlvla.commands.run_policies import policy_folder
from rlvla.data.demonstrations import Demonstrations
from rlvla.envs.config import EnvConfig, heldout_problems
from rlvla.models.families import Checkpoint, check_checkpoint, checkpoint_overrides
from rlvla.trainer.progress.report import trainable_and_all
from rlvla.trainer.supervised.config import (
    FrameModelConfig,
    FrameRunConfig,
    NewModelConfig,
    SFTConfig,
    SupervisedRunConfig,
)
from rlvla.trainer.supervised.frame_trainer import FrameTrainer
from rlvla.utils.cli.config_file import write_config_file
from rlvla.utils.cli.flags import no_effect_problems, range_problems
from rlvla.utils.deepspeed.config import StrategyConfig, launched_world_size
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, Problem, require
from rlvla.utils.files import BestEffortWriter, output_folder_problem, write_json
from rlvla.utils.seeding import seed_everything
from rlvla.utils.terminal import count, header, log, quiet_libraries, table

Run = TypeVar("Run", bound=FrameRunConfig)
Config = TypeVar("Config", bound=FrameModelConfig)


def supervised_problems(run: SupervisedRunConfig, config: SFTConfig | FrameModelConfig) -> Iterator[Problem]:
    """Folders that cannot be used, and a batch that the ranks cannot share."""
    resuming = run.load_checkpoint
    if folder := run_folder_problem(run.save_path, resuming=resuming):
        yield Problem("save_path", "folder_in_use", f"--save_path: {folder}")
    if run.fallback_path and (folder := output_folder_problem(run.fallback_path, resuming=resuming)):
        yield Problem("fallback_path", "folder_in_use", f"--fallback_path: {folder}")
    ranks = launched_world_size()
    if config.train_batch_size % ranks:
        text = f"--train_batch_size {config.train_batch_size} must be divisible by the number of ranks {ranks}"
        yield Problem("train_batch_size", "not_divisible", text)


def claimed_folder(run: SupervisedRunConfig, strategy: DeepspeedStrategy) -> AbstractContextManager[None]:
    """Lock the run folder, and empty it unless the run resumes."""
    folder = Path(run.save_path)
    return claimed_run_folder(folder, strategy, folder / CHECKPOINTS, resuming=run.load_checkpoint)


def start_folder(run: SupervisedRunConfig, strategy: DeepspeedStrategy, write: Callable[[Path], None]) -> Path:
    """The folder of the initial model, written unless the run has a checkpoint to resume from."""
    folder = Path(run.save_path) / "start"
    if strategy.is_main and not list_checkpoints(Path(run.save_path) / CHECKPOINTS):
        shutil.rmtree(folder, ignore_errors=True)
        write(folder)
    strategy.barrier()
    return folder


def supervised_header(
    title: str,
    run: SupervisedRunConfig,
    config: SFTConfig | FrameModelConfig,
    model: nn.Module,
    demos: Demonstrations,
    strategy: DeepspeedStrategy,
) -> str:
    """Header of the run: model, data, task, length, folder."""
    trained, all_weights = trainable_and_all(model)
    start = f"new, {run.pretrain}" if is_new(run.pretrain) else run.pretrain
    tasks = sorted(set(demos.instructions))
    rows = {
        "model": f"{start}; {count(all_weights)} parameters, {count(trained)} of them trained",
        "data": f"{' '.join(run.demos)}; {len(demos.actions):,} episodes with {demos.num_rows:,} decisions",
        "task": tasks[0] if len(tasks) == 1 else f"{len(tasks)} instructions, the first: {tasks[0]}",
        "training": f"epochs: {config.max_epochs}, batch size over all ranks: {config.train_batch_size}",
        "ranks": strategy.described,
        "folder": run.save_path,
    }
    return header(title, rows)


def run_frame_model(
    run: Run,
    sizes: NewModelConfig,
    config: Config,
    strategy_config: StrategyConfig,
    given: Collection[str],
    *,
    read: Callable[[Run], Demonstrations],
    data_problems: Callable[[Demonstrations, Config, Run], Iterable[Problem]],
    flag_problems: Iterable[Problem] = (),
    new_trainer: Callable[[Checkpoint, Demonstrations, DeepspeedStrategy, Config, Run], FrameTrainer],
    conclude: Callable[[Path, dict[str, float], Demonstrations, Run], None],
) -> Path:
    """Train a model of single frames and return its folder.

    Args:
        run: data, initial checkpoint and run folder.
        sizes: sizes of a new model.
        config: hyperparameters.
        strategy_config: options of DeepSpeed.
        given: names of the flags on the command line.
        read: reads the episodes.
        data_problems: problems of the episodes.
        flag_problems: further problems of the flags.
        new_trainer: makes the trainer from the initial checkpoint.
        conclude: prints conclusions from the folder and its metrics.

    Raises:
        ConfigError: all problems of the configuration, before anything is started.
    """
    run = replace(run, pretrain=policy_folder(run.pretrain))
    groups = (run, sizes, config, strategy_config)
    problems = [*(p for group in groups for p in range_problems(group)), *supervised_problems(run, config)]
    problems += [*strategy_config.problems(), *no_effect_problems(groups, {}, given), *flag_problems]
    demos = None
    try:
        demos = read(run)
        problems += data_problems(demos, config, run)
        problems += frame_model_problems(run, sizes, demos)
    except ConfigError as error:
        problems += error.problems
    if problems or demos is None:
        raise ConfigError(problems)
    if config.use_wandb:
        require("wandb", extra="wandb")
    quiet_libraries()
    strategy = DeepspeedStrategy(strategy_config, seed=run.seed)
    seed_everything(run.seed)
    save_path = Path(run.save_path)
    with claimed_folder(run, strategy):
        trainer = new_trainer(_start_of_frame_model(run, sizes, demos, strategy), demos, strategy, config, run)
        if run.load_checkpoint:
            trainer.resume()
        if strategy.is_main:  # only now: a mismatching checkpoint must leave the old configuration
            write_config_file(save_path, groups)
        trainer.logger.describe(groups, outcomes=(trainer.outcome,))
        if strategy.is_main:
            log.info(supervised_header(trainer.name.replace("_", " "), run, config, trainer.model, demos, strategy))
        metrics = trainer.fit()
        if strategy.is_main:
            BestEffortWriter("metrics.json").attempt(lambda: write_json(save_path / "metrics.json", metrics))
            print(table(("held-out episodes", "value"), [(n.split("/")[1], f"{v:.4g}") for n, v in metrics.items()]))
            conclude(trainer.exported, metrics, demos, run)
        return trainer.exported


def frame_model_problems(run: FrameRunConfig, sizes: NewModelConfig, demos: Demonstrations) -> Iterator[Problem]:
    """Problems of the data and the initial checkpoint of a model of single frames; ConfigError for its files."""
    paths, env = " ".join(run.demos), EnvConfig().completed(demos.env_args)
    yield from heldout_problems(run.heldout_tasks, env, (), demos.states_learned_from, paths)
    if is_new(run.pretrain):
        yield from new_model_problems(run, sizes, demos)
    else:
        yield from mismatch_with_policy(demos, paths, _start(run.pretrain, run, demos).spec, run.pretrain)


def _start_of_frame_model(
    run: FrameRunConfig, sizes: NewModelConfig, demos: Demonstrations, strategy: DeepspeedStrategy
) -> Checkpoint:
    """The checkpoint that a model of single frames starts from; a new one is written to `start/` in the run folder."""
    pretrain = Path(run.pretrain)
    if is_new(run.pretrain):
        pretrain = start_folder(run, strategy, lambda folder: new_model(folder, demos, run, sizes))
    return _start(pretrain, run, demos)


def _start(folder: str | Path, run: FrameRunConfig, demos: Demonstrations) -> Checkpoint:
    overrides = checkpoint_overrides(folder, run, run.cameras or demos.env_args.get("cameras") or ())
    return check_checkpoint(folder, run.unnorm_key, overrides=overrides)


def recorded_cameras(run: FrameRunConfig, demos: Demonstrations) -> EnvConfig:
    """The environment of the episodes, with the cameras that the model reads."""
    return EnvConfig().completed(demos.env_args | {"cameras": list(run.cameras or demos.env_args["cameras"])})
