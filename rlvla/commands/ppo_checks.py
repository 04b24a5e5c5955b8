"""Checks of the flags of `cli/train_ppo_vla.py`, made before anything is started."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import RUN_FILE, checkpoint_folder_problem, ended_early, run_folder_problem
from rlvla.checkpoints.training import list_checkpoints
from rlvla.commands.algorithm_checks import algorithm_problems, batch_problems, early_stopping_problems
from rlvla.commands.model_checks import mismatch_with_policy, value_model_problems
from rlvla.commands.policy_checks import density_problems, quantity_problems, score_problems
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.problem_texts import problem
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.data.reading import read_demonstrations
from rlvla.envs.config import EnvConfig
from rlvla.trainer.algorithm import make_sampler
from rlvla.trainer.algorithm_config import learner_scores
from rlvla.trainer.reward_sources import reward_problems
from rlvla.utils.cli.flags import range_problems
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem, require
from rlvla.utils.files import output_folder_problem

# Flags that may change on resume: run length, batching that affects no result, evaluation and saving.
_FREE_GROUPS = ("schedule", "workers", "rollout", "guards")
_FREE_FLAGS = {
    *("num_episodes", "micro_rollout_batch_size", "micro_train_batch_size", "balance_ranks"),
    *("use_dynamic_batch", "train_max_tokens_per_gpu", "custom_module"),
    *("offload_during_rollout", "param_offload"),
    *("save_path", "ckpt_path", "load_checkpoint", "num_envs", "local_rank", "rank_timeout", "dry_run"),
}


def check(flags: PPORun) -> CheckedRun:
    """Check all flags.

    Raises:
        ConfigError: with all problems.
    """
    problems: list[str | Problem] = [p for group in flags.groups.values() for p in range_problems(group)]
    out_of_range = {p.flag for p in problems if isinstance(p, Problem)}  # reported once is enough
    problems += [*batch_problems(flags), *flags.workers.problems(flags.env.env_python), *flags.strategy.problems()]
    problems += [p for p in algorithm_problems(flags) if p.flag not in out_of_range]
    writable = not any(p.reason == "not_writable" for p in problems if isinstance(p, Problem))
    problems += _folder_problems(flags) + _resume_problems(flags) if writable else []
    if flags.schedule.num_videos:
        require("av", extra="video")
    if flags.schedule.use_wandb:
        require("wandb", extra="wandb")
    judged = flags.rewards, flags.success
    scores = learner_scores(flags.algorithm)
    setting, more = check_run(flags.policy, flags.env, flags.split, flags.schedule.eval_episodes, *judged, scores)
    problems += more + value_model_problems(flags, setting)
    own_sampler, num_tasks = flags.batch.task_sampler is not None, len(setting.tasks) if setting is not None else 0
    problems += early_stopping_problems(flags.schedule, num_tasks, own_sampler=own_sampler)
    problems += reward_problems(
        flags.rewards, flags.algorithm, setting.tasks if setting is not None else [], flags.success
    )
    if setting is not None:
        problems += score_problems(setting.spec, flags.algorithm)
        problems += quantity_problems(setting.spec, flags.algorithm) + density_problems(setting.spec, flags)
        problems += _sampler_problems(flags, setting)
        problems += (_changed_flags(flags, setting) if writable else []) + setting.checkpoint.option_problems(
            flags.actor
        )
        problems += _token_problems(flags, setting) + _demonstration_problems(flags, setting)
    if problems or setting is None:
        raise ConfigError(dict.fromkeys(problems))
    return setting


def _folder_problems(flags: PPORun) -> list[Problem]:
    """Folders that a new run cannot use."""
    resuming = bool(flags.run.load_checkpoint)
    problems = {"save_path": run_folder_problem(flags.run.save_path, resuming=resuming)}
    if flags.run.ckpt_path is not None:
        problems["ckpt_path"] = checkpoint_folder_problem(flags.run.ckpt_path, resuming=resuming)
    if flags.schedule.fallback_path is not None:
        problems["fallback_path"] = output_folder_problem(flags.schedule.fallback_path, resuming=resuming)
    return [problem(flag, "folder_in_use", why=why) for flag, why in problems.items() if why]


def _changed_flags(flags: PPORun, setting: CheckedRun) -> list[Problem]:
    """Flags that differ from those with which the run to resume was started."""
    path = Path(flags.run.save_path) / RUN_FILE
    if not flags.run.load_checkpoint or not path.is_file() or ended_early(path.parent, flags.ckpt_path):
        return []
    try:
        stored = read_json(path, allow_nan=True)
    except ConfigError as error:
        return [problem("save_path", "invalid_file", error=error)]
    before = {name: group for name, group in stored.items() if isinstance(group, dict)}
    problems = []
    elsewhere = {name: value for group in before.values() for name, value in group.items()}
    defaults = _defaults(flags, setting)
    for group, now in json.loads(json.dumps(describe(flags, setting))).items():
        if group in _FREE_GROUPS:
            continue
        for name, value in now.items():
            # Flags have moved between groups, and the run may be older than some of them.
            known = before.get(group, {}).get(name, elsewhere.get(name, defaults[group].get(name)))
            if name not in _FREE_FLAGS and known != value:
                problems.append(problem(name, "changed", value=value, folder=flags.run.save_path, known=known))
    return problems


def _resume_problems(flags: PPORun) -> list[Problem]:
    """The folder to resume must have been written by this command, because its policy/ will be replaced."""
    folder, asked = Path(flags.run.save_path), flags.run.load_checkpoint
    if isinstance(asked, str):
        known = [path.name for path in list_checkpoints(flags.ckpt_path)]
        if asked not in known:
            places = {"folder": flags.ckpt_path, "known": ", ".join(known) or "none"}
            return [problem("load_checkpoint", "unknown_name", value=asked, **places)]
    if _evaluates_a_checkpoint(flags) and not list_checkpoints(flags.ckpt_path):
        return [_nothing_to_evaluate(flags)]
    if not flags.run.load_checkpoint or not folder.is_dir() or (folder / RUN_FILE).is_file():
        return []
    # A process killed while writing that file leaves only a hidden temporary file.
    if any(not path.name.startswith(".") for path in folder.iterdir()):
        return [problem("save_path", "mismatch", folder=folder, file=RUN_FILE)]
    return []


def _sampler_problems(flags: PPORun, setting: CheckedRun) -> list[Problem]:
    """Weights that do not fit the tasks, and a sampler that cannot be created."""
    problems = []
    if flags.batch.task_sampler is not None and flags.batch.task_weights:
        problems.append(problem("task_weights", "contradiction"))
    try:
        make_sampler(flags.batch, setting.tasks, flags.split, flags.run.seed)
    except ConfigError as error:
        problems += error.problems
    return problems


def _token_problems(flags: PPORun, setting: CheckedRun) -> list[Problem]:
    """A token limit below the length of a single decision."""
    if not flags.batch.use_dynamic_batch:
        return []
    cap, instructions = flags.batch.train_max_tokens_per_gpu, [task.instruction for task in setting.tasks]
    needed = max(setting.checkpoint.row_tokens(instructions, len(setting.env.camera_names)))
    if needed <= cap:
        return []
    return [problem("train_max_tokens_per_gpu", "too_few", value=cap, needed=needed)]


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
    return [p.of_flag("ptx_demos") for p in problems]


def _evaluates_a_checkpoint(flags: PPORun) -> bool:
    return flags.schedule.val_only and bool(flags.run.load_checkpoint)


def _nothing_to_evaluate(flags: PPORun) -> Problem:
    return problem("load_checkpoint", "missing_file", folder=flags.ckpt_path)


def _defaults(flags: PPORun, setting: CheckedRun) -> dict[str, dict[str, Any]]:
    """What `describe` returns if no flag is given except the suite."""
    defaults = {name: asdict(type(group)()) for name, group in flags.groups.items()}
    defaults["env"] = EnvConfig(task_suite_name=setting.env.task_suite_name).as_dict()
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(defaults))
    return plain


def describe(flags: PPORun, setting: CheckedRun) -> dict[str, Any]:
    """All flags with their values, for the run folder."""
    described = {name: asdict(group) for name, group in flags.groups.items()}
    described["env"] = setting.env.as_dict()
    return described
