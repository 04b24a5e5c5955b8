"""Demonstrations on disk: a robomimic-style HDF5 file with `dataset_statistics.json` next to it.

Layout: `data` (attribute `env_args`, JSON) / `demo_<i>` (attributes `num_samples`, `instruction`, `task_id`,
`init_state_id`, `seed`, `success`) / `actions` [S, D], `rewards` [S], `dones` [S], `obs/<camera>_image` [S, H, W, 3]
uint8, and optionally `obs/proprio` [S, P]. `next_obs` views the same arrays one step later, the last observation twice;
`mask/train` and `mask/valid` (every tenth) list the episodes. Dumped rollouts have images and proprio of decisions only
and no `next_obs`, with `decision_steps` giving the steps of the decisions; the observation after the last action is
`rollout/last_obs/<camera>_image` [H, W, 3] and `rollout/last_obs/proprio` [P]. Corrections have those of the steps
after the takeover only, which are their `decision_steps`. Episodes of a policy with interventions have `interventions`
[S] bool, the steps at which the person or the expert acted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlvla.data.demonstrations import (
    PLAYER,
    POLICY,
    STATISTICS_FILE,
    Demonstrations,
    at_each_step,
    changes_of,
    dataset_entry,
)
from rlvla.data.hdf5 import (
    attribute,
    episode_groups,
    episode_number,
    filters_of,
    hdf5_episode,
    member,
    opened,
    read_stored_images,
)
from rlvla.data.image_storage import empty_images
from rlvla.data.options import AS_RECORDED, ReadOptions
from rlvla.data.selection import episodes_by_number, episodes_of_tasks
from rlvla.data.validation import StoredArray, StoredEpisode, StoredValue, camera_problems, check_episodes, refuse
from rlvla.envs.base import TaskSpec
from rlvla.envs.pictures import ImageFit, image_record
from rlvla.envs.records import checked_record
from rlvla.envs.registry import list_tasks
from rlvla.envs.robosuite.env import CAMERAS as ROBOSUITE_CAMERAS
from rlvla.envs.robosuite.robot_state import WIDTHS
from rlvla.models.dataset_statistics import statistics_problems
from rlvla.utils.data_files import parse_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_json
from rlvla.utils.signals import interrupts_deferred
from rlvla.utils.terminal import log

LAST_OBS, REWARDS = "rollout/last_obs", "rollout/rewards"
INSTRUCTIONS = "instructions"  # attribute of an episode: JSON, see `changes_of`
INTERVENTIONS = "interventions"
_IMAGE = "_image"  # ends the names of images in `obs`
# Proprioception of a file of robomimic by default.
_PROPRIO = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")


class DemonstrationWriter:
    """Writes episodes one by one; the file gets its final name only when it is complete.

    Args:
        path: the HDF5 file.
        env_args: suite, tasks, cameras and options the episodes were recorded with; stored as JSON.
        cameras: camera names in the order of the images.
        gripper_dims: action dimensions that are not normalized (their statistics mask is False).
        control_freq: environment steps per second, if known neither from `env_args` nor from the suite.
        label: the instruction of each step of an episode of a task (None: that of the episode), if `add` gets none.
    """

    def __init__(
        self,
        path: Path,
        env_args: dict[str, Any],
        cameras: Sequence[str],
        gripper_dims: Sequence[int] = (),
        control_freq: float | None = None,
        *,
        label: Callable[[Any, int], list[str] | None] = lambda episode, task_id: None,
    ):
        self._path, self._label = path, label
        self._cameras, self._gripper_dims = list(cameras), list(gripper_dims)
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
        """Append an `ExpertEpisode` of a task, or a dict with its keys other than `events`.

        Arrays under `more` are stored as well, and `instructions`, that of each step.

        An episode that cannot be written, for example on a full disk, leaves nothing in the file.
        """
        name = f"demo_{len(self._actions)}"
        demo = self._data.create_group(name)
        try:
            self._write(demo, episode, task_id)
        except BaseException:
            del self._data[name]
            raise
        self._actions.append(episode["actions"])
        if episode["proprio"] is not None:
            self._proprio.append(episode["proprio"])

    def _write(self, demo: h5py.Group, episode: Any, task_id: int) -> None:
        steps = len(episode["actions"])
        demo.attrs["num_samples"] = steps
        demo.attrs["instruction"] = episode["instruction"]
        texts = episode.get("instructions") or self._label(episode, task_id)
        if texts is not None:
            demo.attrs[INSTRUCTIONS] = json.dumps({"changes": changes_of(texts)})
        demo.attrs["task_id"] = task_id
        demo.attrs["init_state_id"] = episode["init_state_id"]
        demo.attrs["seed"] = str(episode["seed"])
        if episode["success_at_end"] is not None:
            demo.attrs["success"] = bool(episode["success_at_end"])
        if episode.get("rank") is not None:
            demo.attrs["rank"] = episode["rank"]
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
        if "decision_steps" not in demo:
            _view_next_observations(demo)

    def flush(self) -> None:
        """Write everything to the unfinished file, which can be read under another name if the process is killed."""
        self._file.flush()

    def close(self) -> None:
        """Finish the file and write the statistics.

        Raises:
            ConfigError: no episode was added.
        """
        if not self._actions:
            self.abort()
            raise ConfigError(f"no demonstration was kept for {self._path}: the expert never did what was asked for")
        self._data.attrs["total"] = sum(len(actions) for actions in self._actions)
        names = [f"demo_{index}" for index in range(len(self._actions))]
        valid = names[9::10] or names[1:][-1:]
        self._file["mask/train"] = np.array([name for name in names if name not in valid], "S")
        if valid:
            self._file["mask/valid"] = np.array(valid, "S")
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


def _view_next_observations(demo: h5py.Group) -> None:
    """Virtual datasets `next_obs`, which store no copy of `obs`."""
    for key, stored in demo["obs"].items():
        source, view = (
            h5py.VirtualSource(".", stored.name, stored.shape),
            h5py.VirtualLayout(stored.shape, stored.dtype),
        )
        if len(stored) > 1:
            view[:-1] = source[1:]
        view[-1:] = source[-1:]
        demo.create_virtual_dataset(f"next_obs/{key}", view)


@dataclass(frozen=True)
class _Layout:
    """Where a file keeps the observations of its episodes.

    Attributes:
        env_args: the recorded environment.
        images: camera -> name in `obs`, in order.
        proprio: names in `obs` whose values are concatenated.
        instruction: of all episodes; None: recorded with each.
        task_id: of all episodes; None: recorded with each.
        foreign: whether the file was written by robomimic.
        max_steps: step limit of the task in robosuite, which people exceed; None if it is unknown.
    """

    env_args: dict[str, Any]
    images: dict[str, str]
    proprio: tuple[str, ...] = ("proprio",)
    instruction: str | None = None
    task_id: int | None = None
    foreign: bool = False
    max_steps: int | None = None


def read_episodes(
    file: h5py.File,
    path: Path,
    statistics: dict[str, Any] | None,
    cameras: Sequence[str] | None,
    options: ReadOptions = AS_RECORDED,
) -> Demonstrations:
    """Read a file written by `DemonstrationWriter` or by robomimic.

    Args:
        file: the open file.
        path: its path, for messages.
        statistics: content of `dataset_statistics.json`; None leaves the statistics of the result empty.
        cameras: camera names in order; default all cameras of the file.
        options: selection of episodes, proprioception, instruction and resizing of the images.

    Raises:
        ConfigError: arrays or values are missing, or do not fit together; all problems at once.
    """
    problems: list[str] = []
    groups = _selected(file, path, episode_groups(file, problems), options, problems)
    layout = _layout(file, path, groups[0][1], options, problems) if groups else _Layout({}, {})
    control_freq = _control_freq(file, layout.env_args, problems) if groups else None
    unknown = [camera for camera in cameras or () if camera not in layout.images]
    if unknown and layout.images:
        problems.append(f"has no camera {', '.join(unknown)}; it has {', '.join(layout.images)}")
    elif cameras:
        layout = replace(layout, images={camera: layout.images.get(camera, camera) for camera in cameras})
    cameras, fit = [] if unknown else list(layout.images), options.fit
    layout = replace(layout, images={camera: layout.images[camera] for camera in cameras})
    episodes = [_stored_episode(name, group, layout, resized=fit is not None) for name, group in groups]
    instructions = [episode.values["instruction"].value for episode in episodes]
    episodes = [episodes[position] for position in episodes_of_tasks(instructions, options, path)]
    size = layout.env_args.get("image_size")
    check_episodes(path, episodes, problems, {"height": size, "width": size} if isinstance(size, int) else None)
    arrays = [episode.arrays for episode in episodes]
    values = [{name: value.value for name, value in episode.values.items()} for episode in episodes]
    first = arrays[0]
    proprio, interventions = _recorded(arrays, layout.proprio), _recorded(arrays, [INTERVENTIONS])
    decisions = _recorded(arrays, ["decision_steps"])
    if options.stride > 1:
        proprio = None if proprio is None else [states[:: options.stride] for states in proprio]
        decisions = [
            steps[:: options.stride] for steps in decisions or [np.arange(len(e["actions"].values)) for e in arrays]
        ]
    if statistics is not None:
        dims = {"action": first["actions"].array.shape[1]}
        dims |= {"proprio": proprio[0].shape[1]} if proprio is not None else {}
        refuse(path.parent / STATISTICS_FILE, statistics_problems(statistics, dims))
    rewards = _recorded(arrays, ["rewards"])
    rewards = None if rewards is None else [reward.astype(np.float32) for reward in rewards]
    success = None if values[0]["success"] is None else [value["success"] for value in values]
    if layout.foreign and success is None and rewards and all(np.isin(r, (0, 1)).all() for r in rewards):
        success = [bool(reward[-1]) for reward in rewards]
    images = _images(path, arrays, cameras, options)
    height, width = images[0].shape[2:4]
    recorded = image_record(height, width, fit) if fit is not None or layout.foreign else {}
    if layout.foreign and layout.max_steps is not None:
        recorded["max_steps"] = max(layout.max_steps, *(len(episode["actions"].values) for episode in arrays))
    return Demonstrations(
        env_args=layout.env_args | {"cameras": cameras} | recorded,
        statistics=statistics or {},
        images=images,
        proprio=proprio,
        actions=[episode["actions"].values.astype(np.float32, copy=False) for episode in arrays],
        instructions=[value["instruction"] for value in values],
        success=success or [True] * len(episodes),
        init_states=[(value["task_id"], value["init_state_id"]) for value in values],
        decision_steps=decisions,
        last_images=[_last_images(episode, cameras, fit) for episode in arrays]
        if first[f"last image {cameras[0]}"].array is not None
        else None,
        last_proprio=_recorded(arrays, ["last_proprio"]),
        rewards=rewards,
        seeds=[value["seed"] for value in values] if values[0]["seed"] is not None else None,
        interventions=None if interventions is None else [flags.astype(bool) for flags in interventions],
        autonomous=[True] * len(episodes) if layout.env_args.get(PLAYER) == POLICY else None,
        ranks=[value["rank"] for value in values] if values[0]["rank"] is not None else None,
        control_freq=control_freq,
        names=[episode.name for episode in episodes],
        success_recorded=success is not None,
        step_instructions=_step_instructions(path, episodes),
        proprio_names=None if proprio is None or layout.proprio == ("proprio",) else _dimension_names(first, layout),
    )


def _step_instructions(path: Path, episodes: Sequence[StoredEpisode]) -> list[list[str]] | None:
    """Per episode the instruction of each step; None if they are not recorded."""
    if episodes[0].values[INSTRUCTIONS].value is None:
        return None
    texts = []
    for episode in episodes:
        where = f"{path} ({episode.name}, attribute {INSTRUCTIONS})"
        changes = parse_json(episode.values[INSTRUCTIONS].value, where).get("changes")
        texts.append(at_each_step(changes, len(episode.arrays["actions"].values), where))
    return texts


def _dimension_names(episode: dict[str, StoredArray], layout: _Layout) -> list[str]:
    """`robot0_eef_pos_0` and so on, the dimensions of concatenated arrays."""
    return [f"{key}_{dim}" for key in layout.proprio for dim in range(episode[key].array.shape[1])]


def _selected(
    file: h5py.File, path: Path, groups: list[tuple[str, h5py.Group]], options: ReadOptions, problems: list[str]
) -> list[tuple[str, h5py.Group]]:
    """The episodes of `--episodes` that the list `mask/<filter_key>` names; all without a key."""
    filter_key = options.filter_key
    if groups:
        groups = episodes_by_number({episode_number(name): (name, group) for name, group in groups}, options, path)
    if filter_key is None:
        return groups
    masks = filters_of(file)
    if filter_key not in masks:
        problems.append(f"has no list mask/{filter_key} (--filter_key); it has {', '.join(masks) or 'none'}")
        return []
    return [(name, group) for name, group in groups if name in masks[filter_key]]


def _layout(file: h5py.File, path: Path, first: h5py.Group, options: ReadOptions, problems: list[str]) -> _Layout:
    """The layout of a file, from its attributes and the names in its first episode."""
    env_args = _env_args(file, path, problems)
    observed = member(first, "obs")
    names = list(observed) if isinstance(observed, h5py.Group) else []
    if missing := [name for name in options.proprio_keys if name not in names]:
        problems.append(f"has no obs/{', obs/'.join(missing)} (--proprio_keys); it has {', '.join(names) or 'none'}")
    if "env_name" not in env_args:
        images = {camera: f"{camera}{_IMAGE}" for camera in env_args.get("cameras", ())}
        return _Layout(env_args, images, options.proprio_keys or ("proprio",), options.instruction)
    env_name = str(env_args["env_name"])
    task = next((task for task in _robosuite_tasks() if task.name == env_name), None)
    env_kwargs = env_args.get("env_kwargs")
    freq = env_kwargs.get("control_freq") if isinstance(env_kwargs, dict) else None
    record: dict[str, Any] = {"task_suite_name": env_name} | ({} if freq is None else {"control_freq": freq})
    images = {name.removesuffix(_IMAGE): name for name in names if name.endswith(_IMAGE)}
    if task is not None:
        own = {name: camera for camera, name in ROBOSUITE_CAMERAS.items()}
        images = {own.get(camera, camera): name for camera, name in images.items()}
        record |= {"task_suite_name": task.suite, "task_ids": [task.task_id]}
    if not images:
        problems.append(f"has no images obs/*{_IMAGE}; write them with robomimic's dataset_states_to_obs.py")
    proprio = options.proprio_keys or tuple(name for name in _PROPRIO if name in names)
    read = {*proprio, *images.values()}
    ignored = [f"obs/{name}" for name in names if name not in read]
    ignored += [name for name in first if name not in ("obs", "actions", "rewards", "dones", INTERVENTIONS)]
    log.info(f"{path}: {env_name} of robomimic, proprioception {', '.join(proprio)}; not read: {', '.join(ignored)}")
    instruction = options.instruction or (None if task is None else task.instruction)
    if instruction is None and attribute(first, "instruction") is None:
        problems.append(f"records no instruction of {env_name}; give --instruction TEXT")
        instruction = env_name
    if task is not None and all(name in WIDTHS for name in proprio):
        record["robot_state"] = list(proprio)  # so that the environment of the policy observes the same
    task_id, limit = (0, None) if task is None else (task.task_id, task.max_steps)
    return _Layout(record, images, proprio or ("proprio",), instruction, task_id, True, limit)


def _robosuite_tasks() -> list[TaskSpec]:
    try:
        return list_tasks("robosuite")
    except (ConfigError, ImportError):
        return []


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


def _stored_episode(name: str, group: h5py.Group, layout: _Layout, *, resized: bool) -> StoredEpisode:
    decisions = member(group, "decision_steps")
    rows = "steps" if decisions is None else "decisions"
    arrays = {
        "actions": StoredArray("actions", member(group, "actions"), ("steps", "action dimensions")),
        "decision_steps": StoredArray("decision_steps", decisions, ("decisions",), "decisions", optional=True),
        "rewards": StoredArray("rewards", member(group, "rewards"), ("steps",), "rewards", optional=True),
        INTERVENTIONS: StoredArray(INTERVENTIONS, member(group, INTERVENTIONS), ("steps",), "flags", optional=True),
    }
    for key in layout.proprio:
        arrays[key] = StoredArray(f"obs/{key}", member(group, f"obs/{key}"), (rows, key), optional=True)
    for camera, key in layout.images.items():
        image, last = f"obs/{key}", f"{LAST_OBS}/{key}"
        # Cameras may have images of different sizes if they are resized.
        picture = ("height" + f" of {camera}" * resized, "width" + f" of {camera}" * resized, 3)
        arrays[f"image {camera}"] = StoredArray(image, member(group, image), (rows, *picture), "images")
        arrays[f"last image {camera}"] = StoredArray(last, member(group, last), picture, "images", optional=True)
    last_proprio = None if arrays[layout.proprio[0]].array is None else member(group, f"{LAST_OBS}/proprio")
    arrays["last_proprio"] = StoredArray(f"{LAST_OBS}/proprio", last_proprio, ("proprio",), optional=True)
    instruction = attribute(group, "instruction") if layout.instruction is None else layout.instruction
    task_id, state = (attribute(group, name) for name in ("task_id", "init_state_id"))
    if layout.foreign:
        task_id, state = layout.task_id, -1
    changes = attribute(group, INSTRUCTIONS) if layout.instruction is None else None
    values = {
        "instruction": StoredValue("instruction", instruction, "text"),
        "success": StoredValue("success", attribute(group, "success"), "flag", optional=True),
        "task_id": StoredValue("task_id", task_id, "number", minimum=0),
        "init_state_id": StoredValue("init_state_id", state, "number", minimum=-1),
        "seed": StoredValue("seed", attribute(group, "seed"), "number", optional=True, minimum=0),
        INSTRUCTIONS: StoredValue(INSTRUCTIONS, changes, "text", optional=True),
        "rank": StoredValue("rank", attribute(group, "rank"), "number", optional=True),
    }
    return hdf5_episode(name, group, arrays, values)


def _images(
    path: Path, arrays: Sequence[dict[str, StoredArray]], cameras: Sequence[str], options: ReadOptions
) -> list[np.ndarray]:
    """Per episode the images [S, N, H, W, 3] uint8 of these cameras."""
    fit, stride = options.fit, options.stride
    stored = [[episode[f"image {camera}"].array for camera in cameras] for episode in arrays]
    shape = stored[0][0].shape[1:] if fit is None else (fit.size, fit.size, 3)
    images = empty_images([-(-len(first) // stride) for first, *_ in stored], (len(cameras), *shape), path)
    for episode, out in zip(stored, images):
        read_stored_images(episode, out, fit, stride=stride)
    return images


def _last_images(episode: dict[str, StoredArray], cameras: Sequence[str], fit: ImageFit | None) -> np.ndarray:
    """The images [N, H, W, 3] after the last action."""
    images = [episode[f"last image {camera}"].array[:] for camera in cameras]
    return np.stack(images if fit is None else [fit(image) for image in images])


def _recorded(arrays: Sequence[dict[str, StoredArray]], roles: Sequence[str]) -> list[np.ndarray] | None:
    """An array of each episode, or several concatenated as float32; None if it is not recorded."""
    if any(arrays[0][role].array is None for role in roles):
        return None
    if len(roles) == 1:
        return [episode[roles[0]].values for episode in arrays]
    return [np.concatenate([episode[role].values for role in roles], axis=1).astype(np.float32) for episode in arrays]


def _env_args(file: h5py.File, path: Path, problems: list[str]) -> dict[str, Any]:
    """The recorded environment; its `cameras` are a list of names, empty if they are invalid."""
    text, source = attribute(file["data"], "env_args"), f"{path} (attribute env_args)"
    if not isinstance(text, (str, bytes)):
        problems.append("data has no attribute env_args with a JSON object; record episodes with cli/collect_demos.py")
        return {}
    parsed = parse_json(text, source)
    if "env_name" in parsed and "cameras" not in parsed:  # of robomimic
        return parsed
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
