"""The stages of every reinforcement-learning run: workers, run folder, resuming, training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rlvla.checkpoints.run_folder import RUN_FILE, claimed_run_folder
from rlvla.commands.custom_modules import modules_with_suites
from rlvla.commands.runs.checks import describe, evaluates_a_checkpoint, nothing_to_evaluate
from rlvla.commands.runs.ending import conclude, newest_checkpoint
from rlvla.commands.runs.flags import TrainingRun
from rlvla.commands.setup import CheckedRun, start_workers
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.rewards import RewardPlan
from rlvla.trainer.live import live_page
from rlvla.trainer.trainer import Trainer
from rlvla.utils.cli.config_file import write_config_file
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, SaveError
from rlvla.utils.files import write_json
from rlvla.utils.seeding import seed_everything
from rlvla.utils.signals import resume_hint
from rlvla.utils.terminal import log, quiet_libraries


@contextmanager
def started(flags: TrainingRun, setting: CheckedRun) -> Iterator[WatchedPool]:
    """The environment workers; everything random is seeded."""
    quiet_libraries()
    num_envs, tasks, modules = flags.run.num_envs, setting.tasks, modules_with_suites(flags.custom)
    with start_workers(num_envs, setting.played_env, tasks, custom_modules=modules, config=flags.workers) as pool:
        seed_everything(flags.run.seed)
        yield pool


@contextmanager
def run_folder(flags: TrainingRun, setting: CheckedRun, strategy: DeepspeedStrategy) -> Iterator[Path]:
    """Lock the run folder and record the flags in it, unless a checkpoint is only evaluated."""
    save_path, resuming = Path(flags.run.save_path), bool(flags.run.load_checkpoint)
    claimed = claimed_run_folder(save_path, strategy, flags.ckpt_path, resuming=resuming)
    with claimed, resume_hint(lambda: newest_checkpoint(flags)):
        if strategy.is_main and not evaluates_a_checkpoint(flags):
            write_json(save_path / RUN_FILE, describe(flags, setting))
            write_config_file(save_path, list(flags.groups.values()))
        yield save_path


def begin(trainer: Trainer, flags: TrainingRun) -> None:
    """Resume if that is asked for, and log the flags.

    Without a checkpoint to resume from, training starts afresh and an evaluation fails.
    """
    asked = flags.run.load_checkpoint
    if asked:
        resumed, alone = trainer.resume(asked if isinstance(asked, str) else None), evaluates_a_checkpoint(flags)
        if alone and not resumed:  # all checkpoints turned out to be damaged
            raise ConfigError(nothing_to_evaluate(flags))
        if resumed and trainer.strategy.is_main:
            what = "evaluating the checkpoint" if alone else "continuing"
            log.info(f"{what} after iteration {trainer.iteration} of {flags.batch.iterations}")
    trainer.logger.describe(list(flags.groups.values()))


def train(trainer: Trainer, flags: TrainingRun, plan: RewardPlan, header: str) -> None:
    """Show the header, train, and conclude.

    Raises:
        SaveError: after the end of the run, if its results could not be written.
    """
    folder, is_main, unsaved = Path(flags.run.save_path), trainer.strategy.is_main, None
    followed = is_main and flags.schedule.live
    with live_page(folder, flags.schedule.live_port) if followed else nullcontext():
        if is_main and not flags.schedule.val_only:
            log.info(header)
        plan.start()
        try:
            with trainer.signals.caught():  # not before: a signal ends what has nothing to save at once
                trainer.fit()
        except SaveError as error:
            unsaved = error
        finally:
            plan.close()
    if is_main:
        conclude(trainer, flags, folder)
    trainer.strategy.barrier()
    if unsaved is not None:
        raise unsaved
