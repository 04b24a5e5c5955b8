"""Checks of batch sizes and algorithm settings of a PPO run, made before anything is started."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rlvla.algorithms.columns import LEVEL_ORDER
from rlvla.commands.policy_checks import wandb_problems
from rlvla.commands.problem_texts import problem, unread
from rlvla.commands.runs.checks import length_problems, rank_problems
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import SplitConfig
from rlvla.rewards.config import OVERLONG, REWARD_MODEL
from rlvla.rollout.config import TaskSamplingConfig
from rlvla.trainer.algorithm import make_sampler
from rlvla.trainer.algorithm_config import ONE_ADVANTAGE_PER_EPISODE, AlgorithmConfig, learner_scores
from rlvla.trainer.config import BatchConfig, ScheduleConfig
from rlvla.trainer.group_collector import EPISODE_METRICS
from rlvla.trainer.guards import EARLY_STOP_EPISODES
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.deepspeed.strategy import has_accelerator
from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun

# Flag -> the argument of the estimator or loss that it sets.
_ESTIMATOR_FLAGS = {
    "gamma": "gamma",
    "lambd": "lam",
    "norm_adv_by_std": "norm_by_std",
    "singleton": "singleton",
    "f_norm": "f_norm",
    "handle_zero_tail": "handle_zero_tail",
}
_LOSS_FLAGS = {
    "eps_clip": "clip_low",
    "eps_clip_low_high": "clip_low",
    "eps_clip_dual": "clip_dual",
    "tau_pos": "tau_pos",
    "tau_neg": "tau_neg",
    "beta": "beta",
    "cov_ratio": "cov_ratio",
    "cov_low": "cov_low",
    "cov_high": "cov_high",
    "kl_cov_coef": "kl_coef",
    "denoising_gamma": "denoising_gamma",
    "denoising_clip": "denoising_clip",
    "fpo_clip": "fpo_clip",
}
_NFT_FLAGS = ("nft_beta", "nft_reward", "nft_clip", "nft_rollout_decay")
# What `--algorithm nft` does not use, besides what belongs to a critic.
_NOT_OF_NFT = {
    "algorithm": (
        *("policy_loss", *_LOSS_FLAGS, "log_prob_level", "loss_agg_mode", "loss_horizon"),
        *("entropy_loss_coef", "init_kl_coef"),
    ),
    "correction": ("rollout_is", "rollout_rs"),
}
_CRITIC_FLAGS = {
    "algorithm": ("bootstrap_truncated", "value_clip", "normalize_values", "share_backbone"),
    "run": ("critic_pretrain", "critic_from"),
    "optimization": ("critic_learning_rate", "freezing_actor_steps"),
    "schedule": ("save_value_network",),
}
# Flags of a separate critic, which do not apply to a value head on the actor's backbone.
_SEPARATE_CRITIC_FLAGS = {
    "run": ("critic_pretrain", "critic_from"),
    "optimization": ("critic_learning_rate", "freezing_actor_steps"),
    "schedule": ("save_value_network",),
}
_KL_FLAGS = ("kl_estimator", "use_kl_in_reward", "use_kl_loss", "kl_target", "kl_horizon")
_FILTER_FLAGS = ("oversample_factor", "max_group_staleness", "max_rollout_rounds")
_IS_FLAGS = ("rollout_is_level", "rollout_is_low", "rollout_is_high", "rollout_is_batch_normalize")
_RS_FLAGS = ("rollout_rs_level", "rollout_rs_low", "rollout_rs_high")


def sampler_problems(batch: BatchConfig, tasks: Sequence[TaskSpec], split: SplitConfig, seed: int) -> list[Problem]:
    """Settings of the task sampler without effect or that contradict, weights that do not fit, an unusable class."""
    own, curriculum, problems = batch.task_sampler is not None, batch.task_sampling != "uniform", []
    if own and batch.task_weights:
        problems.append(problem("task_weights", "contradiction"))
    if own and curriculum:
        problems.append(problem("task_sampling", "contradiction", value=batch.task_sampling))
    for name in () if curriculum else ("task_sampling_floor", "task_success_horizon"):
        if (value := getattr(batch, name)) != getattr(TaskSamplingConfig(), name):
            problems.append(unread(name, as_typed(name, value), "curriculum"))
    if curriculum and len(tasks) == 1:
        problems.append(unread("task_sampling", as_typed("task_sampling", batch.task_sampling), "one task"))
    try:
        make_sampler(batch, tasks, split, seed)
    except ConfigError as error:
        problems += error.problems
    return problems


def task_problems(algorithm: AlgorithmConfig, tasks: Sequence[TaskSpec]) -> list[Problem]:
    """Settings that need several tasks."""
    if algorithm.whiten_per_task and len(tasks) == 1:
        return [unread("whiten_per_task", "--whiten_per_task", "one task")]
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
    problems = [problem("plateau_iterations", "too_few")] if schedule.plateau_iterations == 1 else []

    def changed(*names: str) -> dict[str, str]:
        """Those flags that were given, as typed."""
        values = {name: getattr(schedule, name) for name in names}
        return {name: as_typed(name, v) for name, v in values.items() if v != getattr(ScheduleConfig(), name)}

    if not schedule.early_stopping:
        given = changed("early_stop_success", "early_stop_evaluations", "early_stop_by", "early_stop_iterations")
        return problems + [unread(name, typed, "switch", switch="early_stopping") for name, typed in given.items()]
    by = schedule.early_stop_by
    other = {"evaluations": "early_stop_iterations", "sampled": "early_stop_evaluations"}
    given = changed(other[by]) if by in other else {}
    problems += [unread(name, typed, "other early end", by=by) for name, typed in given.items()]
    if by != "evaluations" and sampling is not None and sampling.favours_some:
        how = "--task_sampler" if sampling.task_sampler is not None else f"--task_sampling {sampling.task_sampling}"
        problems.append(problem("early_stop_by", "contradiction", value=by, how=how))
    if by == "sampled":
        return problems
    if not schedule.eval_steps:
        problems.append(problem("early_stopping", "needs_flag"))
    if 0 < num_tasks * schedule.eval_episodes < EARLY_STOP_EPISODES:
        amounts = {"least": EARLY_STOP_EPISODES, "episodes": schedule.eval_episodes, "tasks": num_tasks}
        problems.append(problem("early_stopping", "too_few", **amounts))
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
        values = {"value": batch.train_batch_size, "episodes": episodes, "near": f"; give {near}" if near else ""}
        problems.append(problem("train_batch_size", "does_not_divide", **values))
    problems += length_problems(flags)
    frozen = flags.optimization.freezing_actor_steps
    if flags.algorithm.needs_critic and frozen and frozen >= batch.iterations and not flags.schedule.val_only:
        problems.append(problem("freezing_actor_steps", "contradiction", value=frozen, iterations=batch.iterations))
    return problems


def nft_problems(flags: PPORun) -> list[Problem]:
    """Settings that `--algorithm nft` does not have; its own, with another learner."""
    algorithm, unread_flags = flags.algorithm, _Unread(flags)
    learner = {"algorithm": algorithm.algorithm}
    if algorithm.algorithm != "nft":
        unread_flags.check("algorithm", _NFT_FLAGS, True, "learner", **learner)
        return unread_flags.problems
    for group, names in _NOT_OF_NFT.items():
        unread_flags.check(group, names, True, "learner", **learner)
    unread_flags.check("algorithm", ["nft_clip", "whiten_per_task"], algorithm.nft_reward == "success", "success alone")
    unread_flags.check("optimization", ("ema_beta", "use_ema"), True, "own average", **learner)
    problems = unread_flags.problems
    if algorithm.needs_critic:
        value = algorithm.advantage_estimator
        problems.append(problem("advantage_estimator", "contradiction", value=value, **learner))
    if flags.strategy.zero_stage == 3:
        problems.append(problem("zero_stage", "contradiction", **learner))
    return problems


def algorithm_problems(flags: PPORun) -> list[Problem]:
    """Settings of estimator, loss, KL, filters and correction that contradict each other or have no effect."""
    return [
        *_offload_problems(flags),
        *_group_problems(flags),
        *_range_problems(flags),
        *_kl_problems(flags.algorithm),
        *_step_problems(flags),
        *_without_effect(flags),
        *nft_problems(flags),
    ]


def _offload_problems(flags: PPORun) -> list[Problem]:
    if not flags.optimization.offload_during_rollout:
        return []
    reasons = {
        "needs_flag": flags.strategy.engine_stage == 0,
        "contradiction": flags.strategy.adam_offload,
        "unavailable": not has_accelerator(),
    }
    return [problem("offload_during_rollout", reason) for reason, holds in reasons.items() if holds]


def _group_problems(flags: PPORun) -> list[Problem]:
    algorithm, n, problems = flags.algorithm, flags.batch.n_samples_per_prompt, []
    options, estimator = algorithm.estimator_options, algorithm.advantage_estimator
    # An estimator with the option `singleton` supports groups of one.
    if "group_ids" in options and "singleton" not in options and n < 2:
        problems.append(problem("advantage_estimator", "too_few", value=estimator, n=n))
    advantage_level, level = algorithm.advantage_level, algorithm.log_prob_level
    if estimator not in ONE_ADVANTAGE_PER_EPISODE and LEVEL_ORDER[advantage_level] < LEVEL_ORDER[level]:
        problems.append(problem("log_prob_level", "contradiction", value=level, advantage_level=advantage_level))
    if flags.filters.filter_zero_variance and n < 2:
        problems.append(problem("filter_zero_variance", "too_few", n=n))
    return problems


def _range_problems(flags: PPORun) -> list[Problem]:
    algorithm, correction, problems = flags.algorithm, flags.correction, []
    widths = algorithm.eps_clip_low_high
    # A lower width of 1 or more disables the lower bound, as in the paper on cispo.
    open_below = algorithm.policy_loss == "cispo" and len(widths) == 2 and widths[0] >= 1
    if widths and (len(widths) != 2 or (widths[0] > widths[1] and not open_below)):
        problems.append(problem("eps_clip_low_high", "out_of_range", value=" ".join(map(str, widths))))
    rising = algorithm.denoising_clip
    if len(rising) != 2 or rising[0] > rising[1]:
        problems.append(problem("denoising_clip", "out_of_range", value=" ".join(map(str, rising))))
    problems += _pair_problems(flags)
    bounds = (
        (algorithm, "cov_low", "cov_high"),
        (flags.filters, "accuracy_lower_bound", "accuracy_upper_bound"),
        (correction, "rollout_is_low", "rollout_is_high"),
        (correction, "rollout_rs_low", "rollout_rs_high"),
    )
    for group, lower, upper in bounds:
        low, high = getattr(group, lower), getattr(group, upper)
        if low > high:
            problems.append(problem(lower, "bounds_crossed", value=low, other=upper, bound=high))
    if (correction.rollout_is, correction.rollout_is_level) == ("seq_mask_tis", "sequence"):
        problems.append(problem("rollout_is", "contradiction"))
    return problems


def _pair_problems(flags: PPORun) -> list[Problem]:
    """Ranges given as two numbers, and what they belong to."""
    algorithm, filters, problems = flags.algorithm, flags.filters, []
    for name, pair in (
        ("reward_clip_range", algorithm.reward_clip_range),
        ("filter_metric_range", filters.filter_metric_range),
    ):
        if pair and (len(pair) != 2 or not pair[0] < pair[1]):
            problems.append(problem(name, "out_of_range", value=" ".join(map(str, pair))))
    if filters.filter_metric is not None and not _is_episode_metric(flags, filters.filter_metric):
        sources = ", ".join([*EPISODE_METRICS, *_reward_names(flags), "<source>_<number>"])
        problems.append(problem("filter_metric", "unknown_name", value=filters.filter_metric, known=sources))
    if filters.filter_metric is not None and not filters.filter_metric_range:
        problems.append(problem("filter_metric", "needs_flag", value=filters.filter_metric))
    if "component_rewards" in algorithm.estimator_options:
        for name, active in (
            ("normalize_reward", algorithm.normalize_reward),
            ("reward_clip_range", bool(algorithm.reward_clip_range)),
        ):
            if active:
                problems.append(problem(name, "contradiction", estimator=algorithm.advantage_estimator))
    return problems


def _reward_names(flags: PPORun) -> list[str]:
    rewards = flags.rewards
    names = [spec.partition(":")[0] for spec in rewards.reward]
    names += [REWARD_MODEL] if rewards.reward_pretrain is not None else []
    return names + ([OVERLONG] if rewards.overlong_buffer_len else [])


def _is_episode_metric(flags: PPORun, name: str) -> bool:
    """Whether episodes may have the number; what a source reports is known only when it does."""
    return name in EPISODE_METRICS or any(
        name == source or name.startswith(f"{source}_") for source in _reward_names(flags)
    )


def _kl_problems(algorithm: AlgorithmConfig) -> list[Problem]:
    weight, problems = algorithm.init_kl_coef, []
    if not weight:
        if algorithm.use_kl_loss:
            problems.append(problem("use_kl_loss", "no_effect"))
        if algorithm.kl_target is not None:
            problems.append(problem("kl_target", "needs_flag"))
        return problems
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        problems.append(problem("use_kl_in_reward", "contradiction"))
    if not algorithm.kl_in_reward and not algorithm.kl_in_loss:
        problems.append(problem("use_kl_in_reward", "needs_flag", value=weight))
    kind = algorithm.kl_estimator
    if algorithm.kl_in_reward and kind.endswith("+"):
        problems.append(problem("kl_estimator", "contradiction", value=kind, without_suffix=kind[:-1]))
    if algorithm.kl_in_reward and "component_rewards" in algorithm.estimator_options:
        problems.append(problem("init_kl_coef", "contradiction", value=weight, estimator=algorithm.advantage_estimator))
    return problems


def _step_problems(flags: PPORun) -> list[Problem]:
    """Options of the actor's steps: early end of an iteration, moving average, demonstrations."""
    optimization, batch, problems = flags.optimization, flags.batch, []
    if optimization.target_kl is not None and batch.max_epochs * batch.episodes_per_iteration <= batch.train_batch_size:
        problems.append(problem("target_kl", "no_effect", value=optimization.target_kl))
    if optimization.ema_beta and flags.strategy.zero_stage == 3:
        problems.append(problem("ema_beta", "contradiction", value=optimization.ema_beta))
    if optimization.use_ema and not optimization.ema_beta:
        problems.append(problem("use_ema", "needs_flag"))
    if bool(optimization.ptx_coef) != (optimization.ptx_demos is not None):
        problems.append(problem("ptx_coef", "needs_flag"))
    if flags.actor.lora_dropout:
        problems.append(problem("lora_dropout", "contradiction", value=flags.actor.lora_dropout))
    return problems + _saving_problems(flags)


