"""Checks of all reinforcement-learning runs: lengths, folders, resuming, flags changed since the start."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import RUN_FILE, checkpoint_folder_problem, ended_early, run_folder_problem
from rlvla.checkpoints.training import list_checkpoints
from rlvla.commands.runs.flags import TrainingRun
from rlvla.commands.setup import CheckedRun
from rlvla.envs.config import EnvConfig
from rlvla.utils.cli.flags import flag_fields, no_effect_problems, range_problems, unread_flags
from rlvla.utils.data_files import read_json
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.errors import ChangedSetting, ConfigError, Problem, require
from rlvla.utils.files import output_folder_problem

# Flags that may change on resume: run length, batching that affects no result, evaluation and saving.
_FREE_GROUPS = ("schedule", "workers", "rollout", "backend", "guards")
_FREE_FLAGS = {
    *("num_episodes", "micro_rollout_batch_size", "micro_train_batch_size", "balance_ranks"),
    *("use_dynamic_batch", "train_max_tokens_per_gpu", "custom_module"),
    *("offload_during_rollout", "param_offload", "full_determinism"),
    *("save_path", "ckpt_path", "load_checkpoint", "num_envs", "local_rank", "rank_timeout", "dry_run"),
    *("gpu_memory", "hours", "measured"),
}
_LONGEST_VALUE = 48  # characters, in a table of settings


def flag_problems(flags: TrainingRun, batch: list[Problem], learner: list[Problem]) -> list[Problem]:
    """Problems of the flags alone; `batch` and `learner` are problems found by the command.

    Raises:
        MissingExtraError: a flag needs a package that is not installed.
    """
    problems = [p for group in flags.groups.values() for p in range_problems(group)]
    learner = [*no_effect_problems(flags.groups.values(), flags.unselected, flags.given), *learner]
    out_of_range = {p.flag for p in problems}  # reported once is enough
    problems += [*batch, *flags.strategy.problems()]
    problems += flags.workers.problems(flags.env.env_python, policies_on_ray=flags.policies_on_ray)
    problems += [p for p in learner if p.flag not in out_of_range]
    if writable(problems):
        problems += folder_problems(flags) + resume_problems(flags)
    if flags.schedule.num_videos:
        require("av", extra="video")
    if flags.schedule.use_wandb:
        require("wandb", extra="wandb")
    return problems


def writable(problems: Iterable[Problem]) -> bool:
    """Whether the outputs of a run can be written, as far as `problems` tell."""
    return all(p.reason != "not_writable" for p in problems)


def rank_problems(flags: TrainingRun) -> list[Problem]:
    """Batch sizes that the ranks cannot share."""
    ranks, sizes = launched_world_size(), ("rollout_batch_size", "train_batch_size")
    values = {name: getattr(flags.batch, name) for name in sizes}
    return [
        Problem(name, "not_divisible", f"--{name} {n} must be divisible by the number of ranks {ranks}")
        for name, n in values.items()
        if n % ranks
    ]


def length_problems(flags: TrainingRun) -> list[Problem]:
    """Episodes that make no whole iterations, and iterations beyond the end of the run."""
    batch, schedule, problems = flags.batch, flags.schedule, []
    episodes = batch.episodes_per_iteration
    if episodes < 1:
        return []  # already reported
    if batch.num_episodes < episodes:
        text = f"--num_episodes {batch.num_episodes} is less than one iteration of {episodes} episodes"
        problems.append(Problem("num_episodes", "too_few", text))
    elif batch.num_episodes % episodes:
        below = batch.num_episodes // episodes * episodes
        text = (
            f"--num_episodes {batch.num_episodes} is not a multiple of the {episodes} episodes of an "
            f"iteration; give {below} or {below + episodes}"
        )
        problems.append(Problem("num_episodes", "not_divisible", text))
    late = " ".join(str(number) for number in schedule.profile_steps if number > batch.iterations)
    if late:
        text = f"--profile_steps {late}: the run has {batch.iterations} iterations, counted from 1; name some of these"
        problems.append(Problem("profile_steps", "out_of_range", text))
    if schedule.profile_steps and schedule.val_only:
        text = "--profile_steps records training, and --val_only leaves it out; give one of the two"
        problems.append(Problem("profile_steps", "contradiction", text))
    return problems


def folder_problems(flags: TrainingRun) -> list[Problem]:
    """Folders that a new run cannot use."""
    resuming = bool(flags.run.load_checkpoint)
    problems = {"save_path": run_folder_problem(flags.run.save_path, resuming=resuming)}
    if flags.run.ckpt_path is not None:
        problems["ckpt_path"] = checkpoint_folder_problem(flags.run.ckpt_path, resuming=resuming)
    if flags.schedule.fallback_path is not None:
        problems["fallback_path"] = output_folder_problem(flags.schedule.fallback_path, resuming=resuming)
    return [Problem(flag, "folder_in_use", f"--{flag}: {why}") for flag, why in problems.items() if why]


def changed_flags(flags: TrainingRun, setting: CheckedRun) -> list[Problem]:
    """Flags that differ from those with which the run to resume was started."""
    path = Path(flags.run.save_path) / RUN_FILE
    if not flags.run.load_checkpoint or not path.is_file() or ended_early(path.parent, flags.ckpt_path):
        return []
    try:
        stored = read_json(path, allow_nan=True)
    except ConfigError as error:
        return [Problem("save_path", "invalid_file", f"{error}; name another --save_path")]
    before = {name: group for name, group in stored.items() if isinstance(group, dict)}
    problems: list[Problem] = []
    elsewhere = {name: value for group in before.values() for name, value in group.items()}
    defaults, unread = _defaults(flags, setting), unread_flags(flags.groups.values(), flags.unselected)
    for group, now in json.loads(json.dumps(describe(flags, setting))).items():
        if group in _FREE_GROUPS:
            continue
        for name, value in now.items():
            # Flags have moved between groups, and the run may be older than some of them.
            started_with = before.get(group, {}).get(name, elsewhere.get(name, defaults[group].get(name)))
            if name not in _FREE_FLAGS and name not in unread and started_with != value:
                text = f"--{name} {value}: the run in {flags.run.save_path} was started with {started_with}"
                text += "; repeat that, or name another --save_path"
                there, here = _in_short(started_with), _in_short(value)
                problems.append(ChangedSetting(name, "changed", text, flags.run.save_path, there, here))
    return problems


def _in_short(value: Any) -> str:
    if value in (None, []):
        return "not given"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def dump_problems(flags: TrainingRun, env: EnvConfig) -> list[Problem]:
    """Episodes that `--dump_rollouts` could not write so that they can be played again."""
    if not flags.schedule.dump_rollouts:
        return []
    try:
        env.with_ordinary_actions()
    except ConfigError as error:
        return [p.of_flag("dump_rollouts") for p in error.problems]
    return []


def resume_problems(flags: TrainingRun) -> list[Problem]:
    """The folder to resume must have been written by this command, because its policy/ will be replaced."""
    folder, asked = Path(flags.run.save_path), flags.run.load_checkpoint
    if isinstance(asked, str):
        names = [path.name for path in list_checkpoints(flags.ckpt_path)]
        if asked not in names:
            text = (
                f"--load_checkpoint {asked}: there is no such checkpoint in {flags.ckpt_path}; there are: "
                f"{', '.join(names) or 'none'}"
            )
            return [Problem("load_checkpoint", "unknown_name", text)]
    if evaluates_a_checkpoint(flags) and not list_checkpoints(flags.ckpt_path):
        return [nothing_to_evaluate(flags)]
    if not flags.run.load_checkpoint or not folder.is_dir() or (folder / RUN_FILE).is_file():
        return []
    # A process killed while writing that file leaves only a hidden temporary file.
    if any(not path.name.startswith(".") for path in folder.iterdir()):
        text = f"--save_path: {folder} holds no run of this command ({RUN_FILE} is missing); name another folder"
        return [Problem("save_path", "mismatch", text)]
    return []


def evaluates_a_checkpoint(flags: TrainingRun) -> bool:
    """Whether nothing is trained, and the policy of a checkpoint evaluated."""
    return flags.schedule.val_only and bool(flags.run.load_checkpoint)


def nothing_to_evaluate(flags: TrainingRun) -> Problem:
    """The problem of a missing checkpoint to evaluate."""
    text = (
        f"--val_only --load_checkpoint: there is no checkpoint in {flags.ckpt_path}; name the run with"
        " --save_path, or leave out --load_checkpoint to evaluate --pretrain"
    )
    return Problem("load_checkpoint", "missing_file", text)


def _defaults(flags: TrainingRun, setting: CheckedRun) -> dict[str, dict[str, Any]]:
    """`describe` of the default flags and of all registered options, except for the suite."""
    defaults = {
        name: {flag: field.default for flag, field in flag_fields(type(group)).items()} | as_flat_dict(type(group)())
        for name, group in flags.groups.items()
    }
    defaults["env"] = EnvConfig(task_suite_name=setting.env.task_suite_name).as_dict()
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(defaults))
    return plain


def as_flat_dict(group: Any) -> dict[str, Any]:
    """The fields of a group; options of registered code stand among them, as flags do."""
    flat: dict[str, Any] = {}
    registered = {f.name for f in fields(group) if "registry" in f.metadata}
    for name, value in asdict(group).items():
        if name in registered:
            for options in value if isinstance(value, tuple) else () if value is None else (value,):
                flat |= options
        else:
            flat[name] = value
    return flat


def describe(flags: TrainingRun, setting: CheckedRun) -> dict[str, Any]:
    """All flags with their values, for the run folder."""
    described = {name: as_flat_dict(group) for name, group in flags.groups.items()}
    described["env"] = setting.env.as_dict()
    return described
