"""Running `cli/train_ppo_vla.py`: checks, models, workers, trainer, and the final summary."""

from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rlvla.checkpoints.checks import check_first_decisions
from rlvla.checkpoints.policy_folder import PolicyRecord, learned_states, recorded_environment
from rlvla.checkpoints.run_folder import RUN_FILE, claimed_run_folder
from rlvla.checkpoints.training import list_checkpoints
from rlvla.commands.custom_modules import modules_with_suites, words_for_later_commands
from rlvla.commands.dry_run import ppo_report
from rlvla.commands.load_models import load_models
from rlvla.commands.ppo_checks import _evaluates_a_checkpoint, _nothing_to_evaluate, check, describe
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.setup import CheckedRun, first_observations, start_workers
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import read_demonstrations
from rlvla.envs.splits import LearnedStates
from rlvla.evaluation.statistics import interval_of_metrics
from rlvla.rewards import RewardPlan
from rlvla.rollout import RolloutEngine
from rlvla.trainer.config import PPOConfig
from rlvla.trainer.ppo_trainer import PPOTrainer
from rlvla.trainer.reward_sources import tie_to_learner, waits_on_host
from rlvla.utils.cli.command import STARTS_ANEW
from rlvla.utils.cli.config_file import write_config_file
from rlvla.utils.deepspeed.config import launched_rank
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.disk import Expendable
from rlvla.utils.ending import outlook
from rlvla.utils.errors import ConfigError, SaveError
from rlvla.utils.files import read_metrics, write_atomic, write_json
from rlvla.utils.seeding import seed_everything
from rlvla.utils.stopping import StopSignals, resume_command
from rlvla.utils.terminal import duration, log, passing_note, quiet_libraries, table

CURVE_FILE = "learning_curve.png"
EVALUATIONS_FILE = "evaluations.json"


def run_ppo(flags: PPORun) -> PPOTrainer | None:
    """Check the configuration, train, and print a summary; problems are raised before anything is started.

    Returns:
        The trainer after the run; None for a dry run.
    """
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
            _record(flags, setting, demos),
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


def newest_checkpoint(flags: PPORun) -> str:
    """How to go on after a run that ends without saving another checkpoint."""
    if flags.schedule.val_only:
        return f"nothing was changed; evaluate again with: {resume_command(sys.argv, trains=False)}"
    checkpoints = list_checkpoints(flags.ckpt_path)
    if not checkpoints:
        return f"{flags.ckpt_path} holds no checkpoint; {STARTS_ANEW}"
    return f"the newest checkpoint is {checkpoints[-1]}; continue with: {resume_command(sys.argv)}"


def _record(flags: PPORun, setting: CheckedRun, demos: Demonstrations | None) -> PolicyRecord:
    """The record of the trained policy, with the initial states of this run, the checkpoint and the demonstrations."""
    before = learned_states(recorded_environment(flags.policy.pretrain)) or []
    now = [(task, flags.split.train_states(task)) for task in setting.tasks]
    trained = [LearnedStates(task.suite, task.task_id, states.start, states.stop) for task, states in now]
    machine_state = setting.state_input.settings if setting.state_input else None
    demonstrated = demos.states_learned_from if demos is not None else []
    return PolicyRecord(setting.env, (*before, *trained, *demonstrated), machine_state)


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


def save_learning_curve(folder: Path) -> Path | None:
    """Plot success (rollout, and evaluation with 95 % interval) and entropy over episodes; None without metrics."""
    records = read_metrics(folder)
    if not records:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, sharex=True, figsize=(11, 4), constrained_layout=True)
    played = [r for r in records if "rollout/success_at_end" in r]
    if played:
        x = [r["total/episodes"] for r in played]
        left.plot(x, [r["rollout/success_at_end"] for r in played], color="tab:blue", label="rollout (sampled)")
    updated = [r for r in played if "actor/entropy" in r]  # missing while only the critic is trained
    if updated:
        right.plot([r["total/episodes"] for r in updated], [r["actor/entropy"] for r in updated], color="tab:green")
    evaluated = [r for r in records if "eval/success_at_end" in r]
    if evaluated:
        x = [r["total/episodes"] for r in evaluated]
        y = [r["eval/success_at_end"] for r in evaluated]
        bounds = [interval_of_metrics(record) for record in evaluated]
        errors = [[v - low for v, (low, _) in zip(y, bounds)], [high - v for v, (_, high) in zip(y, bounds)]]
        left.errorbar(x, y, yerr=errors, fmt="o-", capsize=3, color="tab:red", label="evaluation, 95 %")
    left.set(xlabel="training episodes", ylabel="success at end", ylim=(0, 1.02), title="success")
    left.grid(alpha=0.3)
    left.legend(loc="best")
    right.set(xlabel="training episodes", ylabel="nats per token", title="entropy of the policy")
    right.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    write_atomic(folder / CURVE_FILE, buffer.getvalue())
    return folder / CURVE_FILE
