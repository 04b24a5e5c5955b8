"""The policy of a run folder, which commands accept in place of a policy folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlvla.checkpoints.policy_folder import (
    ENVIRONMENT_FILE,
    PolicyRecord,
    learned_states,
    recorded_environment,
    write_policy,
)
from rlvla.checkpoints.run_folder import CHECKPOINTS, POLICIES, RUN_FILE
from rlvla.checkpoints.training import chosen_checkpoint, whole_weights
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.options import options_like
from rlvla.data.reading import read_demonstrations
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.records import checked_record
from rlvla.envs.splits import LearnedStates
from rlvla.models.families import CONFIG_FILE, family_of
from rlvla.options import from_values
from rlvla.trainer.algorithm_config import LEARNERS, learner_needs_critic
from rlvla.utils.cli.config_file import RUN_CONFIG_FILE
from rlvla.utils.data_files import read_json
from rlvla.utils.deepspeed.config import launched_rank, launched_world_size
from rlvla.utils.errors import ConfigError, SaveError
from rlvla.utils.files import MANIFEST, output_folder_problem
from rlvla.utils.terminal import log, passing_note
from rlvla.utils.torch_files import read_torch_file

EXPORTED = "exported"  # subfolder of the run folder with policies taken from checkpoints
_POLICY = "policy"  # subfolder of the run folder with the policy at its end


@dataclass(frozen=True)
class RunPolicy:
    """The newest policy of a run.

    Attributes:
        folder: a complete policy folder; None if it has to be taken from `checkpoint` first.
        checkpoint: the checkpoint that holds it; None for that of the end of the run.
    """

    folder: Path | None
    checkpoint: Path | None


def policy_folder(folder: str, flag: str = "pretrain", env_python: str | None = None) -> str:
    """The policy folder that a flag such as --pretrain means; `flag` is the one to report.

    For the folder of a run that is its newest policy: `policy/`, or that of the newest checkpoint if it is newer, which
    is taken from the checkpoint if it was not exported before, with the interpreter `env_python` if the run needed one.
    The choice is logged. Any other path is returned unchanged.

    Raises:
        ConfigError: the run holds neither, or its policy has to be exported and several ranks ask for it.
        SaveError: the policy could not be written.
    """
    run = Path(folder)
    if not is_run_folder(run):
        return folder
    try:
        newest = newest_policy(run)
    except ConfigError as error:
        raise ConfigError([replace(problem, flag=flag) for problem in error.problems]) from error
    path, which = newest.folder, "the policy of its end"
    if newest.checkpoint is not None:
        which = f"the policy of its newest checkpoint, {newest.checkpoint.name}"
    if path is None:
        assert newest.checkpoint is not None
        path = run / EXPORTED / newest.checkpoint.name
        if launched_world_size() > 1:
            text = (
                f"{run} is the folder of a run whose newest policy is in a checkpoint; take it out first: python "
                f"cli/export_policy.py {run} --output {path}"
            )
            raise ConfigError.of(flag, "mismatch", text)
        _export(run, newest.checkpoint, path, env_python)
    if launched_rank() == 0:
        log.info(f"{run} is the folder of a run; {which}: {path}")
    return str(path)


def with_policy_folder(flags: PPORun) -> PPORun:
    """The flags with the `policy_folder` of --pretrain and --critic_pretrain; a resumed run keeps its start.

    What the family trains by default is filled in, see `PolicyFamily.reinforced`.

    Raises:
        ConfigError: as in `policy_folder`, for both flags at once.
    """
    record = Path(flags.run.save_path) / RUN_FILE
    before = None
    if flags.run.load_checkpoint and record.is_file() and any(map(_is_run, _folders(flags).values())):
        before = _folders(recorded_run(record.parent))
    chosen, problems = {}, []
    for flag, typed in _folders(flags).items():
        if not _is_run(typed):
            continue
        assert typed is not None
        started = before[flag] if before else None
        try:
            kept = started is not None and Path(started).is_relative_to(typed)
            chosen[flag] = started if kept else policy_folder(typed, flag, flags.env.env_python)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    policy = replace(flags.policy, pretrain=chosen.get("pretrain") or flags.policy.pretrain)
    run = replace(flags.run, critic_pretrain=chosen.get("critic_pretrain") or flags.run.critic_pretrain)
    flags = replace(flags, policy=policy, run=run)
    with suppress(ConfigError):  # reported when the folder is checked
        flags = replace(flags, actor=family_of(policy.pretrain).reinforced(flags.actor))
    return flags


def _folders(flags: PPORun) -> dict[str, str | None]:
    """The flags that take a policy folder, or that of a run."""
    return {"pretrain": flags.policy.pretrain, "critic_pretrain": flags.run.critic_pretrain}


def _is_run(folder: str | None) -> bool:
    return folder is not None and is_run_folder(Path(folder))


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is that of a training run rather than of a policy."""
    marks = (RUN_FILE, RUN_CONFIG_FILE)
    return not (folder / CONFIG_FILE).is_file() and any((folder / mark).is_file() for mark in marks)


