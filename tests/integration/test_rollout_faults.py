"""Workers that die, hang or lie: every episode is accounted for exactly once, and none is scored wrong."""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.processes import ProcessChannel
from rlvla.envs.workers.watchdog import WatchdogLimits, WatchedPool
from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine, TooManyDroppedError
from tests.support import faulty_suite
from tests.support.policies import ScriptedPolicy

MODULE = str(Path(faulty_suite.__file__))
LIMITS = WatchdogLimits(create=6.0, reset=6.0, step=6.0)  # seconds, where a worker sleeps; elsewhere nobody is late
FAULTS = ("raise", "kill", "exit", "sleep", "nan", "shape", "dtype")
KWARGS = {"use_proprio": True, "image_size": faulty_suite.SIZE}


class Nothing(ScriptedPolicy):
    """Always does the same, and remembers its random numbers as tokens."""

    def __init__(self) -> None:
        super().__init__(faulty_suite.CHUNK, 1)

    def tokens(self, images, proprio, noise):
        return super().tokens(images, proprio, noise) if noise is None else noise * 256


def requests(count: int) -> list[EpisodeRequest]:
    return [EpisodeRequest("faulty", i % 2, i, 1000 + i, f"group {i // 4}") for i in range(count)]


def write_plan(folder: Path, faults: dict[str, list]) -> dict[str, object]:
    (folder / "faults.json").write_text(json.dumps(faults))
    return {**KWARGS, "plan": str(folder)}


@pytest.fixture(scope="module")
def pool() -> Iterator[WatchedPool]:
    with WatchedPool(EnvPool(2, custom_modules=[MODULE])) as pool:
        yield pool


def play(pool: WatchedPool, kwargs: dict, count: int, *, kept: int = 0, **config) -> tuple[list[Sample], RolloutEngine]:
    tasks = [faulty_suite.task(0), faulty_suite.task(1)]
    engine = RolloutEngine(pool, kwargs, {"success": 1.0}, RolloutConfig(**config), tasks)
    return engine.run(requests(count), Nothing(), temperature=1.0, kept=kept), engine


def check_scores(samples: list[Sample]) -> None:
    for sample in samples:
        assert sample.success_at_end == sample.success_once == faulty_suite.succeeds(sample.seed)
        assert sample.finish_step == faulty_suite.length_of(sample.seed)
        assert sample.terminated != sample.truncated == (not faulty_suite.succeeds(sample.seed))
        assert sample.images[0].unique().tolist() == [sample.seed % 256], "another episode's picture"


@pytest.mark.parametrize(
    ("phase", "fault"),
    # Building an environment answers nothing that could be wrong.
    [(phase, fault) for phase in ("make", "reset", "step") for fault in FAULTS[: 4 if phase == "make" else None]],
)
def test_a_fault_costs_an_attempt_and_nothing_else(
    pool: WatchedPool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    fault: str,
) -> None:
    if fault == "sleep":
        monkeypatch.setattr(pool, "_limits", LIMITS)
    faults = {"make": [None, fault]} if phase == "make" else {"1003": [[phase, fault]]}
    with caplog.at_level(logging.WARNING):
        samples, engine = play(pool, write_plan(tmp_path, faults), 6)
    assert [s.seed for s in samples] == [r.seed for r in requests(6)]
    check_scores(samples)
    assert engine.stats.retries == 1 and engine.stats.dropped == []
    told = caplog.text
    assert "faulty task 1" in told or phase == "make"
    assert phase == "make" or "seed 1003" in told
    expected = {
        "raise": "in _suffer",
        "kill": "SIGKILL",
        "exit": "exit code 7",
        "sleep": "no answer within 6 s",
        "nan": "NaN",
        "shape": "must have shape [1, 8, 8, 3], not [1, 7, 8, 3]",
        "dtype": "uint8, not [1, 8, 8, 3] float32",
    }
    assert expected[fault] in told


