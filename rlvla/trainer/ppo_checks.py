"""What cannot work in the amounts and the algorithm of a PPO run, found before anything is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlvla.trainer.algorithm_config import ONE_ADVANTAGE_PER_EPISODE, AlgorithmConfig
from rlvla.trainer.levels import LEVEL_ORDER
from rlvla.utils.arguments import as_typed
from rlvla.utils.strategy import has_accelerator
from rlvla.utils.strategy_config import launched_world_size

if TYPE_CHECKING:
    from rlvla.trainer.ppo_run import PPORun

# Flag -> the argument of the estimator or loss through which it acts.
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
}
_CRITIC_FLAGS = {
    "algorithm": ("bootstrap_truncated", "value_clip", "normalize_values", "share_backbone"),
    "run": ("critic_pretrain",),
    "optimization": ("critic_learning_rate", "freezing_actor_steps"),
}
# What is about a critic of its own, and why it has no meaning for a head on the actor's backbone.
_SEPARATE_CRITIC_FLAGS = {
    "run": ("critic_pretrain",),
    "optimization": ("critic_learning_rate", "freezing_actor_steps"),
}
_KL_FLAGS = ("kl_estimator", "use_kl_in_reward", "use_kl_loss", "kl_target", "kl_horizon")
_FILTER_FLAGS = ("oversample_factor", "max_group_staleness", "max_rollout_rounds")
_IS_FLAGS = ("rollout_is_level", "rollout_is_low", "rollout_is_high", "rollout_is_batch_normalize")
_RS_FLAGS = ("rollout_rs_level", "rollout_rs_low", "rollout_rs_high")


def batch_problems(flags: PPORun) -> list[str]:
    """Amounts that do not divide each other."""
    batch, world, found = flags.batch, launched_world_size(), []
    episodes = batch.episodes_per_iteration
    if batch.train_batch_size < 1 or batch.rollout_batch_size < 1 or batch.n_samples_per_prompt < 1:
        return []  # already reported
    if batch.rollout_batch_size % world:
        found.append(
            f"--rollout_batch_size {batch.rollout_batch_size} must be divisible by the number of ranks {world}"
        )
    if batch.train_batch_size % world:
        found.append(f"--train_batch_size {batch.train_batch_size} must be divisible by the number of ranks {world}")
    if episodes % batch.train_batch_size:
        found.append(
            f"--train_batch_size {batch.train_batch_size} must divide the episodes of an iteration, "
            f"rollout_batch_size x n_samples_per_prompt = {episodes}"
        )
    if batch.num_episodes < episodes:
        found.append(f"--num_episodes {batch.num_episodes} is less than one iteration of {episodes} episodes")
    elif batch.num_episodes % episodes:
        below = batch.num_episodes // episodes * episodes
        found.append(
            f"--num_episodes {batch.num_episodes} is no multiple of the {episodes} episodes of an iteration; give "
            f"{below} or {below + episodes}"
        )
    late = [number for number in flags.schedule.profile_steps if number > batch.iterations]
    if late:
        found.append(
            f"--profile_steps {' '.join(map(str, late))}: the run has {batch.iterations} iterations, counted from 1; "
            "name some of these"
        )
    if flags.schedule.profile_steps and flags.schedule.val_only:
        found.append("--profile_steps records training, and --val_only leaves it out; give one of the two")
    frozen = flags.optimization.freezing_actor_steps
    if flags.algorithm.needs_critic and frozen and frozen >= batch.iterations and not flags.schedule.val_only:
        found.append(
            f"--freezing_actor_steps {frozen}: the run has {batch.iterations} iterations, so the actor would never be "
            "trained; lower it or raise --num_episodes"
        )
    return found


def algorithm_problems(flags: PPORun) -> list[str]:
    """Combinations of estimator, loss, KL, filters and correction that make no sense or would be ignored."""
    return [
        *_offload_problems(flags),
        *_group_problems(flags),
        *_range_problems(flags),
        *_kl_problems(flags.algorithm),
        *_step_problems(flags),
        *_without_effect(flags),
    ]


def _offload_problems(flags: PPORun) -> list[str]:
    if not flags.optimization.offload_during_rollout:
        return []
    name, found = "--offload_during_rollout", []
    if flags.strategy.engine_stage == 0:
        found.append(f"{name} needs --zero_stage 1, 2 or 3")
    if flags.strategy.adam_offload:
        found.append(f"{name}: --adam_offload keeps optimizer states in host memory all the time; choose one")
    if not has_accelerator():
        found.append(f"{name} moves memory from an accelerator to the host, and there is no accelerator; leave it out")
    return found


def _group_problems(flags: PPORun) -> list[str]:
    algorithm, n, found = flags.algorithm, flags.batch.n_samples_per_prompt, []
    options, estimator = algorithm.estimator_options, algorithm.advantage_estimator
    # Who offers a choice for a group of one can live with it.
    if "group_ids" in options and "singleton" not in options and n < 2:
        found.append(
            f"--advantage_estimator {estimator} compares the episodes of a group: --n_samples_per_prompt {n} must be "
            "at least 2"
        )
    if estimator not in ONE_ADVANTAGE_PER_EPISODE and (
        LEVEL_ORDER[algorithm.advantage_level] < LEVEL_ORDER[algorithm.log_prob_level]
    ):
        found.append(
            f"--log_prob_level {algorithm.log_prob_level} sums over several advantages of --advantage_level "
            f"{algorithm.advantage_level}; choose the advantage level at least as coarse"
        )
    if flags.filters.filter_zero_variance and n < 2:
        found.append(f"--filter_zero_variance drops every group of --n_samples_per_prompt {n}; give at least 2")
    return found


def _range_problems(flags: PPORun) -> list[str]:
    algorithm, filters, correction, found = flags.algorithm, flags.filters, flags.correction, []
    widths = algorithm.eps_clip_low_high
    # A width of 1 or more leaves the lower side open, which is how cispo was published.
    open_below = algorithm.policy_loss == "cispo" and len(widths) == 2 and widths[0] >= 1
    if widths and (len(widths) != 2 or (widths[0] > widths[1] and not open_below)):
        found.append(f"--eps_clip_low_high {' '.join(map(str, widths))}: give two widths, low <= high")
    if algorithm.cov_low > algorithm.cov_high:
        found.append(f"--cov_low {algorithm.cov_low} exceeds --cov_high {algorithm.cov_high}; swap them")
    if filters.accuracy_lower_bound > filters.accuracy_upper_bound:
        found.append(
            f"--accuracy_lower_bound {filters.accuracy_lower_bound} exceeds --accuracy_upper_bound "
            f"{filters.accuracy_upper_bound}; swap them"
        )
    for name in ("rollout_is", "rollout_rs"):
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        if low > high:
            found.append(f"--{name}_low {low} exceeds --{name}_high {high}; swap them")
    if (correction.rollout_is, correction.rollout_is_level) == ("seq_mask_tis", "sequence"):
        found.append("--rollout_is seq_mask_tis weighs tokens and masks decisions; leave out --rollout_is_level")
    return found


def _kl_problems(algorithm: AlgorithmConfig) -> list[str]:
    found = []
    if not algorithm.init_kl_coef:
        if algorithm.use_kl_loss:
            found.append("--use_kl_loss has no effect with --init_kl_coef 0; give the KL a weight")
        if algorithm.kl_target is not None:
            found.append("--kl_target steers --init_kl_coef, which is 0; give it a start value")
        return found
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        found.append("--use_kl_in_reward and --use_kl_loss charge for the same KL twice; choose one")
    if not algorithm.kl_in_reward and not algorithm.kl_in_loss:
        found.append(
            f"--no-use_kl_in_reward: --init_kl_coef {algorithm.init_kl_coef} would act nowhere; give --use_kl_loss, or "
            "no weight"
        )
    if algorithm.kl_in_reward and algorithm.kl_estimator.endswith("+"):
        found.append(
            f"--kl_estimator {algorithm.kl_estimator}: the suffix + is about the gradient, and a KL in the reward has "
            f"none; give {algorithm.kl_estimator[:-1]}, or --use_kl_loss"
        )
    if algorithm.kl_in_reward and "component_rewards" in algorithm.estimator_options:
        found.append(
            f"--init_kl_coef {algorithm.init_kl_coef}: {algorithm.advantage_estimator} sees the components of the "
            "reward and not their sum, from which the KL is subtracted; give --use_kl_loss"
        )
    return found


def _step_problems(flags: PPORun) -> list[str]:
    """What goes along with the steps of the actor: early end, moving average, demonstrations."""
    optimization, batch, found = flags.optimization, flags.batch, []
    if optimization.target_kl is not None and batch.max_epochs * batch.episodes_per_iteration <= batch.train_batch_size:
        found.append(
            f"--target_kl {optimization.target_kl}: an iteration has one optimizer step only, so there is none to "
            "leave out; raise --max_epochs or lower --train_batch_size"
        )
    if optimization.ema_beta and flags.strategy.zero_stage == 3:
        found.append(f"--ema_beta {optimization.ema_beta} needs whole parameters on every rank: --zero_stage 0, 1 or 2")
    if optimization.use_ema and not optimization.ema_beta:
        found.append("--use_ema: there is no moving average; give --ema_beta, for example 0.99")
    if bool(optimization.ptx_coef) != (optimization.ptx_demos is not None):
        found.append("--ptx_coef and --ptx_demos belong together: give both or neither")
    return found


def _without_effect(flags: PPORun) -> list[str]:
    """Flags that are given, or differ from their default, where nothing reads them."""
    algorithm, found = flags.algorithm, []
    options = algorithm.estimator_options

    def check(group: str, names: Any, unread: Callable[[str], bool] | bool, reason: str) -> None:
        for name in names:
            if (unread(name) if callable(unread) else unread) and _is_set(flags, group, name):
                found.append(f"{as_typed(name, getattr(getattr(flags, group), name))}: {reason}; leave it out")

    estimator, loss = f"--advantage_estimator {algorithm.advantage_estimator}", f"--policy_loss {algorithm.policy_loss}"
    check(
        "algorithm",
        _ESTIMATOR_FLAGS,
        lambda name: _ESTIMATOR_FLAGS[name] not in options,
        f"{estimator} does not use it",
    )
    loss_options = algorithm.loss_options
    check("algorithm", _LOSS_FLAGS, lambda name: _LOSS_FLAGS[name] not in loss_options, f"{loss} does not use it")
    for group, names in _CRITIC_FLAGS.items():
        check(group, names, not algorithm.needs_critic, f"{algorithm.advantage_estimator} has no critic")
    for group, names in _SEPARATE_CRITIC_FLAGS.items():
        check(group, names, algorithm.needs_critic and algorithm.share_backbone, "--share_backbone trains one network")
    check("algorithm", ["vf_coef"], not algorithm.share_backbone, "it belongs to --share_backbone, which is off")
    if not algorithm.init_kl_coef:
        reported = {"use_kl_loss", "kl_target"}  # with a remedy of their own
        check("algorithm", set(_KL_FLAGS) - reported, True, "there is no KL with --init_kl_coef 0")
    elif algorithm.kl_target is None:
        check("algorithm", ["kl_horizon"], True, "it belongs to --kl_target, which is not given")
    check("algorithm", ["loss_horizon"], algorithm.loss_agg_mode != "seq-mean-token-sum-norm", "no such mode is chosen")
    mode_read = "agg_mode" in loss_options or algorithm.needs_critic
    mode_read |= bool(algorithm.entropy_loss_coef) or algorithm.kl_in_loss
    check("algorithm", ["loss_agg_mode"], not mode_read, f"{loss} has a mode of its own, and there is no other loss")
    lonely = "singleton" in options and flags.batch.n_samples_per_prompt > 1
    check("algorithm", ["singleton"], lonely, "no group has a single episode")
    _unread_in_other_groups(flags, check)
    return found


def _unread_in_other_groups(flags: PPORun, check: Callable[..., None]) -> None:
    filters, correction, batch = flags.filters, flags.correction, flags.batch
    check("filters", _FILTER_FLAGS, not filters.active, "no filter is on")
    bounds = ("accuracy_lower_bound", "accuracy_upper_bound")
    check("filters", bounds, not filters.filter_accuracy, "it belongs to --filter_accuracy, which is off")
    check("correction", _IS_FLAGS, correction.rollout_is == "none", "--rollout_is is none")
    check("correction", _RS_FLAGS, correction.rollout_rs == "none", "--rollout_rs is none")
    dynamic = batch.use_dynamic_batch
    check("batch", ["train_max_tokens_per_gpu"], not dynamic, "it belongs to --use_dynamic_batch, which is off")
    check("batch", ["micro_train_batch_size"], dynamic, "--use_dynamic_batch cuts by tokens")
    check("optimization", ["ptx_batch_size"], not flags.optimization.ptx_coef, "there is no --ptx_coef")
    check("run", ["reward_model_coef"], not flags.run.reward_pretrain, "there is no --reward_pretrain")


def _is_set(flags: PPORun, group: str, name: str) -> bool:
    config = getattr(flags, group)
    default = next(field.default for field in dataclasses.fields(config) if field.name == name)
    value = getattr(config, name)
    return value != default or (name in flags.given and value is not None)  # "--kl_target none" sets nothing
