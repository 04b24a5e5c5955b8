"""Reading LeRobot datasets (folders in format v2.1 or v3.0: parquet and mp4) as `Demonstrations`.

The layout follows the documentation of LeRobotDataset. Both versions have `meta/info.json` with `codebase_version`,
`fps`, `features`, `data_path` and `video_path`. v2.1 has a parquet file and a video per episode, `meta/tasks.jsonl` and
`meta/episodes.jsonl`. v3.0 has files shared by many episodes, `meta/tasks.parquet`, and `meta/episodes/**.parquet`,
which locate each episode in them.
"""

from __future__ import annotations

import io
import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.data.demonstrations import PLAYER, POLICY, Demonstrations, dataset_entry
from rlvla.data.image_storage import empty_images
from rlvla.data.lerobot_cache import INFO, cached_dataset
from rlvla.data.options import AS_RECORDED, IMAGE_PREFIX, ReadOptions
from rlvla.data.selection import episodes_by_number, episodes_of_tasks
from rlvla.data.validation import (
    DataError,
    StoredArray,
    StoredEpisode,
    StoredValue,
    camera_problems,
    check_episodes,
    refuse,
    shortened,
)
from rlvla.envs.pictures import ImageFit, image_record
from rlvla.envs.records import checked_record
from rlvla.models.dataset_statistics import entry_problems
from rlvla.utils.budgets import over_expansion, over_memory
from rlvla.utils.data_files import admit, content_of, fits, inside, parse_json, read_json
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.files import is_repo_id
from rlvla.utils.video import VideoFacts, read_frames, read_video, video_facts

VERSIONS = ("v2.1", "v3.0")
PICTURE_TYPES = ("video", "image")  # dtypes of image features
STATE, ACTION = "observation.state", "action"
REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
INTERVENTION = "complementary_info.is_intervention"  # as LeRobot's replay buffer writes it
# In rollouts written by rlvla: whether image and state of a row are new; other rows repeat those of the last decision.
DECISION = "is_decision"
TASK_INSTRUCTION = "task_instruction"  # of an episode whose rows have several instructions, as written by rlvla
CHUNK_ROWS = "steps_executed"  # feature of rollouts with one row per decision

_WIDTH = re.compile(r"\d{0,2}d?")  # of a number in the path of a file
_parsed = string.Formatter().parse
_EPISODE, _FRAME, _TASK, _TIME = "episode_index", "frame_index", "task_index", "timestamp"
_TEXTS = ("task", "__index_level_0__")  # column of meta/tasks.parquet: the name of pandas' index, and without a name
_BATCH_ROWS, _BATCH_BYTES = 2**16, 2**28  # of a parquet file, read at a time
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}  # bytes
_HALF_A_FRAME = 0.5
_ROUNDING = 1.001  # of times, which are stored as float32
PICTURES = ("PNG", "JPEG", "WEBP")  # Pillow would start Ghostscript for others
_FLAGS, _SUCCESSES, _INTERVENTIONS = "decision flags", "successes", "interventions"
# Role -> axes and kind of its array.
_FORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "actions": (("steps", "action dimensions"), "numbers"),
    "proprio": (("steps", "proprio"), "numbers"),
    "rewards": (("steps",), "rewards"),
    _SUCCESSES: (("steps",), "rewards"),
    _FLAGS: (("steps",), "flags"),
    _INTERVENTIONS: (("steps",), "rewards"),
}


def is_lerobot(path: str | Path) -> bool:
    """Whether a path is the folder of a LeRobot dataset, or the repository id of one in a cache of this machine."""
    return _folder_of(path) is not None


def _folder_of(path: str | Path) -> Path | None:
    if (Path(path) / INFO).is_file():
        return Path(path)
    return None if Path(path).exists() or not is_repo_id(path) else cached_dataset(str(path))


def read_lerobot(
    folder: str | Path,
    cameras: Sequence[str] | None = None,
    options: ReadOptions = AS_RECORDED,
) -> Demonstrations:
    """Read a LeRobot dataset.

    Args:
        folder: folder of the dataset, or the repository id of one that `cached_dataset` finds.
        cameras: camera names in order; default all with three color channels, sorted.
        options: names of the cameras and resizing of the images.

    Raises:
        ConfigError: the version is not supported, a camera, feature or file is missing, image sizes differ, a row holds
            a whole action chunk, or the episodes do not fit together (see `rlvla.data.validation`).
        MissingExtraError: pyarrow or PyAV is not installed.
    """
    name, folder = Path(folder).name, _folder_of(folder) or Path(folder)
    require("pyarrow", extra="lerobot")
    require("av", extra="lerobot")
    try:
        admit(folder)
        info = read_json(folder / INFO, allow_nan=True)
        refuse(folder / INFO, info_problems(info))
        return _read(folder, name, info, _chosen_cameras(folder, info, cameras, options.camera_names), options)
    except (OSError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} is not a readable LeRobot dataset ({type(error).__name__}: {error})") from error


