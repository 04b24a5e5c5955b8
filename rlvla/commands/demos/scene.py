"""Images of further cameras for videos: recorded actions are replayed with these cameras."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rlvla.commands.demos.record import Attempt, replay_actions
from rlvla.commands.setup import CheckedRun
from rlvla.envs.config import EnvConfig
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.evaluation.videos import SceneFilm, SceneViews
from rlvla.experience import Sample
from rlvla.rewards.success_source import SIMULATOR
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.terminal import log

_SIDE = 240  # pixels: side of the pictures, at least


def scene_env(setting: CheckedRun, cameras: Sequence[str]) -> EnvConfig:
    """The environment in which the actions of recorded episodes are replayed.

    Raises:
        ConfigError: the actions that the primitives of the suite consist of are unknown.
    """
    played = setting.played_env
    side = max(_SIDE, played.image_size or 0)
    return replace(played.with_ordinary_actions(), cameras=tuple(cameras), image_size=side)


def scene_problems(setting: CheckedRun, cameras: Sequence[str]) -> list[Problem]:
    """Cameras that the suite does not have."""
    if not cameras:
        return []
    try:
        scene_env(setting, cameras).tasks()
    except ConfigError as error:
        return [p.of_flag("video_cameras", " ".join(cameras)) for p in error.problems]
    return []


def scene_film(pool: WatchedPool, setting: CheckedRun, cameras: Sequence[str]) -> SceneFilm | None:
    """Images of recorded episodes by these cameras, without that after the last action; None without cameras."""
    if not cameras:
        return None
    env = scene_env(setting, cameras)

    limits = {task.task_id: task.max_steps for task in setting.tasks}

    def task_and_limit(sample: Sample) -> tuple[int, int]:
        ended_by_model = setting.success_source != SIMULATOR
        return sample.task_id, sample.finish_step if ended_by_model else limits[sample.task_id]

    def film(samples: Sequence[Sample]) -> Iterator[SceneViews | None]:
        for (task_id, limit), part in groupby(samples, task_and_limit):
            same = list(part)
            views = _film(pool, env, task_id, limit, same)
            for _ in same:
                try:
                    view = next(views, None)
                except (ConfigError, EnvWorkerError) as error:  # the evaluation itself is complete
                    log.warning("videos without %s: %s", " ".join(cameras), error)
                    view = None
                yield view

    return film


def _film(
    pool: WatchedPool, env: EnvConfig, task_id: int, max_steps: int, samples: Sequence[Sample]
) -> Iterator[SceneViews | None]:
    """Replay episodes of one task with this step limit."""
    for attempt in replay_actions(pool, env, task_id, max_steps, samples, retries=0):
        if isinstance(attempt, Attempt) and attempt.episode is not None:
            images = attempt.episode["images"]
            yield {camera: images[:, index] for index, camera in enumerate(env.cameras)}
        else:
            yield None
