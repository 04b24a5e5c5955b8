"""The episodes a reward model learns from: recorded demonstrations and dumped rollouts, in any mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlvla.trainer.demonstrations import Demonstrations, dataset_entry, read_demonstrations
from rlvla.utils.errors import ConfigError

# Options that change what a frame looks like or what its proprio means.
_SAME = ("task_suite_name", "cameras", "image_size", "render_quality")


def read_outcomes(paths: Sequence[str], cameras: Sequence[str] | None = None) -> Demonstrations:
    """Read one or more files of episodes as one.

    Dumped rollouts hold what was seen after the last action; it becomes the last frame of the episode, so an episode of
    S decisions has S + 1 frames there. `actions` keep one row per step, and `decision_steps` is None.

    Args:
        paths: files that `read_demonstrations` reads.
        cameras: which cameras, in which order; default all of the first file.

    Raises:
        ConfigError: a file cannot be read, or they differ in suite, cameras, image size, proprio, rendering or the
            number of action dimensions; all problems at once.
    """
    parts, problems = [], []
    for path in paths:
        try:
            parts.append(_with_last_frames(read_demonstrations(path, cameras)))
        except ConfigError as error:
            problems += error.problems
    if not paths:
        problems.append("--demos names no file")
    for path, part in zip(paths, parts) if not problems else ():
        problems += [
            f"--demos {path}: {name} is {other!r}, but {own!r} in {paths[0]}; a reward model sees one kind of frame"
            for name, own, other in _differences(parts[0], part)
        ]
    if problems:
        raise ConfigError(problems)
    return parts[0] if len(parts) == 1 else _joined(parts)


def _with_last_frames(demos: Demonstrations) -> Demonstrations:
    """The observations after the last actions as further frames, where there are any."""
    if demos.last_images is None:
        return demos
    images = [np.concatenate([own, last[None]]) for own, last in zip(demos.images, demos.last_images)]
    proprio = demos.proprio
    if proprio is not None and demos.last_proprio is not None:
        proprio = [np.concatenate([own, last[None]]) for own, last in zip(proprio, demos.last_proprio)]
    return replace(demos, images=images, proprio=proprio, decision_steps=None, last_images=None, last_proprio=None)


def _differences(first: Demonstrations, other: Demonstrations) -> list[tuple[str, Any, Any]]:
    pairs = [(name, first.env_args.get(name), other.env_args.get(name)) for name in _SAME]
    pairs.append(("having proprio", first.proprio is not None, other.proprio is not None))
    pairs.append(("the shape of an observation", first.images[0].shape[1:], other.images[0].shape[1:]))
    pairs.append(("the number of action dimensions", first.actions[0].shape[1], other.actions[0].shape[1]))
    return [(name, own, others) for name, own, others in pairs if own != others]


def _joined(parts: Sequence[Demonstrations]) -> Demonstrations:
    first = parts[0]
    proprio = None if first.proprio is None else [p for part in parts for p in part.proprio or ()]
    actions = [a for part in parts for a in part.actions]
    (entry,) = first.statistics.values()
    unnormalised = [dim for dim, normalised in enumerate(entry["action"]["mask"]) if not normalised]
    key = first.env_args["task_suite_name"]
    return Demonstrations(
        env_args=first.env_args,
        statistics={key: dataset_entry(actions, proprio, unnormalised)},
        images=[i for part in parts for i in part.images],
        proprio=proprio,
        actions=actions,
        instructions=[t for part in parts for t in part.instructions],
        success=[s for part in parts for s in part.success],
        init_states=[s for part in parts for s in part.init_states],
    )
