"""LIBERO demonstrations, original or regenerated: one HDF5 file per task, `<task>_demo.hdf5`.

Layout: `data` / `demo_<i>` / `actions` [S, 7], `obs/agentview_rgb` and `obs/eye_in_hand_rgb` [S, H, W, 3] uint8
(bottom row first, as in the environments), `obs/ee_pos` [S, 3], `obs/ee_ori` [S, 3] axis-angle, `obs/gripper_states`
[S, 2], `obs/joint_states` [S, 7] of the arm, `states` [S, 1 + nq + nv] of the simulator before each action.

Two kinds of files share this layout. LIBERO's `create_dataset.py` stores with action j the observation *after* it, from
which action j + 1 was chosen. OpenVLA's `regenerate_libero_dataset.py` (`libero_*_no_noops`) stores the observation
before it. They are distinguished by the arm's joints, which match `states` of the next row or of the same row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlvla.data.demonstrations import Demonstrations, dataset_entry
from rlvla.data.hdf5 import (
    UNREADABLE,
    episode_groups,
    episode_number,
    hdf5_episode,
    member,
    opened,
    read_stored_images,
)
from rlvla.data.image_storage import empty_images
from rlvla.data.options import AS_RECORDED, ReadOptions
from rlvla.data.selection import episodes_by_number, episodes_of_tasks
from rlvla.data.validation import StoredArray, StoredEpisode, check_episodes, refuse
from rlvla.envs.libero import install as libero_install
from rlvla.envs.libero.env import instruction_of
from rlvla.utils.data_files import admit
from rlvla.utils.errors import ConfigError

SUFFIX = "_demo.hdf5"
IMAGES = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
PROPRIO = {"ee_pos": 3, "ee_ori": 3, "gripper_states": 2}  # name -> width
GRIPPER_DIM = 6
_ARM = slice(1, 8)  # in a flat state: time, then joint positions, beginning with the arm


def is_libero(path: Path) -> bool:
    """Whether a path is a LIBERO demonstration file, or a folder (taken to contain such files)."""
    return path.is_dir() or path.name.endswith(SUFFIX)


def _files_by_task(path: Path) -> list[tuple[str, int, Path]]:
    """(suite, task id, file) of each file at `path`, ordered by task.

    Raises:
        ConfigError: no file, a file not named after a LIBERO task, or tasks of several suites.
    """
    files = [f for f in admit(path, below=False) if f.name.endswith(SUFFIX)] if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} holds no file *.hdf5, *.h5 or meta/info.json, so there are no demonstrations in it")
    names = {s: tasks for s, tasks in libero_install.task_names().items() if s.startswith("libero_")}
    by_task, unknown = [], []
    for file in files:
        task = file.name.removesuffix(SUFFIX)
        suite = next((s for s, tasks in names.items() if task in tasks and s != "libero_100"), None)
        if suite is None:
            unknown.append(file.name)
        else:
            by_task.append((suite, names[suite].index(task), file))
    problems = [f"{path}: {', '.join(unknown)}: not named after a LIBERO task"] if unknown else []
    suites = sorted({suite for suite, _, _ in by_task})
    if len(suites) > 1:
        problems.append(f"{path} holds tasks of several suites: {', '.join(suites)}")
    if problems:
        raise ConfigError(problems)
    return sorted(by_task)


def read_libero(path: Path, cameras: Sequence[str] | None, options: ReadOptions = AS_RECORDED) -> Demonstrations:
    """Read the episodes of all files; without initial states, since LIBERO's evaluations use others.

    Row j holds the observation before action j. If the files store the observation after each action, the first action
    is dropped, because its observation was not recorded, and the last image goes into `last_images`.

    Args:
        path: a folder of files, or one file.
        cameras: names from `IMAGES` in order; default `agentview`.
        options: selection of episodes, and resizing of the images.

    Raises:
        ConfigError: missing files or episodes, unknown cameras, or another layout.
    """
    cameras = list(cameras or ("agentview",))
    unknown = [camera for camera in cameras if camera not in IMAGES]
    if unknown:
        raise ConfigError(f"LIBERO's demonstrations have no camera {', '.join(unknown)}; they have {', '.join(IMAGES)}")
    files = _files_by_task(path)
    instructions = [instruction_of(file.name.removesuffix(SUFFIX)) for _, _, file in files]
    files = [files[position] for position in episodes_of_tasks(instructions, options, path)]
    columns: defaultdict[str, Any] = defaultdict(list)  # fields of `Demonstrations` with an entry for each episode
    with ExitStack() as stack:
        episodes = _checked_episodes(path, [file for _, _, file in files], cameras, options, stack)
        observed_after = [_observed_after_actions(of_file) for of_file in episodes]
        images = iter(_empty_images(path, episodes, observed_after, cameras, options))
        for (_, _, file), of_file, after in zip(files, episodes, observed_after):
            instruction = instruction_of(file.name.removesuffix(SUFFIX))
            try:
                _add_episodes(of_file, instruction, cameras, columns, options, images=images, observed_after=after)
            except UNREADABLE as error:
                raise ConfigError(f"{file} is not a readable file of LIBERO demonstrations ({error})") from error
    if len(columns["last_images"]) < len(columns["images"]):  # some files store the observation before the action
        columns |= {"last_images": None, "last_proprio": None}
    env_args = {
        "task_suite_name": files[0][0],
        "task_ids": [task_id for _, task_id, _ in files],
        "cameras": cameras,
        "image_size": int(columns["images"][0].shape[2]),
        **({} if options.fit is None else {"image_fit": options.fit.how}),
    }
    statistics = {files[0][0]: dataset_entry(columns["actions"], columns["proprio"], [GRIPPER_DIM])}
    if options.stride == 1:
        columns["decision_steps"] = None
    return Demonstrations(env_args=env_args, statistics=statistics, init_states=[], **columns)


def _checked_episodes(
    path: Path, files: Sequence[Path], cameras: Sequence[str], options: ReadOptions, stack: ExitStack
) -> list[list[StoredEpisode]]:
    """The episodes of each file, which the stack keeps open; ConfigError with all their problems."""
    episodes: list[list[StoredEpisode]] = []
    problems: list[str] = []
    for file in files:
        label = "" if file == path else f"{file.name}: "
        of_file: list[str] = []
        try:
            groups = episode_groups(stack.enter_context(opened(file)), of_file)
            numbered = {episode_number(demo): (demo, group) for demo, group in groups}
            groups = episodes_by_number(numbered, options, file) if groups else []
            episodes.append([_stored_episode(f"{label}{demo}", group, cameras, file.name) for demo, group in groups])
        except ConfigError:  # of the selection
            raise
        except UNREADABLE as error:
            of_file = [f"not a readable file of LIBERO demonstrations ({error})"]
        problems += [f"{label}{text}" for text in of_file or ([] if groups else ["holds no episode"])]
    check_episodes(path, [episode for of_file in episodes for episode in of_file], problems)
    refuse(
        path,
        [
            f"{episode.name}: actions has one row, and the observation before the first action is not recorded"
            for of_file in episodes
            if _observed_after_actions(of_file)
            for episode in of_file
            if len(episode.arrays["actions"].values) < 2
        ],
    )
    return episodes


def _stored_episode(name: str, group: h5py.Group, cameras: Sequence[str], file: str) -> StoredEpisode:
    widths: dict[str, int | str] = {"actions": 7, "states": f"states of {file}"}
    widths |= {f"obs/{name}": width for name, width in {**PROPRIO, "joint_states": 7}.items()}
    arrays = {role: StoredArray(role, member(group, role), ("steps", width)) for role, width in widths.items()}
    for camera in cameras:
        image = f"obs/{IMAGES[camera]}"
        arrays[camera] = StoredArray(image, member(group, image), ("steps", "pixels", "pixels", 3), "images")
    return hdf5_episode(name, group, arrays, {})


def _empty_images(
    path: Path,
    episodes: Sequence[Sequence[StoredEpisode]],
    observed_after: Sequence[bool],
    cameras: Sequence[str],
    options: ReadOptions,
) -> list[np.ndarray]:
    """Arrays for the images of the episodes of all files."""
    fit = options.fit
    shape = episodes[0][0].arrays[cameras[0]].array.shape[1:] if fit is None else (fit.size, fit.size, 3)
    files = zip(episodes, observed_after)
    steps = [len(e.arrays[cameras[0]].array) - after for of_file, after in files for e in of_file]
    lengths = [-(-count // options.stride) for count in steps]
    return empty_images(lengths, (len(cameras), *shape), path)


def _add_episodes(
    episodes: Sequence[StoredEpisode],
    instruction: str,
    cameras: Sequence[str],
    columns: defaultdict[str, Any],
    options: ReadOptions,
    *,
    images: Iterator[np.ndarray],
    observed_after: bool,
) -> None:
    for episode, of_episode in zip(episodes, images):
        stored = [episode.arrays[camera].array for camera in cameras]
        final = read_stored_images(stored, of_episode, options.fit, rest=int(observed_after), stride=options.stride)
        proprio = np.concatenate([episode.arrays[f"obs/{name}"].values for name in PROPRIO], axis=1).astype(np.float32)
        actions = episode.arrays["actions"].values.astype(np.float32)
        if observed_after:
            columns["last_images"].append(final[0])
            columns["last_proprio"].append(proprio[-1])
            proprio, actions = proprio[:-1], actions[1:]
        columns["images"].append(of_episode)
        columns["proprio"].append(proprio[:: options.stride])
        columns["decision_steps"].append(np.arange(len(actions))[:: options.stride])
        columns["actions"].append(actions)
        columns["instructions"].append(instruction)
        columns["names"].append(episode.name)
        columns["success"].append(True)  # both kinds contain successful demonstrations only


def _observed_after_actions(episodes: Sequence[StoredEpisode]) -> bool:
    """Whether row j of `obs` was recorded after action j; irrelevant if the arm never moves."""
    same_row, next_row = 0.0, 0.0
    for episode in episodes:
        observed, before = episode.arrays["obs/joint_states"].values[:-1], episode.arrays["states"].values[:, _ARM]
        same_row += float(np.abs(observed - before[:-1]).sum())
        next_row += float(np.abs(observed - before[1:]).sum())
    return next_row <= same_row
