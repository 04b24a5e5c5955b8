"""Checks of the flags of `cli/train_ppo_vla.py`, made before anything is started."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from rlvla.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rlvla.algorithms.columns import LEVEL_ORDER
from rlvla.algorithms.kl import ADAPTIVE_ERROR_BOUND
from rlvla.algorithms.policy_losses import POLICY_LOSSES
from rlvla.commands.model_checks import mismatch_with_policy, value_model_problems
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.runs.asynchronous import async_problems
from rlvla.commands.runs.checks import (
    changed_flags,
    dump_problems,
    flag_problems,
    length_problems,
    rank_problems,
    writable,
)
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.data.options import options_like
from rlvla.data.reading import check_options, read_demonstrations
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import SplitConfig, heldout_problems
from rlvla.models.families import checkpoint_option_problems
from rlvla.models.policy import PolicySpec
from rlvla.options import flag_values, options_of
from rlvla.rewards.base import REWARDS
from rlvla.rewards.config import REWARD_MODEL
from rlvla.rewards.overlong import OVERLONG
from rlvla.rollout.config import COLOCATED, ROLLOUT_BACKENDS, TaskSamplingConfig
from rlvla.trainer.algorithm import make_sampler
from rlvla.trainer.algorithm_config import (
    LEARNERS,
    STATE,
    AlgorithmConfig,
    learner_needs_critic,
    learner_needs_reference,
    learner_scores,
)
from rlvla.trainer.config import LoopBatchConfig, ScheduleConfig
from rlvla.trainer.group_collector import EPISODE_METRICS
from rlvla.trainer.guards import EARLY_STOP_EPISODES
from rlvla.trainer.reward_sources import reward_problems
from rlvla.utils.cli.flags import as_typed, is_set, no_effect
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.deepspeed.strategy import has_accelerator
from rlvla.utils.errors import ConfigError, Problem

# What a policy loss or learner trains on, by `PolicySpec.scores` -> the policies that provide it.
_SCORED_BY = {
    "step_log_probs": "it needs a flow-matching policy whose denoising steps are all noisy: --flow_noisy_steps all",
    "matching": "it needs a flow-matching policy without noise in its steps: --flow_method ode",
    "mirrored": "it needs a flow-matching policy with --flow_method sde or cps",
}


def check(flags: PPORun) -> CheckedRun:
    """Check all flags.

    Raises:
        ConfigError: with all problems.
    """
    problems = flag_problems(flags, batch_problems(flags), [*algorithm_problems(flags), *async_problems(flags)])
    setting, more = check_run(
        flags.policy,
        flags.env,
        flags.split,
        flags.schedule.eval_episodes,
        flags.rewards,
        flags.success,
        learner_scores(flags.algorithm),
    )
    tasks = setting.tasks if setting is not None else []
    problems += more + value_model_problems(flags, setting) + backend_problems(flags, setting)
    problems += early_stopping_problems(flags.schedule, len(tasks), flags.batch)
    reported = {p.flag for p in problems}
    of_rewards = reward_problems(flags.rewards, flags.algorithm, tasks, flags.success)
    problems += [p for p in of_rewards if p.reason != "no_effect" or p.flag not in reported]
    if setting is not None:
        problems += _score_problems(setting.spec, flags.algorithm)
        problems += quantity_problems(setting.spec, flags.algorithm) + _density_problems(setting.spec, flags)
        problems += sampler_problems(flags.batch, tasks, flags.split, flags.run.seed)
        problems += dump_problems(flags, setting.env)
        problems += changed_flags(flags, setting) if writable(problems) else []
        if flags.algorithm.whiten_per_task and len(tasks) == 1:
            problems.append(no_effect("whiten_per_task", True, "there is only one task"))
        problems += checkpoint_option_problems(setting.checkpoint, flags.actor, flags.given)
        problems += flags.strategy.kernel_problems(flags.actor.attn_implementation)
        problems += [*_token_problems(flags, setting), *_demonstration_problems(flags, setting)]
        if flags.algorithm.critic_input == STATE:
            try:
                setting = setting.with_privileged_state()
            except ConfigError as error:
                problems += error.problems
    if problems or setting is None:
        raise ConfigError(dict.fromkeys(problems))
    return setting


# ---------------------------------------------------------------------------------------------- batches and tasks
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
            f"--freezing_actor_steps {frozen}: the actor would never be trained in {batch.iterations} iterations; "
            "lower it or raise --num_episodes"
        )
        problems.append(Problem("freezing_actor_steps", "contradiction", text))
    return problems


def _near_divisors(number: int, size: int, ranks: int) -> list[int]:
    """The divisors of a number next to `size`, below and above, that are multiples of the number of ranks."""
    small = [n for n in range(1, min(math.isqrt(number), 10**5) + 1) if number % n == 0]
    fitting = [n for n in {*small, *(number // n for n in small)} if n % ranks == 0]
    below, above = [n for n in fitting if n < size], [n for n in fitting if n > size]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def sampler_problems(batch: LoopBatchConfig, tasks: Sequence[TaskSpec], split: SplitConfig, seed: int) -> list[Problem]:
    """Task weights that do not fit, an unusable sampler class, and settings that contradict or have no effect."""
    problems, curriculum = [], batch.task_sampling != "uniform"
    conflicts = {"task_weights": bool(batch.task_weights), "task_sampling": curriculum}
    for flag in (flag for flag, conflicting in conflicts.items() if conflicting and batch.task_sampler is not None):
        text = f"--{flag}: --task_sampler chooses the tasks by itself; leave one of them out"
        problems.append(Problem(flag, "contradiction", text))
    if curriculum and len(tasks) == 1:
        problems.append(no_effect("task_sampling", batch.task_sampling, "there is only one task"))
    try:
        make_sampler(batch, tasks, split, seed)
    except ConfigError as error:
        problems += error.problems
    return problems


def early_stopping_problems(
    schedule: ScheduleConfig, num_tasks: int, sampling: TaskSamplingConfig | None = None
) -> list[Problem]:
    """Early stopping that can never happen, or that measures the difficulty of the sampled tasks.

    Args:
        schedule: the settings.
        num_tasks: number of tasks that are evaluated; 0 if unknown.
        sampling: choice of tasks and states.
    """
    problems, by = [], schedule.early_stop_by
    if schedule.plateau_iterations == 1:
        text = "--plateau_iterations 1: one iteration has no spread to compare with; give at least 2, or 0: no report"
        problems.append(Problem("plateau_iterations", "too_few", text))
    if not schedule.early_stopping:
        return problems
    if by != "evaluations" and sampling is not None and sampling.favours_some:
        how = "--task_sampler" if sampling.task_sampler is not None else f"--task_sampling {sampling.task_sampling}"
        text = f"--early_stop_by {by}: with {how} sampled success depends on the sampled tasks; end by evaluations"
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


def _token_problems(flags: PPORun, setting: CheckedRun) -> Iterator[Problem]:
    """A token limit below the length of a single decision."""
    if flags.batch.use_dynamic_batch:
        limit, instructions = flags.batch.train_max_tokens_per_gpu, [task.instruction for task in setting.tasks]
        needed = max(setting.checkpoint.row_tokens(instructions, len(setting.env.camera_names)))
        if needed > limit:
            text = f"--train_max_tokens_per_gpu {limit}: one decision has {needed} tokens; give at least that"
            yield Problem("train_max_tokens_per_gpu", "too_few", text)


def _demonstration_problems(flags: PPORun, setting: CheckedRun) -> list[Problem]:
    """Problems if --ptx_demos cannot be read or does not fit the policy."""
    path = flags.optimization.ptx_demos
    if path is None:
        return []
    try:
        options = options_like(setting.env, flags.optimization.dataset_camera)
        check_options(options, [path])
        demos = read_demonstrations(path, setting.env.camera_names, options)
    except ConfigError as error:
        return [p.of_flag("ptx_demos") for p in error.problems]
    problems = mismatch_with_policy(demos, path, setting.spec, flags.policy.pretrain)
    problems += flags.split.problems(setting.tasks, flags.schedule.eval_episodes, demos.states_learned_from)
    if not demos.demonstrated_episodes:
        text = f"in {path} the policy acted in every step, and no person or expert who could be imitated"
        problems.append(Problem(None, "too_few", text))
    heldout = heldout_problems(flags.split.heldout_tasks, setting.env, (), demos.states_learned_from, path)
    return [*(p.of_flag("ptx_demos") for p in problems), *heldout]


def backend_problems(flags: PPORun, setting: CheckedRun | None) -> list[Problem]:
    """Reasons why the rollout backend cannot be used."""
    if flags.schedule.val_only:  # evaluations use the policy itself
        return []
    return ROLLOUT_BACKENDS.get(flags.backend.rollout_backend).problems(flags.backend_setup(setting))


# ------------------------------------------------------------------------------------------------------ algorithm
def algorithm_problems(flags: PPORun) -> list[Problem]:
    """Settings of estimator, loss, KL, filters and correction that contradict each other or have no effect."""
    return [
        *_group_problems(flags),
        *_reward_problems(flags),
        *_kl_problems(flags.algorithm),
        *_kl_horizon_problems(flags),
        *_step_problems(flags),
        *_critic_start_problems(flags),
        *_graph_problems(flags),
        *_learner_problems(flags),
    ]


def _learner_problems(flags: PPORun) -> list[Problem]:
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


def _group_problems(flags: PPORun) -> Iterator[Problem]:
    algorithm, n = flags.algorithm, flags.batch.n_samples_per_prompt
    estimator, parameters = algorithm.advantage_estimator, algorithm.estimator_parameters
    if "group_ids" in parameters and n < 2 and not ADVANTAGE_ESTIMATORS.attribute(estimator, "allows_singletons"):
        text = f"--advantage_estimator {estimator} compares episodes of a group: --n_samples_per_prompt must be over 1"
        yield Problem("advantage_estimator", "too_few", text)
    coarse, level = algorithm.advantage_level, algorithm.log_prob_level
    if not algorithm.one_advantage_per_episode and LEVEL_ORDER[coarse] < LEVEL_ORDER[level]:
        text = f"--log_prob_level {level} sums over several advantages of --advantage_level {coarse}; make it as coarse"
        yield Problem("log_prob_level", "contradiction", text)
    if flags.filters.filter_zero_variance and n < 2:
        text = f"--filter_zero_variance drops every group of --n_samples_per_prompt {n}; give at least 2"
        yield Problem("filter_zero_variance", "too_few", text)
    if (flags.correction.rollout_is, flags.correction.rollout_is_level) == ("seq_mask_tis", "sequence"):
        text = "--rollout_is seq_mask_tis weighs tokens and masks decisions; leave out --rollout_is_level"
        yield Problem("rollout_is", "contradiction", text)


def _reward_problems(flags: PPORun) -> Iterator[Problem]:
    """Filters of unknown numbers, and a scaled reward where the estimator uses its components."""
    algorithm, metric = flags.algorithm, flags.filters.filter_metric
    rewards, estimator = flags.rewards, algorithm.advantage_estimator
    sources = [*rewards.source_names]
    sources += [REWARD_MODEL] if rewards.reward_pretrain is not None else []
    sources += [OVERLONG] if options_of(rewards, REWARDS, OVERLONG).overlong_buffer_len else []
    # The numbers that a source reports are known only when it does.
    names, prefixes = (*EPISODE_METRICS, *sources), tuple(f"{source}_" for source in sources)
    if metric is not None and metric not in names and not metric.startswith(prefixes):
        text = f"--filter_metric {metric}: episodes have no such number, but {', '.join(names)}, <source>_<number>"
        yield Problem("filter_metric", "unknown_name", text)
    if metric is not None and not flags.filters.filter_metric_range:
        text = f"--filter_metric {metric} needs --filter_metric_range LOW HIGH"
        yield Problem("filter_metric", "needs_flag", text)
    if "component_rewards" in algorithm.estimator_parameters and algorithm.normalize_reward:
        text = f"--normalize_reward: {estimator} normalizes each component of the reward by itself; leave it out"
        yield Problem("normalize_reward", "contradiction", text)
    if "component_rewards" in algorithm.estimator_parameters and algorithm.reward_clip_range:
        text = f"--reward_clip_range clips the sum of the rewards, and {estimator} uses its components; leave it out"
        yield Problem("reward_clip_range", "contradiction", text)


def _kl_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    weight, kind = algorithm.init_kl_coef, algorithm.kl_estimator
    if not weight:
        return
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        text = "--use_kl_in_reward and --use_kl_loss penalize the same KL twice; choose one"
        yield Problem("use_kl_in_reward", "contradiction", text)
    if not algorithm.kl_in_reward and not algorithm.kl_in_loss:
        text = f"--no-use_kl_in_reward: --init_kl_coef {weight} would have no effect; give --use_kl_loss, or no weight"
        yield Problem("use_kl_in_reward", "needs_flag", text)
    if algorithm.kl_in_reward and kind.endswith("+"):
        text = (
            f"--kl_estimator {kind}: the suffix + changes the gradient, and a KL in the reward has none; "
            f"give {kind[:-1]}, or --use_kl_loss"
        )
        yield Problem("kl_estimator", "contradiction", text)
    if algorithm.kl_in_reward and "component_rewards" in algorithm.estimator_parameters:
        text = (
            f"--init_kl_coef {weight} subtracts the KL from the sum of the rewards, and "
            f"{algorithm.advantage_estimator} uses its components; give --use_kl_loss"
        )
        yield Problem("init_kl_coef", "contradiction", text)


def _kl_horizon_problems(flags: PPORun) -> Iterator[Problem]:
    """An adaptive KL weight that one iteration could make negative."""
    algorithm, episodes = flags.algorithm, flags.batch.episodes_per_iteration
    if algorithm.kl_target is not None and ADAPTIVE_ERROR_BOUND * episodes >= algorithm.kl_horizon:
        text = f"--kl_horizon {algorithm.kl_horizon}: an iteration of {episodes} episodes could make the weight of the"
        yield Problem("kl_horizon", "out_of_range", f"{text} KL negative; take at least {episodes}")


def _step_problems(flags: PPORun) -> Iterator[Problem]:
    """Options of the actor's steps: early end of an iteration, moving average, demonstrations, memory."""
    optimization, batch, strategy, dropout = flags.optimization, flags.batch, flags.strategy, flags.actor.lora_dropout
    if batch.max_epochs * batch.episodes_per_iteration <= batch.train_batch_size:
        why = "an iteration has only one optimizer step, in which the KL is 0; raise --max_epochs"
        for flag, limit in (("target_kl", optimization.target_kl), ("desired_kl", optimization.desired_kl)):
            if limit is not None:
                yield Problem(flag, "no_effect", f"--{flag} {limit}: {why}")
    if optimization.ema_beta:
        yield from strategy.sharding_problems("ema_beta", optimization.ema_beta)
    if optimization.use_ema and not optimization.ema_beta:
        text = "--use_ema: there is no moving average; give --ema_beta, for example 0.99"
        yield Problem("use_ema", "needs_flag", text)
    if bool(optimization.ptx_coef) != (optimization.ptx_demos is not None):
        text = "--ptx_coef and --ptx_demos belong together: give both or neither"
        yield Problem("ptx_coef", "needs_flag", text)
    if dropout:
        text = f"--lora_dropout {dropout} would change every probability ratio; use it in train_sft_vla.py alone"
        yield Problem("lora_dropout", "contradiction", text)
    if not optimization.offload_during_rollout:
        return
    flag = "offload_during_rollout"
    if strategy.engine_stage == 0:
        yield Problem(flag, "needs_flag", f"--{flag} needs --zero_stage 1, 2 or 3")
    if strategy.adam_offload:
        text = f"--{flag}: --adam_offload keeps optimizer states in host memory all the time; choose one"
        yield Problem(flag, "contradiction", text)
    if not has_accelerator():
        text = f"--{flag} moves memory from an accelerator to the host, and there is no accelerator; leave it out"
        yield Problem(flag, "unavailable", text)


