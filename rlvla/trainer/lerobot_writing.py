"""Writing `Demonstrations` as a LeRobot data set, see `rlvla.trainer.lerobot`: a row per environment step.

Demonstrations hold a picture of every step. Dumped rollouts hold one per decision: there picture and state of a row are
those of the last decision, and `is_decision` tells the rows at which they are new. Where the episodes come from stands
under `rlvla` in `info.json`, which other readers ignore.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.trainer.demonstrations import Demonstrations
from rlvla.trainer.lerobot import ACTION, DECISION, DONE, IMAGE_PREFIX, REWARD, STATE
from rlvla.utils.errors import require
from rlvla.utils.video import encode_frames

_CHUNKS_SIZE = 1000
_PICTURES = 10  # of each episode, from which the statistics of the cameras are taken
_CRF = 8  # close to lossless: the pictures are training data
_PATHS = {
    "v2.1": {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    },
    "v3.0": {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    },
}


@dataclass(frozen=True)
class _Rows:
    """The steps of one episode: actions [S, D], the others [S, ...] or None.

    A picture is held once, however many rows show it: `shown` [S] are their positions in `pictures` [P, N, H, W, 3].
    """

    actions: np.ndarray
    pictures: np.ndarray
    shown: np.ndarray
    proprio: np.ndarray | None
    rewards: np.ndarray | None
    decision: np.ndarray | None

    def frames(self, column: int) -> Iterator[np.ndarray]:
        """[H, W, 3] of one camera, row by row."""
        return (self.pictures[position, column] for position in self.shown)


def write_lerobot(folder: Path, demos: Demonstrations, control_freq: float, version: str = "v3.0") -> None:
    """Write a data set; the folder appears complete or not at all.

    Args:
        folder: must not exist, or be empty.
        demos: the episodes.
        control_freq: environment steps per second, the `fps` of the data set.
        version: "v2.1" (a file per episode) or "v3.0" (one file for all, one video per camera).

    Raises:
        MissingExtraError: pyarrow or PyAV is not installed.
    """
    require("pyarrow", extra="lerobot")
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    episodes = [_rows_of(demos, index) for index in range(len(demos.actions))]
    tasks = sorted(set(demos.instructions))
    (temporary / "meta").mkdir(parents=True)
    info = _info(demos, episodes, tasks, control_freq, version)
    (temporary / "meta" / "info.json").write_text(json.dumps(info, indent=4), encoding="utf-8")
    statistics = _statistics(episodes, demos.env_args["cameras"])
    (temporary / "meta" / "stats.json").write_text(json.dumps(statistics, indent=4), encoding="utf-8")
    (_write_v2 if version == "v2.1" else _write_v3)(temporary, demos, episodes, tasks, control_freq, info)
    if folder.exists():
        folder.rmdir()  # empty
    temporary.rename(folder)


def _rows_of(demos: Demonstrations, index: int) -> _Rows:
    actions, images = demos.actions[index], demos.images[index]
    proprio = None if demos.proprio is None else demos.proprio[index]
    rewards = None if demos.rewards is None else demos.rewards[index]
    steps = np.arange(len(actions))
    if demos.decision_steps is None:
        return _Rows(actions, images, steps, proprio, rewards, None)
    last = np.searchsorted(demos.decision_steps[index], steps, side="right") - 1  # the decision a step belongs to
    decision = np.isin(steps, demos.decision_steps[index])
    return _Rows(actions, images, last, None if proprio is None else proprio[last], rewards, decision)


def _info(demos: Demonstrations, episodes: list[_Rows], tasks: list[str], fps: float, version: str) -> dict[str, Any]:
    first, cameras = episodes[0], demos.env_args["cameras"]
    height, width = first.pictures.shape[2:4]
    features: dict[str, Any] = {ACTION: _feature("float32", [first.actions.shape[1]])}
    if first.proprio is not None:
        features[STATE] = _feature("float32", [first.proprio.shape[1]])
    for camera in cameras:
        video = {"video.fps": fps, "video.codec": "h264", "video.pix_fmt": "yuv420p", "has_audio": False}
        shape = {"dtype": "video", "shape": [height, width, 3], "names": ["height", "width", "channels"]}
        features[IMAGE_PREFIX + camera] = shape | {"info": video}
    features |= {name: _feature("int64", [1]) for name in ("frame_index", "episode_index", "index", "task_index")}
    features["timestamp"] = _feature("float32", [1])
    if first.rewards is not None:
        features |= {REWARD: _feature("float32", [1]), DONE: _feature("bool", [1])}
    if first.decision is not None:
        features[DECISION] = _feature("bool", [1])
    suite = str(demos.env_args.get("task_suite_name") or "")
    mask = demos.statistics.get(suite, {}).get("action", {}).get("mask")
    own = {**demos.env_args, **({"action_mask": mask} if mask else {})}
    count = len(episodes)
    return {
        "codebase_version": version,
        "robot_type": suite,
        "total_episodes": count,
        "total_frames": sum(len(rows.actions) for rows in episodes),
        "total_tasks": len(tasks),
        "total_videos": count * len(cameras),
        "total_chunks": -(-count // _CHUNKS_SIZE),
        "chunks_size": _CHUNKS_SIZE,
        "fps": round(fps) if float(fps).is_integer() else fps,
        "splits": {"train": f"0:{count}"},
        **_PATHS[version],
        "features": features,
        "rlvla": own,
    }


def _feature(dtype: str, shape: list[int]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "names": None}


def _statistics(episodes: list[_Rows], cameras: Sequence[str]) -> dict[str, Any]:
    """min, max, mean, std, count of some episodes: [D] of actions and proprio, [3, 1, 1] in 0..1 of each camera."""
    found = {ACTION: _moments(np.concatenate([rows.actions for rows in episodes]))}
    if episodes[0].proprio is not None:
        found[STATE] = _moments(np.concatenate([rows.proprio for rows in episodes if rows.proprio is not None]))
    for column, camera in enumerate(cameras):
        # A few evenly spaced pictures of each episode tell as much as all of them.
        found[IMAGE_PREFIX + camera] = _picture_moments(
            rows.pictures[rows.shown[row], column]
            for rows in episodes
            for row in np.unique(np.linspace(0, len(rows.shown) - 1, _PICTURES).round().astype(int))
        )
    return found


def _moments(values: np.ndarray) -> dict[str, Any]:
    numbers = {"min": values.min, "max": values.max, "mean": values.mean, "std": values.std}
    return {name: number(axis=0).tolist() for name, number in numbers.items()} | {"count": [len(values)]}


def _picture_moments(pictures: Iterable[np.ndarray]) -> dict[str, Any]:
    """Of the channels of [H, W, 3] uint8, from exact counts of their 256 values."""
    counts = np.zeros((3, 256), np.int64)
    number = 0
    for picture in pictures:
        counts += [np.bincount(picture[..., channel].ravel(), minlength=256) for channel in range(3)]
        number += 1
    values = np.arange(256) / 255
    mean = counts @ values / counts.sum(1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    present = [values[row > 0] for row in counts]
    moments = {"min": [v[0] for v in present], "max": [v[-1] for v in present], "mean": mean, "std": variance**0.5}
    return {name: [[[float(v)]] for v in channels] for name, channels in moments.items()} | {"count": [number]}


def _table(rows: _Rows, episode: int, first_index: int, task_index: int, fps: float) -> Any:
    import pyarrow as pa

    count = len(rows.actions)
    columns: dict[str, Any] = {ACTION: pa.array(rows.actions.tolist(), pa.list_(pa.float32()))}
    if rows.proprio is not None:
        columns[STATE] = pa.array(rows.proprio.tolist(), pa.list_(pa.float32()))
    columns["timestamp"] = pa.array(np.arange(count, dtype=np.float32) / np.float32(fps))
    for name, values in (
        ("frame_index", np.arange(count)),
        ("episode_index", np.full(count, episode)),
        ("index", first_index + np.arange(count)),
        ("task_index", np.full(count, task_index)),
    ):
        columns[name] = pa.array(values.astype(np.int64))
    if rows.rewards is not None:
        columns[REWARD] = pa.array(rows.rewards.astype(np.float32))
        columns[DONE] = pa.array(np.arange(count) == count - 1)
    if rows.decision is not None:
        columns[DECISION] = pa.array(rows.decision)
    return pa.table(columns)


def _episode_facts(demos: Demonstrations, index: int, rows: _Rows) -> dict[str, Any]:
    facts = {"episode_index": index, "tasks": [demos.instructions[index]], "length": len(rows.actions)}
    facts["success"] = demos.success[index]
    if demos.init_states:
        facts |= dict(zip(("task_id", "init_state_id"), demos.init_states[index]))
    if demos.seeds is not None:
        facts["seed"] = str(demos.seeds[index])  # larger than an int64
    return facts


def _write_v2(
    folder: Path, demos: Demonstrations, episodes: list[_Rows], tasks: list[str], fps: float, info: dict[str, Any]
) -> None:
    import pyarrow.parquet as pq

    lines, numbers, done = [], [], 0
    for index, rows in enumerate(episodes):
        where = {"episode_chunk": index // _CHUNKS_SIZE, "episode_index": index}
        data = folder / info["data_path"].format(**where)
        data.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(rows, index, done, tasks.index(demos.instructions[index]), fps), data)
        done += len(rows.actions)
        for column, camera in enumerate(demos.env_args["cameras"]):
            video = folder / info["video_path"].format(video_key=IMAGE_PREFIX + camera, **where)
            video.parent.mkdir(parents=True, exist_ok=True)
            encode_frames(video, rows.frames(column), fps, crf=_CRF)
        lines.append(_episode_facts(demos, index, rows))
        numbers.append({"episode_index": index, "stats": _statistics([rows], demos.env_args["cameras"])})
    _write_lines(folder / "meta" / "episodes.jsonl", lines)
    _write_lines(folder / "meta" / "episodes_stats.jsonl", numbers)
    _write_lines(folder / "meta" / "tasks.jsonl", [{"task_index": i, "task": task} for i, task in enumerate(tasks)])


def _write_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def _write_v3(
    folder: Path, demos: Demonstrations, episodes: list[_Rows], tasks: list[str], fps: float, info: dict[str, Any]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables, records, done = [], [], 0
    keys = [IMAGE_PREFIX + camera for camera in demos.env_args["cameras"]]
    first = {"chunk_index": 0, "file_index": 0}
    for index, rows in enumerate(episodes):
        tables.append(_table(rows, index, done, tasks.index(demos.instructions[index]), fps))
        count = len(rows.actions)
        record = _episode_facts(demos, index, rows) | {f"data/{name}": number for name, number in first.items()}
        record |= {"dataset_from_index": done, "dataset_to_index": done + count}
        for key in keys:
            record |= {f"videos/{key}/{name}": number for name, number in first.items()}
            record |= {f"videos/{key}/from_timestamp": done / fps, f"videos/{key}/to_timestamp": (done + count) / fps}
        records.append(record | {f"meta/episodes/{name}": number for name, number in first.items()})
        done += count
    for relative, table in (
        (info["data_path"].format(**first), pa.concat_tables(tables)),
        ("meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(records)),
        ("meta/tasks.parquet", _task_table(tasks)),
    ):
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / relative)
    for column, key in enumerate(keys):
        video = folder / info["video_path"].format(video_key=key, **first)
        video.parent.mkdir(parents=True, exist_ok=True)
        encode_frames(video, chain.from_iterable(rows.frames(column) for rows in episodes), fps, crf=_CRF)


def _task_table(tasks: list[str]) -> Any:
    """Numbers of the tasks; their texts are the index of the data frame, as LeRobot's reader expects them."""
    import pyarrow as pa

    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": tasks})
    columns = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
    ]
    described = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [{**column, "metadata": None} for column in columns],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(described)})
