"""The videos of a page: those of several policies from one initial state beside each other, then all others."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvla.evaluation.findings import PolicyEvaluation
from rlvla.evaluation.videos import recorded_state
from rlvla.utils.video import video_poster, video_size


@dataclass(frozen=True)
class ShownVideo:
    """An embedded video.

    Attributes:
        name: the episode.
        success: success at its end.
        policy: label of the policy.
        tall: height divided by width, as text; None if unknown.
        data, poster: base64; the poster is the last frame as JPEG, "" if unknown.
    """

    name: str
    success: bool
    policy: str
    tall: str | None
    data: str
    poster: str


@dataclass(frozen=True)
class ShownVideos:
    """The videos of a suite.

    Attributes:
        beside: episode and mode -> its videos of several policies, baselines first.
        others: policy and mode -> videos of episodes that no other policy was filmed in.
    """

    beside: Mapping[str, Sequence[ShownVideo]]
    others: Mapping[str, Sequence[ShownVideo]]

    def __bool__(self) -> bool:
        return bool(self.beside or self.others)


def shown_videos(everyone: Sequence[PolicyEvaluation], labels: Mapping[str, str]) -> ShownVideos:
    """The recorded episodes of a policy and its baselines; files that no longer exist are skipped."""
    filmed: defaultdict[tuple[str, str, int], list[tuple[PolicyEvaluation, Path]]] = defaultdict(list)
    for evaluation in [*everyone[1:], *everyone[:1]]:  # before, then after
        for mode, paths in evaluation.videos.items():
            for path in paths:
                if path.is_file():
                    filmed[(mode, *recorded_state(path))].append((evaluation, path))
    beside: dict[str, list[ShownVideo]] = {}
    others: dict[tuple[int, str], list[ShownVideo]] = {}
    for (mode, task, state), entries in filmed.items():
        videos = [_video(path, f"{task}, initial state {state}", labels[e.policy]) for e, path in entries]
        if len(videos) > 1:
            beside[f"{task}, initial state {state}, {mode}"] = videos
            continue
        (evaluation, _) = entries[0]
        others.setdefault((everyone.index(evaluation), f"{labels[evaluation.policy]}, {mode}"), []).extend(videos)
    return ShownVideos(beside, {heading: others[position, heading] for position, heading in sorted(others)})


def _video(path: Path, name: str, policy: str) -> ShownVideo:
    size, poster = video_size(path), video_poster(path)
    return ShownVideo(
        name=name,
        success=path.stem.endswith("_success"),
        policy=policy,
        tall=None if size is None else f"{size[1] / size[0]:.4f}",
        data=base64.b64encode(path.read_bytes()).decode(),
        poster="" if poster is None else base64.b64encode(poster).decode(),
    )
