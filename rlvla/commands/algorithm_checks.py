"""Checks of batch sizes and algorithm settings of a PPO run, made before anything is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlvla.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rlvla.algorithms.columns import LEVEL_ORDER
from rlvla.commands.runs.checks import length_problems, rank_problems
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import SplitConfig
from rlvla.options import flag_values, options_of
from rlvla.rewards.base import REWARDS
from rlvla.rewards.config import REWARD_MODEL
from rlvla.rewards.overlong import OVERLONG
from rlvla.rollout.config import TaskSamplingConfig
from rlvla.trainer.algorithm import make_sampler
from rlvla.trainer.algorithm_config import LEARNERS, AlgorithmConfig
from rlvla.trainer.config import LoopBatchConfig, ScheduleConfig
from rlvla.trainer.group_collector import EPISODE_METRICS
from rlvla.trainer.guards import EARLY_STOP_EPISODES
from rlvla.utils.cli.flags import is_set, no_effect
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.deepspeed.strategy import has_accelerator
from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun


def sampler_problems(batch: LoopBatchConfig, tasks: Sequence[TaskSpec], split: SplitConfig, seed: int) -> list[Problem]:
    """Settings of the task sampler without effect or that contradict, weights that do not fit, an unusable class."""
    own, curriculum, problems = batch.task_sampler is not None, batch.task_sampling != "uniform", []
    if own and batch.task_weights:
        text = "--task_weights: --task_sampler chooses the tasks by itself; leave one of them out"
        problems.append(Problem("task_weights", "contradiction", text))
    if own and curriculum:
        text = (
            f"--task_sampling {batch.task_sampling}: --task_sampler chooses the tasks by itself; leave one of them out"
        )
        problems.append(Problem("task_sampling", "contradiction", text))
    if curriculum and len(tasks) == 1:
        problems.append(no_effect("task_sampling", batch.task_sampling, "there is only one task"))
    try:
        make_sampler(batch, tasks, split, seed)
    except ConfigError as error:
        problems += error.problems
    return problems


def task_problems(algorithm: AlgorithmConfig, tasks: Sequence[TaskSpec]) -> list[Problem]:
    """Settings that need several tasks."""
    if algorithm.whiten_per_task and len(tasks) == 1:
        return [no_effect("whiten_per_task", True, "there is only one task")]
    return []


def early_stopping_problems(
    schedule: ScheduleConfig, num_tasks: int, sampling: TaskSamplingConfig | None = None
) -> list[Problem]:
    """Settings with which early stopping can never happen, or that have no effect, and a window without a spread.

    Args:
        schedule: the settings.
        num_tasks: number of tasks that are evaluated.
        sampling: how tasks and states are chosen; sampled success is not to be judged by the difficulty of those.
    """
    problems = (
        [
            Problem(
                "plateau_iterations",
                "too_few",
                "--plateau_iterations 1: one iteration has no spread to compare with; give at least 2, or 0 "
                "for no report",
            )
        ]
        if schedule.plateau_iterations == 1
        else []
    )

    if not schedule.early_stopping:
        return problems
    by = schedule.early_stop_by
    if by != "evaluations" and sampling is not None and sampling.favours_some:
        how = "--task_sampler" if sampling.task_sampler is not None else f"--task_sampling {sampling.task_sampling}"
        text = (
            f"--early_stop_by {by}: with {how} sampled success depends on what is chosen to be played; end"
            " by evaluations instead"
        )
        problems.append(Problem("early_stop_by", "contradiction", text))
    if by == "sampled":
        return problems
    if not schedule.eval_steps:
        text = "--early_stopping needs evaluations during training: give --eval_steps, or --early_stop_by sampled"
        problems.append(Problem("early_stopping", "needs_flag", text))
    if 0 < num_tasks * schedule.eval_episodes < EARLY_STOP_EPISODES:
        text = (
            f"--early_stopping needs evaluations of at least {EARLY_STOP_EPISODES} episodes: "
            f"--eval_episodes {schedule.eval_episodes} on {num_tasks} task(s) is too few"
        )
        problems.append(Problem("early_stopping", "too_few", text))
    return problems


def _near_divisors(number: int, wanted: int, ranks: int) -> list[int]:
    """The nearest divisors of a number below and above another one that are multiples of the number of ranks."""
    small = [n for n in range(1, min(math.isqrt(number), 10**5) + 1) if number % n == 0]
    fitting = [n for n in {*small, *(number // n for n in small)} if n % ranks == 0]
    below, above = [n for n in fitting if n < wanted], [n for n in fitting if n > wanted]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def batch_problems(flags: PPORun) -> list[Problem]:
    """Batch sizes that do not divide each other, and lengths that leave nothing to train."""
    batch = flags.batch
    if batch.train_batch_size < 1 or batch.rollout_batch_size < 1 or batch.n_samples_per_prompt < 1:
        return []  # already reported
    problems, episodes = rank_problems(flags), batch.episodes_per_iteration
    if episodes % batch.train_batch_size:
        near = " or ".join(map(str, _near_divisors(episodes, batch.train_batch_size, launched_world_size())))
        text = (
            f"--train_batch_size {batch.train_batch_size} must divide the episodes of an iteration, "
            f"rollout_batch_size x n_samples_per_prompt = {episodes}{f'; give {near}' if near else ''}"
        )
        problems.append(Problem("train_batch_size", "does_not_divide", text))
    problems += length_problems(flags)
    frozen = flags.optimization.freezing_actor_steps
    if flags.algorithm.needs_critic and frozen and frozen >= batch.iterations and not flags.schedule.val_only:
        text = (
            f"--freezing_actor_steps {frozen}: the run has {batch.iterations} iterations, so the actor "
            "would never be trained; lower it or raise --num_episodes"
        )
        problems.append(Problem("freezing_actor_steps", "contradiction", text))
    return problems


def learner_problems(flags: PPORun) -> list[Problem]:
    """Flags that the learner does not read (`Algorithm.unread`), and its own checks."""
    algorithm, learner = flags.algorithm, LEARNERS.get(flags.algorithm.algorithm)
    fields = {f.name: (f, value) for group in flags.groups.values() for f, value in flag_values(group)}
    unread = set(learner.unread)
    if "policy_loss" in unread and algorithm.loss_options is not None:
        unread |= {field.name for field, _ in flag_values(algorithm.loss_options)}
    why = f"--algorithm {algorithm.algorithm} does not use it"
    return [
        *(no_effect(name, fields[name][1], why) for name in sorted(unread) if is_set(*fields[name], flags.given)),
        *learner.problems(algorithm, flags.strategy),
    ]


def algorithm_problems(flags: PPORun) -> list[Problem]:
    """Settings of estimator, loss, KL, filters and correction that contradict each other or have no effect."""
    return [
        *_offload_problems(flags),
        *_group_problems(flags),
        *_range_problems(flags),
        *_kl_problems(flags.algorithm),
        *_step_problems(flags),
        *learner_problems(flags),
    ]


def _offload_problems(flags: PPORun) -> list[Problem]:
    flag, problems = "offload_during_rollout", []
    if not flags.optimization.offload_during_rollout:
        return []
    if flags.strategy.engine_stage == 0:
        problems.append(Problem(flag, "needs_flag", f"--{flag} needs --zero_stage 1, 2 or 3"))
    if flags.strategy.adam_offload:
        text = f"--{flag}: --adam_offload keeps optimizer states in host memory all the time; choose one"
        problems.append(Problem(flag, "contradiction", text))
    if not has_accelerator():
        text = f"--{flag} moves memory from an accelerator to the host, and there is no accelerator; leave it out"
        problems.append(Problem(flag, "unavailable", text))
    return problems


def _group_problems(flags: PPORun) -> list[Problem]:
    algorithm, n, problems = flags.algorithm, flags.batch.n_samples_per_prompt, []
    parameters, estimator = algorithm.estimator_parameters, algorithm.advantage_estimator
    if "group_ids" in parameters and n < 2 and not ADVANTAGE_ESTIMATORS.attribute(estimator, "allows_singletons"):
        text = (
            f"--advantage_estimator {estimator} compares the episodes of a group: --n_samples_per_prompt "
            f"{n} must be at least 2"
        )
        problems.append(Problem("advantage_estimator", "too_few", text))
    advantage_level, level = algorithm.advantage_level, algorithm.log_prob_level
    if not algorithm.one_advantage_per_episode and LEVEL_ORDER[advantage_level] < LEVEL_ORDER[level]:
        text = (
            f"--log_prob_level {level} sums over several advantages of --advantage_level "
            f"{advantage_level}; choose the advantage level at least as coarse"
        )
        problems.append(Problem("log_prob_level", "contradiction", text))
    if flags.filters.filter_zero_variance and n < 2:
        text = f"--filter_zero_variance drops every group of --n_samples_per_prompt {n}; give at least 2"
        problems.append(Problem("filter_zero_variance", "too_few", text))
    return problems


def _range_problems(flags: PPORun) -> list[Problem]:
    """Names and values that do not fit those of other flags."""
    algorithm, filters, correction, problems = flags.algorithm, flags.filters, flags.correction, []
    if (correction.rollout_is, correction.rollout_is_level) == ("seq_mask_tis", "sequence"):
        text = "--rollout_is seq_mask_tis weighs tokens and masks decisions; leave out --rollout_is_level"
        problems.append(Problem("rollout_is", "contradiction", text))
    if filters.filter_metric is not None and not _is_episode_metric(flags, filters.filter_metric):
        sources = ", ".join([*EPISODE_METRICS, *_reward_names(flags), "<source>_<number>"])
        text = f"--filter_metric {filters.filter_metric}: episodes have no such number; they have {sources}"
        problems.append(Problem("filter_metric", "unknown_name", text))
    if filters.filter_metric is not None and not filters.filter_metric_range:
        text = f"--filter_metric {filters.filter_metric} needs --filter_metric_range LOW HIGH"
        problems.append(Problem("filter_metric", "needs_flag", text))
    if "component_rewards" in algorithm.estimator_parameters:
        estimator = algorithm.advantage_estimator
        if algorithm.normalize_reward:
            text = f"--normalize_reward: {estimator} normalizes each component of the reward by itself; leave it out"
            problems.append(Problem("normalize_reward", "contradiction", text))
        if algorithm.reward_clip_range:
            text = (
                f"--reward_clip_range: {estimator} uses the components of the reward rather than their sum, which "
                "would be clipped; leave it out"
            )
            problems.append(Problem("reward_clip_range", "contradiction", text))
    return problems


def _reward_names(flags: PPORun) -> list[str]:
    rewards = flags.rewards
    names = [spec.partition(":")[0] for spec in rewards.reward]
    names += [REWARD_MODEL] if rewards.reward_pretrain is not None else []
    return names + ([OVERLONG] if options_of(rewards, REWARDS, OVERLONG).overlong_buffer_len else [])


def _is_episode_metric(flags: PPORun, name: str) -> bool:
    """Whether episodes may have the number; what a source reports is known only when it does."""
    return name in EPISODE_METRICS or any(
        name == source or name.startswith(f"{source}_") for source in _reward_names(flags)
    )


def _kl_problems(algorithm: AlgorithmConfig) -> list[Problem]:
    weight, problems = algorithm.init_kl_coef, []
    if not weight:
        return []
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        text = "--use_kl_in_reward and --use_kl_loss penalize the same KL twice; choose one"
        problems.append(Problem("use_kl_in_reward", "contradiction", text))
    if not algorithm.kl_in_reward and not algorithm.kl_in_loss:
        text = f"--no-use_kl_in_reward: --init_kl_coef {weight} would have no effect; give --use_kl_loss, or no weight"
        problems.append(Problem("use_kl_in_reward", "needs_flag", text))
    kind = algorithm.kl_estimator
    if algorithm.kl_in_reward and kind.endswith("+"):
        text = (
            f"--kl_estimator {kind}: the suffix + changes the gradient, and a KL in the reward has none; "
            f"give {kind[:-1]}, or --use_kl_loss"
        )
        problems.append(Problem("kl_estimator", "contradiction", text))
    if algorithm.kl_in_reward and "component_rewards" in algorithm.estimator_parameters:
        text = (
            f"--init_kl_coef {weight}: {algorithm.advantage_estimator} uses the components of the reward "
            "rather than their sum, from which the KL is subtracted; give --use_kl_loss"
        )
        problems.append(Problem("init_kl_coef", "contradiction", text))
    return problems


def _step_problems(flags: PPORun) -> list[Problem]:
    """Options of the actor's steps: early end of an iteration, moving average, demonstrations."""
    optimization, batch, problems = flags.optimization, flags.batch, []
    if optimization.target_kl is not None and batch.max_epochs * batch.episodes_per_iteration <= batch.train_batch_size:
        text = (
            f"--target_kl {optimization.target_kl}: an iteration has only one optimizer step, so there is "
            "none to skip; raise --max_epochs or lower --train_batch_size"
        )
        problems.append(Problem("target_kl", "no_effect", text))
    if optimization.ema_beta and flags.strategy.zero_stage == 3:
        text = f"--ema_beta {optimization.ema_beta} needs whole parameters on every rank: --zero_stage 0, 1 or 2"
        problems.append(Problem("ema_beta", "contradiction", text))
    if optimization.use_ema and not optimization.ema_beta:
        problems.append(
            Problem("use_ema", "needs_flag", "--use_ema: there is no moving average; give --ema_beta, for example 0.99")
        )
    if bool(optimization.ptx_coef) != (optimization.ptx_demos is not None):
        problems.append(
            Problem("ptx_coef", "needs_flag", "--ptx_coef and --ptx_demos belong together: give both or neither")
        )
    if flags.actor.lora_dropout:
        text = (
            f"--lora_dropout {flags.actor.lora_dropout}: rollouts and updates must score an action alike, "
            "and dropout would change every probability ratio; use it in train_sft_vla.py, and leave it "
            "out here"
        )
        problems.append(Problem("lora_dropout", "contradiction", text))
    return problems + _saving_problems(flags)


def _saving_problems(flags: PPORun) -> list[Problem]:
    """Where the critic starts from, what is exported, and how often a state is evaluated."""
    run, problems = flags.run, []
    if run.critic_from == "rm_model" and run.critic_pretrain is not None:
        text = "--critic_from rm_model: the critic would also start from --critic_pretrain; choose one"
        problems.append(Problem("critic_from", "contradiction", text))
    if run.critic_from == "rm_model" and flags.algorithm.needs_critic and flags.critic_folder is None:
        text = (
            "--critic_from rm_model: the run has no reward model; give --reward_pretrain, or --reward "
            "rm_model with --rm_model_path"
        )
        problems.append(Problem("critic_from", "needs_flag", text))
    if flags.schedule.save_hf_ckpt and not flags.schedule.save_steps:
        text = "--save_hf_ckpt exports policies with the checkpoints; give --save_steps"
        problems.append(Problem("save_hf_ckpt", "needs_flag", text))
    if flags.schedule.eval_samples > 1 and not flags.schedule.eval_temperature:
        text = (
            f"--eval_samples {flags.schedule.eval_samples}: greedy episodes of an initial state are all "
            "alike; give --eval_temperature"
        )
        problems.append(Problem("eval_samples", "needs_flag", text))
    return problems
