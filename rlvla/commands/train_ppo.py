"""Running `cli/train_ppo_vla.py`: checks, models, workers, trainer, and the final summary."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rlvla.checkpoints.checks import check_first_decisions
from rlvla.checkpoints.run_folder import CURVE_FILE, RUN_FILE, claimed_run_folder
from rlvla.checkpoints.training import list_checkpoints
from rlvla.commands.custom_modules import modules_with_suites, words_for_later_commands
from rlvla.commands.dry_run import ppo_report
from rlvla.commands.load_models import load_models
from rlvla.commands.ppo_checks import _evaluates_a_checkpoint, _nothing_to_evaluate, check, describe
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.run_policies import policy_record, with_policy_folder
from rlvla.commands.setup import CheckedRun, first_observations, start_workers
from rlvla.data.reading import read_demonstrations
from rlvla.rewards import RewardPlan
from rlvla.rollout import RolloutEngine
from rlvla.trainer.algorithm_config import learner_needs_reference
from rlvla.trainer.config import PPOConfig
from rlvla.trainer.ppo_trainer import PPOTrainer
from rlvla.trainer.progress.curve import save_learning_curve
from rlvla.trainer.progress.signal import trainable_and_all
from rlvla.trainer.reward_sources import tie_to_learner, waits_on_host
from rlvla.utils.cli.command import STARTS_ANEW
from rlvla.utils.cli.config_file import write_config_file
from rlvla.utils.deepspeed.config import launched_rank
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.disk import Expendable
from rlvla.utils.ending import outlook
from rlvla.utils.errors import ConfigError, SaveError
from rlvla.utils.files import write_json
from rlvla.utils.seeding import seed_everything
from rlvla.utils.stopping import StopSignals, resume_command
from rlvla.utils.terminal import count, duration, log, passing_note, quiet_libraries, table

EVALUATIONS_FILE = "evaluations.json"


def run_ppo(flags: PPORun) -> PPOTrainer | None:
    """Check the configuration, train, and print a summary; problems are raised before anything is started.

    Returns:
        The trainer after the run; None for a dry run.
    """
    flags = with_policy_folder(flags)
    setting = check(flags)
    if flags.run.dry_run:
        if launched_rank() == 0:
            print(ppo_report(flags, setting))
        return None
    quiet_libraries()
    signals, modules = StopSignals(), modules_with_suites(flags.custom)
    with (
        signals.caught(),
        start_workers(flags.run.num_envs, setting.played_env, setting.tasks[0], modules, flags.workers) as pool,
        ExitStack() as stack,
    ):
        seed_everything(flags.run.seed)  # LoRA adapters are initialized randomly
        with passing_note(f"loading {flags.policy.pretrain}"):
            models = load_models(flags, setting)
            strategy = DeepspeedStrategy(flags.strategy, seed=flags.run.seed)
        save_path = Path(flags.run.save_path)
        stack.enter_context(claimed_run_folder(save_path, strategy, flags.ckpt_path))
        stack.enter_context(outlook(lambda: newest_checkpoint(flags)))
        if strategy.is_main and not _evaluates_a_checkpoint(flags):  # otherwise keep the records of the training run
            write_json(save_path / RUN_FILE, describe(flags, setting))
            write_config_file(save_path, list(flags.groups.values()))
        plan = RewardPlan.from_config(flags.rewards, flags.success)
        waits = waits_on_host(flags.strategy, flags.optimization)
        tie_to_learner(plan, flags.algorithm, strategy.device, waits_on_host=waits, bf16=flags.strategy.bf16)
        parts = (plan, flags.rollout, setting.tasks, setting.state_input)
        rollout = RolloutEngine(pool, setting.played_env.env_kwargs(), *parts)
        demos = None
        if flags.optimization.ptx_demos is not None:
            demos = read_demonstrations(flags.optimization.ptx_demos, setting.env.camera_names)
        config = PPOConfig(
            flags.batch,
            flags.algorithm,
            flags.optimization,
            flags.schedule,
            flags.split,
            policy_record(flags, setting, demos),
            flags.filters,
            flags.correction,
            plan.weights,
            flags.guards,
        )
        folders = (save_path, flags.ckpt_path)
        trainer = PPOTrainer(models, strategy, rollout, setting.tasks, config, *folders, signals, demos)
        if flags.run.load_checkpoint:
            _resume(trainer, flags)
        trainer.logger.describe(list(flags.groups.values()))
        if trainer.iteration == 0:
            check_first_decisions(setting.checkpoint, models.actor, first_observations(pool, setting))
        if strategy.is_main and not flags.schedule.val_only:
            log.info(header(flags, setting, trainer))
        plan.start()
        unsaved = None
        try:
            trainer.fit()
        except SaveError as error:
            unsaved = error
        finally:
            plan.close()
        if strategy.is_main:
            _conclude(trainer, flags, save_path)
        strategy.barrier()
        if unsaved is not None:
            raise unsaved
    return trainer


def _resume(trainer: PPOTrainer, flags: PPORun) -> None:
    """Resume from the chosen checkpoint; without one, training starts afresh and an evaluation fails."""
    asked = flags.run.load_checkpoint
    resumed, alone = trainer.resume(asked if isinstance(asked, str) else None), _evaluates_a_checkpoint(flags)
    if alone and not resumed:  # all checkpoints turned out to be damaged
        raise ConfigError(_nothing_to_evaluate(flags))
    if resumed and trainer.strategy.is_main:
        what = "evaluating the checkpoint" if alone else "continuing"
        log.info(f"{what} after iteration {trainer.iteration} of {flags.batch.iterations}")


def header(flags: PPORun, setting: CheckedRun, trainer: PPOTrainer) -> str:
    """What is trained, from where, on what, for how long, and what ends the run."""
    batch, schedule, algorithm = flags.batch, flags.schedule, flags.algorithm
    trained, all_weights = trainable_and_all(trainer.algorithm.actor.module)
    weights = f"{count(all_weights)} parameters" + ("" if trained == all_weights else f", {count(trained)} trained")
    method = algorithm.algorithm
    if method == "ppo":
        method = f"{algorithm.advantage_estimator} advantages, {algorithm.policy_loss} loss"
    method += f", KL {algorithm.init_kl_coef:g} to the start" if learner_needs_reference(algorithm) else ""
    names = [task.name for task in setting.tasks]
    tasks = names[0] if len(names) == 1 else f"{len(names)} tasks"
    states = sum(len(flags.split.train_states(task)) for task in setting.tasks)
    rewards = ", ".join(f"{name} x {weight:g}" for name, weight in trainer.config.reward_weights().items())
    groups = f"{batch.rollout_batch_size} states"
    groups += f" x {batch.n_samples_per_prompt} episodes" if batch.n_samples_per_prompt > 1 else ""
    every = f"every {schedule.eval_steps} iterations and at the end" if schedule.eval_steps else "at the end"
    held = f"{schedule.eval_episodes * len(names)} {flags.split.protocol_name} episodes"
    start = "before training, " if schedule.val_before_train else ""
    end = f"after iteration {batch.iterations}"
    if schedule.early_stopping:
        end += f", or once success reaches {100 * schedule.early_stop_success:g} % (by {schedule.early_stop_by})"
    rows = {
        "policy": f"{flags.policy.pretrain} ({weights})",
        "method": method,
        "task": f"{setting.env.suite}, {tasks}, {states:,} initial states; success told by {setting.success_source}",
        "reward": rewards,
        "episodes": f"{batch.episodes_per_iteration * batch.iterations:,} = {batch.iterations} iterations of {groups}",
        "evaluation": f"{start}{every}, on {held}",
        "end": f"{end}; the duration is known after the first iteration",
        "folder": flags.run.save_path,
    }
    return "training\n" + "\n".join(f"  {name:<10} {text}" for name, text in rows.items())


def newest_checkpoint(flags: PPORun) -> str:
    """How to go on after a run that ends without saving another checkpoint."""
    if flags.schedule.val_only:
        return f"nothing was changed; evaluate again with: {resume_command(sys.argv, trains=False)}"
    checkpoints = list_checkpoints(flags.ckpt_path)
    if not checkpoints:
        return f"{flags.ckpt_path} holds no checkpoint; {STARTS_ANEW}"
    return f"the newest checkpoint is {checkpoints[-1]}; continue with: {resume_command(sys.argv)}"


def _conclude(trainer: PPOTrainer, flags: PPORun, save_path: Path) -> None:
    evaluations = [{"iteration": iteration, **result.as_dict()} for iteration, result in trainer.evaluations]
    alone = _evaluates_a_checkpoint(flags)
    if alone:
        evaluations = _merged(evaluations, save_path / EVALUATIONS_FILE)

    def write() -> None:
        if not alone:
            write_json(save_path / "totals.json", trainer.totals)
        write_json(save_path / EVALUATIONS_FILE, evaluations)
        if not flags.schedule.val_only:
            save_learning_curve(save_path)

    Expendable(f"the summary in {save_path}").attempt(write)
    print(closing_words(trainer, save_path))


def _merged(evaluations: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """The evaluations in a file, by iteration, with the last of `evaluations` and what else the file lacks."""
    merged = {entry["iteration"]: entry for entry in evaluations}
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # no file, or a damaged one
        recorded = json.loads(file.read_text(encoding="utf-8"))
        merged |= {int(entry["iteration"]): entry for entry in recorded}
    merged[evaluations[-1]["iteration"]] = evaluations[-1]
    return [merged[iteration] for iteration in sorted(merged)]


def closing_words(trainer: PPOTrainer, save_path: Path) -> str:
    """The summary of a run: all evaluations, totals, and the command to run next."""
    rows = [
        (iteration, result.success_at_end.n, result.success_at_end, result.success_once, f"{result.mean_length:.1f}")
        for iteration, result in trainer.evaluations
    ]
    last = trainer.evaluations[-1][1]
    protocol = f"{last.protocol}; {last.told_by}"
    totals, how = trainer.totals, _how_evaluated(trainer)
    evaluations = table(("iteration", "n", "success at end [95 %]", "success once [95 %]", "steps"), rows)
    if trainer.config.schedule.val_only:
        return f"{evaluations}\n({how}, protocol {protocol}; nothing was trained)"
    return "\n".join(
        [
            evaluations,
            f"({how}, protocol {protocol}; {totals['episodes']:.0f} episodes, {totals['env_steps']:.0f} env steps, "
            f"{duration(totals['seconds'])} of training)",
            f"curves: tensorboard --logdir {save_path} (picture: {save_path / CURVE_FILE})"
            if trainer.config.schedule.use_tensorboard
            else f"curves: {save_path / CURVE_FILE}",
            f"next: python cli/eval_vla.py --pretrain {trainer.exported} --report {save_path / 'report'}"
            + words_for_later_commands(),
        ]
    )


def _how_evaluated(trainer: PPOTrainer) -> str:
    schedule, result = trainer.config.schedule, trainer.evaluations[-1][1]
    if result.greedy:
        return "greedy"
    how = f"sampled at temperature {schedule.eval_temperature:g}"
    if result.pass_at_k is None:
        return how
    return f"{how}, {result.samples} episodes per state: pass@{result.samples} {result.pass_at_k}"