def _saving_problems(flags: PPORun) -> list[Problem]:
    """Where the critic starts from, what is exported, and how often a state is evaluated."""
    run, problems = flags.run, []
    if run.critic_from == "rm_model" and run.critic_pretrain is not None:
        problems.append(problem("critic_from", "contradiction"))
    if run.critic_from == "rm_model" and flags.algorithm.needs_critic and flags.critic_folder is None:
        problems.append(problem("critic_from", "needs_flag"))
    if flags.schedule.save_hf_ckpt and not flags.schedule.save_steps:
        problems.append(problem("save_hf_ckpt", "needs_flag"))
    if flags.schedule.eval_samples > 1 and not flags.schedule.eval_temperature:
        amounts = {"value": flags.schedule.eval_samples, "switch": "--eval_temperature"}
        problems.append(problem("eval_samples", "needs_flag", **amounts))
    return problems + wandb_problems(flags.schedule)


class _Unread:
    """Collects flags that are set but have no effect."""

    def __init__(self, flags: PPORun):
        self._flags = flags
        self.problems: list[Problem] = []

    def check(
        self, group: str, names: Iterable[str], unused: Callable[[str], bool] | bool, why: str, **values: str
    ) -> None:
        """Record the flags of a group that are `unused` and set; `why` and `values` as for `unread`."""
        for name in names:
            if (unused(name) if callable(unused) else unused) and _is_set(self._flags, group, name):
                typed = as_typed(name, getattr(getattr(self._flags, group), name))
                self.problems.append(unread(name, typed, why, **values))