def test_an_episode_that_keeps_failing_is_dropped_and_not_scored(pool: WatchedPool, tmp_path: Path) -> None:
    kwargs = write_plan(tmp_path, {"1002": [["reset", "raise"]] * 3})
    samples, engine = play(pool, kwargs, 8, max_dropped_fraction=0.2)
    assert [s.seed for s in samples] == [r.seed for r in requests(8) if r.seed != 1002]
    check_scores(samples)
    (dropped,) = engine.stats.dropped
    assert dropped.request.seed == 1002 and dropped.error.phase == "reset" and engine.stats.retries == 2
    assert engine.stats.as_metrics()["rollout/dropped"] == 1.0


def test_too_many_dropped_episodes_stop_the_run_with_a_diagnosis(pool: WatchedPool, tmp_path: Path) -> None:
    plan = {str(1000 + i): [["step", "raise"]] * 2 for i in (1, 3)}
    kwargs = write_plan(tmp_path, plan)
    with pytest.raises(TooManyDroppedError) as error:
        play(pool, kwargs, 10, max_env_retries=1, max_dropped_fraction=0.1)
    for part in ("2 of 10 episodes", "step_chunk: ZeroDivisionError (2)", "faulty task 1 (2)", "in _suffer"):
        assert part in str(error.value)
    (again := tmp_path / "again").mkdir()
    kwargs = write_plan(again, plan)
    samples, _ = play(pool, kwargs, 10, kept=10, max_env_retries=1, max_dropped_fraction=0.1)
    assert len(samples) == 8, "the fraction is of a rollout that was interrupted after ten more"
    samples, _ = play(pool, KWARGS, 4)  # the pool can be used again at once
    check_scores(samples)


def test_a_worker_whose_memory_grows_is_replaced_between_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlvla.envs.workers.watchdog._MEMORY_INTERVAL", 0.0)
    limits = WatchdogLimits(max_rss_gb=0.25)
    with WatchedPool(EnvPool(1, custom_modules=[MODULE]), limits) as pool:
        samples, engine = play(pool, {**KWARGS, "leak_mb": 50}, 12)
        assert pool.recycled >= 2 and pool.restarts == 0 and engine.stats.retries == 0
    assert len(samples) == 12
    check_scores(samples)


def test_a_worker_with_several_slots_is_replaced_when_none_of_them_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlvla.envs.workers.watchdog._MEMORY_INTERVAL", 0.0)
    limits = WatchdogLimits(max_rss_gb=0.35)
    with WatchedPool(EnvPool(4, envs_per_worker=2, custom_modules=[MODULE]), limits) as pool:
        samples, engine = play(pool, {**KWARGS, "leak_mb": 50}, 40)
        assert pool.recycled >= 2 and pool.restarts == 0 and engine.stats.retries == 0
    assert len(samples) == 40
    check_scores(samples)


@pytest.mark.parametrize(("fault", "most"), [("raise", 1), ("kill", 3), ("nan", 3)])
def test_a_fault_costs_at_most_the_episodes_of_its_worker(tmp_path: Path, fault: str, most: int) -> None:
    """Three slots to a worker. An exception costs its own episode alone, since environments are separate."""
    kwargs = write_plan(tmp_path, {"1005": [["step", fault]]})
    with WatchedPool(EnvPool(6, envs_per_worker=3, custom_modules=[MODULE])) as pool:
        samples, engine = play(pool, kwargs, 24)
        assert [s.seed for s in samples] == [r.seed for r in requests(24)]
        check_scores(samples)
        assert 1 <= engine.stats.retries <= most and engine.stats.dropped == []
        assert pool.restarts == (fault != "raise")
        samples, engine = play(pool, KWARGS, 24)  # nothing is left behind
        assert len(samples) == 24 and engine.stats.retries == 0
        check_scores(samples)


