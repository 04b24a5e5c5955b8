"""The rows and pictures of the episodes of a LeRobot dataset, see `rlvla.data.lerobot`."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.data.demonstrations import empty_images
from rlvla.data.lerobot_layout import ACTION, DECISION, REWARD, STATE, EpisodePlace, picture_size
from rlvla.data.validation import Fact, Part, StoredEpisode, refuse
from rlvla.utils.video import read_video, video_frames

_EPISODE, _FRAME = "episode_index", "frame_index"
_HALF_A_FRAME = 0.5
PICTURES = ("PNG", "JPEG", "WEBP")  # Pillow would start Ghostscript for others
_FLAGS = "decision flags"
# Role -> axes and kind of its array.
_LOOKS: dict[str, tuple[tuple[str, ...], str]] = {
    "actions": (("steps", "action dimensions"), "numbers"),
    "proprio": (("steps", "proprio"), "numbers"),
    "rewards": (("steps",), "rewards"),
    _FLAGS: (("steps",), "flags"),
}


@dataclass(frozen=True)
class _Frames:
    """Shape and dtype of the frames of an episode in a video that has not been decoded."""

    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(np.uint8)


def stored_episodes(
    places: Sequence[EpisodePlace], info: Mapping[str, Any], cameras: Sequence[str], side: int
) -> list[StoredEpisode]:
    """The episodes for `check_episodes`: rows are read, videos are not decoded.

    Args:
        places: the files of each episode.
        info: content of `meta/info.json`.
        cameras: camera features.
        side: height and width of their images.
    """
    features, fps = info["features"], float(info["fps"])
    wanted = {"actions": ACTION, "proprio": STATE, "rewards": REWARD} | ({_FLAGS: DECISION} if "rlvla" in info else {})
    wanted = {role: name for role, name in wanted.items() if name in features}
    videos = {key: picture_size(features[key]) for key in cameras if features[key]["dtype"] == "video"}
    tables = _Tables(wanted.values())
    lengths: dict[Path, tuple[int | None, int, int]] = {}
    problems = _overlaps(places, fps)
    listed: defaultdict[Path, set[int]] = defaultdict(set)
    for place in places:
        listed[place.data].add(place.index)
    episodes = []
    for place in places:
        facts = _facts(place)
        episode = StoredEpisode(place.name, {}, facts, facts["length"].value, problems[place.index])
        episodes.append(episode)
        try:
            rows = tables.rows(place)
            unknown = tables.episodes(place.data) - listed[place.data]
        except (OSError, ValueError, LookupError, TypeError) as error:
            episode.problems.append(f"{place.data} cannot be used ({error})")
            continue
        if unknown:
            episode.problems.append(f"{place.data} also holds rows of episode {min(unknown)}, which is not listed")
            listed[place.data] |= unknown  # reported once
        count = len(rows[_FRAME])
        if rows[_FRAME].tolist() != list(range(count)):
            episode.problems.append(f"{_FRAME} does not number its {count} rows from 0 to {count - 1}")
        episode.parts |= _parts(rows, wanted, episode.problems)
        for key, size in videos.items():
            try:
                frames = _frames(place.videos[key], fps, size, lengths, count)
            except ValueError as error:
                episode.problems.append(str(error))
                continue
            episode.parts[key] = Part(key, frames, ("steps", "pixels", "pixels", 3), "images")
    return episodes


def _facts(place: EpisodePlace) -> dict[str, Fact]:
    facts = place.facts
    return {
        "instruction": Fact("tasks", place.task, "text"),
        "success": Fact("success", facts.get("success"), "flag", optional=True),
        "task_id": Fact("task_id", facts.get("task_id"), "number", optional=True, minimum=0),
        "init_state_id": Fact("init_state_id", facts.get("init_state_id"), "number", optional=True, minimum=-1),
        "seed": Fact("seed", facts.get("seed"), "number", optional=True, minimum=0),
        "length": Fact("length", facts.get("length"), "number", optional=True, minimum=1),
    }


class _Tables:
    """Rows of parquet files by episode; each file is read once.

    Args:
        columns: names of the columns to read.
    """

    def __init__(self, columns: Any):
        self._columns = [*columns, _EPISODE, _FRAME]
        self._tables: dict[Path, tuple[Any, np.ndarray, set[int]]] = {}

    def rows(self, place: EpisodePlace) -> dict[str, Any]:
        """The columns of an episode, in the order of its frames; columns that the file lacks are left out."""
        table, indices, _ = self._read(place.data)
        start, stop = np.searchsorted(indices, [place.index, place.index + 1])
        if start == stop:
            raise ValueError("it holds no row of this episode")
        rows = {name: table.column(name).slice(start, stop - start) for name in table.column_names}
        return rows | {_FRAME: rows[_FRAME].to_numpy()}

    def episodes(self, path: Path) -> set[int]:
        """The numbers of all episodes with rows in a file."""
        return self._read(path)[2]

    def _read(self, path: Path) -> tuple[Any, np.ndarray, set[int]]:
        import pyarrow.parquet as pq

        if path not in self._tables:
            there = pq.read_schema(path).names
            table = pq.read_table(path, columns=[name for name in self._columns if name in there])
            table = table.sort_by([(_EPISODE, "ascending"), (_FRAME, "ascending")])
            indices = table.column(_EPISODE).to_numpy()
            self._tables[path] = table, indices, set(np.unique(indices).tolist())
        return self._tables[path]


def _parts(rows: Mapping[str, Any], wanted: Mapping[str, str], problems: list[str]) -> dict[str, Part]:
    """The arrays of an episode; columns that are no arrays of numbers are added to `problems`."""
    parts: dict[str, Part] = {}
    for role, name in wanted.items():
        axes, kind = _LOOKS[role]
        try:
            parts[role] = Part(name, as_array(rows[name], len(axes)) if name in rows else None, axes, kind)
        except ValueError as error:
            problems.append(f"{name} {error}")
    flags = parts.get(_FLAGS)
    if flags is not None and flags.array is not None and flags.array.dtype == bool and flags.array.ndim == 1:
        parts["decision_steps"] = Part(flags.name, np.flatnonzero(flags.array), ("decisions",), "decisions")
    return parts


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
    place: tuple[Path, float, float | None],
    fps: float,
    size: tuple[int, int],
    known: dict[Path, tuple[int | None, int, int]],
    rows: int,
) -> _Frames:
    """What an episode has of a video; `known` collects what `video_frames` returns for each file."""
    path, start, end = place
    if path not in known:
        known[path] = video_frames(path)
    total, height, width = known[path]
    if end is not None:
        first, last = round(start * fps), round(end * fps)
        count = last - first if total is None else min(last, total) - min(first, total)
    else:
        count = rows if total is None else total  # if it is not recorded, frames are counted while they are decoded
    # The encoder pads odd sides.
    height, width = (own if shown == own + own % 2 else shown for own, shown in zip(size, (height, width)))
    return _Frames((count, height, width, 3))


def _overlaps(places: Sequence[EpisodePlace], fps: float) -> defaultdict[int, list[str]]:
    """Episode -> problems, for episodes that share frames of a video with another one."""
    spans: defaultdict[tuple[str, Path], list[tuple[float, float, int]]] = defaultdict(list)
    for place in places:
        for key, (path, start, end) in place.videos.items():
            if end is not None:
                spans[key, path].append((start, end, place.index))
    problems: defaultdict[int, list[str]] = defaultdict(list)
    for (key, _), listed in spans.items():
        listed.sort()
        for (_, end, other), (start, _, index) in zip(listed, listed[1:]):
            if start < end - _HALF_A_FRAME / fps:
                problems[index].append(f"its part of the video {key} overlaps with that of episode {other}")
    return problems


def read_images(
    folder: Path,
    episodes: Sequence[tuple[EpisodePlace, int, np.ndarray]],
    features: Mapping[str, Any],
    cameras: Sequence[str],
    side: int,
) -> list[np.ndarray]:
    """Per episode the images [S, N, H, W, 3] uint8.

    Args:
        folder: the dataset, for messages.
        episodes: the files of each episode, its number of rows, and the rows [S] whose images are wanted.
        features: the features of the dataset.
        cameras: camera features.
        side: height and width of their images.

    Raises:
        ConfigError: images are missing, cannot be decoded, or have another size or mode than the features say.
    """
    images = empty_images([len(seen) for *_, seen in episodes], (len(cameras), side, side, 3))
    problems = []
    for (place, count, seen), of_episode in zip(episodes, images):
        for index, key in enumerate(cameras):
            try:
                video = features[key]["dtype"] == "video"
                frames = _decoded(place, key, count, side) if video else _embedded(place, key, side)
                of_episode[:, index] = frames[seen]
            except (OSError, ValueError, LookupError, TypeError) as error:
                problems.append(f"{place.name}: {key}: {error}")
    refuse(folder, problems)
    return images


def _decoded(place: EpisodePlace, key: str, count: int, side: int) -> np.ndarray:
    frames = read_video(*place.videos[key])
    if len(frames) != count:
        raise ValueError(f"the video has {len(frames)} frames; expected {count}, one for each row")
    return frames[:, :side, :side]


def _embedded(place: EpisodePlace, key: str, side: int) -> np.ndarray:
    """The images that the rows of an episode hold as encoded files."""
    import pyarrow.parquet as pq

    table = pq.read_table(place.data, columns=[key, _FRAME], filters=[(_EPISODE, "=", place.index)])
    cells = table.sort_by(_FRAME).column(key).to_pylist()
    return np.stack([_picture(cell, row, side) for row, cell in enumerate(cells)])


def _picture(cell: Any, row: int, side: int) -> np.ndarray:
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
    if image.mode != "RGB" or image.size != (side, side):
        shown = f"{image.height}x{image.width} pixels of mode {image.mode}"
        raise ValueError(f"the image in row {row} has {shown}; expected {side}x{side} of mode RGB")
    try:
        return np.asarray(image)
    except Exception as error:
        raise ValueError(f"the image in row {row} cannot be decoded ({error})") from error
