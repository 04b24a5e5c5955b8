"""Environments that a slot keeps for tasks it returns to."""

import dataclasses

import pytest

from rlvla.envs.base import TaskSpec
from rlvla.envs.registry import Suite, get_suite, register_suite
from rlvla.envs.workers.messages import EnvSpec, Failure, Make, Reset
from rlvla.envs.workers.pool import _Slot
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
