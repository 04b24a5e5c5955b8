"""Demonstrations on disk: robomimic-style HDF5 plus `dataset_statistics.json` beside it.

Layout: `data` (attribute `env_args`, JSON) / `demo_<i>` (attributes `num_samples`, `instruction`, `task_id`,
`init_state_id`, `seed`, `success`) / `actions` [S, D], `rewards` [S], `dones` [S], `obs/<camera>_image` [S, H, W, 3]
uint8, `obs/proprio` [S, P] where there is any. Dumped rollouts hold
pictures and proprio of decisions only; `decision_steps` says at which steps those were. What was seen after the last
action is there `rollout/last_obs/<camera>_image` [H, W, 3] and `rollout/last_obs/proprio` [P].
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlvla.envs.splits import LearnedStates
from rlvla.trainer.libero_demonstrations import GRIPPER_DIM, is_libero, read_libero_episodes
from rlvla.utils.errors import ConfigError
from rlvla.utils.runs import write_json

STATISTICS_FILE = "dataset_statistics.json"
LAST_OBS = "rollout/last_obs"
UNKNOWN_STATE = (0, -1)  # task and initial state of an episode that was recorded elsewhere


class DemonstrationWriter:
    """Writes episodes as they come; the file appears under its name only when complete.

    Args:
        path: the HDF5 file.
        env_args: suite, tasks, cameras and options with which the episodes were made; stored as JSON.
        cameras: camera names in the order of the images.
        gripper_dims: action dimensions that are not normalised (their statistics mask is False).
        control_freq: environment steps per second, where neither `env_args` nor the suite tells.
    """

    def __init__(
        self,
        path: Path,
        env_args: dict[str, Any],
        cameras: Sequence[str],
        gripper_dims: Sequence[int] = (),
        control_freq: float | None = None,
    ):
        self._path, self._cameras, self._gripper_dims = path, list(cameras), list(gripper_dims)
        self._env_args = env_args
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.part")
        self._file = h5py.File(self._temporary, "w")
        self._data = self._file.create_group("data")
        self._data.attrs["env_args"] = json.dumps(env_args)
        if control_freq is not None:
            self._data.attrs["control_freq"] = control_freq
        self._actions: list[np.ndarray] = []
        self._proprio: list[np.ndarray] = []

    def add(self, episode: Any, task_id: int) -> None:
        """Append an `ExpertEpisode` of a task, or a dict with its keys; arrays under `more` are kept, too."""
        demo = self._data.create_group(f"demo_{len(self._actions)}")
        steps = len(episode["actions"])
        demo.attrs["num_samples"] = steps
        demo.attrs["instruction"] = episode["instruction"]
        demo.attrs["task_id"] = task_id
        demo.attrs["init_state_id"] = episode["init_state_id"]
        demo.attrs["seed"] = str(episode["seed"])
        demo.attrs["success"] = bool(episode["success_at_end"])
        demo["actions"] = episode["actions"]
        for name, values in episode.get("more", {}).items():
            demo[name] = values
        demo["rewards"] = episode["rewards"]
        demo["dones"] = np.arange(steps) == steps - 1
        for index, camera in enumerate(self._cameras):
            demo.create_dataset(f"obs/{camera}_image", data=episode["images"][:, index], compression="lzf")
        if episode["proprio"] is not None:
            demo["obs/proprio"] = episode["proprio"]
            self._proprio.append(episode["proprio"])
        self._actions.append(episode["actions"])

    def close(self) -> None:
        """Finish the file and write the statistics; ConfigError if no episode was added."""
        if not self._actions:
            self.abort()
            raise ConfigError(f"no demonstration was kept for {self._path}: the expert never did what was asked for")
        self._data.attrs["total"] = sum(len(actions) for actions in self._actions)
        self._file.close()
        entry = dataset_entry(self._actions, self._proprio, self._gripper_dims)
        write_json(self._path.parent / STATISTICS_FILE, {self._env_args["task_suite_name"]: entry})
        os.replace(self._temporary, self._path)

    def abort(self) -> None:
        """Throw the unfinished file away."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def statistics(values: np.ndarray, unnormalised: Sequence[int] = ()) -> dict[str, list[float] | list[bool]]:
    """mean, std, min, max, q01, q99 of [M, D] per dimension, and the mask of the dimensions to normalise."""
    values = values.astype(np.float64)
    q01, q99 = np.quantile(values, [0.01, 0.99], axis=0)
    numbers = {
        "mean": values.mean(0),
        "std": values.std(0),
        "min": values.min(0),
        "max": values.max(0),
        "q01": q01,
        "q99": q99,
    }
    mask = [dim not in unnormalised for dim in range(values.shape[1])]
    return {**{name: column.tolist() for name, column in numbers.items()}, "mask": mask}


