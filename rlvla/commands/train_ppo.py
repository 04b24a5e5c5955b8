"""Running `cli/train_ppo_vla.py`: checks, models, workers, trainer, and the final summary."""

from __future__ import annotations

from contextlib import ExitStack

from rlvla.checkpoints.policy_folder import check_first_decisions
from rlvla.commands.dry_run import ppo_report
from rlvla.commands.load_models import load_models
from rlvla.commands.ppo_checks import check
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.run_policies import policy_record, read_ptx_demos, with_policy_folder
from rlvla.commands.runs.asynchronous import correction_of
from rlvla.commands.runs.training import begin, run_folder, started, train
from rlvla.commands.setup import CheckedRun, first_observations
from rlvla.rewards import RewardPlan
from rlvla.rollout import RolloutEngine
from rlvla.trainer.algorithm_config import learner_needs_reference
from rlvla.trainer.config import PPOConfig
from rlvla.trainer.ppo_trainer import PPOTrainer
from rlvla.trainer.progress.report import trainable_and_all
from rlvla.trainer.reward_sources import configure_for_learner, waits_on_host
from rlvla.utils.deepspeed.config import launched_rank
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import count, header, passing_note


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
    with started(flags, setting) as pool, ExitStack() as stack:
        with passing_note(f"loading {flags.policy.pretrain}"):
            models = load_models(flags, setting)
            strategy = DeepspeedStrategy(flags.strategy, seed=flags.run.seed)
        save_path = stack.enter_context(run_folder(flags, setting, strategy))
        plan = RewardPlan.from_config(flags.rewards, flags.success)
        waits = waits_on_host(flags.strategy, flags.optimization)
        configure_for_learner(plan, flags.algorithm, strategy.device, waits_on_host=waits, bf16=flags.strategy.bf16)
        rollout = RolloutEngine(
            pool,
            setting.played_env.env_kwargs(),
            plan,
            flags.rollout,
            tasks=setting.tasks,
            state_input=setting.state_input,
            policy_proprio=setting.policy_proprio,
            instructions=setting.instructions,
        )
        demos = read_ptx_demos(flags, setting)
        config = PPOConfig(
            batch=flags.batch,
            algorithm=flags.algorithm,
            optimization=flags.optimization,
            schedule=flags.schedule,
            split=flags.split,
            record=policy_record(flags.policy.pretrain, flags.split, setting, demos),
            filters=flags.filters,
            correction=correction_of(flags),
            reward_weights=plan.weights,
            guards=flags.guards,
            asynchronous=flags.asynchronous,
            backend=flags.backend_setup(setting),
        )
        trainer = PPOTrainer(
            models,
            strategy,
            rollout,
            setting.tasks,
            config=config,
            save_path=save_path,
            ckpt_path=flags.ckpt_path,
            demos=demos,
        )
        stack.callback(trainer.player.close)  # also if the run fails before its first iteration
        begin(trainer, flags)
        if trainer.iteration == 0:
            check_first_decisions(setting.checkpoint, models.actor, first_observations(pool, setting))
        train(trainer, flags, plan, describe_run(flags, setting, trainer))
    return trainer


def describe_run(flags: PPORun, setting: CheckedRun, trainer: PPOTrainer) -> str:
    """Header of the run: policy, method, task, reward, length, evaluation, end."""
    batch, schedule, algorithm = flags.batch, flags.schedule, flags.algorithm
    trained, all_weights = trainable_and_all(trainer.algorithm.actor.module)
    weights = f"{count(all_weights)} parameters" + ("" if trained == all_weights else f", {count(trained)} trained")
    method = algorithm.algorithm
    if method == "ppo":
        method = f"{algorithm.advantage_estimator} advantages, {algorithm.policy_loss} loss"
        method += ", critic on privileged state" if setting.privileged else ""
    method += f", KL {algorithm.init_kl_coef:g} to the start" if learner_needs_reference(algorithm) else ""
    ahead = flags.asynchronous
    if ahead.plays_ahead:
        method += f", episodes played up to {ahead.max_staleness} iteration{'s'[: ahead.max_staleness > 1]} ahead"
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
        threshold, last = f"{100 * schedule.early_stop_success:g} %", f"{schedule.early_stop_iterations} iterations"
        evaluated, sampled = (
            f"an evaluation reaches {threshold}",
            f"the lower 95 % bound of sampled success over {last} reaches {threshold}",
        )
        by = {"evaluations": evaluated, "sampled": sampled}
        end += f", or once {by.get(schedule.early_stop_by, f'{evaluated}, or {sampled}')}"
    rows = {
        "policy": f"{flags.policy.pretrain} ({weights})",
        "method": method,
        "task": f"{setting.env.suite}, {tasks}, {states:,} initial states; success detector: {setting.success_source}",
        "reward": rewards,
        "episodes": f"{batch.episodes_per_iteration * batch.iterations:,} = {batch.iterations} iterations of {groups}",
        "evaluation": f"{start}{every}, on {held}",
        "end": f"{end}; the duration is known after the first iteration",
        "ranks": f"{trainer.strategy.described}, with {flags.run.num_envs} environments each",
        "folder": flags.run.save_path,
    }
    return header("training", rows)
