"""Header of supervised training."""

from __future__ import annotations

from torch import nn

from rlvla.commands.new_models import is_new
from rlvla.data.demonstrations import Demonstrations
from rlvla.trainer.progress.report import trainable_and_all
from rlvla.trainer.supervised.config import RewardModelConfig, SFTConfig, SupervisedRunConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import count, header


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
    instructions = sorted(set(demos.instructions))
    rows = {
        "model": f"{start}; {count(all_weights)} parameters, {count(trained)} of them trained",
        "data": f"{' '.join(run.demos)}; {len(demos.actions):,} episodes with {demos.num_rows:,} decisions",
        "task": instructions[0] if len(instructions) == 1 else f"{len(instructions)} instructions, the first: {instructions[0]}",
        "training": f"epochs: {config.max_epochs}, batch size over all ranks: {config.train_batch_size}",
        "ranks": strategy.described,
        "folder": run.save_path,
    }
    return header(title, rows)
