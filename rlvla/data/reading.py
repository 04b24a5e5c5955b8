"""Reading demonstrations in any supported format, from one file or from several as one dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlvla.data.demonstrations import STATISTICS_FILE, UNKNOWN_STATE, Demonstrations, dataset_entry
from rlvla.data.hdf5 import UNREADABLE, opened
from rlvla.data.lerobot import is_lerobot, read_lerobot
from rlvla.data.lerobot_cache import cache_folders
from rlvla.data.libero import SUFFIX as LIBERO_SUFFIX
from rlvla.data.libero import is_libero, read_libero
from rlvla.data.options import AS_RECORDED, ReadOptions
from rlvla.data.robomimic import read_episodes
from rlvla.data.selection import parsed_episodes
from rlvla.data.validation import camera_problems, refuse
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import TASK, EnvConfig
from rlvla.envs.registry import is_known
from rlvla.utils.data_files import inside, read_json
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import is_repo_id

T = TypeVar("T")
SUITE = "task_suite_name"  # in `Demonstrations.env_args`
_HDF5 = (".hdf5", ".h5")


def read_demonstrations(
    path: str | Path,
    cameras: Sequence[str] | None = None,
    options: ReadOptions = AS_RECORDED,
) -> Demonstrations:
    """Read a file written by `DemonstrationWriter`, a LeRobot dataset, or LIBERO demonstrations (`*_demo.hdf5`).

    Statistics are computed if there is no `dataset_statistics.json` next to the file.

    Args:
        path: an HDF5 file; a folder with a LeRobot dataset, LIBERO files, or other HDF5 files, which are read as one
            dataset; or the repository id of a LeRobot dataset in a cache of this machine.
        cameras: camera names in order; default all cameras of the file.
        options: resizing of the images, and the flags of single formats.

    Raises:
        ConfigError: the file is missing, it has another format, it lacks a camera, or its episodes do not fit together
            (see `rlvla.data.validation`), or its instructions are of another source than `options` ask for.
    """
    demos, asked = _read(Path(path), cameras, options), options.instruction_source
    recorded = demos.env_args.get("instruction_source") or TASK
    if asked == TASK or demos.step_instructions is None:
        demos = replace(demos, step_instructions=None)
        if recorded != TASK:
            demos.env_args["instruction_source"] = recorded = TASK
    if asked not in (None, recorded):
        text = f"{path} was recorded with the instructions of --instruction_source {recorded}, not {asked}; record "
        text += f"demonstrations with --instruction_source {asked} (cli/collect_demos.py)"
        raise ConfigError.of("instruction_source", "mismatch", text)
    return demos


def _read(path: Path, cameras: Sequence[str] | None, options: ReadOptions) -> Demonstrations:
    if cameras:
        refuse(path, camera_problems(cameras, "--cameras"))
    if is_lerobot(path):
        return read_lerobot(path, cameras, options)
    files = data_files([path])
    if files != [str(path)]:
        return read_several(files, cameras, options=options)
    if path.exists() and is_libero(path):
        return read_libero(path, cameras, options)
    if not path.is_file():
        text = f"{path} does not exist; make it with cli/collect_demos.py"
        raise ConfigError.of(None, "missing_file", text + not_cached(path))
    beside = path.parent / STATISTICS_FILE
    try:
        with opened(path) as file:
            # Numbers that are not finite are reported by their keys.
            recorded = read_json(inside(path.parent, beside.name), allow_nan=True) if beside.is_file() else None
            demos = read_episodes(file, path, recorded, cameras, options)
            return demos if recorded is not None else replace(demos, statistics=computed_statistics([demos]))
    except UNREADABLE as error:
        if isinstance(error, ConfigError):
            raise
        text = f"{path} is not a readable file of demonstrations ({error})"
        raise ConfigError.of(None, "invalid_file", text) from error


def not_cached(path: str | Path) -> str:
    """Message suffix with the caches searched for a LeRobot dataset of this name; "" if it is not a repository id."""
    if not is_repo_id(path) or Path(path).parent.exists():  # or just not in this folder
        return ""
    places = ", ".join(map(str, cache_folders(str(path))))
    fetch = f"hf download {path} --repo-type dataset"
    return f". No LeRobot dataset of this name is in {places} either; nothing is downloaded, but `{fetch}` does that"


def check_options(options: ReadOptions, paths: Sequence[str]) -> None:
    """Refuse options that are malformed or that no path reads.

    Raises:
        ConfigError: options of a format that no path has; or as `ReadOptions.camera_names` and `parsed_episodes`.
    """
    problems = []
    if options.camera_names and not any(map(is_lerobot, paths)):
        text = "--dataset_camera names features of LeRobot datasets, and the data hold none; leave it out"
        problems.append(Problem("dataset_camera", "no_effect", text))
    parsed_episodes(options.episodes)
    if all(is_lerobot(path) or is_libero(Path(path)) for path in paths):
        problems += [
            Problem(name, "no_effect", f"--{name} is for HDF5 files in robomimic's layout, of which there are none")
            for name in ("proprio_keys", "instruction", "filter_key")
            if getattr(options, name)
        ]
    if problems:
        raise ConfigError(problems)


def data_files(paths: Sequence[str | Path]) -> list[str]:
    """Expand folders of HDF5 files, such as `--output` of `cli/collect_demos.py`, into the files in and below them.

    The folder of a LeRobot dataset or of LIBERO files is one dataset and stays as it is.
    """
    files: list[str] = []
    for path in map(Path, paths):
        whole = not path.is_dir() or is_lerobot(path) or any(path.glob(f"*{LIBERO_SUFFIX}"))
        below = [] if whole else sorted(p for p in path.rglob("*") if p.suffix in _HDF5 and p.name[0] != ".")
        try:
            below = [inside(path, str(file.relative_to(path))) for file in below]
        except ValueError as error:
            raise ConfigError.of("demos", "leaves_folder", f"--demos: {error}") from None
        files += map(str, below or [path])
    return files


def computed_statistics(datasets: Sequence[Demonstrations]) -> dict[str, Any]:
    """The content of `dataset_statistics.json` for these datasets: an entry for each suite.

    Dimensions that command a gripper are not normalized, if the suite is known here.
    """
    by_suite: dict[str, list[Demonstrations]] = {}
    for demos in datasets:
        by_suite.setdefault(str(demos.env_args.get("task_suite_name")), []).append(demos)
    return {
        suite: dataset_entry(
            [actions for demos in group for actions in demos.actions],
            _concatenated(group, lambda demos: demos.proprio),
            group[0].unnormalized_dims if group[0].statistics else _gripper_dims(group[0]),
        )
        for suite, group in by_suite.items()
    }


def _gripper_dims(demos: Demonstrations) -> Sequence[int]:
    task = task_of(demos)
    return [] if task is None else [dim for dim in task.gripper_dims if dim < demos.actions[0].shape[1]]


def task_of(demos: Demonstrations) -> TaskSpec | None:
    """The first task of the recorded environment; None if the suite or an option of it is not known here."""
    return next(iter(_tasks_of(demos)), None)


def _tasks_of(demos: Demonstrations) -> Sequence[TaskSpec]:
    try:
        return EnvConfig().completed(demos.env_args).tasks()
    except (ConfigError, ImportError):
        return []


def read_several(
    paths: Sequence[str],
    cameras: Sequence[str] | None = None,
    *,
    options: ReadOptions = AS_RECORDED,
    same: Sequence[str] = (),
    prepared: Callable[[Demonstrations], Demonstrations] = lambda demos: demos,
) -> Demonstrations:
    """Read one or more files as one dataset: `read_parts`, then `joined`."""
    return joined(read_parts(paths, cameras, options=options, same=same, prepared=prepared))


def read_parts(
    paths: Sequence[str],
    cameras: Sequence[str] | None = None,
    *,
    options: ReadOptions = AS_RECORDED,
    same: Sequence[str] = (),
    prepared: Callable[[Demonstrations], Demonstrations] = lambda demos: demos,
) -> list[Demonstrations]:
    """Read one or more files and check that they can be joined.

    Args:
        paths: files or folders that `read_demonstrations` can read; see `data_files` for folders.
        cameras: camera names in order; default all cameras of the first file.
        options: see `read_demonstrations`.
        same: further entries of `env_args` that must agree.
        prepared: applied to each file before the files are compared.

    Raises:
        ConfigError: a file cannot be read or is given twice, or the files differ in cameras, image size, proprio,
            action dimensions or control frequency; all problems are reported at once.
    """
    paths = data_files(paths)
    twice = [path for path in dict.fromkeys(paths) if list(paths).count(path) > 1]
    problems = [Problem("demos", "duplicate", f"--demos names {path} twice") for path in twice]
    if not paths:
        problems.append(Problem("demos", "too_few", "--demos names no file"))
    datasets: list[Demonstrations] = []
    check_options(options, paths)
    for path in paths:
        try:
            datasets.append(prepared(read_demonstrations(path, cameras, options)))
        except ConfigError as error:
            problems += error.problems
    if not problems and len(datasets) > 1:
        problems += disagreements(paths, datasets, same if cameras else (*same, "cameras"))
    if problems:
        raise ConfigError(problems)
    return datasets


def joined(datasets: Sequence[Demonstrations]) -> Demonstrations:
    """Join datasets; the environment options are taken from the first one."""
    first = datasets[0]
    if len(datasets) == 1:
        return first
    actions = [a for demos in datasets for a in demos.actions]
    proprio = _concatenated(datasets, lambda demos: demos.proprio)
    decisions = None
    if any(demos.decision_steps is not None for demos in datasets):
        decisions = [
            d for demos in datasets for d in demos.decision_steps or [np.arange(len(a)) for a in demos.actions]
        ]
    interventions = None
    if any(demos.interventions is not None for demos in datasets):  # an expert played the episodes of the others
        interventions = [
            flags
            for demos in datasets
            for flags in demos.interventions or [np.ones(len(a), bool) for a in demos.actions]
        ]
    autonomous = None
    if any(demos.autonomous is not None for demos in datasets):
        autonomous = [own for demos in datasets for own in demos.autonomous or [False] * len(demos.actions)]
    init_states: list[tuple[int, int]] = []
    if any(demos.init_states for demos in datasets):
        init_states = [s for demos in datasets for s in demos.init_states or [UNKNOWN_STATE] * len(demos.actions)]
    env_args = dict(first.env_args)
    if all(demos.env_args.get("task_suite_name") == first.env_args["task_suite_name"] for demos in datasets):
        task_ids = [set(demos.env_args.get("task_ids") or ()) for demos in datasets]
        env_args.pop("task_ids", None)
        if all(task_ids):  # a file without task ids holds the default tasks of its suite
            env_args["task_ids"] = sorted(set().union(*task_ids))
        env_args["max_steps"] = _max_steps(datasets)
    return Demonstrations(
        env_args=env_args,
        statistics={str(first.env_args["task_suite_name"]): dataset_entry(actions, proprio, first.unnormalized_dims)},
        images=[i for demos in datasets for i in demos.images],
        proprio=proprio,
        actions=actions,
        instructions=[text for demos in datasets for text in demos.instructions],
        success=[success for demos in datasets for success in demos.success],
        init_states=init_states,
        decision_steps=decisions,
        last_images=_concatenated(datasets, lambda demos: demos.last_images),
        last_proprio=_concatenated(datasets, lambda demos: demos.last_proprio),
        rewards=_concatenated(datasets, lambda demos: demos.rewards),
        seeds=_concatenated(datasets, lambda demos: demos.seeds),
        interventions=interventions,
        autonomous=autonomous,
        ranks=_concatenated(datasets, lambda demos: demos.ranks),
        control_freq=first.control_freq,
        names=_concatenated(datasets, lambda demos: demos.names),
        success_recorded=all(demos.success_recorded for demos in datasets),
        learned_from=[states for demos in datasets for states in demos.states_learned_from],
        action_names=_common([demos.action_names for demos in datasets]),
        proprio_names=_common([demos.proprio_names for demos in datasets]),
        step_instructions=_concatenated(datasets, lambda demos: demos.step_instructions),
    )


def _common(names: Sequence[list[str] | None]) -> list[str] | None:
    """The names on which all datasets agree; None if they do not."""
    return names[0] if all(other == names[0] for other in names) else None


def _max_steps(datasets: Sequence[Demonstrations]) -> int | None:
    """The largest step limit of files from one suite, so that no episode exceeds it; None for the suite's default."""
    recorded = [demos.env_args.get("max_steps") for demos in datasets]
    if len(set(recorded)) == 1:
        return recorded[0]
    limits = [limit for limit in recorded if limit is not None]
    unrecorded = [demos for demos, limit in zip(datasets, recorded) if limit is None]
    return max([*limits, *(task.max_steps for demos in unrecorded for task in _tasks_of(demos))], default=None)


