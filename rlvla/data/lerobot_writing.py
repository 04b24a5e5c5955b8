"""Writing `Demonstrations` as a LeRobot v3.0 dataset with one row per environment step, see `rlvla.data.lerobot`.

Rows have the instruction of their step; where it changes within an episode, `task_instruction` in `meta/episodes` is
that of the task. Demonstrations have an image for each step. Dumped rollouts have one per decision: rows in between
repeat image and state of the last decision, and `is_decision` marks the rows where they are new. The origin of the
episodes is recorded under `rlvla` in `info.json`, which other readers ignore.
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

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.lerobot import (
    ACTION,
    DECISION,
    DONE,
    IMAGE_PREFIX,
    INTERVENTION,
    REWARD,
    STATE,
    TASK_INSTRUCTION,
)
from rlvla.utils.errors import require
from rlvla.utils.video import encode_frames

_CHUNKS_SIZE = 1000
_PICTURES = 10  # images per episode from which the statistics of a camera are computed
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_CRF = 8  # close to lossless, since the images are training data
_VERSION = "v3.0"
_PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


@dataclass(frozen=True)
class _Rows:
    """The steps of one episode: actions [S, D], the other fields [S, ...] or None.

    Images that several rows share are stored once: `shown` [S] indexes `pictures` [P, N, H, W, 3].
    """

    actions: np.ndarray
    pictures: np.ndarray
    shown: np.ndarray
    proprio: np.ndarray | None
    rewards: np.ndarray | None
    decision: np.ndarray | None
    interventions: np.ndarray | None
    texts: list[str]

    def frames(self, column: int) -> Iterator[np.ndarray]:
        """The images [H, W, 3] of one camera, row by row."""
        return (self.pictures[position, column] for position in self.shown)


def write_lerobot(folder: Path, demos: Demonstrations, control_freq: float) -> None:
    """Write a dataset with one data file and one video per camera; the folder appears only when complete.

    Args:
        folder: must be empty or not exist.
        demos: the episodes.
        control_freq: environment steps per second, the `fps` of the dataset.

    Raises:
        MissingExtraError: pyarrow or PyAV is not installed.
    """
    require("pyarrow", extra="lerobot")
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    episodes = [_rows_of(demos, index) for index in range(len(demos.actions))]
    tasks = sorted({text for rows in episodes for text in rows.texts})
    (temporary / "meta").mkdir(parents=True)
    info = _info(demos, episodes, tasks, control_freq)
    (temporary / "meta" / "info.json").write_text(json.dumps(info, indent=4), encoding="utf-8")
    statistics = _statistics(episodes, demos.env_args["cameras"])
    (temporary / "meta" / "stats.json").write_text(json.dumps(statistics, indent=4), encoding="utf-8")
    (temporary / "README.md").write_text(_card(folder.name, info, tasks), encoding="utf-8")
    _write_files(temporary, demos, episodes, tasks, control_freq, info)
    if folder.exists():
        folder.rmdir()  # empty
    temporary.rename(folder)


def _rows_of(demos: Demonstrations, index: int) -> _Rows:
    actions, images = demos.actions[index], demos.images[index]
    proprio = None if demos.proprio is None else demos.proprio[index]
    rewards = None if demos.rewards is None else demos.rewards[index]
    interventions = None if demos.interventions is None else demos.interventions[index]
    steps = np.arange(len(actions))
    texts = demos.step_instructions[index] if demos.step_instructions else [demos.instructions[index]] * len(actions)
    if demos.decision_steps is None:
        return _Rows(actions, images, steps, proprio, rewards, None, interventions, texts)
    last = np.searchsorted(demos.decision_steps[index], steps, side="right") - 1  # decision of each step
    last = np.maximum(last, 0)  # before a takeover, that of the takeover
    decision = np.isin(steps, demos.decision_steps[index])
    shown = None if proprio is None else proprio[last]
    return _Rows(actions, images, last, shown, rewards, decision, interventions, texts)


def _info(demos: Demonstrations, episodes: list[_Rows], tasks: list[str], fps: float) -> dict[str, Any]:
    first, cameras = episodes[0], demos.env_args["cameras"]
    height, width = first.pictures.shape[2:4]
    features: dict[str, Any] = {ACTION: _feature("float32", [first.actions.shape[1]], demos.action_names)}
    if first.proprio is not None:
        features[STATE] = _feature("float32", [first.proprio.shape[1]], demos.proprio_names)
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
    if first.interventions is not None:
        features[INTERVENTION] = _feature("float32", [1])
    suite = str(demos.env_args.get("task_suite_name") or "")
    mask = demos.statistics.get(suite, {}).get("action", {}).get("mask")
    origin = {**demos.env_args, **({"action_mask": mask} if mask else {})}
    count = len(episodes)
    return {
        "codebase_version": _VERSION,
        "robot_type": suite,
        "total_episodes": count,
        "total_frames": sum(len(rows.actions) for rows in episodes),
        "total_tasks": len(tasks),
        "total_videos": count * len(cameras),
        "total_chunks": -(-count // _CHUNKS_SIZE),
        "chunks_size": _CHUNKS_SIZE,
        "fps": round(fps) if float(fps).is_integer() else fps,
        "splits": {"train": f"0:{count}"},
        **_PATHS,
        "features": features,
        "rlvla": origin,
    }


def _card(name: str, info: dict[str, Any], tasks: list[str]) -> str:
    """The dataset card of the Hub."""
    head = "---\ntask_categories:\n- robotics\ntags:\n- LeRobot\nconfigs:\n- config_name: default\n"
    head += "  data_files: data/*/*.parquet\n---"
    facts = f"{info['total_episodes']} episodes, {info['total_frames']} steps at {info['fps']} Hz, {info['robot_type']}"
    listed = "\n".join(f"- {task}" for task in tasks)
    features = "\n".join(f"| {key} | {f['dtype']} | {f['shape']} |" for key, f in info["features"].items())
    table = f"| feature | type | shape |\n|---|---|---|\n{features}"
    return f"{head}\n\n# {name}\n\nLeRobot {_VERSION}: {facts}.\n\n{table}\n\nTasks:\n\n{listed}\n"


def _feature(dtype: str, shape: list[int], names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "names": names}


def _statistics(episodes: list[_Rows], cameras: Sequence[str]) -> dict[str, Any]:
    """Moments and quantiles: [D] of columns of numbers, [3, 1, 1] in 0..1 of each camera."""
    statistics = {ACTION: _moments(np.concatenate([rows.actions for rows in episodes]))}
    if episodes[0].proprio is not None:
        statistics[STATE] = _moments(np.concatenate([rows.proprio for rows in episodes if rows.proprio is not None]))
    if episodes[0].rewards is not None:
        rewards = [rows.rewards for rows in episodes if rows.rewards is not None]
        statistics[REWARD] = _moments(np.concatenate(rewards)[:, None].astype(np.float64))
        last = [np.arange(len(row)) == len(row) - 1 for row in rewards]
        statistics[DONE] = _moments(np.concatenate(last)[:, None].astype(np.float64))
    for column, camera in enumerate(cameras):
        # from a few evenly spaced images of each episode
        statistics[IMAGE_PREFIX + camera] = _picture_moments(
            rows.pictures[rows.shown[row], column]
            for rows in episodes
            for row in np.unique(np.linspace(0, len(rows.shown) - 1, _PICTURES).round().astype(int))
        )
    return statistics


def _moments(values: np.ndarray) -> dict[str, Any]:
    moments = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    moments |= dict(zip(_QUANTILES, np.quantile(values, list(_QUANTILES.values()), axis=0)))
    return {name: numbers.tolist() for name, numbers in moments.items()} | {"count": [len(values)]}


def _picture_moments(pictures: Iterable[np.ndarray]) -> dict[str, Any]:
    """Moments per channel of images [H, W, 3] uint8, from exact counts of the 256 values."""
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
    shares = counts.cumsum(1) / counts.sum(1, keepdims=True)
    moments |= {name: [values[np.searchsorted(row, q)] for row in shares] for name, q in _QUANTILES.items()}
    return {name: [[[float(v)]] for v in channels] for name, channels in moments.items()} | {"count": [number]}


def _table(rows: _Rows, episode: int, first_index: int, tasks: list[str], fps: float) -> Any:
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
        ("task_index", np.array([tasks.index(text) for text in rows.texts])),
    ):
        columns[name] = pa.array(values.astype(np.int64))
    if rows.rewards is not None:
        columns[REWARD] = pa.array(rows.rewards.astype(np.float32))
        columns[DONE] = pa.array(np.arange(count) == count - 1)
    if rows.decision is not None:
        columns[DECISION] = pa.array(rows.decision)
    if rows.interventions is not None:
        columns[INTERVENTION] = pa.array(rows.interventions.astype(np.float32))
    return pa.table(columns)


def _episode_facts(demos: Demonstrations, index: int, rows: _Rows) -> dict[str, Any]:
    facts = {"episode_index": index, "tasks": list(dict.fromkeys(rows.texts)), "length": len(rows.actions)}
    if demos.step_instructions is not None:
        facts[TASK_INSTRUCTION] = demos.instructions[index]
    if demos.success_recorded:
        facts["success"] = demos.success[index]
    if demos.init_states:
        facts |= dict(zip(("task_id", "init_state_id"), demos.init_states[index]))
    if demos.seeds is not None:
        facts["seed"] = str(demos.seeds[index])  # larger than an int64
    return facts


def _write_files(
    folder: Path, demos: Demonstrations, episodes: list[_Rows], tasks: list[str], fps: float, info: dict[str, Any]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables, records, done = [], [], 0
    keys = [IMAGE_PREFIX + camera for camera in demos.env_args["cameras"]]
    first = {"chunk_index": 0, "file_index": 0}
    for index, rows in enumerate(episodes):
        tables.append(_table(rows, index, done, tasks, fps))
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
    """Task indices; the instructions are the index of the data frame, as LeRobot's reader expects."""
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