def _without_effect(flags: PPORun) -> list[Problem]:
    algorithm, unread_flags = flags.algorithm, _Unread(flags)
    check, options, loss_options = unread_flags.check, algorithm.estimator_options, algorithm.loss_options
    estimator, loss = {"estimator": algorithm.advantage_estimator}, {"loss": algorithm.policy_loss}
    check("algorithm", _ESTIMATOR_FLAGS, lambda name: _ESTIMATOR_FLAGS[name] not in options, "estimator", **estimator)
    check("algorithm", _LOSS_FLAGS, lambda name: _LOSS_FLAGS[name] not in loss_options, "loss", **loss)
    for group, names in _CRITIC_FLAGS.items():
        check(group, names, not algorithm.needs_critic, "no critic", **estimator)
    for group, names in _SEPARATE_CRITIC_FLAGS.items():
        check(group, names, algorithm.needs_critic and algorithm.share_backbone, "shared critic")
    check("algorithm", ["vf_coef"], not algorithm.share_backbone, "switch", switch="share_backbone")
    if not algorithm.init_kl_coef:
        reported = {"use_kl_loss", "kl_target"}  # reported by `_kl_problems`
        check("algorithm", set(_KL_FLAGS) - reported, True, "no KL")
    elif algorithm.kl_target is None:
        check("algorithm", ["kl_horizon"], True, "not given", switch="kl_target")
    check("algorithm", ["loss_horizon"], algorithm.loss_agg_mode != "seq-mean-token-sum-norm", "mode")
    mode_read = "agg_mode" in loss_options or algorithm.needs_critic
    mode_read |= bool(algorithm.entropy_loss_coef) or algorithm.kl_in_loss
    check("algorithm", ["loss_agg_mode"], not mode_read, "loss mode", **loss)
    whole = algorithm.algorithm != "nft" and learner_scores(algorithm) not in (None, "log_probs")
    check("algorithm", ["log_prob_level"], whole, "whole ratio", **loss)
    lonely = "singleton" in options and flags.batch.n_samples_per_prompt > 1
    check("algorithm", ["singleton"], lonely, "no lonely episode")
    _unread_in_other_groups(flags, unread_flags)
    return unread_flags.problems


