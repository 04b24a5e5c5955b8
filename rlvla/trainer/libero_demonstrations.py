"""LIBERO's demonstrations, its own or played again by others: one HDF5 file per task, `<task>_demo.hdf5`.

Layout: `data` / `demo_<i>` / `actions` [S, 7], `obs/agentview_rgb` and `obs/eye_in_hand_rgb` [S, H, W, 3] uint8 (first
row lowest, as in the environments), `obs/ee_pos` [S, 3], `obs/ee_ori` [S, 3] axis-angle, `obs/gripper_states` [S, 2],
`obs/joint_states` [S, 7] of the arm, `states` [S, 1 + nq + nv] of the simulator before each action.

Two kinds have this layout. LIBERO's own `create_dataset.py` writes beside action j what was seen *after* it, which is
what action j + 1 was chosen from. OpenVLA's `regenerate_libero_dataset.py` (`libero_*_no_noops`) writes what was seen
before it. The arm's joints tell them apart: they are those of `states` one row later, or of the same row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlvla.envs import libero_install
from rlvla.envs.libero_env import instruction_of
from rlvla.utils.errors import ConfigError

SUFFIX = "_demo.hdf5"
IMAGES = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
PROPRIO = ("ee_pos", "ee_ori", "gripper_states")
GRIPPER_DIM = 6
_ARM = slice(1, 8)  # of a flat state: time, then joint positions, the arm's first


def is_libero(path: Path) -> bool:
    """Whether this is a folder of LIBERO's files, or one of them."""
    return path.is_dir() or path.name.endswith(SUFFIX)


def libero_files(path: Path) -> list[tuple[str, int, Path]]:
    """(suite, task id, file) of each file below `path`, in the order of the tasks.

    Raises:
        ConfigError: no file, names that are no task of LIBERO, or tasks of several suites.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} holds no file *{SUFFIX}; LIBERO's demonstrations have such names")
    names = libero_install.task_names()
    found, unknown = [], []
    for file in files:
        task = file.name.removesuffix(SUFFIX)
        suites = [suite for suite, tasks in names.items() if task in tasks and suite.startswith("libero_")]
        suites = [suite for suite in suites if suite != "libero_100"]
        if suites:
            found.append((suites[0], names[suites[0]].index(task), file))
        else:
            unknown.append(file.name)
    problems = [f"{path}: {', '.join(unknown)}: no task of LIBERO is named like that"] if unknown else []
    if len({suite for suite, _, _ in found}) > 1:
        problems.append(f"{path} holds tasks of several suites: {', '.join(sorted({s for s, _, _ in found}))}")
    if problems:
        raise ConfigError(problems)
    return sorted(found)


def read_libero_episodes(path: Path, cameras: Sequence[str] | None) -> dict[str, Any]:
    """All episodes of all files, as keyword arguments of `rlvla.trainer.demonstrations.Demonstrations`.

    Row j holds what was seen before action j. Of files that hold what was seen after it, the first action is left out:
    what it was chosen from was not recorded. The last picture is then in `last_images`.

    Args:
        path: the folder, or one file.
        cameras: names from `IMAGES`, in the order of the images; default `agentview`.

    Raises:
        ConfigError: no such files, unknown cameras, a file of another layout, or no episode that could be learned from.
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
            with h5py.File(file, "r") as opened:
                _read_file(opened, instruction_of(file.name.removesuffix(SUFFIX)), cameras, content, last)
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
    if len(last["last_images"]) == len(content["images"]):  # not of files of the other kind
        content |= last
    # LIBERO's demonstrations start from states of their own, none of those that evaluations start from.
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
            last["last_images"].append(images[-1].copy())  # a view would keep all pictures of the episode
            last["last_proprio"].append(proprio[-1])
            images, proprio, actions = images[:-1], proprio[:-1], actions[1:]
        content["images"].append(images)
        content["proprio"].append(proprio)
        content["actions"].append(actions)
        content["instructions"].append(instruction)
        content["success"].append(True)  # both kinds hold successful demonstrations only


def _seen_after_actions(demos: Sequence[h5py.Group]) -> bool:
    """Whether row j of `obs` was seen after action j; where the arm never moves it makes no difference."""
    same_row, next_row = 0.0, 0.0
    for demo in demos:
        seen, before = demo["obs"]["joint_states"][:-1], demo["states"][:, _ARM]
        same_row += float(np.abs(seen - before[:-1]).sum())
        next_row += float(np.abs(seen - before[1:]).sum())
    return next_row <= same_row