def _concatenated(
    datasets: Sequence[Demonstrations], field: Callable[[Demonstrations], list[T] | None]
) -> list[T] | None:
    """A field of all datasets, concatenated; None if any dataset lacks it."""
    columns = [field(demos) for demos in datasets]
    return None if any(values is None for values in columns) else [x for values in columns for x in values or ()]


def control_frequency(demos: Demonstrations) -> float | None:
    """Environment steps per second: as recorded, else of the task; None if neither is known.

    Raises:
        ConfigError: the suite is known, but does not support the recorded options, for example a camera.
    """
    if demos.control_freq is not None:
        return demos.control_freq
    config = EnvConfig().completed(demos.env_args)
    try:
        config.suite_tasks({})
    except (ConfigError, ImportError):  # no suite, or one that is not installed here
        return None
    return config.tasks()[0].control_freq


def disagreements(paths: Sequence[str], datasets: Sequence[Demonstrations], same: Sequence[str]) -> list[Problem]:
    """Differences of the files from the first one."""
    problems, freqs = [], []
    for path, demos in zip(paths, datasets):
        try:
            freqs.append(control_frequency(demos))
        except ConfigError as error:
            problems += [problem.of_flag("demos", path) for problem in error.problems]
            freqs.append(None)
    for path, demos, freq in zip(paths, datasets, freqs):
        differences = _differences(datasets[0], demos, same)
        if None not in (freqs[0], freq) and freq != freqs[0]:
            differences.append(("control_freq", freqs[0], freq))
        for name, first, other in differences:
            text = f"{name} is {other!r}, but {first!r} in {paths[0]}; only files that agree can be joined"
            problems.append(Problem(None, "mismatch", text).of_flag("demos", path))
    return problems


def _differences(first: Demonstrations, other: Demonstrations, same: Sequence[str]) -> list[tuple[str, Any, Any]]:
    suites = [str(demos.env_args.get(SUITE)) for demos in (first, other)]
    source, other_source = (demos.env_args.get("instruction_source") or TASK for demos in (first, other))
    # A dataset made elsewhere is named after its folder, which is no suite.
    same = [name for name in same if name != SUITE or any(map(is_known, suites))]
    pairs = [(name, first.env_args.get(name), other.env_args.get(name)) for name in same]
    pairs.append(("instruction_source (--instruction_source task makes them equal)", source, other_source))
    pairs.append(("having proprio", first.proprio is not None, other.proprio is not None))
    if first.proprio and other.proprio:
        pairs.append(("the number of proprio values", first.proprio[0].shape[1], other.proprio[0].shape[1]))
    shapes = [demos.images[0].shape[1:] for demos in (first, other)]
    resized = shapes[0][0] == shapes[1][0]
    pairs.append((f"the shape of an observation{' (--image_size makes them equal)' * resized}", shapes[0], shapes[1]))
    pairs.append(("the number of action dimensions", first.actions[0].shape[1], other.actions[0].shape[1]))
    return [(name, value, different) for name, value, different in pairs if value != different]