def newest_policy(run: Path) -> RunPolicy:
    """The newest policy of a run folder; of the same age, that of the end of the run.

    Raises:
        ConfigError: there is neither a policy nor an intact checkpoint.
    """
    final = run / _POLICY
    ended = _written(final / ENVIRONMENT_FILE) or _written(final / CONFIG_FILE)
    checkpoint = None
    if (run / RUN_FILE).is_file():
        checkpoint = chosen_checkpoint(checkpoint_folder(run), since=ended)
    if checkpoint is None and ended:
        return RunPolicy(final, None)
    if checkpoint is None:
        text = f"{run} is the folder of a run that holds no policy and no checkpoint yet; wait for its first checkpoint"
        raise ConfigError.of("pretrain", "missing_file", text)
    for place in (run / POLICIES / checkpoint.name, run / EXPORTED / checkpoint.name):
        if _written(place / ENVIRONMENT_FILE) >= _written(checkpoint / MANIFEST):
            return RunPolicy(place, checkpoint)
    return RunPolicy(None, checkpoint)


def _written(file: Path) -> float:
    """When a file was written, 0 if there is none."""
    return file.stat().st_mtime if file.is_file() else 0.0


# ------------------------------------------------------------------------------------------------------- export
def export_checkpoint(
    run: Path, output: str | Path | None = None, name: str | None = None, env_python: str | None = None
) -> tuple[Path, Path]:
    """Write the policy of a checkpoint of a run, as the run itself would have exported it after that iteration.

    Args:
        run: the run folder.
        output: the folder to write, which must not exist or be empty; by default `exported/NAME` in the run folder.
        name: the checkpoint; by default the newest intact one.
        env_python: interpreter with the simulator; a run folder decides none.

    Returns:
        The checkpoint, and the folder of the policy.

    Raises:
        ConfigError: `run` is not the folder of a PPO run, has no such checkpoint, or what it started from has gone.
        SaveError: the policy could not be written.
    """
    if not (run / RUN_FILE).is_file():
        raise ConfigError(f"{run} is not the folder of a run of train_ppo_vla.py: {RUN_FILE} is missing")
    folder = checkpoint_folder(run)
    checkpoint = chosen_checkpoint(folder, name)
    if checkpoint is None:
        raise ConfigError(f"{folder} holds no checkpoint; --save_steps of train_ppo_vla.py writes some during training")
    target = run / EXPORTED / checkpoint.name if output is None else Path(output)
    if output is not None and (problem := output_folder_problem(target)):
        raise ConfigError.of("output", "folder_in_use", f"--output: {problem}")
    _export(run, checkpoint, target, env_python)
    return checkpoint, target


