"""Demonstrations on disk: a robomimic-style HDF5 file with `dataset_statistics.json` next to it.

Layout: `data` (attribute `env_args`, JSON) / `demo_<i>` (attributes `num_samples`, `instruction`, `task_id`,
`init_state_id`, `seed`, `success`) / `actions` [S, D], `rewards` [S], `dones` [S], `obs/<camera>_image` [S, H, W, 3]
uint8, and optionally `obs/proprio` [S, P]. Dumped rollouts have images and proprio of decisions only, with
`decision_steps` giving the steps of the decisions; the observation after the last action is
`rollout/last_obs/<camera>_image` [H, W, 3] and `rollout/last_obs/proprio` [P]. Corrections have those of the steps
after the takeover only, which are their `decision_steps`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlvla.data.demonstrations import STATISTICS_FILE, Demonstrations, dataset_entry, empty_images
from rlvla.data.hdf5 import attribute, episode_groups, hdf5_episode, member, opened, read_stored_images
from rlvla.data.validation import StoredArray, StoredEpisode, StoredValue, camera_problems, check_episodes, refuse
from rlvla.envs.records import checked_record
from rlvla.models.dataset_statistics import statistics_problems
from rlvla.utils.data_files import parse_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_json
from rlvla.utils.signals import interrupts_deferred

LAST_OBS, REWARDS = "rollout/last_obs", "rollout/rewards"
_PIXELS = "pixels"


class DemonstrationWriter:
    """Writes episodes one by one; the file gets its final name only when it is complete.

    Args:
        path: the HDF5 file.
        env_args: suite, tasks, cameras and options the episodes were recorded with; stored as JSON.
        cameras: camera names in the order of the images.
        gripper_dims: action dimensions that are not normalized (their statistics mask is False).
        control_freq: environment steps per second, if known neither from `env_args` nor from the suite.
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

    @interrupts_deferred()
    def add(self, episode: Any, task_id: int) -> None:
        """Append an `ExpertEpisode` of a task, or a dict with the same keys; arrays under `more` are stored as well."""
        demo = self._data.create_group(f"demo_{len(self._actions)}")
        steps = len(episode["actions"])
        demo.attrs["num_samples"] = steps
        demo.attrs["instruction"] = episode["instruction"]
        demo.attrs["task_id"] = task_id
        demo.attrs["init_state_id"] = episode["init_state_id"]
        demo.attrs["seed"] = str(episode["seed"])
        if episode["success_at_end"] is not None:
            demo.attrs["success"] = bool(episode["success_at_end"])
        demo["actions"] = episode["actions"]
        for name, values in episode.get("more", {}).items():
            demo[name] = values
        if episode["rewards"] is not None:
            demo["rewards"] = episode["rewards"]
        demo["dones"] = np.arange(steps) == steps - 1
        for index, camera in enumerate(self._cameras):
            demo.create_dataset(f"obs/{camera}_image", data=episode["images"][:, index], compression="lzf")
        if episode["proprio"] is not None:
            demo["obs/proprio"] = episode["proprio"]
            self._proprio.append(episode["proprio"])
        self._actions.append(episode["actions"])

    def close(self) -> None:
        """Finish the file and write the statistics.

        Raises:
            ConfigError: no episode was added.
        """
        if not self._actions:
            self.abort()
            raise ConfigError(f"no demonstration was kept for {self._path}: the expert never did what was asked for")
        self._data.attrs["total"] = sum(len(actions) for actions in self._actions)
        self._file.close()
        entry = dataset_entry(self._actions, self._proprio, self._gripper_dims)
        write_json(self._path.parent / STATISTICS_FILE, {self._env_args["task_suite_name"]: entry})
        os.replace(self._temporary, self._path)

    def abort(self) -> None:
        """Discard the unfinished file."""
        try:
            self._file.close()
        finally:
            self._temporary.unlink(missing_ok=True)


def read_episodes(
    file: h5py.File, path: Path, statistics: dict[str, Any] | None, cameras: Sequence[str] | None
) -> Demonstrations:
    """Read a file written by `DemonstrationWriter`.

    Args:
        file: the open file.
        path: its path, for messages.
        statistics: content of `dataset_statistics.json`; None leaves the statistics of the result empty.
        cameras: camera names in order; default all cameras of the file.

    Raises:
        ConfigError: arrays or values are missing, or do not fit together; all problems at once.
    """
    problems: list[str] = []
    groups = episode_groups(file, problems)
    env_args = _env_args(file, path, problems) if groups else {}
    control_freq = _control_freq(file, env_args, problems) if groups else None
    recorded = env_args.get("cameras", [])
    unknown = [camera for camera in cameras or () if camera not in recorded]
    if unknown and recorded:
        problems.append(f"has no camera {', '.join(unknown)}; it has {', '.join(recorded)}")
    cameras = list(cameras or recorded) if not unknown else []
    episodes = [_stored_episode(name, group, cameras) for name, group in groups]
    size = env_args.get("image_size")
    check_episodes(path, episodes, problems, {_PIXELS: size} if isinstance(size, int) else None)
    arrays = [episode.arrays for episode in episodes]
    values = [{name: value.value for name, value in episode.values.items()} for episode in episodes]
    first = arrays[0]
    if statistics is not None:
        dims = {"action": first["actions"].array.shape[1]}
        dims |= {"proprio": first["proprio"].array.shape[1]} if first["proprio"].array is not None else {}
        refuse(path.parent / STATISTICS_FILE, statistics_problems(statistics, dims))
    return Demonstrations(
        env_args=env_args | {"cameras": cameras},
        statistics=statistics or {},
        images=_images(arrays, cameras),
        proprio=_recorded(arrays, "proprio"),
        actions=[episode["actions"].values for episode in arrays],
        instructions=[value["instruction"] for value in values],
        success=[value["success"] is not False for value in values],
        init_states=[(value["task_id"], value["init_state_id"]) for value in values],
        decision_steps=_recorded(arrays, "decision_steps"),
        last_images=[np.stack([episode[f"last image {camera}"].array[:] for camera in cameras]) for episode in arrays]
        if first[f"last image {cameras[0]}"].array is not None
        else None,
        last_proprio=_recorded(arrays, "last_proprio"),
        rewards=None if (rewards := _recorded(arrays, "rewards")) is None else [r.astype(np.float32) for r in rewards],
        seeds=[value["seed"] for value in values] if values[0]["seed"] is not None else None,
        ranks=[value["rank"] for value in values] if values[0]["rank"] is not None else None,
        control_freq=control_freq,
        names=[episode.name for episode in episodes],
        success_recorded=values[0]["success"] is not None,
    )


