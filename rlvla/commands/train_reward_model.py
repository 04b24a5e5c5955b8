"""Training of a reward model, for `cli/train_rm_vla.py`: checks, model, trainer, and the final summary."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from rlvla.checkpoints.policy_folder import PolicyRecord
from rlvla.commands.custom_modules import words_for_later_commands
from rlvla.commands.supervised import recorded_cameras, run_frame_model
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.replayed_episodes import replay_problem
from rlvla.data.reward_model_rows import ranked_pairs, read_outcomes, split_episodes
from rlvla.models.families import Checkpoint
from rlvla.trainer.supervised.config import NewModelConfig, RewardModelConfig, RewardRunConfig
from rlvla.trainer.supervised.reward_model_trainer import RewardModelTrainer
from rlvla.utils.deepspeed.config import StrategyConfig, launched_world_size
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import Problem
from rlvla.utils.terminal import show, suggest


def run_reward_model(
    run: RewardRunConfig,
    sizes: NewModelConfig,
    config: RewardModelConfig,
    strategy_config: StrategyConfig,
    given: Collection[str] = (),
) -> Path:
    """Train a reward model and return its folder; configuration problems are raised before anything is started.

    `given` are the names of the flags on the command line.
    """
    return run_frame_model(
        run,
        sizes,
        config,
        strategy_config,
        given,
        read=lambda run: read_outcomes(run.demos, run.cameras or None, run),
        data_problems=_data_problems,
        flag_problems=_pair_problems(config, launched_world_size()),
        new_trainer=_new_trainer,
        conclude=_conclude,
    )


def _new_trainer(
    start: Checkpoint,
    demos: Demonstrations,
    strategy: DeepspeedStrategy,
    config: RewardModelConfig,
    run: RewardRunConfig,
) -> RewardModelTrainer:
    record = PolicyRecord(recorded_cameras(run, demos), tuple(demos.states_learned_from))
    model = start.load_reward_model(new=True)
    return RewardModelTrainer(model, demos, strategy, config, Path(run.save_path), record, run.fallback_path)


def _conclude(folder: Path, metrics: dict[str, float], demos: Demonstrations, run: RewardRunConfig) -> None:
    """Print where the model is, and the command that scores episodes with it."""
    show(f"saved {folder}; --reward_pretrain {shlex.quote(str(folder))} adds it to the reward of a run")
    if replay_problem(run.demos[0], demos) is None:
        argv = ["--demos", run.demos[0], "--reward", "rm_model", "--rm_model_path", str(folder)]
        argv += ["--output", str(Path(run.save_path) / "scores")]
        suggest(f"python cli/score_episodes.py {shlex.join(argv)}{words_for_later_commands()}")


def _pair_problems(config: RewardModelConfig, ranks: int) -> list[Problem]:
    """A batch that does not hold a pair for each rank."""
    if config.pair_frames < 1 or config.pairs is None:  # the former is already reported
        return []
    if config.pairs_per_step < ranks or config.pairs_per_step % ranks:
        text = f"--train_batch_size {config.train_batch_size}: a pair has {2 * config.pair_frames} frames"
        text += f"; give a multiple of that, for each of {ranks} rank(s)"
        return [Problem("train_batch_size", "pairs", text)]
    return []


def _data_problems(demos: Demonstrations, config: RewardModelConfig, run: RewardRunConfig) -> list[Problem]:
    """Problems of the data: both outcomes must occur (or pairs of them), and each rank needs a frame."""
    train, heldout = split_episodes(demos, config.heldout_share, run.seed)
    frames, world = sum(len(demos.images[i]) for i in train), launched_world_size()
    problems, paths = [], " ".join(run.demos)
    if not demos.success_recorded and config.pairs not in ("return", "rank"):
        text = f"--demos {paths}: success of the episodes is not recorded, which a reward model is trained on; record"
        text += " it (`next.success` or `success`), or compare episodes by --pairs return or rank"
        return [Problem("demos", "mismatch", text)]
    if frames < world:
        text = f"--demos {paths}: {frames} training frames cannot be shared by {world} ranks"
        problems.append(Problem("demos", "too_few_frames", f"{text}; use fewer ranks or more episodes"))
    for name, part in (("training", train), ("held-out", heldout)):
        if config.pairs is not None:
            try:
                pairs = len(ranked_pairs(demos, part, config.pairs))
            except ValueError as error:
                return [*problems, Problem("pairs", "mismatch", f"--pairs {config.pairs}: {paths}: {error}")]
            if pairs < world:
                text = f"--pairs {config.pairs}: the {name} episodes ({len(part)}) make {pairs} pairs of a better "
                text += "and a worse episode of one task; record more episodes"
                problems.append(Problem("pairs", "too_few", text))
            continue
        outcomes = [demos.success[i] for i in part]
        if len(set(outcomes)) < 2:
            text = (
                f"--demos {paths}: the {name} episodes hold {sum(outcomes)} successes among {len(part)}; "
                "both outcomes are needed: record with --keep all and an expert that errs"
            )
            problems.append(Problem("demos", "one_outcome", text))
    return problems
