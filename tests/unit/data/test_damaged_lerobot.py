"""LeRobot folders that do not fit together are refused, naming episode and feature."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvla.data.lerobot import EpisodeFiles, listing_problems
from rlvla.data.reading import read_demonstrations
from rlvla.utils.errors import ConfigError
from tests.support.damaged_data import SIDE, STEPS, Change, Originals, copied, encoded, problems

NAN = float("nan")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"))


def table(change: Callable[[dict[str, list]], Any]) -> Change:
    """Change the columns of the first parquet file with rows."""

    def apply(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = sorted((folder / "data").rglob("*.parquet"))[0]
        columns = pq.read_table(path).to_pydict()
        columns = change(columns) or columns
        pq.write_table(pa.table(columns), path)

    return apply


def cells(name: str, change: Callable[[list], Any]) -> Change:
    return table(lambda columns: columns | {name: change(columns[name])})


def records(change: Callable[[list[dict]], Any]) -> Change:
    """Change the records of the episodes."""

    def apply(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        lines, files = folder / "meta" / "episodes.jsonl", sorted((folder / "meta" / "episodes").rglob("*.parquet"))
        facts = pq.read_table(files[0]).to_pylist() if files else list(map(json.loads, lines.read_text().splitlines()))
        facts = change(facts) or facts
        if files:
            pq.write_table(pa.Table.from_pylist(facts), files[0])
        else:
            lines.write_text("\n".join(map(json.dumps, facts)))

    return apply


def info(change: Callable[[dict], Any]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / "meta" / "info.json"
        content = json.loads(path.read_text())
        changed = change(content)
        path.write_text(json.dumps(changed if isinstance(changed, list) else content))

    return apply


def video(frames: int, side: int = SIDE) -> Change:
    """Replace the video of the left camera."""

    def apply(folder: Path) -> None:
        from rlvla.utils.video import encode_frames

        path = next((folder / "videos" / "observation.images.left").rglob("*.mp4"))
        encode_frames(path, np.zeros((frames, side, side, 3), np.uint8), 10.0)

    return apply


def first(value: Any) -> Callable[[list], list]:
    return lambda items: [value, *items[1:]]


def frames(items: list, **changed: Any) -> None:
    """Change the record of the second episode."""
    items[1] |= {f"videos/observation.images.left/{name}": value for name, value in changed.items()}


def header_of_png(side: int) -> bytes:
    head = b"IHDR" + struct.pack("!IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack("!I", 13) + head + struct.pack("!I", zlib.crc32(head))


VIDEO, PICTURE = "observation.images.left", "observation.images.front"
LEROBOT: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "a video cut short": ("videos", video(2 * STEPS + 3), ("episode 2", VIDEO)),
    "a video of other pictures": ("videos", video(3 * STEPS, 32), ("episode 0", VIDEO, "32")),
    "no video": ("videos", lambda d: shutil.rmtree(d / "videos" / VIDEO), ("episode 0", VIDEO)),
    "a video of text": (
        "videos",
        lambda d: next((d / "videos" / VIDEO).rglob("*.mp4")).write_text("no"),
        ("episode 0", VIDEO),
    ),
    "overlapping videos": (
        "videos",
        records(lambda r: frames(r, from_timestamp=0.3, to_timestamp=0.9)),
        ("episode 1",),
    ),
    "too long a part of a video": ("videos", records(lambda r: frames(r, to_timestamp=1.5)), ("episode 1", VIDEO)),
    "a reversed part of a video": ("videos", records(lambda r: frames(r, to_timestamp=0.1)), ("episode 1", VIDEO)),
    "a time of NaN": ("videos", records(lambda r: frames(r, from_timestamp=NAN)), ("episode 1", VIDEO)),
    "NaN in actions": ("videos", cells("action", first([NAN] * 4)), ("episode 0", "action", "row 0")),
    "actions of different lengths": ("videos", cells("action", first([1.0])), ("episode 0", "action")),
    "an action missing": ("videos", cells("action", first(None)), ("episode 0", "action")),
    "a number of an action missing": ("videos", cells("action", first([None] * 4)), ("episode 0", "action")),
    "text actions": ("videos", cells("action", lambda v: [["1"] * 4 for _ in v]), ("episode 0", "action", "text")),
    "one text as action": ("videos", cells("action", lambda v: ["1"] * len(v)), ("episode 0", "action", "text")),
    "nested actions": ("videos", cells("action", lambda v: [[row] for row in v]), ("episode 0", "action")),
    "actions without numbers": ("videos", cells("action", lambda v: [[] for _ in v]), ("episode 0", "action")),
    "no column of actions": ("videos", table(lambda c: c.pop("action") and None), ("episode 0", "action")),
    "infinity in states": (
        "videos",
        cells("observation.state", first([np.inf] * 3)),
        ("episode 0", "observation.state"),
    ),
    "no column of states": (
        "videos",
        table(lambda c: c.pop("observation.state") and None),
        ("episode 0", "observation.state"),
    ),
    "NaN in rewards": ("videos", cells("next.reward", first(NAN)), ("episode 0", "next.reward")),
    "text rewards": ("videos", cells("next.reward", lambda v: ["0"] * len(v)), ("episode 0", "next.reward")),
    "a row twice": ("videos", cells("frame_index", first(1)), ("episode 0", "frame_index")),
    "a row missing": (
        "videos",
        table(lambda c: {name: values[1:] for name, values in c.items()}),
        ("episode 0", "frame_index", "action"),
    ),
    "rows of an unlisted episode": ("videos", cells("episode_index", first(9)), ("episode 9",)),
    "an episode without rows": (
        "videos",
        cells("episode_index", lambda v: [0 if i == 1 else i for i in v]),
        ("episode 1",),
    ),
    "an episode listed twice": ("videos", records(lambda r: r + r[:1]), ("episode 0", "twice")),
    "an episode not listed": ("videos", records(lambda r: r[:-1]), ("3 episodes", "episode 2")),
    "a blank instruction": ("videos", records(lambda r: r[1].update(tasks=[" "])), ("episode 1", "tasks")),
    "another length recorded": ("videos", records(lambda r: r[1].update(length=STEPS + 1)), ("episode 1", "action")),
    "success in some episodes": ("videos", records(lambda r: r[1].update(success=None)), ("episode 1", "success")),
    "a seed in words": ("videos", records(lambda r: r[1].update(seed="lucky")), ("episode 1", "seed")),
    "a state in some episodes": (
        "videos",
        records(lambda r: r[1].update(init_state_id=None)),
        ("episode 1", "init_state_id"),
    ),
    "no episodes": ("videos", records(lambda r: [r[0] | {"episode_index": 5}]), ("3 episodes", "episode 5")),
    "info is a list": ("videos", info(lambda i: [1]), ("info.json",)),
    "features are a list": ("videos", info(lambda i: i.update(features=[])), ("info.json", "features")),
    "a feature without shape": ("videos", info(lambda i: i["features"]["action"].pop("shape")), ("info.json",)),
    "grey video": ("videos", info(lambda i: i["features"][VIDEO].update(shape=[16, 16, 1])), ("info.json", VIDEO)),
    "a video of floats": ("videos", info(lambda i: i["features"][VIDEO].update(dtype="float32")), ("info.json", VIDEO)),
    "no frames per second": ("videos", info(lambda i: i.update(fps=0)), ("info.json", "fps")),
    "frames per second in words": ("videos", info(lambda i: i.update(fps="ten")), ("info.json", "fps")),
    "a frequency of NaN": ("videos", info(lambda i: i.update(fps=NAN)), ("info.json", "fps")),
    "cameras of rlvla in one word": ("videos", info(lambda i: i["rlvla"].update(cameras="left")), ("cameras",)),
    "rlvla is a list": ("videos", info(lambda i: i.update(rlvla=[])), ("info.json", "rlvla")),
    "a mask of another robot": ("videos", info(lambda i: i["rlvla"].update(action_mask=[True])), ("action.mask",)),
    "a grey picture": ("pictures", cells(PICTURE, first(encoded("L", SIDE))), ("episode 0", PICTURE, "row 0")),
    "a picture with transparency": ("pictures", cells(PICTURE, first(encoded("RGBA", SIDE))), ("episode 0", PICTURE)),
    "a smaller picture": ("pictures", cells(PICTURE, first(encoded("RGB", 8))), ("episode 0", PICTURE, "8x8")),
    "a picture of text": (
        "pictures",
        cells(PICTURE, first({"bytes": b"no picture", "path": None})),
        ("episode 0", PICTURE),
    ),
    "a picture elsewhere": (
        "pictures",
        cells(PICTURE, first({"bytes": None, "path": "a.png"})),
        ("episode 0", PICTURE),
    ),
    "a picture cut short": (
        "pictures",
        cells(PICTURE, first({"bytes": encoded("RGB", SIDE)["bytes"][:50], "path": None})),
        ("episode 0", PICTURE),
    ),
    "pictures of infinite actions": ("pictures", cells("action", first([np.inf, 0.0])), ("episode 0", "action")),
    "no instructions": ("pictures", records(lambda r: r[0].pop("tasks") and None), ("episode 0", "tasks")),
    "a picture of a billion pixels": (
        "pictures",
        cells(PICTURE, first({"bytes": header_of_png(2**15), "path": None})),
        ("episode 0", PICTURE, "row 0"),
    ),
    "no episodes per folder": ("pictures", info(lambda i: i.update(chunks_size=0)), ("info.json", "chunks_size")),
    "a frequency beyond floats": ("pictures", info(lambda i: i.update(fps=10**400)), ("info.json", "fps")),
    "a file missing": ("pictures", lambda d: (d / "data" / "000001.parquet").unlink(), ("episode 1",)),
    "a file of text": ("pictures", lambda d: (d / "data" / "000001.parquet").write_text("no"), ("episode 1",)),
}


@pytest.mark.parametrize("name", LEROBOT)
def test_damaged_lerobot_folders_are_refused(name: str, originals: Originals, tmp_path: Path) -> None:
    kind, change, expected = LEROBOT[name]
    folder = copied(originals(kind), tmp_path)
    change(folder)
    text = problems(folder)
    assert all(word in text for word in expected), text


@pytest.mark.parametrize(
    "template",
    [
        "/etc/{episode_index}",
        "../{episode_index}",
        "{nobody}",
        "{episode_index.x}",
        "{episode_index:300000000d}",
        "{episode_index:{episode_chunk}}",
        7,
    ],
)
def test_paths_stay_in_the_folder(template: Any, originals: Originals, tmp_path: Path) -> None:
    folder = copied(originals("pictures"), tmp_path)
    info(lambda i: i.update(data_path=template))(folder)
    assert "meta/info.json" in problems(folder)


def with_depth(folder: Path) -> None:
    """Add a camera of one channel, whose pictures nobody reads."""
    depth = {"dtype": "video", "shape": [64, 64, 1], "names": ["height", "width", "channels"]}
    info(lambda i: i["features"].update({"observation.images.depth": depth}))(folder)
    info(lambda i: i.update(video_path="videos/{video_key}/{episode_index}.mp4"))(folder)


@pytest.mark.parametrize("cameras", [None, ["front"]])
def test_cameras_without_colors_are_left_out(cameras: Any, originals: Originals, tmp_path: Path) -> None:
    folder = copied(originals("pictures"), tmp_path)
    with_depth(folder)
    assert read_demonstrations(folder, cameras).env_args["cameras"] == ["front"]


def test_cameras_without_colors_are_refused_when_chosen(originals: Originals, tmp_path: Path) -> None:
    folder = copied(originals("pictures"), tmp_path)
    with_depth(folder)
    with pytest.raises(ConfigError, match="observation.images.depth is a video of shape"):
        read_demonstrations(folder, ["depth"])
    info(lambda i: i["features"].pop(PICTURE))(folder)
    with pytest.raises(ConfigError, match="no camera with three color channels; it has depth"):
        read_demonstrations(folder)


def test_other_arithmetic_in_the_metadata_ends_in_one_sentence(originals: Originals, tmp_path: Path) -> None:
    folder = copied(originals("videos"), tmp_path)
    info(lambda i: i.update(fps=1.7e308))(folder)
    records(lambda r: frames(r, from_timestamp=50.0, to_timestamp=100.0))(folder)
    with pytest.raises(ConfigError, match="is not a readable LeRobot dataset"):
        read_demonstrations(folder)


def test_many_episodes_are_counted_at_once() -> None:
    places = [EpisodeFiles(index, Path(), {}, {}) for index in [*range(100_000), 7, 5]]
    began = time.process_time()
    assert listing_problems(places, {}) == ["episode 5 is listed twice", "episode 7 is listed twice"]
    assert time.process_time() - began < 5


def _rows(count: int) -> dict[str, Any]:
    import pyarrow as pa

    return {"episode_index": pa.array(np.zeros(count, np.int64)), "frame_index": pa.array(np.zeros(count, np.int64))}


def _numbers() -> Any:
    """A column of equal numbers, in a few bytes."""
    import pyarrow as pa

    return pa.table(_rows(2**20) | {"action": pa.FixedSizeListArray.from_arrays(np.zeros(2**26, np.float32), 64)})


def _texts() -> Any:
    """A text that a dictionary repeats."""
    import pyarrow as pa

    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**10, np.int32)), pa.array(["x" * 2**22]))
    return pa.table(_rows(2**10) | {"action": long})


def _pages() -> Any:
    """A page that compresses well."""
    import pyarrow as pa

    return pa.table(_rows(1) | {"action": pa.array(["x" * 2**27])})


@pytest.mark.parametrize("content", [_numbers, _texts, _pages])
@pytest.mark.parametrize("where", ["data", "meta/episodes"])
def test_a_parquet_bomb_is_not_expanded(content: Any, where: str, originals: Originals, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = copied(originals("videos"), tmp_path)
    (file,) = (path / where).rglob("*.parquet")
    quickly = {"use_dictionary": content is not _pages, "write_statistics": False}
    pq.write_table(content(), file, compression="zstd", store_schema=False, **quickly)
    assert file.stat().st_size < 400_000
    gc.collect()
    pa.default_memory_pool().release_unused()
    before, peak = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    text = problems(path)
    assert f"{file.name}: would take" in text and "GiB of memory, more than 1,000 times the" in text
    assert pa.default_memory_pool().max_memory() <= max(peak, before + 2**29)


def test_a_huge_list_of_episodes_is_not_read(originals: Originals, tmp_path: Path) -> None:
    path = copied(originals("pictures"), tmp_path)
    os.truncate(path / "meta" / "episodes.jsonl", 2**40)
    assert "bytes, more than 67,108,864" in problems(path)
