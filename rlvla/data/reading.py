"""Reading demonstrations in any supported format, from one file or from several as one dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlvla.data.demonstrations import STATISTICS_FILE, UNKNOWN_STATE, Demonstrations, dataset_entry, statistics
from rlvla.data.hdf5 import UNREADABLE, opened
from rlvla.data.lerobot_cache import cache_folders, is_repo_id
from rlvla.data.libero import GRIPPER_DIM, is_libero, read_libero_episodes
from rlvla.data.libero import SUFFIX as LIBERO_SUFFIX
from rlvla.data.robomimic import read_episodes
from rlvla.data.validation import camera_problems, refuse
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem

T = TypeVar("T")
_HDF5 = (".hdf5", ".h5")


def read_demonstrations(path: str | Path, cameras: Sequence[str] | None = None) -> Demonstrations:
    """Read a file written by `DemonstrationWriter`, a LeRobot dataset, or LIBERO demonstrations (`*_demo.hdf5`).

    Statistics are computed if there is no `dataset_statistics.json` next to the file.

    Args:
        path: an HDF5 file, or a folder: of a LeRobot dataset, of LIBERO files, or of other HDF5 files, which are read
            as one dataset; or the repository id of a LeRobot dataset in a cache of this machine.
        cameras: names of the cameras in the order wanted; default all cameras of the file.

    Raises:
        ConfigError: the file is missing, it has another format, it lacks a camera, or its episodes do not fit together
            (see `rlvla.data.validation`).
    """
    path = Path(path)
    from rlvla.data import lerobot

    if cameras:
        refuse(path, camera_problems(cameras, "--cameras"))
    if lerobot.is_lerobot(path):
        return lerobot.read_lerobot(path, cameras)
    files = data_files([path])
    if files != [str(path)]:
        return read_several(files, cameras)
    if path.exists() and is_libero(path):
        episodes = read_libero_episodes(path, cameras)
        return Demonstrations(statistics={episodes["env_args"]["task_suite_name"]: _libero_entry(episodes)}, **episodes)
    if not path.is_file():
        text = f"{path} does not exist; make it with cli/collect_demos.py"
        raise ConfigError.of(None, "missing_file", text + not_cached(path))
    beside = path.parent / STATISTICS_FILE
    try:
        with opened(path) as file:
            # Numbers that are not finite are reported by their keys.
            recorded = read_json(beside, allow_nan=True) if beside.is_file() else None
            demos = read_episodes(file, path, recorded, cameras)
            return demos if recorded is not None else replace(demos, statistics=computed_statistics([demos]))
    except UNREADABLE as error:
        if isinstance(error, ConfigError):
            raise
        text = f"{path} is not a readable file of demonstrations ({error})"
        raise ConfigError.of(None, "invalid_file", text) from error


def not_cached(path: str | Path) -> str:
    """A clause on where a LeRobot dataset of this name was looked for, for messages; "" if it is no repository id."""
    if not is_repo_id(path) or Path(path).parent.exists():  # or just not in this folder
        return ""
    places = ", ".join(map(str, cache_folders(str(path))))
    fetch = f"hf download {path} --repo-type dataset"
    return f". No LeRobot dataset of this name is in {places} either; nothing is downloaded, but `{fetch}` does that"


def data_files(paths: Sequence[str | Path]) -> list[str]:
    """The datasets at these paths: a folder of HDF5 files stands for each file in it and in the folders below.

    So `--output` of `cli/collect_demos.py` and `--save_path` of a run with dumped rollouts are understood. The folder
    of a LeRobot dataset or of LIBERO files is one dataset.
    """
    from rlvla.data import lerobot

    files: list[str] = []
    for path in map(Path, paths):
        whole = not path.is_dir() or lerobot.is_lerobot(path) or any(path.glob(f"*{LIBERO_SUFFIX}"))
        below = [] if whole else sorted(p for p in path.rglob("*") if p.suffix in _HDF5 and p.name[0] != ".")
        files += map(str, below or [path])
    return files


def computed_statistics(parts: Sequence[Demonstrations]) -> dict[str, Any]:
    """The content of `dataset_statistics.json` for these datasets: an entry for each suite.

    Dimensions that command a gripper are not normalized, if the suite is known here.
    """
    of_suite: dict[str, list[Demonstrations]] = {}
    for part in parts:
        of_suite.setdefault(str(part.env_args.get("task_suite_name")), []).append(part)
    return {
        suite: dataset_entry(
            [actions for part in same for actions in part.actions],
            _all(same, lambda part: part.proprio),
            same[0].unnormalized_dims if same[0].statistics else _gripper_dims(same[0]),
        )
        for suite, same in of_suite.items()
    }


def _gripper_dims(demos: Demonstrations) -> Sequence[int]:
    task = task_of(demos)
    return [] if task is None else [dim for dim in task.gripper_dims if dim < demos.actions[0].shape[1]]


def task_of(demos: Demonstrations) -> TaskSpec | None:
    """The first task of the recorded environment; None if the suite or an option of it is not known here."""
    try:
        return EnvConfig().completed(demos.env_args).tasks()[0]
    except (ConfigError, ImportError):
        return None


def _libero_entry(episodes: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": statistics(np.concatenate(episodes["actions"]), [GRIPPER_DIM]),
        "proprio": statistics(np.concatenate(episodes["proprio"])),
        "num_transitions": sum(len(actions) for actions in episodes["actions"]),
        "num_trajectories": len(episodes["actions"]),
    }


def read_several(
    paths: Sequence[str],
    cameras: Sequence[str] | None = None,
    *,
    same: Sequence[str] = (),
    prepared: Callable[[Demonstrations], Demonstrations] = lambda demos: demos,
) -> Demonstrations:
    """Read one or more files as one dataset: `read_parts`, then `joined`."""
    return joined(read_parts(paths, cameras, same=same, prepared=prepared))


def read_parts(
    paths: Sequence[str],
    cameras: Sequence[str] | None = None,
    *,
    same: Sequence[str] = (),
    prepared: Callable[[Demonstrations], Demonstrations] = lambda demos: demos,
) -> list[Demonstrations]:
    """Read one or more files and check that they can be joined.

    Args:
        paths: files or folders that `read_demonstrations` can read; see `data_files` for folders.
        cameras: names of the cameras in the order wanted; default all cameras of the first file.
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
    parts: list[Demonstrations] = []
    for path in paths:
        try:
            parts.append(prepared(read_demonstrations(path, cameras)))
        except ConfigError as error:
            problems += error.problems
    if not problems and len(parts) > 1:
        problems += disagreements(paths, parts, same if cameras else (*same, "cameras"))
    if problems:
        raise ConfigError(problems)
    return parts