def _unread_in_other_groups(flags: PPORun, unread_flags: _Unread) -> None:
    filters, correction, check = flags.filters, flags.correction, unread_flags.check
    check("filters", _FILTER_FLAGS, not filters.active, "no filter")
    bounds = ("accuracy_lower_bound", "accuracy_upper_bound")
    check("filters", bounds, not filters.filter_accuracy, "switch", switch="filter_accuracy")
    check("filters", ["filter_metric_range"], not filters.filter_metric, "missing", switch="filter_metric")
    without = {"switch": "rollout_is", "value": correction.rollout_is}
    check("correction", _IS_FLAGS, not correction.weighs, "value", **without)
    check("correction", _RS_FLAGS, correction.rollout_rs == "none", "value", switch="rollout_rs", value="none")
    dynamic = flags.batch.use_dynamic_batch
    check("batch", ["train_max_tokens_per_gpu"], not dynamic, "switch", switch="use_dynamic_batch")
    check("batch", ["micro_train_batch_size"], dynamic, "by tokens")
    check("optimization", ["ptx_batch_size"], not flags.optimization.ptx_coef, "missing", switch="ptx_coef")
    check("rewards", ["reward_model_coef"], not flags.rewards.reward_pretrain, "missing", switch="reward_pretrain")


def _is_set(flags: PPORun, group: str, name: str) -> bool:
    config = getattr(flags, group)
    default = next(field.default for field in dataclasses.fields(config) if field.name == name)
    value = getattr(config, name)
    return value != default or (name in flags.given and value is not None)  # "--kl_target none" sets nothing