def dataset_entry(
    actions: Sequence[np.ndarray], proprio: Sequence[np.ndarray] | None, unnormalised: Sequence[int] = ()
) -> dict[str, Any]:
    """The entry of a data set in `dataset_statistics.json`, from the actions and proprio of its episodes."""
    entry: dict[str, Any] = {"action": statistics(np.concatenate(actions), unnormalised)}
    if proprio:
        entry["proprio"] = statistics(np.concatenate(proprio))
    entry["num_transitions"] = sum(len(episode) for episode in actions)
    entry["num_trajectories"] = len(actions)
    return entry


@dataclass
class Demonstrations:
    """All episodes of a file, in memory.

    Attributes:
        env_args: how the episodes were made; `cameras` are those of `images`, in their order.
        statistics: content of `dataset_statistics.json`.
        images: per episode [S, N, H, W, 3] uint8.
        proprio: per episode [S, P] float32, or None.
        actions: per episode [S, D] float32.
        instructions: per episode.
        success: per episode.
        init_states: per episode (task id, initial state id), or `UNKNOWN_STATE`; empty where none is known.
        decision_steps: per episode [S] int, the steps at which a picture was taken; None: at every step.
        last_images: per episode [N, H, W, 3] uint8, seen after its last action; None where that is not recorded.
        last_proprio: per episode [P] float32 of that observation, or None.
        rewards: per episode [S] float32; None where they are not recorded.
        seeds: per episode the seed it was played with; None where that is not known.
        control_freq: environment steps per second, where the files tell; see `control_frequency`.
        learned_from: known initial states of several files, whose suites may differ; None: see `init_states`.
    """

    env_args: dict[str, Any]
    statistics: dict[str, Any]
    images: list[np.ndarray]
    proprio: list[np.ndarray] | None
    actions: list[np.ndarray]
    instructions: list[str]
    success: list[bool]
    init_states: list[tuple[int, int]]
    decision_steps: list[np.ndarray] | None = None
    last_images: list[np.ndarray] | None = None
    last_proprio: list[np.ndarray] | None = None
    rewards: list[np.ndarray] | None = None
    seeds: list[int] | None = None
    control_freq: float | None = None
    learned_from: list[LearnedStates] | None = None

    @property
    def num_steps(self) -> int:
        """Environment steps of all episodes."""
        return sum(len(actions) for actions in self.actions)

    @property
    def num_rows(self) -> int:
        """Decisions that were pictured: what a model is trained on."""
        return sum(len(images) for images in self.images)

    @property
    def states_learned_from(self) -> list[LearnedStates]:
        """The initial states of the episodes, as far as they are known: one range for each task."""
        if self.learned_from is not None:
            return self.learned_from
        states: dict[int, list[int]] = {}
        for known in self.init_states:
            if known != UNKNOWN_STATE:
                states.setdefault(known[0], []).append(known[1])
        suite = str(self.env_args.get("task_suite_name"))
        return [LearnedStates(suite, task_id, min(own), max(own) + 1) for task_id, own in states.items()]

    @property
    def image_bytes(self) -> int:
        """Memory of the pictures."""
        return sum(images.nbytes for images in self.images)

    def joined_images(self) -> np.ndarray:
        """[M, N, H, W, 3] uint8, all episodes one after the other; `images` are views of it from now on.

        Pictures are most of the memory of a supervised run: they are held once.
        """
        joined = np.empty((sum(map(len, self.images)), *self.images[0].shape[1:]), self.images[0].dtype)
        start = 0
        for position, images in enumerate(self.images):  # each is given up as soon as it has been copied
            self.images[position] = joined[start : start + len(images)]
            self.images[position][:] = images
            start += len(images)
        return joined