def _read(
    folder: Path, name: str, info: dict[str, Any], chosen: Mapping[str, str], options: ReadOptions
) -> Demonstrations:
    """Read the episodes; `chosen` maps cameras, in order, to their features."""
    fit = options.fit
    features, origin = info["features"], checked_record(info.get("rlvla", {}), folder / INFO)
    cameras, keys = list(chosen), list(chosen.values())
    refuse(
        folder / INFO,
        [
            f"{key} is a {features[key]['dtype']} of shape {features[key]['shape']}; expected video or image with "
            "three color channels"
            for key in keys
            if not _has_colors(features[key]) or features[key]["dtype"] not in PICTURE_TYPES
        ],
    )
    height, width = _common_size(folder, cameras, [features[key] for key in keys], fit)
    env_args = {"task_suite_name": name, **origin, "cameras": cameras}
    env_args |= image_record(height, width, fit)
    mask = env_args.pop("action_mask", None)
    listed = list((_episode_files_v2 if info["codebase_version"] == "v2.1" else _episode_files_v3)(folder, info))
    files = episodes_by_number({episode.index: episode for episode in listed}, options, folder)
    tasks = _instructions(folder, info)
    episodes = _stored_episodes(listed, files, info, keys, tasks)
    check_episodes(folder, episodes, listing_problems(listed, info))
    of_tasks = episodes_of_tasks([episode.values["instruction"].value for episode in episodes], options, folder)
    files, episodes = [files[i] for i in of_tasks], [episodes[i] for i in of_tasks]
    arrays = [episode.arrays for episode in episodes]
    values = [{role: value.value for role, value in episode.values.items()} for episode in episodes]
    counts = [len(episode["actions"].values) for episode in arrays]
    decisions = [episode["decision_steps"].values for episode in arrays] if "decision_steps" in arrays[0] else None
    rows_with_images = [rows[:: options.stride] for rows in decisions or [np.arange(count) for count in counts]]

    def numbers(role: str) -> list[np.ndarray] | None:
        return [episode[role].values.astype(np.float32) for episode in arrays] if role in arrays[0] else None

    actions, proprio = numbers("actions"), numbers("proprio")
    assert actions is not None
    if proprio is not None:
        proprio = [states[rows] for states, rows in zip(proprio, rows_with_images)]
    success = _success(arrays, [value["success"] for value in values], written="rlvla" in info)
    entry = dataset_entry(actions, proprio)
    entry["action"]["mask"] = mask or entry["action"]["mask"]
    refuse(folder / INFO, entry_problems(entry, {"action": actions[0].shape[1]}))
    return Demonstrations(
        env_args=env_args,
        statistics={str(env_args["task_suite_name"]): entry},
        images=_read_images(folder, list(zip(files, counts, rows_with_images)), info, keys, fit),
        proprio=proprio,
        actions=actions,
        instructions=[value["instruction"] for value in values],
        success=success or [True] * len(episodes),
        init_states=[(v["task_id"], v["init_state_id"]) for v in values if v["init_state_id"] is not None],
        decision_steps=None if decisions is None and options.stride == 1 else rows_with_images,
        rewards=numbers("rewards"),
        interventions=[episode[_INTERVENTIONS].values.astype(bool) for episode in arrays]
        if _INTERVENTIONS in arrays[0]
        else None,
        seeds=[value["seed"] for value in values] if values[0]["seed"] is not None else None,
        autonomous=[True] * len(episodes) if env_args.get(PLAYER) == POLICY else None,
        control_freq=float(info["fps"]),
        names=[episode.name for episode in episodes],
        success_recorded=success is not None,
        step_instructions=[[tasks[index] for index in episode[_TASK].values.tolist()] for episode in arrays]
        if _TASK in arrays[0]
        else None,
        action_names=_dimension_names(features, ACTION),
        proprio_names=_dimension_names(features, STATE),
    )


def _dimension_names(features: Mapping[str, Any], key: str) -> list[str] | None:
    """Names of the dimensions of a vector: a list, or lists by kind as in `{"motors": [...]}`; None without them."""
    feature = features.get(key, {})
    names = feature.get("names")
    if isinstance(names, dict):
        names = [name for listed in names.values() for name in (listed if isinstance(listed, list) else [listed])]
    complete = isinstance(names, list) and [len(names)] == feature["shape"]
    return names if complete and all(isinstance(name, str) for name in names) else None


