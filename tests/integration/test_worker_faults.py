"""Environments that break their contract, and processes that end: each costs an attempt, and nothing survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rlvla.envs.workers.answer_checks import BadAnswerError
from rlvla.envs.workers.messages import EnvSpec, Reset
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.watchdog import WatchdogLimits, WatchedPool
from rlvla.envs.workers.worker_env import WorkerEnv
from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine
from tests.support import faulty_suite
from tests.support.policies import ScriptedPolicy
from tests.support.workers import FAKE_SUITES, fake, is_running, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
LIMITS = WatchdogLimits(create=30.0, reset=30.0, step=10.0)
# Fault -> the kind as which it is counted.
KINDS = {
    **dict.fromkeys(faulty_suite.CONTRACT, "bad_answer"),
    **faulty_suite.KINDS,
    "orphan": "ended",
    "long_error": "exception",
    "strange_error": "exception",
}


def play(pool: WatchedPool, folder: Path, faults: dict[int, str], count: int) -> tuple[list[Sample], RolloutEngine]:
    """Play episodes with seeds 1000, 1001, ...; the first attempt at some of them suffers a fault in its first step."""
    plan = {str(1000 + index): [["step", fault]] for index, fault in faults.items()}
    (folder / "faults.json").write_text(json.dumps(plan))
    kwargs = {"use_proprio": True, "image_size": faulty_suite.SIZE, "plan": str(folder)}
    tasks = [faulty_suite.task(0), faulty_suite.task(1)]
    requests = [EpisodeRequest("faulty", 0, i, 1000 + i, f"group {i // 4}") for i in range(count)]
    engine = RolloutEngine(pool, kwargs, {"env": 1.0}, RolloutConfig(), tasks)
    return engine.run(requests, ScriptedPolicy(faulty_suite.CHUNK, 1), temperature=1.0), engine


def check_scores(samples: list[Sample], count: int) -> None:
    """Every episode is there, and as it would be without any fault."""
    assert [sample.seed for sample in samples] == [1000 + index for index in range(count)]
    for sample in samples:
        assert sample.success_at_end == sample.success_once == faulty_suite.succeeds(sample.seed)
        assert sample.finish_step == faulty_suite.length_of(sample.seed)
        assert sample.instruction == "do it"
        assert float(sample.rewards.sum()) == float(faulty_suite.succeeds(sample.seed))


@pytest.mark.parametrize("fault", ["orphan", "long_error", "events_nested", "absurd_reward"])
def test_a_fault_costs_an_attempt(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Long before a time limit, even if a child of a dead worker holds its connection."""
    limits = WatchdogLimits(create=600.0, reset=600.0, step=600.0)
    with WatchedPool(EnvPool(1, custom_modules=[faulty_suite.__file__]), limits) as pool:
        samples, engine = play(pool, tmp_path, {1: fault}, 2)
    check_scores(samples, 2)
    kind = KINDS[fault]
    assert engine.stats.faults == {kind: 1} and engine.stats.as_metrics()[f"rollout/env_faults_{kind}"] == 1.0
    assert all(len(record.getMessage()) < 30_000 for record in caplog.records)


def test_an_answer_of_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "faults.json").write_text(json.dumps({"1000": [["step", "observation"]]}))
    options = {"use_proprio": True, "image_size": faulty_suite.SIZE, "plan": str(tmp_path)}
    with EnvPool(1, custom_modules=[faulty_suite.__file__]) as pool:
        env = WorkerEnv(pool, 0, EnvSpec("faulty", 0, options))
        env.reset(0, 1000)
        with pytest.raises(BadAnswerError, match="expected ChunkResult, not Observation"):
            env.step_chunk(np.zeros((1, 1), np.float32))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_in_one_rollout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with WatchedPool(EnvPool(4, custom_modules=[faulty_suite.__file__]), LIMITS) as pool:
        samples, engine = play(pool, tmp_path, dict(enumerate(KINDS)), len(KINDS) + 4)
    check_scores(samples, len(KINDS) + 4)
    assert engine.stats.dropped == []
    assert engine.stats.faults == Counter(KINDS.values())
    assert all(record.getMessage().encode() for record in caplog.records), "a log could not be written"
    assert "Traceback" not in capfd.readouterr().out


TRAINER = """
    import sys
    from rlvla.envs.workers.messages import EnvSpec, Reset
    from rlvla.envs.workers.pool import EnvPool

    pool = EnvPool(1, custom_modules=[sys.argv[1]])
    pool.call(0, Reset(EnvSpec("fake", 0, {"children": sys.argv[2]}), 0, 0))
    print("ready", flush=True)
    sys.stdin.read()
"""


def children_of(folder: Path) -> list[int]:
    """The two processes that the simulator has started: one in its group, one that left it."""
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == 2 and all(map(is_running, pids))
    return pids


@pytest.mark.parametrize("end", ["closed", "killed", "restarted"])
def test_what_a_simulator_has_started_ends_with_its_worker(tmp_path: Path, end: str) -> None:
    with EnvPool(1, custom_modules=[FAKE_SUITES]) as pool:
        pool.call(0, Reset(fake(children=str(tmp_path)), 0, 0))
        pids = children_of(tmp_path)
        if end == "killed":
            os.kill(pool.pid(0), signal.SIGKILL)
            pool.submit(0, Reset(fake(), 0, 0))
            [(_, error)] = pool.wait()
            assert "SIGKILL" in str(error)
        elif end == "restarted":
            pool.restart(0)
        if end != "closed":
            assert wait_until_gone(pids)
    assert wait_until_gone(pids)


def test_what_a_simulator_has_started_ends_with_the_trainer(tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), FAKE_SUITES, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with trainer:
        try:
            assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
            pids = children_of(tmp_path)
        finally:
            trainer.kill()
    assert wait_until_gone(pids)


def test_a_dead_worker_is_noticed_though_its_child_holds_the_connection(tmp_path: Path) -> None:
    with EnvPool(1, custom_modules=[FAKE_SUITES]) as pool:
        pool.call(0, Reset(fake(children=str(tmp_path), inherit=True), 0, 0))
        pids = children_of(tmp_path)
        pool.submit(0, Reset(fake(reset="kill"), 0, 0))
        start = time.monotonic()
        [(_, error)] = pool.wait()
        assert "SIGKILL" in str(error) and wait_until_gone(pids)
        assert time.monotonic() - start < 60.0, "the children would hold it for ten minutes"


def test_workers_are_out_of_the_terminals_reach() -> None:
    """Ctrl-C and a hang-up reach the session and the group of the trainer only."""
    with EnvPool(1) as pool:
        assert os.getsid(pool.pid(0)) == os.getpgid(pool.pid(0)) == pool.pid(0)