def _graph_problems(flags: PPORun) -> Iterator[Problem]:
    """CUDA graphs without a GPU, or where the policy is not in this process or its weights move."""
    if not flags.rollout.cuda_graphs:
        return
    backend = flags.backend.rollout_backend
    if backend != COLOCATED:
        yield no_effect("cuda_graphs", True, f"--rollout_backend {backend} decides in other processes")
    if flags.strategy.zero_stage == 3:
        text = "--cuda_graphs: --zero_stage 3 gathers the weights for each rollout; choose one"
        yield Problem("cuda_graphs", "contradiction", text)
    if not torch.cuda.is_available():
        text = "--cuda_graphs launches the kernels of a CUDA GPU, and there is none; leave it out"
        yield Problem("cuda_graphs", "unavailable", text)


def _critic_start_problems(flags: PPORun) -> Iterator[Problem]:
    """The start of the critic."""
    run = flags.run
    if run.critic_from == "rm_model" and run.critic_pretrain is not None:
        text = "--critic_from rm_model: the critic would also start from --critic_pretrain; choose one"
        yield Problem("critic_from", "contradiction", text)
    if run.critic_from == "rm_model" and flags.algorithm.needs_critic and flags.critic_folder is None:
        text = "--critic_from rm_model: there is no reward model; give --reward_pretrain, or --reward rm_model"
        yield Problem("critic_from", "needs_flag", f"{text} with --rm_model_path")