def _success(
    arrays: Sequence[Mapping[str, StoredArray]], recorded: list[bool | None], *, written: bool
) -> list[bool] | None:
    """Success of each episode; None if it is not recorded.

    It is `next.success` of the last row; else whether a row has the reward 1, if all rewards are 0 or 1; else the
    value `recorded` with the episode. Datasets `written` by rlvla record the last, and rewards of any kind.
    """
    first = arrays[0]
    of_episodes = [value is True for value in recorded] if recorded[0] is not None else None
    if _SUCCESSES in first:
        return [bool(episode[_SUCCESSES].values[-1]) for episode in arrays]
    if written or "rewards" not in first:
        return of_episodes
    rewards = [episode["rewards"].values for episode in arrays]
    return [bool(row.any()) for row in rewards] if all(map(_is_binary, rewards)) else of_episodes


def _is_binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0, 1)).all())


def _chosen_cameras(
    folder: Path, info: dict[str, Any], cameras: Sequence[str] | None, camera_names: Mapping[str, str]
) -> dict[str, str]:
    """Camera -> feature of the cameras to read, in order."""
    features = info["features"]
    recorded = _camera_features(folder, features, camera_names)
    names = {key: camera for camera, key in recorded.items()}
    colored = [camera for camera, key in sorted(recorded.items()) if _has_colors(features[key])]  # not depth or masks
    written = [names.get(IMAGE_PREFIX + name, name) for name in info.get("rlvla", {}).get("cameras", ())]
    chosen = list(cameras or written or colored)
    unknown = [camera for camera in chosen if camera not in recorded]
    if unknown or not chosen:
        missing = ", ".join(unknown) or "with three color channels"
        raise ConfigError(f"{folder} has no camera {missing}; it has {', '.join(sorted(recorded)) or 'none'}")
    if CHUNK_ROWS in features and "rlvla" in info:
        raise ConfigError(
            f"{folder} holds rollouts with a whole chunk of actions in each row, which is no longer supported; convert "
            "the dumped rollouts again with cli/convert_demos.py"
        )
    return {camera: recorded[camera] for camera in chosen}


def _camera_features(folder: Path, features: Mapping[str, Any], camera_names: Mapping[str, str]) -> dict[str, str]:
    """Camera -> feature of all image features; those in `camera_names` are named by it."""
    keys = [key for key in features if key.startswith(IMAGE_PREFIX) or features[key]["dtype"] in PICTURE_TYPES]
    named = [(camera, key) for key, camera in camera_names.items() if key in keys]
    cameras = dict(named)
    problems = camera_problems([camera for camera, _ in named], "--dataset_camera") if named else []
    default = {
        key: key.removeprefix(IMAGE_PREFIX) if key.startswith(IMAGE_PREFIX) else key.rpartition(".")[2]
        for key in sorted(keys, key=lambda key: (not key.startswith(IMAGE_PREFIX), key))
        if key not in camera_names
    }
    others = Counter(name for key, name in default.items() if not key.startswith(IMAGE_PREFIX))
    for key, name in default.items():
        ambiguous = name in cameras or (not key.startswith(IMAGE_PREFIX) and others[name] > 1)
        cameras[key if ambiguous else name] = key
    listed = ", ".join(sorted(keys)) or "none"
    problems += [
        f"--dataset_camera {camera}={key}: there is no feature {key}; image features: {listed}"
        for key, camera in camera_names.items()
        if key not in keys and camera not in cameras  # another dataset of the command may have it
    ]
    refuse(folder / INFO, problems + (camera_problems(list(cameras), "features") if cameras else []))
    return cameras


def _common_size(
    folder: Path, cameras: Sequence[str], features: Sequence[dict[str, Any]], fit: ImageFit | None
) -> tuple[int, int]:
    """(height, width) of the images of all cameras in pixels; ConfigError if they differ and are not resized."""
    if fit is not None:
        return fit.size, fit.size
    sizes = set(map(_picture_size, features))
    if len(sizes) > 1:
        listed = ", ".join(f"{height}x{width}" for height, width in sorted(sizes))
        raise ConfigError(
            f"{folder}: the cameras {', '.join(cameras)} have images of different sizes: {listed}; make them equal "
            "with --image_size N --image_fit crop, pad or stretch, or choose with --cameras"
        )
    return sizes.pop()