@pytest.mark.parametrize("fault", ["kill", "nan"])
def test_an_episode_that_keeps_failing_takes_no_other_with_it(tmp_path: Path, fault: str) -> None:
    """Of four slots of a worker it is dropped alone, as with a worker for itself, and takes as many attempts."""
    for envs_per_worker in (1, 4):
        folder = tmp_path / str(envs_per_worker)
        folder.mkdir()
        kwargs = write_plan(folder, {"1005": [["step", fault]] * 3})
        slots = EnvPool(4, envs_per_worker=envs_per_worker, custom_modules=[MODULE])
        with WatchedPool(slots) as pool:
            samples, engine = play(pool, kwargs, 40, max_dropped_fraction=0.2)
        (dropped,) = engine.stats.dropped
        assert dropped.request.seed == 1005 and not dropped.error.collateral
        assert dropped.error.worker_id == (dropped.error.slot if envs_per_worker == 1 else 0)
        assert [s.seed for s in samples] == [r.seed for r in requests(40) if r.seed != 1005]
        check_scores(samples)
        assert pool.restarts == 3 and 2 <= engine.stats.retries <= 2 + 9 * (envs_per_worker == 4)


def test_no_shared_memory_left(tmp_path: Path) -> None:
    """The worker's files may not grow: as on a full /dev/shm, an answer finds no room."""
    with WatchedPool(EnvPool(1, custom_modules=[MODULE])) as pool:
        play(pool, KWARGS, 2)
        resource.prlimit(pool._pool.pid(0), resource.RLIMIT_FSIZE, (4096, 4096))
        (tmp_path / "faults.json").write_text("{}")
        with pytest.raises(TooManyDroppedError, match=r"File too large"):
            play(pool, {**KWARGS, "image_size": 64, "plan": str(tmp_path)}, 2, max_dropped_fraction=0.4)


def test_a_command_that_finds_no_shared_memory_is_a_failed_attempt(
    pool: WatchedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, calls = ProcessChannel.send, []

    def full_once(self, commands):
        calls.append(commands)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return send(self, commands)

    monkeypatch.setattr(ProcessChannel, "send", full_once)
    samples, engine = play(pool, KWARGS, 6)
    assert len(samples) == 6 and engine.stats.retries == 1
    check_scores(samples)


def test_a_worker_that_cannot_start_is_not_tried_for_ever(tmp_path: Path) -> None:
    python, broken = tmp_path / "python", tmp_path / "broken"
    python.write_text(f'#!/bin/sh\n[ -e "{broken}" ] && exit 1\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with WatchedPool(EnvPool(1, python=str(python), custom_modules=[MODULE])) as pool:
        broken.touch()
        pool.replace(0)
        with pytest.raises(RuntimeError, match="exit code 1"):
            play(pool, KWARGS, 1)


@pytest.mark.slow
def test_two_faults_in_five_episodes(tmp_path: Path) -> None:
    """Every episode is finished or dropped, exactly once, and scored right, in workers with two slots."""
    episodes = 200
    rng = np.random.default_rng(0)
    faults: dict[str, list] = {"make": [None, "raise", None, "kill", None, None, "raise", "exit"]}
    weights = np.array([10, 3, 2, 0.6, 1, 1, 1])
    planned = Counter()
    for _ in range(2 * episodes // 5 - 3):
        seed, phase = str(1000 + int(rng.integers(episodes))), str(rng.choice(["reset", "step"]))
        faults.setdefault(seed, []).append([phase, str(rng.choice(FAULTS, p=weights / weights.sum()))])
        planned[seed] += 1
    slots = EnvPool(4, envs_per_worker=2, custom_modules=[MODULE])
    with WatchedPool(slots, LIMITS) as pool:
        samples, engine = play(
            pool, write_plan(tmp_path, faults), episodes, max_env_retries=2, max_dropped_fraction=0.2
        )
    finished, dropped = [s.seed for s in samples], [d.request.seed for d in engine.stats.dropped]
    assert sorted(finished + dropped) == [r.seed for r in requests(episodes)]
    check_scores(samples)
    assert {seed for seed, count in planned.items() if count > 2} <= set(map(str, dropped))
    # Whichever episode waits for a construction that fails loses an attempt: four, of the three that drop an episode.
    assert sum(max(0, 3 - planned[str(seed)]) for seed in dropped) <= 4
    assert engine.stats.retries + len(dropped) >= 0.38 * episodes
