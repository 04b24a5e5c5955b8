"""What the cameras of --video_cameras show: the recorded episodes, each as long as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlvla.commands.demos import scene
from rlvla.commands.demos.scene import scene_film, scene_problems
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.experience import Sample
from rlvla.models.config import PolicyConfig
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.utils.errors import ConfigError


@pytest.fixture(scope="module")
def setting(policy_folder: Path) -> CheckedRun:
    checked, problems = check_run(PolicyConfig(pretrain=str(policy_folder)), EnvConfig(), SplitConfig(), 4)
    assert checked is not None and not problems
    return checked


@pytest.fixture(scope="module")
def pool() -> Iterator[WatchedPool]:
    with EnvPool(2) as workers:
        yield WatchedPool(workers)


@pytest.fixture(scope="module")
def samples(setting: CheckedRun, pool: WatchedPool) -> list[Sample]:
    requests = [EpisodeRequest("toy_reach", 0, 8000 + i, 7 + i, f"eval/0/{i}") for i in range(3)]
    engine = RolloutEngine(pool, setting.env.env_kwargs(), {"success": 1.0}, tasks=setting.tasks)
    return engine.run(requests, setting.checkpoint.load_policy().eval(), temperature=1.0)


def apart(view: np.ndarray, step: int, image: np.ndarray) -> float:
    """Mean difference of what a camera shows before a step and what the policy saw, in gray levels."""
    small = Image.fromarray(view[step]).resize(image.shape[:2], Image.Resampling.BOX)
    return float(np.abs(np.asarray(small).astype(int) - image).mean())


def same_scene(view: np.ndarray, sample: Sample) -> bool:
    """Whether the camera shows what was seen at the first and the last decision, and what moved in between."""
    start = int(sample.executed[:-1].sum())  # of the last decision
    first, last = (image.numpy() for image in sample.images[[0, -1], 0])
    return apart(view, 0, first) < 4 and apart(view, start, last) < min(4, 0.6 * apart(view, 0, last))


def test_the_scene_is_that_of_the_recorded_episode(
    setting: CheckedRun, pool: WatchedPool, samples: list[Sample]
) -> None:
    views = list(scene_film(pool, setting, ["top"])(samples))
    assert [view["top"].shape for view in views] == [(s.finish_step, 240, 240, 3) for s in samples]
    assert all(same_scene(view["top"], sample) for view, sample in zip(views, samples))
    assert not same_scene(views[0]["top"], samples[1])
    assert scene_film(pool, setting, []) is None


def test_episodes_that_a_model_has_ended_are_as_long_as_they_were(
    setting: CheckedRun, pool: WatchedPool, samples: list[Sample]
) -> None:
    cut = [
        replace(s, actions=s.actions[:1], executed=s.executed[:1], finish_step=int(s.executed[0].sum()))
        for s in samples
    ]
    assert list(scene_film(pool, setting, ["top"])(cut[:1])) == [None], "the simulator would have gone on"
    judged = replace(setting, success_source="vlm")
    views = list(scene_film(pool, judged, ["top"])(cut))
    assert [len(view["top"]) for view in views] == [s.finish_step for s in cut]


def test_what_cannot_be_filmed_ends_no_evaluation(
    setting: CheckedRun, pool: WatchedPool, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Iterator[None]:
        raise ConfigError("no GL")
        yield

    monkeypatch.setattr(scene, "_film", broken)
    assert list(scene_film(pool, setting, ["top"])(samples)) == [None] * len(samples)


def test_cameras_of_the_suite_are_known_before(setting: CheckedRun) -> None:
    assert scene_problems(setting, []) == scene_problems(setting, ["top"]) == []
    (problem,) = scene_problems(setting, ["nowhere"])
    assert problem.flag == "video_cameras" and "known cameras: top" in problem.text