# ----------------------------------------------------------------------------------- distribution of the policy
def quantity_problems(spec: PolicySpec, algorithm: AlgorithmConfig) -> list[Problem]:
    """Flags that need a quantity the policy does not have (`PolicySpec.missing`), each with the reason."""
    needs_critic = learner_needs_critic(algorithm)
    needed = [
        ("entropy_loss_coef", "entropy", bool(algorithm.entropy_loss_coef)),
        ("kl_estimator", "kl", algorithm.exact_kl and learner_needs_reference(algorithm)),
        ("advantage_estimator", "sum_pi_squared", "sum_pi_squared" in algorithm.estimator_parameters),
        ("advantage_estimator", "critic", needs_critic and not algorithm.share_backbone),
        ("share_backbone", "value_head", needs_critic and algorithm.share_backbone),
        *(("policy_loss", quantity, True) for quantity in POLICY_LOSSES.attribute(algorithm.policy_loss, "needs")),
    ]
    return [
        Problem(flag, "mismatch", f"{as_typed(flag, getattr(algorithm, flag))}: {spec.missing[quantity]}; leave it out")
        for flag, quantity, used in needed
        if used and quantity in spec.missing
    ]


def _score_problems(spec: PolicySpec, algorithm: AlgorithmConfig) -> list[Problem]:
    """A policy loss or learner that trains on other scores than the policy's (`PolicySpec.scores`)."""
    scores = learner_scores(algorithm)
    if scores in (None, spec.scores):
        return []
    if scores == "log_probs":  # only a policy without noise has none
        text = (
            f"--flow_method ode samples without noise, so that --policy_loss {algorithm.policy_loss} has "
            "no probabilities to compare; give --policy_loss fpo, or another --flow_method"
        )
        return [Problem("flow_method", "needs_flag", text)]
    flag = "policy_loss" if algorithm.algorithm == "ppo" else "algorithm"
    text = f"--{flag} {getattr(algorithm, flag)} does not work with this policy: {_SCORED_BY[scores]}"
    return [Problem(flag, "needs_flag", text)]