@dataclass(frozen=True)
class EpisodeFiles:
    """The files of an episode.

    Attributes:
        index: number of the episode.
        data: parquet file.
        videos: feature -> (file, start in s, end in s or None for the end of the file).
        record: the full record of the episode.
    """

    index: int
    data: Path
    videos: dict[str, tuple[Path, float, float | None]]
    record: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the episode in messages."""
        return f"episode {self.index}"

    @property
    def task(self) -> Any:
        """The language instruction as recorded; None if there is none."""
        tasks = self.record.get("tasks")
        return tasks[0] if isinstance(tasks, list) and tasks else None


def info_problems(info: Any) -> list[str]:
    """Problems of the content of `meta/info.json`."""
    if not isinstance(info, dict):
        return [f"holds a {type(info).__name__}; a JSON object is needed"]
    version, features = info.get("codebase_version"), info.get("features")
    fps: Any = info.get("fps")
    if version not in VERSIONS:
        return [f"has format {version}; supported: {', '.join(VERSIONS)}; convert it with lerobot's tools"]
    if not isinstance(features, dict) or not all(_describes_a_feature(feature) for feature in features.values()):
        return ["features must be an object that gives dtype and shape of each feature"]
    problems = []
    if ACTION not in features:
        problems.append(f"has no feature 'action'; it has {', '.join(sorted(features))}")
    if not fits(fps, float) or fps <= 0:
        problems.append(f"fps is {shortened(fps)}; expected the number of frames per second")
    chunk: Any = info.get("chunks_size")
    if version == "v2.1" and (not fits(chunk, int) or chunk < 1):
        problems.append(f"chunks_size is {shortened(chunk)}; expected the number of episodes in a folder")
    cameras = [name.removeprefix(IMAGE_PREFIX) for name in features if name.startswith(IMAGE_PREFIX)]
    problems += camera_problems(cameras, "features") if cameras else []
    origin = info.get("rlvla", {})
    if not isinstance(origin, dict):
        return [*problems, f"rlvla is {origin!r}; expected an object"]
    return problems + (camera_problems(origin["cameras"], "rlvla") if "cameras" in origin else [])


def _describes_a_feature(feature: Any) -> bool:
    shape = feature.get("shape") if isinstance(feature, dict) else None
    whole = isinstance(shape, (list, tuple)) and all(isinstance(n, int) and n > 0 for n in shape)
    return whole and isinstance(feature.get("dtype"), str)


def _has_colors(feature: dict[str, Any]) -> bool:
    """Whether a checked feature has three axes, one of them with three channels."""
    return len(feature["shape"]) == 3 and 3 in feature["shape"]


def _picture_size(feature: dict[str, Any]) -> tuple[int, int]:
    """(height, width) of a camera feature.

    Its `names` label the axes, since some datasets put the channels first. Without names the channels are last.
    """
    named = dict(zip(feature.get("names") or (), feature["shape"]))
    return named.get("height", feature["shape"][0]), named.get("width", feature["shape"][1])


def _episode_files_v2(folder: Path, info: dict[str, Any]) -> Iterator[EpisodeFiles]:
    """All episodes of a dataset with a checked `info.json`, as listed; DataError if a path leads out of the folder."""
    for line in content_of(folder / "meta" / "episodes.jsonl").decode().splitlines():
        record = parse_json(line, folder / "meta" / "episodes.jsonl")
        index = record["episode_index"]
        where = {"episode_chunk": index // info["chunks_size"], "episode_index": index}
        videos: dict[str, tuple[Path, float, float | None]] = {
            key: (_located(folder, info["video_path"], video_key=key, **where), 0.0, None)
            for key, feature in info["features"].items()
            if feature["dtype"] == "video"
        }
        yield EpisodeFiles(index, _located(folder, info["data_path"], **where), videos, record)


def _episode_files_v3(folder: Path, info: dict[str, Any]) -> Iterator[EpisodeFiles]:
    """As `_episode_files_v2`; DataError also if the times of an episode in a video are not an interval."""
    for path in sorted((folder / "meta" / "episodes").rglob("*.parquet")):
        for record in read_parquet(path).to_pylist():
            where = {name: record[f"data/{name}"] for name in ("chunk_index", "file_index")}
            data = _located(folder, info["data_path"], **where)
            videos = {}
            for key in (k for k, feature in info["features"].items() if feature["dtype"] == "video"):
                where = {name: record[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
                start, end = (record[f"videos/{key}/{name}_timestamp"] for name in ("from", "to"))
                if not (isinstance(start, float) and isinstance(end, float) and 0 <= start < end < math.inf):
                    name = f"episode {record['episode_index']}"
                    refuse(folder, [f"{name}: {key} lies from {start} to {end} s; expected increasing times"])
                videos[key] = (_located(folder, info["video_path"], video_key=key, **where), start, end)
            yield EpisodeFiles(record["episode_index"], data, videos, record)


def _located(folder: Path, template: Any, **where: Any) -> Path:
    """File of a path template of `meta/info.json`; DataError if it is not inside the folder."""
    try:
        if not isinstance(template, str) or not all(
            _WIDTH.fullmatch(spec or "") for _, _, spec, _ in _parsed(template)
        ):
            raise ValueError
        return inside(folder, template.format(**where))
    except (LookupError, ValueError, AttributeError):
        refuse(folder, [f"the path {template!r} in meta/info.json does not name a file in the folder"])
        raise


def listing_problems(episodes: Sequence[EpisodeFiles], info: dict[str, Any]) -> list[str]:
    """Problems of the list of episodes."""
    counts = Counter(files.index for files in episodes)
    problems = [f"episode {index} is listed twice" for index, count in sorted(counts.items()) if count > 1]
    total = info.get("total_episodes", len(episodes))
    if episodes and total != len(episodes):
        problems.append(f"meta/info.json counts {total} episodes; {len(episodes)} are listed in meta/episodes")
    return problems


@dataclass(frozen=True)
class _Frames:
    """Shape and dtype of the frames of an episode in a video that has not been decoded."""

    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(np.uint8)


def _stored_episodes(
    listed: Sequence[EpisodeFiles],
    selected: Sequence[EpisodeFiles],
    info: Mapping[str, Any],
    cameras: Sequence[str],
    tasks: Mapping[int, str],
) -> list[StoredEpisode]:
    """The selected episodes for `check_episodes`: rows are read, videos are not decoded.

    `listed` are all episodes of the dataset, `tasks` maps its task indices to instructions.
    """
    features, fps = info["features"], float(info["fps"])
    columns = {"actions": ACTION, "proprio": STATE, "rewards": REWARD, _SUCCESSES: SUCCESS}
    columns[_INTERVENTIONS] = INTERVENTION
    columns |= {_FLAGS: DECISION} if "rlvla" in info else {}
    columns = {role: name for role, name in columns.items() if name in features}
    videos = {key: _picture_size(features[key]) for key in cameras if features[key]["dtype"] == "video"}
    tables = _Tables([*columns.values(), _TASK, _TIME])
    encoded: dict[Path, VideoFacts] = {}
    problems = _overlaps(listed, fps)
    indices: defaultdict[Path, set[int]] = defaultdict(set)  # data file -> listed episodes
    for files in listed:
        indices[files.data].add(files.index)
    episodes = []
    for files in selected:
        values = _stored_values(files)
        episode = StoredEpisode(files.name, {}, values, values["length"].value, problems[files.index])
        episodes.append(episode)
        try:
            rows = tables.rows(files)
            unlisted = tables.episodes(files.data) - indices[files.data]
        except DataError:  # of the file: no episode of it is read
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:
            episode.problems.append(f"{files.data} cannot be used ({error})")
            continue
        if unlisted:
            episode.problems.append(f"{files.data} also holds rows of episode {min(unlisted)}, which is not listed")
            indices[files.data] |= unlisted  # reported once
        count = len(rows[_FRAME])
        if rows[_FRAME].tolist() != list(range(count)):
            episode.problems.append(f"{_FRAME} does not number its {count} rows from 0 to {count - 1}")
        episode.arrays |= _stored_arrays(rows, columns, episode.problems)
        if videos and _TIME in rows:
            episode.problems += _time_problems(rows[_TIME], fps)
        values["instruction"] = _stored_instruction(files, rows, tasks, episode.problems)
        if values["instruction"].name == TASK_INSTRUCTION and not episode.problems:
            episode.arrays[_TASK] = StoredArray(_TASK, as_array(rows[_TASK], 1), ("steps",), "numbers")
        for key, size in videos.items():
            try:
                frames = _frames(files.videos[key], fps, size, encoded, count)
            except ValueError as error:
                episode.problems.append(str(error))
                continue
            episode.arrays[key] = StoredArray(key, frames, ("steps", *size, 3), "images")
    return episodes


def _stored_values(files: EpisodeFiles) -> dict[str, StoredValue]:
    record = files.record
    numbers = {"task_id": 0, "init_state_id": -1, "seed": 0, "length": 1}  # name -> minimum
    return {
        "instruction": StoredValue("tasks", files.task, "text"),
        "success": StoredValue("success", record.get("success"), "flag", optional=True),
        **{n: StoredValue(n, record.get(n), "number", optional=True, minimum=m) for n, m in numbers.items()},
    }


def _instructions(folder: Path, info: Mapping[str, Any]) -> dict[int, str]:
    """Task index -> language instruction; {} without a table of tasks."""
    lines, table = folder / "meta" / "tasks.jsonl", folder / "meta" / "tasks.parquet"
    if info["codebase_version"] == "v2.1":
        records = content_of(lines).decode().splitlines() if lines.is_file() else []
        return {task[_TASK]: task["task"] for task in (parse_json(record, lines) for record in records)}
    if not table.is_file():
        return {}
    columns = read_parquet(table, [_TASK, *_TEXTS]).to_pydict()
    text = next((name for name in _TEXTS if name in columns), None)
    if text is None or _TASK not in columns:
        refuse(table, [f"has the columns {', '.join(columns) or 'of another table'}; expected {_TASK} and task"])
    return dict(zip(columns[_TASK], columns[str(text)]))


def _stored_instruction(
    files: EpisodeFiles, rows: Mapping[str, Any], tasks: Mapping[int, str], problems: list[str]
) -> StoredValue:
    """The instruction of an episode, by the task index of its rows if there is one; contradictions are `problems`."""
    try:
        indices = np.unique(as_array(rows[_TASK], 1)).tolist() if _TASK in rows else []
    except ValueError as error:
        problems.append(f"{_TASK} {error}")
        indices = []
    recorded = files.record.get("tasks")
    names = recorded if isinstance(recorded, list) else []
    if (of_task := files.record.get(TASK_INSTRUCTION)) is not None:
        if unknown := [index for index in indices if index not in tasks]:
            problems.append(f"{_TASK} {shortened(unknown)} is not in meta/tasks")
        return StoredValue(TASK_INSTRUCTION, of_task, "text")
    text = tasks.get(indices[0]) if indices else None
    if len(indices) > 1:
        problems.append(f"{_TASK} changes within the episode ({shortened(indices)}); split it where the task changes")
    elif text is None and len(names) > 1:
        problems.append(f"has {len(names)} tasks, {shortened(names)}; expected one instruction")
    elif text is not None and len(names) == 1 and names != [text]:
        problems.append(f"tasks is {shortened(names)}, but {_TASK} {indices[0]} is {shortened(text)} in meta/tasks")
    if indices and text is None and files.task is None:
        return StoredValue(f"{_TASK} {indices[0]} of meta/tasks", None, "text")
    return StoredValue("tasks", files.task if text is None else text, "text")


class _Tables:
    """Rows of parquet files by episode, limited to these `columns`; each file is read once."""

    def __init__(self, columns: Any):
        self._columns = [*columns, _EPISODE, _FRAME]
        self._tables: dict[Path, tuple[Any, np.ndarray, set[int]]] = {}

    def rows(self, files: EpisodeFiles) -> dict[str, Any]:
        """The columns of an episode that the file has, in the order of its frames."""
        table, indices, _ = self._read(files.data)
        start, stop = np.searchsorted(indices, [files.index, files.index + 1])
        if start == stop:
            raise ValueError("it holds no row of this episode")
        rows = {name: table.column(name).slice(start, stop - start) for name in table.column_names}
        return rows | {_FRAME: rows[_FRAME].to_numpy()}

    def episodes(self, path: Path) -> set[int]:
        """The numbers of all episodes with rows in a file."""
        return self._read(path)[2]

    def _read(self, path: Path) -> tuple[Any, np.ndarray, set[int]]:
        if path not in self._tables:
            table = read_parquet(path, self._columns)
            table = table.sort_by([(_EPISODE, "ascending"), (_FRAME, "ascending")])
            indices = table.column(_EPISODE).to_numpy()
            self._tables[path] = table, indices, set(np.unique(indices).tolist())
        return self._tables[path]


def read_parquet(path: Path, columns: Sequence[str] | None = None, *, episode: int | None = None) -> Any:
    """Table of a parquet file, read in parts whose size is bounded, however well its pages are compressed.

    Args:
        path: the file.
        columns: to read, as far as the file has them; None: all.
        episode: keep only the rows of this episode, for which `columns` must include its index.

    Raises:
        DataError: it would take more memory than there is, or than data of its size do.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        stored, fields = path.stat().st_size, file.schema_arrow
        names = [name for name in fields.names if columns is None or name in columns]
        size, largest = _declared_bytes(file, names)

        def check(size: int) -> None:
            problem = over_expansion(size, stored) or over_memory(size)
            refuse(path, [problem] if problem else [])

        check(size)
        groups: Sequence[int] = range(file.num_row_groups)
        if episode is not None:
            groups = [n for n in groups if _may_hold(file.metadata.row_group(n), episode)]
        rows, size, parts = max(1, min(_BATCH_ROWS, _BATCH_BYTES // largest)), 0, []
        for batch in file.iter_batches(rows, row_groups=list(groups), columns=names):
            check(size := size + batch.nbytes)
            parts.append(batch if episode is None else batch.filter(pc.equal(batch[_EPISODE], episode)))
        return pa.Table.from_batches(parts, pa.schema([fields.field(name) for name in names]))


def _may_hold(group: Any, episode: int) -> bool:
    """Whether the statistics of a row group of a parquet file admit rows of an episode."""
    columns = (group.column(index) for index in range(group.num_columns))
    known = next((c.statistics for c in columns if c.path_in_schema == _EPISODE and c.is_stats_set), None)
    return known is None or not known.has_min_max or known.min <= episode <= known.max


def _declared_bytes(file: Any, names: Sequence[str]) -> tuple[int, int]:
    """Bytes of columns of a `pyarrow.parquet.ParquetFile`, and an upper bound of those of a text or picture.

    Dictionaries may repeat a text at no cost, so the first number counts each once.
    """
    size, largest = 0, 1
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        for index in range(group.num_columns):
            column, kind = group.column(index), file.schema.column(index)
            if column.path_in_schema.split(".")[0] not in names:
                continue
            width = _WIDTHS.get(column.physical_type, kind.length)
            size += max(column.num_values * width, column.total_uncompressed_size)
            if column.physical_type == "BYTE_ARRAY":
                largest = max(largest, column.total_uncompressed_size)
    return size, largest


def _stored_arrays(rows: Mapping[str, Any], columns: Mapping[str, str], problems: list[str]) -> dict[str, StoredArray]:
    """The arrays of an episode; columns that are not arrays of numbers are added to `problems`."""
    arrays: dict[str, StoredArray] = {}
    for role, name in columns.items():
        axes, kind = _FORMS[role]
        try:
            arrays[role] = StoredArray(name, as_array(rows[name], len(axes)) if name in rows else None, axes, kind)
        except ValueError as error:
            problems.append(f"{name} {error}")
    for role in (_SUCCESSES, _INTERVENTIONS):
        flags = arrays.get(role)
        if flags is not None and flags.array is not None and not _is_binary(flags.array):
            problems.append(f"{columns[role]} holds other values than true and false")
    flags = arrays.get(_FLAGS)
    if flags is not None and flags.array is not None and flags.array.dtype == bool and flags.array.ndim == 1:
        arrays["decision_steps"] = StoredArray(flags.name, np.flatnonzero(flags.array), ("decisions",), "decisions")
    return arrays


def as_array(column: Any, rank: int) -> np.ndarray:
    """A column of numbers, or of lists of numbers, as an array of this rank.

    Lists of one number may be stored as numbers, and the other way around.

    Raises:
        ValueError: cells are empty or of different lengths, or hold something else; the text follows the column's name.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    data = column.combine_chunks()
    shape: tuple[int, ...] = (len(data),)
    if data.null_count:
        raise ValueError(f"has {data.null_count} empty cells")
    if pa.types.is_list(data.type) or pa.types.is_large_list(data.type) or pa.types.is_fixed_size_list(data.type):
        lengths = sorted(pc.unique(pc.list_value_length(data)).to_pylist())
        if len(lengths) > 1:
            raise ValueError(
                f"has rows of {' and '.join(map(str, lengths[:2]))} numbers; expected the same in all rows"
            )
        data, shape = data.flatten(), (len(data), *lengths)
    kind = data.type
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ValueError(f"holds {'text' if pa.types.is_string(kind) else kind}; expected numbers")
    values = data.to_numpy(zero_copy_only=False).reshape(shape)
    if values.ndim < rank:
        return values[:, None]
    return values[:, 0] if values.ndim > rank and values.shape[1] == 1 else values


def _frames(
    span: tuple[Path, float, float | None],
    fps: float,
    size: tuple[int, int],
    encoded: dict[Path, VideoFacts],
    rows: int,
) -> _Frames:
    """The frames of an episode in a video; `encoded` caches `video_facts` of each file."""
    path, start, end = span
    if path not in encoded:
        encoded[path] = video_facts(path)
    facts = encoded[path]
    count = facts.frames
    if end is not None:
        # Frames may begin later than their number tells, where the videos of a file were joined with gaps.
        left = [0 if facts.frames is None else facts.frames - round(start * fps)]
        left += [] if facts.seconds is None else [round((facts.seconds - start) * fps)]
        count = round((end - start) * fps)
        count = count if facts.frames is None else min(count, max(0, *left))
    # If it is not recorded, frames are counted while they are decoded.
    count, height, width = rows if count is None else count, facts.height, facts.width
    # The encoder pads odd sides.
    height, width = (side if padded == side + side % 2 else padded for side, padded in zip(size, (height, width)))
    return _Frames((count, height, width, 3))


def _time_problems(column: Any, fps: float) -> list[str]:
    """Problems of the times of an episode's rows, which tell the frames of its videos."""
    try:
        times = as_array(column, 1)
    except ValueError as error:
        return [f"{_TIME} {error}"]
    late = times - np.arange(len(times)) / fps
    rows = np.flatnonzero(~(np.abs(late) <= _HALF_A_FRAME / fps * _ROUNDING))
    if not len(rows):
        return []
    row = rows[0]
    return [
        f"{_TIME} of row {row} is {times[row]:g} s, {abs(late[row]) * fps:.2g} frames from {_FRAME} / fps; at most "
        f"{_HALF_A_FRAME} are permitted, because the times tell the frames of the videos"
    ]


def _overlaps(episodes: Sequence[EpisodeFiles], fps: float) -> defaultdict[int, list[str]]:
    """Episode -> problems, for episodes that share frames of a video with another one."""
    spans: defaultdict[tuple[str, Path], list[tuple[float, float, int]]] = defaultdict(list)
    for files in episodes:
        for key, (path, start, end) in files.videos.items():
            if end is not None:
                spans[key, path].append((start, end, files.index))
    problems: defaultdict[int, list[str]] = defaultdict(list)
    for (key, _), listed in spans.items():
        listed.sort()
        for (_, end, other), (start, _, index) in zip(listed, listed[1:]):
            if start < end - _HALF_A_FRAME / fps:
                problems[index].append(f"its part of the video {key} overlaps with that of episode {other}")
    return problems


def _read_images(
    folder: Path,
    episodes: Sequence[tuple[EpisodeFiles, int, np.ndarray]],
    info: Mapping[str, Any],
    cameras: Sequence[str],
    fit: ImageFit | None,
) -> list[np.ndarray]:
    """Per episode the images [S, N, H, W, 3] uint8, resized by `fit`.

    `episodes` holds the files of each episode, its number of rows, and the rows [S] with images.

    Raises:
        DataError: images are missing, cannot be decoded, or have another size or mode than the features say.
    """
    features, fps = info["features"], float(info["fps"])
    sizes = {key: _picture_size(features[key]) for key in cameras}
    shape = sizes[cameras[0]] if fit is None else (fit.size, fit.size)
    images = empty_images([len(rows) for *_, rows in episodes], (len(cameras), *shape, 3), folder)
    problems = []
    for (files, count, rows), of_episode in zip(episodes, images):
        for index, key in enumerate(cameras):
            try:
                video = features[key]["dtype"] == "video"
                frames = _decoded(files, key, count, sizes[key], fps) if video else _embedded(files, key, sizes[key])
                of_episode[:, index] = frames[rows] if fit is None else fit(frames[rows])
            except (OSError, ValueError, LookupError, TypeError) as error:
                problems.append(f"{files.name}: {key}: {error}")
    refuse(folder, problems)
    return images


def _decoded(files: EpisodeFiles, key: str, count: int, size: tuple[int, int], fps: float) -> np.ndarray:
    path, start, end = files.videos[key]
    if end is None:
        frames = read_video(path, most=count + 1)
        if len(frames) != count:
            number = f"{len(frames)} frames" if len(frames) < count else "more frames"
            raise ValueError(f"the video has {number}; expected {count}, one for each row")
    else:
        frames = read_frames(path, start + np.arange(count) / fps, _HALF_A_FRAME / fps * _ROUNDING)
    return frames[:, : size[0], : size[1]]


def _embedded(files: EpisodeFiles, key: str, size: tuple[int, int]) -> np.ndarray:
    """Images [rows, H, W, 3] that the rows of an episode hold as encoded files."""
    table = read_parquet(files.data, [key, _FRAME, _EPISODE], episode=files.index)
    cells = table.sort_by(_FRAME).column(key).to_pylist()
    return np.stack([_picture(cell, row, size) for row, cell in enumerate(cells)])


def _picture(cell: Any, row: int, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    content = cell.get("bytes") if isinstance(cell, dict) else None
    if not content:
        raise ValueError(f"row {row} holds no image")
    try:
        image = Image.open(io.BytesIO(content), formats=PICTURES)
    except UnidentifiedImageError:
        raise ValueError(f"row {row} holds no image in a known format") from None
    except Exception as error:  # Pillow's errors have no common class
        raise ValueError(f"the image in row {row} cannot be opened ({error})") from error
    if image.mode != "RGB" or (image.height, image.width) != size:
        shown = f"{image.height}x{image.width} pixels of mode {image.mode}"
        raise ValueError(f"the image in row {row} has {shown}; expected {size[0]}x{size[1]} of mode RGB")
    try:
        return np.asarray(image)
    except Exception as error:
        raise ValueError(f"the image in row {row} cannot be decoded ({error})") from error
