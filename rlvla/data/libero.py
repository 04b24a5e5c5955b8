"""LIBERO demonstrations, original or regenerated: one HDF5 file per task, `<task>_demo.hdf5`.

Layout: `data` / `demo_<i>` / `actions` [S, 7], `obs/agentview_rgb` and `obs/eye_in_hand_rgb` [S, H, W, 3] uint8
(bottom row first, as in the environments), `obs/ee_pos` [S, 3], `obs/ee_ori` [S, 3] axis-angle, `obs/gripper_states`
[S, 2], `obs/joint_states` [S, 7] of the arm, `states` [S, 1 + nq + nv] of the simulator before each action.

Two kinds of files share this layout. LIBERO's `create_dataset.py` stores with action j the observation *after* it, from
which action j + 1 was chosen. OpenVLA's `regenerate_libero_dataset.py` (`libero_*_no_noops`) stores the observation
before it. They are distinguished by the arm's joints, which match `states` of the next row or of the same row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlvla.data.hdf5 import opened
from rlvla.envs.libero import install as libero_install
from rlvla.envs.libero.env import instruction_of
from rlvla.utils.errors import ConfigError

SUFFIX = "_demo.hdf5"
IMAGES = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
PROPRIO = ("ee_pos", "ee_ori", "gripper_states")
GRIPPER_DIM = 6
_ARM = slice(1, 8)  # in a flat state: time, then joint positions, beginning with the arm


def is_libero(path: Path) -> bool:
    """Whether a path is a LIBERO demonstration file, or a folder (taken to contain such files)."""
    return path.is_dir() or path.name.endswith(SUFFIX)


def libero_files(path: Path) -> list[tuple[str, int, Path]]:
    """(suite, task id, file) of each file at `path`, in the order of the tasks.

    Raises:
        ConfigError: there is no file, a file is not named after a LIBERO task, or the tasks belong to several suites.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} holds no file *{SUFFIX}; LIBERO's demonstrations have such names")
    names = libero_install.task_names()
    tasks_of_files, unknown = [], []
    for file in files:
        task = file.name.removesuffix(SUFFIX)
        suites = [suite for suite, tasks in names.items() if task in tasks and suite.startswith("libero_")]
        suites = [suite for suite in suites if suite != "libero_100"]
        if suites:
            tasks_of_files.append((suites[0], names[suites[0]].index(task), file))
        else:
            unknown.append(file.name)
    problems = [f"{path}: {', '.join(unknown)}: no task of LIBERO is named like that"] if unknown else []
    if len({suite for suite, _, _ in tasks_of_files}) > 1:
        listed = ", ".join(sorted({suite for suite, _, _ in tasks_of_files}))
        problems.append(f"{path} holds tasks of several suites: {listed}")
    if problems:
        raise ConfigError(problems)
    return sorted(tasks_of_files)


def read_libero_episodes(path: Path, cameras: Sequence[str] | None) -> dict[str, Any]:
    """All episodes of all files, as keyword arguments of `rlvla.data.demonstrations.Demonstrations`.

    Row j holds the observation before action j. If the files store the observation after each action, the first action
    is dropped, because its observation was not recorded, and the last image goes into `last_images`.

    Args:
        path: a folder of files, or one file.
        cameras: names from `IMAGES` in the order wanted; default `agentview`.

    Raises:
        ConfigError: there are no files, cameras are unknown, a file has another layout, or there are no episodes.
    """
    cameras = list(cameras or ("agentview",))
    unknown = [camera for camera in cameras if camera not in IMAGES]
    if unknown:
        raise ConfigError(f"LIBERO's demonstrations have no camera {', '.join(unknown)}; they have {', '.join(IMAGES)}")
    files = libero_files(path)
    content: dict[str, list] = {name: [] for name in ("images", "proprio", "actions", "instructions", "success")}
    last: dict[str, list] = {name: [] for name in ("last_images", "last_proprio")}
    for _, _, file in files:
        try:
            with opened(file) as hdf5:
                _read_file(hdf5, instruction_of(file.name.removesuffix(SUFFIX)), cameras, content, last)
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"{file} is not a readable file of LIBERO demonstrations ({error})") from error
    if not content["actions"]:
        raise ConfigError(f"{path} holds no episode")
    env_args = {
        "task_suite_name": files[0][0],
        "task_ids": [task_id for _, task_id, _ in files],
        "cameras": cameras,
        "image_size": int(content["images"][0].shape[2]),
    }
    if len(last["last_images"]) == len(content["images"]):  # empty for files that store the observation before
        content |= last
    # LIBERO demonstrations do not start from the initial states used in evaluations.
    return {**content, "env_args": env_args, "init_states": []}


def _read_file(
    file: h5py.File, instruction: str, cameras: Sequence[str], content: dict[str, list], last: dict[str, list]
) -> None:
    data = file["data"]
    demos = {name: data[name] for name in sorted(data, key=lambda name: int(name.split("_")[1]))}
    seen_after = _seen_after_actions(list(demos.values()))
    for name, demo in demos.items():
        images = np.stack([demo["obs"][IMAGES[camera]][:] for camera in cameras], axis=1)
        if images.dtype != np.uint8 or images.ndim != 5 or images.shape[2] != images.shape[3]:
            raise ValueError(f"{name} has images {list(images.shape)} {images.dtype}, not square ones of uint8")
        proprio = np.concatenate([demo["obs"][part][:] for part in PROPRIO], axis=1).astype(np.float32)
        actions = demo["actions"][:].astype(np.float32)
        if seen_after:
            if len(actions) < 2:
                raise ValueError(f"{name} has {len(actions)} step, and of the first action it is not known what it saw")
            last["last_images"].append(images[-1].copy())  # a view would keep all images of the episode alive
            last["last_proprio"].append(proprio[-1])
            images, proprio, actions = images[:-1], proprio[:-1], actions[1:]
        content["images"].append(images)
        content["proprio"].append(proprio)
        content["actions"].append(actions)
        content["instructions"].append(instruction)
        content["success"].append(True)  # both kinds contain successful demonstrations only


def _seen_after_actions(demos: Sequence[h5py.Group]) -> bool:
    """Whether row j of `obs` was recorded after action j; if the arm never moves, it makes no difference."""
    same_row, next_row = 0.0, 0.0
    for demo in demos:
        seen, before = demo["obs"]["joint_states"][:-1], demo["states"][:, _ARM]
        same_row += float(np.abs(seen - before[:-1]).sum())
        next_row += float(np.abs(seen - before[1:]).sum())
    return next_row <= same_row