def _export(run: Path, checkpoint: Path, output: Path, env_python: str | None) -> None:
    if "sac" in read_json(run / RUN_FILE, allow_nan=True):
        text = f"{run} is a run of train_sac_vla.py, which exports its policies itself: policy/, best_policy/, and"
        raise ConfigError(f"{text} with --save_hf_ckpt policies/")
    flags = recorded_run(run)
    judged = flags.rewards, flags.success
    env = replace(flags.env, env_python=env_python)
    setting, problems = check_run(flags.policy, env, flags.split, flags.schedule.eval_episodes, *judged, plays=False)
    if setting is None or problems:
        reason = f"the policy of {checkpoint} needs what the run started from: "
        raise ConfigError([p.prefixed(reason) for p in problems])
    demos = read_ptx_demos(flags, setting)
    with passing_note(f"reading {checkpoint}"):
        shared = flags.algorithm.share_backbone and learner_needs_critic(flags.algorithm)
        policy: Any = setting.checkpoint.load_policy(flags.actor, value_head=shared)
        policy.to(torch.bfloat16 if flags.strategy.bf16 else torch.float32)
        weights = whole_weights(checkpoint)
        played = LEARNERS.get(flags.algorithm.algorithm).played_tensors
        played = "ema" if flags.optimization.use_ema and flags.optimization.ema_beta else played
        if played is not None:
            weights |= read_torch_file(checkpoint / "tensors.pt")[played]
        try:
            policy.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(f"{checkpoint} does not fit {flags.policy.pretrain}: {error}") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    problem = write_policy(policy, output, policy_record(flags.policy.pretrain, flags.split, setting, demos))
    if problem:
        raise SaveError(f"the policy could not be written to {output} ({problem})")


def read_ptx_demos(flags: PPORun, setting: CheckedRun) -> Demonstrations | None:
    """The demonstrations of --ptx_demos; None without."""
    if flags.optimization.ptx_demos is None:
        return None
    options = options_like(setting.env, flags.optimization.dataset_camera)
    return read_demonstrations(flags.optimization.ptx_demos, setting.env.camera_names, options)


def policy_record(
    start: str | None, split: SplitConfig, setting: CheckedRun, demos: Demonstrations | None
) -> PolicyRecord:
    """The record of the trained policy, with the initial states of the run, of its start and of the demonstrations.

    Args:
        start: folder of the policy that the run starts from, or None.
        split: which states are trained on.
        setting: the checked run.
        demos: demonstrations that it learns from, or None.
    """
    before = (learned_states(recorded_environment(start)) if start is not None else None) or []
    now = [(task, split.train_states(task)) for task in setting.tasks]
    trained = [LearnedStates(task.suite, task.task_id, states.start, states.stop) for task, states in now]
    machine_state = setting.state_input.settings if setting.state_input else None
    demonstrated = demos.states_learned_from if demos is not None else []
    return PolicyRecord(setting.env, (*before, *trained, *demonstrated), machine_state)


# ------------------------------------------------------------------------------------------------ records of a run
def recorded_run(run: Path) -> PPORun:
    """The flags of a run of `train_ppo_vla.py`; those that an older run does not record have their defaults.

    Raises:
        ConfigError: the record cannot be read.
    """
    path = run / RUN_FILE
    stored = read_json(path, allow_nan=True)
    groups = {name: group for name, group in stored.items() if isinstance(group, dict)}
    anywhere = {name: value for group in groups.values() for name, value in group.items()}  # flags have moved
    made: dict[str, Any] = {}
    for name, kind in PPORun.kinds().items():
        if name == "env":
            made[name] = EnvConfig().completed(checked_record(groups.get("env", {}), path))
            continue
        values = anywhere | groups.get(name, {})
        made[name] = from_values(kind, {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
    return PPORun(**made)


def checkpoint_folder(run: Path) -> Path:
    """Where a run writes its checkpoints: in its folder, or where --ckpt_path says."""
    inside = run / CHECKPOINTS  # a run folder may have been moved
    return inside if inside.is_dir() else recorded_run(run).ckpt_path
