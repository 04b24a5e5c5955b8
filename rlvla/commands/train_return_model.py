"""Training of a return model, for `cli/train_value_vla.py`: checks, model, trainer, and the verdict."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from rlvla.commands.supervised import recorded_cameras, run_frame_model
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import SUITE, read_several
from rlvla.data.return_rows import ActionScale, return_scales
from rlvla.data.reward_model_rows import split_episodes
from rlvla.models.families import Checkpoint
from rlvla.trainer.supervised.config import NewModelConfig, ReturnModelConfig, ReturnRunConfig
from rlvla.trainer.supervised.return_model_trainer import (
    CALIBRATION_FILE,
    LEAST_EXPLAINED,
    ReturnFacts,
    ReturnModelTrainer,
    ReturnRecord,
)
from rlvla.utils.deepspeed.config import StrategyConfig, launched_world_size
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import Problem
from rlvla.utils.terminal import show


def run_return_model(
    run: ReturnRunConfig,
    sizes: NewModelConfig,
    config: ReturnModelConfig,
    strategy_config: StrategyConfig,
    given: Collection[str] = (),
) -> Path:
    """Train a return model and return its folder; configuration problems are raised before anything is started.

    `given` are the names of the flags on the command line.
    """
    iql = config.value_objective == "iql"  # its targets follow whole networks
    return run_frame_model(
        run,
        sizes,
        config,
        strategy_config,
        given,
        read=lambda run: read_several(run.demos, run.cameras or None, options=run, same=(SUITE,)),
        data_problems=_data_problems,
        flag_problems=strategy_config.sharding_problems("value_objective", "iql") if iql else [],
        new_trainer=_new_trainer,
        conclude=_conclude,
    )


def _new_trainer(
    start: Checkpoint,
    demos: Demonstrations,
    strategy: DeepspeedStrategy,
    config: ReturnModelConfig,
    run: ReturnRunConfig,
) -> ReturnModelTrainer:
    iql = config.value_objective == "iql"
    facts = ReturnFacts(return_scales(demos, config.failure_cost), actions=ActionScale.of(demos) if iql else None)
    record = ReturnRecord(recorded_cameras(run, demos), tuple(demos.states_learned_from), facts=facts)
    return ReturnModelTrainer(
        start.load_return_model(new=True, action_values=iql),
        demos,
        strategy,
        config,
        Path(run.save_path),
        record,
        start.spec.action_chunk_len,
        run.fallback_path,
    )


def _conclude(folder: Path, metrics: dict[str, float], demos: Demonstrations, run: ReturnRunConfig) -> None:
    """Print the verdict, and the flags that use the model."""
    explained = metrics["return_model/explained_variance"]
    show(verdict(explained, metrics["return_model/train_explained_variance"]))
    show(f"saved {folder}; calibration: {Path(run.save_path) / CALIBRATION_FILE}")
    if explained >= LEAST_EXPLAINED:
        flags = ["--advantage_conditioning", "--advantage_weighting"]
        if ReturnFacts.read(folder).actions is not None:
            flags.reverse()
        quoted = shlex.quote(str(folder))
        show(f"{flags[0]} {quoted} of train_sft_vla.py uses it ({flags[1]}, too)")


def verdict(heldout: float, train: float) -> str:
    """Conclusion from the explained variance of held-out and training episodes."""
    if heldout >= LEAST_EXPLAINED:
        return (
            f"Returns of held-out episodes are predictable: explained variance {heldout:.2f} (training: {train:.2f})."
        )
    text = (
        f"Nothing useful was learned: explained variance {heldout:.2f} on held-out episodes, {train:.2f} in training; "
    )
    more = "record more episodes, with successes and failures, or train for fewer epochs"
    return text + (more if train >= LEAST_EXPLAINED else "train for longer, or with cameras that show progress") + "."


def _data_problems(demos: Demonstrations, config: ReturnModelConfig, run: ReturnRunConfig) -> list[Problem]:
    """Problems of the data: outcomes must be recorded, and each rank needs a frame."""
    paths, world = " ".join(run.demos), launched_world_size()
    if not demos.success_recorded:
        text = f"--demos {paths}: success of the episodes is not recorded, which returns are computed from; record it"
        return [Problem("demos", "mismatch", f"{text} (`next.success` or `success`)")]
    train, heldout = split_episodes(demos, config.heldout_share, run.seed)
    if not heldout or sum(len(demos.images[i]) for i in train) < world:
        text = f"--demos {paths}: {len(demos.actions)} episodes leave too few to train on or to hold out; record more"
        return [Problem("demos", "too_few", text)]
    return []
