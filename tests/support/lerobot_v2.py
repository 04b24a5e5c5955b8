"""A LeRobot dataset in the layout of v2.1, which rlvla reads and no longer writes: a file and videos per episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.lerobot import IMAGE_PREFIX
from rlvla.data.lerobot_writing import _episode_facts, _rows_of, _statistics, _table, write_lerobot
from rlvla.utils.video import encode_frames

PATHS = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}


def write_v2(folder: Path, demos: Demonstrations, fps: float) -> None:
    """`demos` in the older layout; what does not depend on the layout is taken from the newer one."""
    newer = folder.with_name(f"{folder.name}_v3")
    write_lerobot(newer, demos, fps)
    info = json.loads((newer / "meta" / "info.json").read_text()) | {"codebase_version": "v2.1", **PATHS}
    meta = folder / "meta"
    meta.mkdir(parents=True)
    (meta / "info.json").write_text(json.dumps(info))
    (meta / "stats.json").write_bytes((newer / "meta" / "stats.json").read_bytes())
    tasks, cameras = sorted(set(demos.instructions)), demos.env_args["cameras"]
    lines, numbers, done = [], [], 0
    for index in range(len(demos.actions)):
        rows = _rows_of(demos, index)
        where = {"episode_chunk": 0, "episode_index": index}
        data = folder / PATHS["data_path"].format(**where)
        data.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(rows, index, done, tasks, fps), data)
        done += len(rows.actions)
        for column, camera in enumerate(cameras):
            video = folder / PATHS["video_path"].format(video_key=IMAGE_PREFIX + camera, **where)
            video.parent.mkdir(parents=True, exist_ok=True)
            encode_frames(video, rows.frames(column), fps, crf=8)
        lines.append(_episode_facts(demos, index, rows))
        numbers.append({"episode_index": index, "stats": _statistics([rows], cameras)})
    write_lines(meta / "episodes.jsonl", lines)
    write_lines(meta / "episodes_stats.jsonl", numbers)
    write_lines(meta / "tasks.jsonl", [{"task_index": i, "task": task} for i, task in enumerate(tasks)])


def write_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
