"""Reading LeRobot datasets (folders in format v2.1 or v3.0: parquet and mp4) as `Demonstrations`.

The layout follows the documentation of LeRobotDataset. Both versions have `meta/info.json` with `codebase_version`,
`fps`, `features`, `data_path` and `video_path`. v2.1 has a parquet file and a video per episode, `meta/tasks.jsonl` and
`meta/episodes.jsonl`. v3.0 has files shared by many episodes, `meta/tasks.parquet`, and `meta/episodes/**.parquet`,
which locate each episode in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.data.demonstrations import Demonstrations, dataset_entry
from rlvla.data.lerobot_cache import INFO, cached_dataset, is_repo_id
from rlvla.data.lerobot_episodes import read_images, stored_episodes
from rlvla.data.lerobot_layout import (
    CHUNK_ROWS,
    IMAGE_PREFIX,
    episode_places,
    has_colors,
    info_problems,
    picture_problems,
    picture_size,
    place_problems,
)
from rlvla.data.validation import check_episodes, refuse
from rlvla.envs.records import checked_record
from rlvla.models.dataset_statistics import entry_problems
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, require


def is_lerobot(path: str | Path) -> bool:
    """Whether a path is the folder of a LeRobot dataset, or the repository id of one in a cache of this machine."""
    return _folder_of(path) is not None


def _folder_of(path: str | Path) -> Path | None:
    if (Path(path) / INFO).is_file():
        return Path(path)
    return None if Path(path).exists() or not is_repo_id(path) else cached_dataset(str(path))


def read_lerobot(folder: str | Path, cameras: Sequence[str] | None = None) -> Demonstrations:
    """Read a LeRobot dataset.

    Args:
        folder: folder of the dataset, or the repository id of one that `cached_dataset` finds.
        cameras: camera names (after `observation.images.`) in the order wanted; default all with three color channels,
            sorted.

    Raises:
        ConfigError: the version is not supported, a camera, feature or file is missing, image sizes differ, a row holds
            a whole action chunk, or the episodes do not fit together (see `rlvla.data.validation`).
        MissingExtraError: pyarrow or PyAV is not installed.
    """
    name, folder = Path(folder).name, _folder_of(folder) or Path(folder)
    require("pyarrow", extra="lerobot")
    require("av", extra="lerobot")
    try:
        return _read(folder, name, read_json(folder / INFO, allow_nan=True), cameras)
    except (OSError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} is not a readable LeRobot dataset ({type(error).__name__}: {error})") from error


def _read(folder: Path, name: str, info: dict[str, Any], cameras: Sequence[str] | None) -> Demonstrations:
    refuse(folder / INFO, info_problems(info))
    features, origin = info["features"], checked_record(info.get("rlvla", {}), folder / INFO)
    chosen = _chosen_cameras(folder, info, cameras)
    refuse(folder / INFO, picture_problems(features, chosen))
    side = _common_side(folder, chosen, features)
    env_args = {"task_suite_name": name, **origin, "cameras": chosen, "image_size": side}
    mask = env_args.pop("action_mask", None)
    keys = [IMAGE_PREFIX + camera for camera in chosen]
    places = episode_places(folder, info)
    episodes = stored_episodes(places, info, keys, side)
    check_episodes(folder, episodes, place_problems(places, info), {"pixels": side})
    parts = [episode.parts for episode in episodes]
    facts = [{role: fact.value for role, fact in episode.facts.items()} for episode in episodes]
    counts = [len(part["actions"].values) for part in parts]
    decisions = [part["decision_steps"].values for part in parts] if "decision_steps" in parts[0] else None
    seen = decisions or [np.arange(count) for count in counts]

    def numbers(role: str) -> list[np.ndarray] | None:
        return [part[role].values.astype(np.float32) for part in parts] if role in parts[0] else None

    actions, proprio = numbers("actions"), numbers("proprio")
    assert actions is not None
    if proprio is not None:
        proprio = [values[rows] for values, rows in zip(proprio, seen)]
    entry = dataset_entry(actions, proprio)
    entry["action"]["mask"] = mask or entry["action"]["mask"]
    refuse(folder / INFO, entry_problems(entry, {"action": actions[0].shape[1]}))
    return Demonstrations(
        env_args=env_args,
        statistics={str(env_args["task_suite_name"]): entry},
        images=read_images(folder, list(zip(places, counts, seen)), features, keys, side),
        proprio=proprio,
        actions=actions,
        instructions=[fact["instruction"] for fact in facts],
        success=[fact["success"] is not False for fact in facts],
        init_states=[(fact["task_id"], fact["init_state_id"]) for fact in facts if fact["init_state_id"] is not None],
        decision_steps=decisions,
        rewards=numbers("rewards"),
        seeds=[fact["seed"] for fact in facts] if facts[0]["seed"] is not None else None,
        control_freq=float(info["fps"]),
        names=[episode.name for episode in episodes],
    )


def _chosen_cameras(folder: Path, info: dict[str, Any], cameras: Sequence[str] | None) -> list[str]:
    features = info["features"]
    known = sorted(name.removeprefix(IMAGE_PREFIX) for name in features if name.startswith(IMAGE_PREFIX))
    usual = [camera for camera in known if has_colors(features[IMAGE_PREFIX + camera])]  # others give depth or masks
    chosen = list(cameras or info.get("rlvla", {}).get("cameras", usual))
    unknown = [camera for camera in chosen if camera not in known]
    if unknown or not chosen:
        missing = ", ".join(unknown) or "with three color channels"
        raise ConfigError(f"{folder} has no camera {missing}; it has {', '.join(known) or 'none'}")
    if CHUNK_ROWS in features and "rlvla" in info:
        raise ConfigError(
            f"{folder} holds rollouts with a whole chunk of actions in each row, which is no longer supported; convert "
            "the dumped rollouts again with cli/convert_demos.py"
        )
    return chosen


def _common_side(folder: Path, cameras: Sequence[str], features: dict[str, Any]) -> int:
    """The side of the square images of all these cameras in pixels."""
    sizes = {picture_size(features[IMAGE_PREFIX + camera]) for camera in cameras}
    if len(sizes) > 1:
        listed = ", ".join(f"{height}x{width}" for height, width in sorted(sizes))
        raise ConfigError(f"{folder}: the cameras {', '.join(cameras)} have images of different sizes: {listed}")
    height, width = sizes.pop()
    if height != width:
        raise ConfigError(
            f"{folder} has images of {height}x{width} pixels; policies take square ones: crop or resize the dataset"
        )
    return height