def joined(parts: Sequence[Demonstrations]) -> Demonstrations:
    """The episodes of all parts as one dataset; its environment options are those of the first part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    actions = [a for part in parts for a in part.actions]
    proprio = _all(parts, lambda part: part.proprio)
    decisions = None
    if any(part.decision_steps is not None for part in parts):
        decisions = [d for part in parts for d in part.decision_steps or [np.arange(len(a)) for a in part.actions]]
    env_args = dict(first.env_args)
    if all(part.env_args.get("task_suite_name") == first.env_args["task_suite_name"] for part in parts):
        task_ids = [set(part.env_args.get("task_ids") or ()) for part in parts]
        env_args.pop("task_ids", None)
        if all(task_ids):  # a file without task ids holds the default tasks of its suite
            env_args["task_ids"] = sorted(set().union(*task_ids))
        env_args["max_steps"] = _longest(parts)
    return Demonstrations(
        env_args=env_args,
        statistics={str(first.env_args["task_suite_name"]): dataset_entry(actions, proprio, first.unnormalized_dims)},
        images=[i for part in parts for i in part.images],
        proprio=proprio,
        actions=actions,
        instructions=[t for part in parts for t in part.instructions],
        success=[s for part in parts for s in part.success],
        init_states=_init_states(parts),
        decision_steps=decisions,
        last_images=_all(parts, lambda part: part.last_images),
        last_proprio=_all(parts, lambda part: part.last_proprio),
        rewards=_all(parts, lambda part: part.rewards),
        seeds=_all(parts, lambda part: part.seeds),
        ranks=_all(parts, lambda part: part.ranks),
        control_freq=first.control_freq,
        names=_all(parts, lambda part: part.names),
        learned_from=[states for part in parts for states in part.states_learned_from],
    )


def _longest(parts: Sequence[Demonstrations]) -> int | None:
    """The largest step limit of files from one suite, so that no episode exceeds it; None for the suite's default."""
    recorded = [part.env_args.get("max_steps") for part in parts]
    if len(set(recorded)) == 1:
        return recorded[0]
    limits = [limit if limit is not None else _default_limit(part) for limit, part in zip(recorded, parts)]
    return max((limit for limit in limits if limit is not None), default=None)


