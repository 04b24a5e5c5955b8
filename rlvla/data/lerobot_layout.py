"""The layout of LeRobot datasets: `meta/info.json`, and where the rows and videos of each episode are."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvla.data.validation import camera_problems, refuse, shortened
from rlvla.utils.data_files import fits, inside, parse_json

VERSIONS = ("v2.1", "v3.0")
IMAGE_PREFIX = "observation.images."
STATE, ACTION = "observation.state", "action"
REWARD, DONE = "next.reward", "next.done"
# In rollouts written by rlvla: whether image and state of a row are new; other rows repeat those of the last decision.
DECISION = "is_decision"
CHUNK_ROWS = "steps_executed"  # feature of rollouts with one row per decision

_WIDTH = re.compile(r"\d{0,2}d?")  # of a number in the path of a file
_parsed = string.Formatter().parse


@dataclass(frozen=True)
class EpisodePlace:
    """The files of an episode.

    Attributes:
        index: number of the episode.
        data: parquet file.
        videos: feature -> (file, start in s, end in s or None for the end of the file).
        facts: the full record of the episode.
    """

    index: int
    data: Path
    videos: dict[str, tuple[Path, float, float | None]]
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """For messages."""
        return f"episode {self.index}"

    @property
    def task(self) -> Any:
        """The language instruction as recorded; None if there is none."""
        tasks = self.facts.get("tasks")
        return tasks[0] if isinstance(tasks, list) and tasks else None


def info_problems(info: Any) -> list[str]:
    """What is wrong with the content of `meta/info.json`."""
    if not isinstance(info, dict):
        return [f"holds a {type(info).__name__}; a JSON object is needed"]
    version, features, fps = info.get("codebase_version"), info.get("features"), info.get("fps")
    if version not in VERSIONS:
        return [f"has format {version}; known: {', '.join(VERSIONS)}; convert it with lerobot's tools"]
    if not isinstance(features, dict) or not all(_describes_a_feature(feature) for feature in features.values()):
        return ["features must be an object that gives dtype and shape of each feature"]
    problems = []
    if ACTION not in features:
        problems.append(f"has no feature 'action'; it has {', '.join(sorted(features))}")
    if not fits(fps, float) or fps <= 0:
        problems.append(f"fps is {shortened(fps)}; expected the number of frames per second")
    chunk = info.get("chunks_size")
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


def has_colors(feature: dict[str, Any]) -> bool:
    """Whether a checked feature has three axes, one of them of three channels."""
    return len(feature["shape"]) == 3 and 3 in feature["shape"]


def picture_problems(features: dict[str, Any], cameras: Sequence[str]) -> list[str]:
    """What is wrong with the pictures of these cameras."""
    described = {name: features[name] for name in (IMAGE_PREFIX + camera for camera in cameras)}
    return [
        f"{name} is a {feature['dtype']} of shape {feature['shape']}; expected video or image with three color channels"
        for name, feature in described.items()
        if not has_colors(feature) or feature["dtype"] not in ("video", "image")
    ]


def picture_size(feature: dict[str, Any]) -> tuple[int, int]:
    """(height, width) of a camera feature.

    Its `names` label the axes, since some datasets put the channels first. Without names the channels are last.
    """
    named = dict(zip(feature.get("names") or (), feature["shape"]))
    return named.get("height", feature["shape"][0]), named.get("width", feature["shape"][1])


def episode_places(folder: Path, info: dict[str, Any]) -> list[EpisodePlace]:
    """All episodes of a dataset with a checked `info.json`, in the order in which they are listed.

    Raises:
        ConfigError: a path leads out of the folder, or the times of an episode in a video are no interval.
    """
    return list((_places_v2 if info["codebase_version"] == "v2.1" else _places_v3)(folder, info))


def _places_v2(folder: Path, info: dict[str, Any]) -> Iterator[EpisodePlace]:
    for line in (folder / "meta" / "episodes.jsonl").read_text(encoding="utf-8").splitlines():
        facts = parse_json(line, folder / "meta" / "episodes.jsonl")
        index = facts["episode_index"]
        where = {"episode_chunk": index // info["chunks_size"], "episode_index": index}
        videos = {
            key: (_located(folder, info["video_path"], video_key=key, **where), 0.0, None)
            for key, feature in info["features"].items()
            if feature["dtype"] == "video"
        }
        yield EpisodePlace(index, _located(folder, info["data_path"], **where), videos, facts)


def _places_v3(folder: Path, info: dict[str, Any]) -> Iterator[EpisodePlace]:
    import pyarrow.parquet as pq

    for path in sorted((folder / "meta" / "episodes").rglob("*.parquet")):
        for facts in pq.read_table(path).to_pylist():
            place = {name: facts[f"data/{name}"] for name in ("chunk_index", "file_index")}
            data = _located(folder, info["data_path"], **place)
            videos = {}
            for key in (k for k, feature in info["features"].items() if feature["dtype"] == "video"):
                place = {name: facts[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
                start, end = (facts[f"videos/{key}/{name}_timestamp"] for name in ("from", "to"))
                if not (isinstance(start, float) and isinstance(end, float) and 0 <= start < end < math.inf):
                    name = f"episode {facts['episode_index']}"
                    refuse(folder, [f"{name}: {key} lies from {start} to {end} s; expected increasing times"])
                videos[key] = (_located(folder, info["video_path"], video_key=key, **place), start, end)
            yield EpisodePlace(facts["episode_index"], data, videos, facts)


def _located(folder: Path, template: Any, **where: Any) -> Path:
    """The file that a template of `meta/info.json` names; always inside the folder."""
    try:
        if not isinstance(template, str) or not all(
            _WIDTH.fullmatch(spec or "") for _, _, spec, _ in _parsed(template)
        ):
            raise ValueError
        return inside(folder, template.format(**where))
    except (LookupError, ValueError, AttributeError):
        refuse(folder, [f"the path {template!r} in meta/info.json does not name a file in the folder"])
        raise


def place_problems(places: Sequence[EpisodePlace], info: dict[str, Any]) -> list[str]:
    """What is wrong with the list of episodes."""
    indices = [place.index for place in places]
    problems = [f"episode {index} is listed twice" for index, count in sorted(Counter(indices).items()) if count > 1]
    total = info.get("total_episodes", len(places))
    if places and total != len(places):
        problems.append(f"meta/info.json counts {total} episodes; {len(places)} are listed in meta/episodes")
    return problems
