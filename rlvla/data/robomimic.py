"""Demonstrations on disk: a robomimic-style HDF5 file with `dataset_statistics.json` next to it.

Layout: `data` (attribute `env_args`, JSON) / `demo_<i>` (attributes `num_samples`, `instruction`, `task_id`,
`init_state_id`, `seed`, `success`) / `actions` [S, D], `rewards` [S], `dones` [S], `obs/<camera>_image` [S, H, W, 3]
uint8, and optionally `obs/proprio` [S, P]. Dumped rollouts have images and proprio of decisions only, with
`decision_steps` giving the steps of the decisions; the observation after the last action is
`rollout/last_obs/<camera>_image` [H, W, 3] and `rollout/last_obs/proprio` [P].
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlvla.data.demonstrations import STATISTICS_FILE, Demonstrations, dataset_entry
from rlvla.envs.records import checked_record
from rlvla.utils.data_files import parse_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_json
from rlvla.utils.stopping import interrupts_deferred

LAST_OBS = "rollout/last_obs"


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


def _read(file: h5py.File, stats: dict[str, Any], path: Path, cameras: Sequence[str] | None) -> Demonstrations:
    data = file["data"]
    source = f"{path} (attribute env_args)"
    env_args = checked_record(parse_json(data.attrs["env_args"], source), source)
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
