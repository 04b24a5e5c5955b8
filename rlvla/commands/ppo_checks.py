"""Checks of the flags of `cli/train_ppo_vla.py`, made before anything is started."""

from __future__ import annotations

from rlvla.commands.algorithm_checks import (
    algorithm_problems,
    batch_problems,
    early_stopping_problems,
    sampler_problems,
    task_problems,
)
from rlvla.commands.model_checks import mismatch_with_policy, value_model_problems
from rlvla.commands.policy_checks import density_problems, quantity_problems, score_problems
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.rollout_backends import backend_problems
from rlvla.commands.runs.asynchronous import async_problems
from rlvla.commands.runs.checks import changed_flags, dump_problems, flag_problems, writable
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.data.reading import read_demonstrations
from rlvla.envs.config import heldout_problems
from rlvla.trainer.algorithm_config import learner_scores
from rlvla.trainer.reward_sources import reward_problems
from rlvla.utils.errors import ConfigError, Problem


def check(flags: PPORun) -> CheckedRun:
    """Check all flags.

    Raises:
        ConfigError: with all problems.
    """
    of_algorithm = [*algorithm_problems(flags), *async_problems(flags)]
    problems = flag_problems(flags, batch_problems(flags), of_algorithm)
    judged = flags.rewards, flags.success
    scores = learner_scores(flags.algorithm)
    setting, more = check_run(flags.policy, flags.env, flags.split, flags.schedule.eval_episodes, *judged, scores)
    problems += more + value_model_problems(flags, setting) + backend_problems(flags, setting)
    num_tasks = len(setting.tasks) if setting is not None else 0
    problems += early_stopping_problems(flags.schedule, num_tasks, flags.batch)
    problems += reward_problems(
        flags.rewards, flags.algorithm, setting.tasks if setting is not None else [], flags.success
    )
    if setting is not None:
        problems += score_problems(setting.spec, flags.algorithm)
        problems += quantity_problems(setting.spec, flags.algorithm) + density_problems(setting.spec, flags)
        problems += sampler_problems(flags.batch, setting.tasks, flags.split, flags.run.seed) + dump_problems(
            flags, setting.env
        )
        problems += changed_flags(flags, setting) if writable(problems) else []
        problems += task_problems(flags.algorithm, setting.tasks) + setting.checkpoint.option_problems(flags.actor)
        problems += _token_problems(flags, setting) + _demonstration_problems(flags, setting)
    if problems or setting is None:
        raise ConfigError(dict.fromkeys(problems))
    return setting


def _token_problems(flags: PPORun, setting: CheckedRun) -> list[Problem]:
    """A token limit below the length of a single decision."""
    if not flags.batch.use_dynamic_batch:
        return []
    cap, instructions = flags.batch.train_max_tokens_per_gpu, [task.instruction for task in setting.tasks]
    needed = max(setting.checkpoint.row_tokens(instructions, len(setting.env.camera_names)))
    if needed <= cap:
        return []
    text = f"--train_max_tokens_per_gpu {cap}: one decision has {needed} tokens; give at least that"
    return [Problem("train_max_tokens_per_gpu", "too_few", text)]


def _demonstration_problems(flags: PPORun, setting: CheckedRun) -> list[Problem]:
    """Problems if --ptx_demos cannot be read or does not fit the policy."""
    path = flags.optimization.ptx_demos
    if path is None:
        return []
    try:
        demos = read_demonstrations(path, setting.env.camera_names)
    except ConfigError as error:
        return [p.of_flag("ptx_demos") for p in error.problems]
    problems = mismatch_with_policy(demos, path, setting.spec, flags.policy.pretrain)
    problems += flags.split.problems(setting.tasks, flags.schedule.eval_episodes, demos.states_learned_from)
    heldout = heldout_problems(flags.split.heldout_tasks, setting.env, (), demos.states_learned_from, path)
    return [*(p.of_flag("ptx_demos") for p in problems), *heldout]