def _density_problems(spec: PolicySpec, flags: PPORun) -> list[Problem]:
    """Flags that compare log-probs, or scale noise, where the policy has none, each with the reason."""
    algorithm, correction, level = flags.algorithm, flags.correction, flags.batch.flow_noise_level_end
    optimization = flags.optimization
    estimated_kl = bool(algorithm.init_kl_coef) and not algorithm.exact_kl and learner_needs_reference(algorithm)
    needed = [
        ("kl_estimator", "densities", algorithm.kl_estimator, estimated_kl),
        ("target_kl", "densities", optimization.target_kl, optimization.target_kl is not None),
        ("desired_kl", "densities", optimization.desired_kl, optimization.desired_kl is not None),
        ("rollout_is", "densities", correction.rollout_is, correction.weighs),
        ("rollout_rs", "densities", correction.rollout_rs, correction.rollout_rs != "none"),
        ("temperature", "temperature", flags.batch.temperature, flags.batch.temperature != 1.0),
    ]
    problems = untrainable(spec.missing)
    if level is not None and not spec.anneals_noise:
        text = "only flow-matching policies with --flow_method sde or cps have a noise level; leave it out"
        problems.append(Problem("flow_noise_level_end", "mismatch", f"--flow_noise_level_end {level}: {text}"))
    return problems + [
        Problem(flag, "mismatch", f"{as_typed(flag, value)}: {spec.missing[quantity]}; leave it out")
        for flag, quantity, value, used in needed
        if used and quantity in spec.missing
    ]


def untrainable(missing: Mapping[str, str]) -> list[Problem]:
    """A policy that cannot be trained on stored decisions; `missing` as in `PolicySpec`."""
    text = f"--pretrain: this command cannot train this policy: {missing.get('training')}"
    return [Problem("pretrain", "mismatch", text)] if "training" in missing else []
