"""Checks and header common to supervised fine-tuning and the reward model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rlvla.checkpoints.run_folder import run_folder_problem
from rlvla.commands.new_models import is_new
from rlvla.data.demonstrations import Demonstrations
from rlvla.trainer.progress.report import trainable_and_all
from rlvla.trainer.supervised.config import RewardModelConfig, SFTConfig, SupervisedRunConfig
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import Problem
from rlvla.utils.files import output_folder_problem
from rlvla.utils.terminal import count, header


def supervised_problems(run: SupervisedRunConfig, config: SFTConfig | RewardModelConfig) -> Iterator[Problem]:
    """Folders that cannot be used, and a batch that the ranks cannot share."""
    if folder := run_folder_problem(run.save_path):
        yield Problem("save_path", "folder_in_use", f"--save_path: {folder}")
    if run.fallback_path and (folder := output_folder_problem(run.fallback_path)):
        yield Problem("fallback_path", "folder_in_use", f"--fallback_path: {folder}")
    ranks = launched_world_size()
    if config.train_batch_size % ranks:
        text = f"--train_batch_size {config.train_batch_size} must be divisible by the number of ranks {ranks}"
        yield Problem("train_batch_size", "not_divisible", text)


def supervised_header(
    title: str,
    run: SupervisedRunConfig,
    config: SFTConfig | RewardModelConfig,
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