def read_demonstrations(path: str | Path, cameras: Sequence[str] | None = None) -> Demonstrations:
    """Read a file written by `DemonstrationWriter`, a LeRobot folder, or LIBERO's own demonstrations (`*_demo.hdf5`).

    Args:
        path: the HDF5 file, or a folder: a LeRobot data set, or LIBERO's files.
        cameras: which cameras, in which order; default all of the file.

    Raises:
        ConfigError: the file or its statistics are missing, it is not such a file, or a camera is not in it.
    """
    path = Path(path)
    from rlvla.trainer import lerobot  # it makes `Demonstrations`

    if lerobot.is_lerobot(path):
        return lerobot.read_lerobot(path, cameras)
    if path.exists() and is_libero(path):
        episodes = read_libero_episodes(path, cameras)
        return Demonstrations(statistics={episodes["env_args"]["task_suite_name"]: _libero_entry(episodes)}, **episodes)
    statistics_path = path.parent / STATISTICS_FILE
    problems = [
        f"{p} does not exist; make it with cli/collect_demos.py" for p in (path, statistics_path) if not p.is_file()
    ]
    if problems:
        raise ConfigError(problems)
    try:
        with h5py.File(path, "r") as file:
            return _read(file, json.loads(statistics_path.read_text(encoding="utf-8")), path, cameras)
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not a readable file of demonstrations ({error})") from error


def _libero_entry(episodes: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": statistics(np.concatenate(episodes["actions"]), [GRIPPER_DIM]),
        "proprio": statistics(np.concatenate(episodes["proprio"])),
        "num_transitions": sum(len(actions) for actions in episodes["actions"]),
        "num_trajectories": len(episodes["actions"]),
    }


def _read(file: h5py.File, stats: dict[str, Any], path: Path, cameras: Sequence[str] | None) -> Demonstrations:
    data = file["data"]
    env_args = json.loads(data.attrs["env_args"])
    known = env_args["cameras"]
    unknown = [camera for camera in cameras or () if camera not in known]
    if unknown:
        raise ConfigError(f"{path} has no camera {', '.join(unknown)}; it has {', '.join(known)}")
    wanted = list(cameras or known)
    demos = [data[name] for name in sorted(data, key=lambda name: int(name.split("_")[1]))]
    has_proprio = "proprio" in demos[0]["obs"]
    starts = [demo["decision_steps"][:] for demo in demos if "decision_steps" in demo]
    after = [demo[LAST_OBS] for demo in demos if LAST_OBS in demo]
    return Demonstrations(
        env_args=env_args | {"cameras": wanted},
        statistics=stats,
        images=[np.stack([demo[f"obs/{c}_image"][:] for c in wanted], axis=1) for demo in demos],
        proprio=[demo["obs/proprio"][:] for demo in demos] if has_proprio else None,
        actions=[demo["actions"][:] for demo in demos],
        instructions=[str(demo.attrs["instruction"]) for demo in demos],
        success=[bool(demo.attrs["success"]) for demo in demos],
        init_states=[(int(demo.attrs["task_id"]), int(demo.attrs["init_state_id"])) for demo in demos],
        decision_steps=starts or None,
        last_images=[np.stack([obs[f"{c}_image"][:] for c in wanted]) for obs in after] or None,
        last_proprio=[obs["proprio"][:] for obs in after] if after and has_proprio else None,
        rewards=[demo["rewards"][:].astype(np.float32) for demo in demos] if "rewards" in demos[0] else None,
        seeds=[int(demo.attrs["seed"]) for demo in demos] if "seed" in demos[0].attrs else None,
        control_freq=data.attrs.get("control_freq", env_args.get("control_freq")),
    )