def recorded_rewards(path: Path, names: Iterable[str]) -> dict[str, dict[str, np.ndarray]]:
    """Episode -> reward source -> rewards [S] that a dumped rollout records beside their sum; {} for other formats."""
    if path.suffix not in (".hdf5", ".h5"):
        return {name: {} for name in names}
    with opened(path) as file:
        rewards: dict[str, dict[str, np.ndarray]] = {}
        for name in names:
            group = member(file, f"data/{name}/{REWARDS}")
            sources = {s: member(group, s) for s in group} if isinstance(group, h5py.Group) else {}
            rewards[name] = {
                source: array[:]
                for source, array in sources.items()
                if isinstance(array, h5py.Dataset) and array.ndim == 1 and array.dtype.kind in "fiu"
            }
        return rewards


def _stored_episode(name: str, group: h5py.Group, cameras: Sequence[str]) -> StoredEpisode:
    decisions = member(group, "decision_steps")
    rows = "steps" if decisions is None else "decisions"
    picture = (_PIXELS, _PIXELS, 3)
    arrays = {
        "actions": StoredArray("actions", member(group, "actions"), ("steps", "action dimensions")),
        "decision_steps": StoredArray("decision_steps", decisions, ("decisions",), "decisions", optional=True),
        "rewards": StoredArray("rewards", member(group, "rewards"), ("steps",), "rewards", optional=True),
        "proprio": StoredArray("obs/proprio", member(group, "obs/proprio"), (rows, "proprio"), optional=True),
    }
    for camera in cameras:
        image, last = f"obs/{camera}_image", f"{LAST_OBS}/{camera}_image"
        arrays[f"image {camera}"] = StoredArray(image, member(group, image), (rows, *picture), "images")
        arrays[f"last image {camera}"] = StoredArray(last, member(group, last), picture, "images", optional=True)
    last_proprio = None if arrays["proprio"].array is None else member(group, f"{LAST_OBS}/proprio")
    arrays["last_proprio"] = StoredArray(f"{LAST_OBS}/proprio", last_proprio, ("proprio",), optional=True)
    values = {
        "instruction": StoredValue("instruction", attribute(group, "instruction"), "text"),
        "success": StoredValue("success", attribute(group, "success"), "flag", optional=True),
        "task_id": StoredValue("task_id", attribute(group, "task_id"), "number", minimum=0),
        "init_state_id": StoredValue("init_state_id", attribute(group, "init_state_id"), "number", minimum=-1),
        "seed": StoredValue("seed", attribute(group, "seed"), "number", optional=True, minimum=0),
        "rank": StoredValue("rank", attribute(group, "rank"), "number", optional=True),
    }
    return hdf5_episode(name, group, arrays, values)


def _images(arrays: Sequence[dict[str, StoredArray]], cameras: Sequence[str]) -> list[np.ndarray]:
    """Per episode the images [S, N, H, W, 3] uint8 of these cameras."""
    stored = [[episode[f"image {camera}"].array for camera in cameras] for episode in arrays]
    images = empty_images([len(first) for first, *_ in stored], (len(cameras), *stored[0][0].shape[1:]))
    for episode, out in zip(stored, images):
        read_stored_images(episode, out)
    return images


def _recorded(arrays: Sequence[dict[str, StoredArray]], role: str) -> list[np.ndarray] | None:
    """An array of each episode; None if it is not recorded."""
    return None if arrays[0][role].array is None else [episode[role].values for episode in arrays]


def _env_args(file: h5py.File, path: Path, problems: list[str]) -> dict[str, Any]:
    """The recorded environment; its `cameras` are a list of names, empty if they are invalid."""
    text, source = attribute(file["data"], "env_args"), f"{path} (attribute env_args)"
    if not isinstance(text, (str, bytes)):
        problems.append("data has no attribute env_args with a JSON object; record episodes with cli/collect_demos.py")
        return {}
    parsed = parse_json(text, source)
    wrong = camera_problems(parsed.get("cameras"), "env_args")
    if wrong:
        problems += wrong
        return parsed | {"cameras": []}
    env_args = checked_record(parsed, source)
    suite = env_args.get("task_suite_name")
    if StoredValue("task_suite_name", suite, "text").value is None:
        problems.append(f"task_suite_name in env_args is {suite!r}; expected the name of a suite")
    return env_args


def _control_freq(file: h5py.File, env_args: dict[str, Any], problems: list[str]) -> float | None:
    freq = attribute(file["data"], "control_freq")
    freq = env_args.get("control_freq") if freq is None else freq
    if freq is None:
        return None
    if isinstance(freq, (int, float, np.number)) and 0 < freq < np.inf:
        return float(freq)
    problems.append(f"control_freq is {freq!r}; expected the number of environment steps per second")
    return None
