"""Reading LeRobot datasets (folders in format v2.1 or v3.0: parquet and mp4) as `Demonstrations`.

The layout follows the documentation of LeRobotDataset. Both versions have `meta/info.json` with `codebase_version`,
`fps`, `features`, `data_path` and `video_path`. v2.1 has a parquet file and a video per episode, `meta/tasks.jsonl` and
`meta/episodes.jsonl`. v3.0 has files shared by many episodes, `meta/tasks.parquet`, and `meta/episodes/**.parquet`,
which locate each episode in them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.data.demonstrations import Demonstrations, dataset_entry
from rlvla.envs.records import checked_record
from rlvla.utils.data_files import check_types, inside, parse_json, read_json
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.video import read_video

VERSIONS = ("v2.1", "v3.0")
PICTURES = ("PNG", "JPEG", "WEBP")  # Pillow would start Ghostscript for others
IMAGE_PREFIX = "observation.images."
_INFO = {
    **{"codebase_version": str, "fps": float, "features": dict[str, dict], "rlvla": dict},
    **{"data_path": str, "video_path": str | None, "chunks_size": int | None},
}
STATE, ACTION = "observation.state", "action"
REWARD, DONE = "next.reward", "next.done"
# In rollouts written by rlvla: whether image and state of a row are new; other rows repeat those of the last decision.
DECISION = "is_decision"
_CHUNK_ROWS = "steps_executed"  # feature of rollouts with one row per decision


@dataclass(frozen=True)
class EpisodePlace:
    """The files of an episode.

    Attributes:
        index: number of the episode.
        data: parquet file.
        videos: feature -> (file, start in s, end in s or None for the end of the file).
        task: language instruction.
        facts: the full record of the episode.
    """

    index: int
    data: Path
    videos: dict[str, tuple[Path, float, float | None]]
    task: str
    facts: dict[str, Any]


def is_lerobot(path: str | Path) -> bool:
    """Whether a path is the folder of a LeRobot dataset."""
    return (Path(path) / "meta" / "info.json").is_file()


def read_lerobot(folder: str | Path, cameras: Sequence[str] | None = None) -> Demonstrations:
    """Read a LeRobot dataset.

    Args:
        folder: folder of the dataset.
        cameras: camera names (after `observation.images.`) in the order wanted; default all, sorted.

    Raises:
        ConfigError: the version is not supported, a camera, feature or file is missing, image sizes differ, or a row
            holds a whole action chunk.
        MissingExtraError: pyarrow or PyAV is not installed.
    """
    folder = Path(folder)
    require("pyarrow", extra="lerobot")
    require("av", extra="lerobot")
    try:
        return _read(folder, read_json(folder / "meta" / "info.json"), cameras)
    except (OSError, KeyError, ValueError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} is not a readable LeRobot dataset ({type(error).__name__}: {error})") from error


def _read(folder: Path, info: dict[str, Any], cameras: Sequence[str] | None) -> Demonstrations:
    check_types(info, _INFO, folder / "meta" / "info.json")
    version = info["codebase_version"]
    if version not in VERSIONS:
        raise ConfigError(
            f"{folder} has format {version}; known: {', '.join(VERSIONS)}; convert it with lerobot's tools"
        )
    features = info["features"]
    known = sorted(name.removeprefix(IMAGE_PREFIX) for name in features if name.startswith(IMAGE_PREFIX))
    wanted = list(cameras or info.get("rlvla", {}).get("cameras", known))
    unknown = [camera for camera in wanted if camera not in known]
    if unknown or not wanted:
        raise ConfigError(f"{folder} has no camera {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    if ACTION not in features:
        raise ConfigError(f"{folder} has no feature 'action'; it has {', '.join(sorted(features))}")
    if _CHUNK_ROWS in features and "rlvla" in info:
        raise ConfigError(
            f"{folder} holds rollouts with a whole chunk of actions in each row, which is no longer supported; convert "
            "the dumped rollouts again with cli/convert_demos.py"
        )
    keys = [IMAGE_PREFIX + camera for camera in wanted]
    sizes = {_picture_size(features[key]) for key in keys}
    if len(sizes) > 1:
        listed = ", ".join(f"{height}x{width}" for height, width in sorted(sizes))
        raise ConfigError(f"{folder}: the cameras {', '.join(wanted)} have images of different sizes: {listed}")
    height, width = sizes.pop()
    if height != width:
        raise ConfigError(
            f"{folder} has images of {height}x{width} pixels; policies take square ones: crop or resize the dataset"
        )
    origin = checked_record(info.get("rlvla", {}), folder / "meta" / "info.json")
    env_args = {"task_suite_name": folder.name, **origin, "cameras": wanted, "image_size": height}
    demos = Demonstrations(env_args, {}, [], [] if STATE in features else None, [], [], [], [])
    demos.control_freq = float(info["fps"])
    demos.seeds, demos.rewards = [], [] if REWARD in features else None
    demos.decision_steps = [] if DECISION in features and "rlvla" in info else None
    for place in (_places_v2 if version == "v2.1" else _places_v3)(folder, info):
        _add_episode(demos, place, features, keys)
    if not demos.actions:
        raise ConfigError(f"{folder} holds no episode")
    if len(demos.seeds or ()) != len(demos.actions):
        demos.seeds = None
    entry = dataset_entry(demos.actions, demos.proprio)
    entry["action"]["mask"] = info.get("rlvla", {}).get("action_mask", entry["action"]["mask"])
    env_args.pop("action_mask", None)
    demos.statistics = {str(env_args["task_suite_name"]): entry}
    return demos


def _picture_size(feature: dict[str, Any]) -> tuple[int, int]:
    """(height, width) of a camera feature.

    Its `names` label the axes, since some datasets put the channels first. Without names the channels are last.
    """
    named = dict(zip(feature.get("names") or (), feature["shape"]))
    return named.get("height", feature["shape"][0]), named.get("width", feature["shape"][1])


def _add_episode(demos: Demonstrations, place: EpisodePlace, features: dict[str, Any], keys: Sequence[str]) -> None:
    rows = _rows(place, [ACTION, *(name for name in (STATE, REWARD, DECISION) if name in features), *keys])
    actions = np.array(rows[ACTION], dtype=np.float32)
    seen = np.arange(len(actions))
    if demos.decision_steps is not None:
        seen = np.flatnonzero(rows[DECISION])
        demos.decision_steps.append(seen)
    images = []
    for key in keys:
        if features[key]["dtype"] == "video":
            frames = read_video(*place.videos[key])
        else:
            frames = np.stack([_picture(cell) for cell in rows[key]])
        if len(frames) < len(actions):
            raise ConfigError(f"episode {place.index} has {len(actions)} rows and {len(frames)} frames of {key}")
        images.append(frames[seen])
    demos.images.append(np.stack(images, axis=1))
    demos.actions.append(actions)
    if demos.proprio is not None:
        demos.proprio.append(np.array(rows[STATE], dtype=np.float32)[seen])
    if demos.rewards is not None:
        demos.rewards.append(np.array(rows[REWARD], dtype=np.float32).reshape(-1))
    demos.instructions.append(place.task)
    demos.success.append(bool(place.facts.get("success", True)))
    if "init_state_id" in place.facts:
        demos.init_states.append((int(place.facts["task_id"]), int(place.facts["init_state_id"])))
    if demos.seeds is not None and "seed" in place.facts:
        demos.seeds.append(int(place.facts["seed"]))


def _rows(place: EpisodePlace, wanted: Sequence[str]) -> dict[str, list[Any]]:
    import pyarrow.parquet as pq

    schema = pq.read_schema(place.data).names
    columns = [name for name in dict.fromkeys(wanted) if name in schema]
    table = pq.read_table(place.data, columns=[*columns, "frame_index"], filters=[("episode_index", "=", place.index)])
    if table.num_rows == 0:
        raise ConfigError(f"{place.data} holds no row of episode {place.index}")
    return table.sort_by("frame_index").to_pydict()


def _picture(cell: Any) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(cell["bytes"]), formats=PICTURES).convert("RGB"))


def _places_v2(folder: Path, info: dict[str, Any]) -> Iterator[EpisodePlace]:
    for line in (folder / "meta" / "episodes.jsonl").read_text(encoding="utf-8").splitlines():
        facts = parse_json(line, folder / "meta" / "episodes.jsonl")
        index = facts["episode_index"]
        where = {"episode_chunk": index // info["chunks_size"], "episode_index": index}
        videos = {
            key: (inside(folder, info["video_path"].format(video_key=key, **where)), 0.0, None)
            for key, feature in info["features"].items()
            if feature["dtype"] == "video"
        }
        yield EpisodePlace(index, inside(folder, info["data_path"].format(**where)), videos, facts["tasks"][0], facts)


def _places_v3(folder: Path, info: dict[str, Any]) -> Iterator[EpisodePlace]:
    import pyarrow.parquet as pq

    for path in sorted((folder / "meta" / "episodes").rglob("*.parquet")):
        for facts in pq.read_table(path).to_pylist():
            data = info["data_path"].format(chunk_index=facts["data/chunk_index"], file_index=facts["data/file_index"])
            videos = {}
            for key in (k for k, feature in info["features"].items() if feature["dtype"] == "video"):
                place = {name: facts[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
                file = inside(folder, info["video_path"].format(video_key=key, **place))
                videos[key] = (file, facts[f"videos/{key}/from_timestamp"], facts[f"videos/{key}/to_timestamp"])
            yield EpisodePlace(facts["episode_index"], inside(folder, data), videos, facts["tasks"][0], facts)