def _default_limit(demos: Demonstrations) -> int | None:
    """The suite's step limit, the largest of the recorded tasks; None if the suite is unknown here."""
    try:
        return max(task.max_steps for task in EnvConfig().completed(demos.env_args).tasks())
    except (ConfigError, ImportError):
        return None


def control_frequency(demos: Demonstrations) -> float | None:
    """Environment steps per second: as recorded, else those of the task; None if neither is known.

    Raises:
        ConfigError: the suite is known, but does not support the recorded options, for example a camera.
    """
    if demos.control_freq is not None:
        return float(demos.control_freq)
    config = EnvConfig().completed(demos.env_args)
    try:
        config.suite_tasks({})
    except (ConfigError, ImportError):  # no suite, or one that is not installed here
        return None
    return config.tasks()[0].control_freq


def disagreements(paths: Sequence[str], parts: Sequence[Demonstrations], same: Sequence[str]) -> list[Problem]:
    """How the files differ from the first one, as problems."""
    problems, freqs = [], []
    for path, part in zip(paths, parts):
        try:
            freqs.append(control_frequency(part))
        except ConfigError as error:
            problems += [problem.of_flag("demos", path) for problem in error.problems]
            freqs.append(None)
    for path, part, freq in zip(paths, parts, freqs):
        differences = _differences(parts[0], part, same)
        if None not in (freqs[0], freq) and freq != freqs[0]:
            differences.append(("control_freq", freqs[0], freq))
        for name, first, other in differences:
            text = f"{name} is {other!r}, but {first!r} in {paths[0]}; only files that agree can be joined"
            problems.append(Problem(None, "mismatch", text).of_flag("demos", path))
    return problems


def _differences(first: Demonstrations, other: Demonstrations, same: Sequence[str]) -> list[tuple[str, Any, Any]]:
    pairs = [(name, first.env_args.get(name), other.env_args.get(name)) for name in same]
    pairs.append(("having proprio", first.proprio is not None, other.proprio is not None))
    if first.proprio and other.proprio:
        pairs.append(("the number of proprio values", first.proprio[0].shape[1], other.proprio[0].shape[1]))
    pairs.append(("the shape of an observation", first.images[0].shape[1:], other.images[0].shape[1:]))
    pairs.append(("the number of action dimensions", first.actions[0].shape[1], other.actions[0].shape[1]))
    return [(name, value, different) for name, value, different in pairs if value != different]


def _init_states(parts: Sequence[Demonstrations]) -> list[tuple[int, int]]:
    """The initial states of all episodes; [] if none is known."""
    if not any(part.init_states for part in parts):
        return []
    return [state for part in parts for state in part.init_states or [UNKNOWN_STATE] * len(part.actions)]


def _all(parts: Sequence[Demonstrations], field: Callable[[Demonstrations], list[T] | None]) -> list[T] | None:
    """A field of all parts, concatenated; None if any part lacks it."""
    lists = [field(part) for part in parts]
    return None if any(values is None for values in lists) else [x for values in lists for x in values or ()]
