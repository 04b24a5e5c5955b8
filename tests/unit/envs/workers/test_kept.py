"""Environments that a slot keeps for tasks it returns to."""

import dataclasses
from pathlib import Path

import pytest

from rlvla.envs.base import TaskSpec
from rlvla.envs.registry import Suite, get_suite, register_suite
from rlvla.envs.workers.backend import UNLIMITED
from rlvla.envs.workers.config import max_kept
from rlvla.envs.workers.messages import EnvSpec, Failure, Make, Reset
from rlvla.envs.workers.pool import EnvPool, _Slot
from rlvla.envs.workers.worker import Worker
from tests.support import fake_suites


class Counted(fake_suites.FakeEnv):
    """Notes which environments were built and closed, by task."""

    log: list[str] = []

    def __init__(self, task_id: int, options: dict):
        super().__init__(options)
        self.task = dataclasses.replace(fake_suites.TASK, task_id=task_id)
        self.log.append(f"+{task_id}")

    def close(self) -> None:
        self.log.append(f"-{self.task.task_id}")


@pytest.fixture
def log() -> list[str]:
    get = {"list_tasks": lambda **kw: [], "make": lambda task_id, **kw: Counted(task_id, kw), "cameras": ("none",)}
    register_suite("kept", Suite(**get, kept=2))
    Counted.log = []
    return Counted.log


def played(worker: Worker, task_id: int, slot: int = 0, **options) -> TaskSpec | Failure:
    spec = EnvSpec("kept", task_id, options)
    answers = [answer for group in worker.execute([(slot, Make(spec))]) for _, answer in group]
    list(worker.execute([(slot, Reset(spec, 0, 0))]))
    return answers[0]


def test_those_played_last_are_kept(log: list[str]) -> None:
    worker = Worker()
    assert [played(worker, task).task_id for task in (0, 1, 2, 0, 1, 0)] == [0, 1, 2, 0, 1, 0]
    assert log == ["+0", "+1", "+2"]
    played(worker, 3)  # 1 and 0 were played after 2
    assert log[3:] == ["-2", "+3"]
    worker.close()
    assert sorted(log[5:]) == ["-0", "-1", "-3"]


def test_other_options_and_slots_are_others(log: list[str]) -> None:
    worker = Worker(num_slots=2)
    played(worker, 0)
    played(worker, 0, slot=1)
    played(worker, 0, image_size=32)
    played(worker, 0)
    assert log == ["+0", "+0", "+0"]


def test_one_that_failed_is_not_kept(log: list[str]) -> None:
    worker = Worker()
    played(worker, 0)
    played(worker, 1, reset="raise")
    assert log == ["+0", "+1", "-1"]
    played(worker, 0)
    assert log == ["+0", "+1", "-1"], "the other one was kept"
    assert isinstance(played(worker, 2, make="raise"), Failure)
    played(worker, 0)
    assert log == ["+0", "+1", "-1"]


def test_the_pool_knows_what_its_workers_keep() -> None:
    get_suite("metaworld")  # of which a slot keeps nine
    slot = _Slot()
    for task in (*range(12), 3):
        slot.set_built(EnvSpec("metaworld", task, {}))
    assert slot.built == EnvSpec("metaworld", 3, {})
    assert [spec.task_id for spec in slot.kept] == [2, 4, 5, 6, 7, 8, 9, 10, 11]
    slot.set_built(EnvSpec("toy_reach", 0, {}))
    assert slot.kept == []


def test_meta_world_keeps_those_of_mt10() -> None:
    suite = get_suite("metaworld")
    assert len(suite.groups["MT10"]) == suite.kept + 1


def test_libero_keeps_those_of_a_suite() -> None:
    assert [get_suite(f"libero_{name}").kept for name in ("object", "goal_swap", "plus_goal")] == [9, 9, 0]


def test_a_worker_and_its_pool_keep_no_more_than_the_limit(log: list[str]) -> None:
    worker, slot = Worker(max_kept=1), _Slot(max_kept=1)
    for task in (0, 1, 2):
        played(worker, task)
        slot.set_built(EnvSpec("kept", task, {}))
    assert log == ["+0", "+1", "-0", "+2"]
    assert [spec.task_id for spec in slot.kept] == [1]


def test_the_limit_reaches_a_worker_process(tmp_path: Path) -> None:
    module, noted = tmp_path / "noting.py", tmp_path / "noted"
    module.write_text(
        "from rlvla.envs.registry import Suite, register_suite\n"
        "from tests.unit.envs.workers.test_kept import Counted\n"
        "class Noting(Counted):\n"
        f"    def close(self): open({str(noted)!r}, 'a').write(str(self.task.task_id))\n"
        "make = lambda task_id, **kw: Noting(task_id, kw)\n"
        "register_suite('noting', Suite(list_tasks=lambda **kw: [], make=make, cameras=('none',), kept=2))\n"
    )
    with EnvPool(1, custom_modules=[str(module)], max_kept=1) as pool:
        for task in (0, 1, 2):
            pool.submit(0, Make(EnvSpec("noting", task, {})))
            [(_, answer)] = pool.wait()
            assert getattr(answer, "task_id", answer) == task
        assert noted.read_text() == "0"


def test_no_more_are_kept_than_fit_into_the_memory(monkeypatch: pytest.MonkeyPatch, log: list[str], caplog) -> None:
    register_suite("kept", dataclasses.replace(get_suite("kept"), kept=9, env_mb=lambda options: options["mb"]))
    monkeypatch.setattr("rlvla.envs.workers.config.memory_bytes", lambda: 16 * 10**9)  # 12 for environments

    def limit(num_envs: int, mb: int, num_tasks: int = 10) -> int:
        caplog.clear()
        return max_kept(num_envs, EnvSpec("kept", 0, {"mb": mb}), num_tasks)

    for fits in ((4, 250, 10), (4, 1000, 2), (4, 0, 10)):  # the last one: not measured
        assert limit(*fits) == UNLIMITED and not caplog.messages
    assert limit(4, 1000) == 1
    assert "10 tasks need about 38.4 GiB (1000 MB each), and this machine has 14.9 GiB" in caplog.text
    assert "They keep 2" in caplog.text and "--num_envs" in caplog.text
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert limit(4, 1000) == 0 and limit(2, 1000) == 1
    assert limit(13, 1000, 1) == 0 and "26 environments need about 31.5 GiB" in caplog.text
    assert max_kept(1, EnvSpec("of_the_workers_only", 0, {}), 10) == UNLIMITED
