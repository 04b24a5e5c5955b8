"""Several files of demonstrations or dumped rollouts as one data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from rlvla.envs.config import EnvConfig
from rlvla.trainer.demonstrations import UNKNOWN_STATE, Demonstrations, dataset_entry, read_demonstrations
from rlvla.utils.errors import ConfigError

T = TypeVar("T")


def read_several(
    paths: Sequence[str],
    cameras: Sequence[str] | None = None,
    *,
    same: Sequence[str] = (),
    prepared: Callable[[Demonstrations], Demonstrations] = lambda demos: demos,
) -> Demonstrations:
    """Read one or more files as one: `read_parts`, then `joined`."""
    return joined(read_parts(paths, cameras, same=same, prepared=prepared))


def read_parts(
    paths: Sequence[str],
    cameras: Sequence[str] | None = None,
    *,
    same: Sequence[str] = (),
    prepared: Callable[[Demonstrations], Demonstrations] = lambda demos: demos,
) -> list[Demonstrations]:
    """Read one or more files that can be joined.

    Args:
        paths: files or folders that `read_demonstrations` reads.
        cameras: which cameras, in which order; default all of the first file.
        same: entries of `env_args` that must agree as well.
        prepared: done with each of them before they are compared.

    Raises:
        ConfigError: a file cannot be read or is given twice, or they differ in cameras, image size, proprio, action
            dimensions or control frequency; all problems at once.
    """
    problems = [f"--demos names {path} twice" for path in dict.fromkeys(paths) if list(paths).count(path) > 1]
    if not paths:
        problems.append("--demos names no file")
    parts = []
    for path in paths:
        try:
            parts.append(prepared(read_demonstrations(path, cameras)))
        except ConfigError as error:
            problems += error.problems
    if not problems and len(parts) > 1:
        problems += _disagreements(paths, parts, same if cameras else (*same, "cameras"))
    if problems:
        raise ConfigError(problems)
    return parts


def joined(parts: Sequence[Demonstrations]) -> Demonstrations:
    """The episodes of all parts as one data set; what it tells of the suite is what the first of them tells."""
    first = parts[0]
    if len(parts) == 1:
        return first
    actions = [a for part in parts for a in part.actions]
    proprio = _all(parts, lambda part: part.proprio)
    (entry,) = first.statistics.values()
    unnormalised = [dim for dim, normalised in enumerate(entry["action"]["mask"]) if not normalised]
    decisions = None
    if any(part.decision_steps is not None for part in parts):
        decisions = [d for part in parts for d in part.decision_steps or [np.arange(len(a)) for a in part.actions]]
    env_args = dict(first.env_args)
    if all(part.env_args.get("task_suite_name") == first.env_args["task_suite_name"] for part in parts):
        task_ids = [set(part.env_args.get("task_ids") or ()) for part in parts]
        env_args.pop("task_ids", None)
        if all(task_ids):  # a file without them holds those that the suite means by default
            env_args["task_ids"] = sorted(set().union(*task_ids))
        env_args["max_steps"] = _longest(parts)
    return Demonstrations(
        env_args=env_args,
        statistics={str(first.env_args["task_suite_name"]): dataset_entry(actions, proprio, unnormalised)},
        images=[i for part in parts for i in part.images],
        proprio=proprio,
        actions=actions,
        instructions=[t for part in parts for t in part.instructions],
        success=[s for part in parts for s in part.success],
        init_states=_init_states(parts),
        decision_steps=decisions,
        last_images=_all(parts, lambda part: part.last_images),
        last_proprio=_all(parts, lambda part: part.last_proprio),
        rewards=_all(parts, lambda part: part.rewards),
        seeds=_all(parts, lambda part: part.seeds),
        control_freq=first.control_freq,
        learned_from=[states for part in parts for states in part.states_learned_from],
    )


def _longest(parts: Sequence[Demonstrations]) -> int | None:
    """The largest step limit of the files of a suite, so that no episode is longer than it; None: the suite's own."""
    recorded = [part.env_args.get("max_steps") for part in parts]
    if len(set(recorded)) == 1:
        return recorded[0]
    limits = [limit if limit is not None else _own_limit(part) for limit, part in zip(recorded, parts)]
    return max((limit for limit in limits if limit is not None), default=None)


def _own_limit(demos: Demonstrations) -> int | None:
    """The suite's own step limit, the largest of the recorded tasks; None where the suite is not known here."""
    try:
        return max(task.max_steps for task in EnvConfig().completed(demos.env_args).tasks())
    except (ConfigError, ImportError):
        return None


def control_frequency(demos: Demonstrations) -> float | None:
    """Environment steps per second: as recorded, else the task's own; None where neither is known here.

    Raises:
        ConfigError: the suite is known here, but what is recorded does not fit it, a camera for instance.
    """
    if demos.control_freq is not None:
        return float(demos.control_freq)
    config = EnvConfig().completed(demos.env_args)
    try:
        config.suite_tasks({})
    except (ConfigError, ImportError):  # a suite of another machine, or none
        return None
    return config.tasks()[0].control_freq


def _disagreements(paths: Sequence[str], parts: Sequence[Demonstrations], same: Sequence[str]) -> list[str]:
    """In what the files differ from the first, as problems."""
    problems, freqs = [], []
    for path, part in zip(paths, parts):
        try:
            freqs.append(control_frequency(part))
        except ConfigError as error:
            problems += [f"--demos {path}: {problem}" for problem in error.problems]
            freqs.append(None)
    for path, part, freq in zip(paths, parts, freqs):
        found = _differences(parts[0], part, same)
        if None not in (freqs[0], freq) and freq != freqs[0]:
            found.append(("control_freq", freqs[0], freq))
        problems += [
            f"--demos {path}: {name} is {other!r}, but {own!r} in {paths[0]}; only files that agree make one data set"
            for name, own, other in found
        ]
    return problems


def _differences(first: Demonstrations, other: Demonstrations, same: Sequence[str]) -> list[tuple[str, Any, Any]]:
    pairs = [(name, first.env_args.get(name), other.env_args.get(name)) for name in same]
    pairs.append(("having proprio", first.proprio is not None, other.proprio is not None))
    if first.proprio and other.proprio:
        pairs.append(("the number of proprio values", first.proprio[0].shape[1], other.proprio[0].shape[1]))
    pairs.append(("the shape of an observation", first.images[0].shape[1:], other.images[0].shape[1:]))
    pairs.append(("the number of action dimensions", first.actions[0].shape[1], other.actions[0].shape[1]))
    return [(name, own, others) for name, own, others in pairs if own != others]


def _init_states(parts: Sequence[Demonstrations]) -> list[tuple[int, int]]:
    """Of every episode; [] where none is known."""
    if not any(part.init_states for part in parts):
        return []
    return [state for part in parts for state in part.init_states or [UNKNOWN_STATE] * len(part.actions)]


def _all(parts: Sequence[Demonstrations], field: Callable[[Demonstrations], list[T] | None]) -> list[T] | None:
    """A field of all parts in a row; None where one of them does not have it."""
    lists = [field(part) for part in parts]
    return None if any(found is None for found in lists) else [x for found in lists for x in found or ()]
