"""Selection of tasks by id, name and group, and held-out tasks."""

from __future__ import annotations

import dataclasses

import pytest

from rlvla.envs.config import EnvConfig, heldout_problems
from rlvla.envs.registry import get_suite, list_tasks
from rlvla.envs.splits import LearnedStates
from rlvla.utils.errors import ConfigError

NAMES = [task.name for task in list_tasks("metaworld")]
MT10 = get_suite("metaworld").groups["MT10"]


def chosen(**flags: object) -> list[str]:
    return [task.name for task in EnvConfig(task_suite_name="metaworld", **flags).tasks()]


def problems(**flags: object) -> list[tuple[str | None, str | None, str]]:
    with pytest.raises(ConfigError) as error:
        chosen(**flags)
    return [(p.flag, p.reason, str(p)) for p in error.value.problems]


def test_names_and_groups() -> None:
    assert chosen(task_names=("push", "assembly", "push")) == ["push", "assembly"], "in their order, each once"
    assert chosen(task_names=("MT10",)) == list(MT10) and len(MT10) == 10
    assert chosen(task_names=("ML45", "ML45-test")) != chosen() and sorted(NAMES) == sorted(chosen())
    assert set(chosen(task_names=("ML45", "ML45-test"))) == set(NAMES)
    assert chosen(task_names=("peg-insert-side", "MT10"))[:2] == ["peg-insert-side", "reach"]


def test_unknown_names_come_with_the_nearest() -> None:
    ((flag, reason, text),) = problems(task_names=("pick-plce",))
    assert (flag, reason) == ("task_names", "unknown_name") and "pick-place" in text and "assembly" not in text
    assert "did you mean MT10" in problems(task_names=("mt10",))[0][2]
    assert all(name in problems(task_names=("xyzzy",))[0][2] for name in NAMES)
    assert [p[1] for p in problems(task_names=("puhs", "raech"))] == ["unknown_name"] * 2, "all at once"
    assert problems(task_names=("push",), task_ids=(1,))[0][:2] == ("task_names", "contradiction")


def test_a_record_holds_the_numbers() -> None:
    named = EnvConfig(task_suite_name="metaworld", task_names=("push", "reach"))
    record = named.numbered(named.tasks()).as_dict()
    ids = [NAMES.index("push"), NAMES.index("reach")]
    assert list(record["task_ids"]) == ids and "task_names" not in record
    assert [task.task_id for task in EnvConfig().completed(record).tasks()] == ids
    other = EnvConfig(task_names=("door-open",)).completed(record)
    assert [task.name for task in other.tasks()] == ["door-open"], "names take the place of recorded numbers"


def test_tasks_that_must_stay_unseen() -> None:
    names, env = ("ML10-test", "reach"), EnvConfig(task_suite_name="metaworld")
    tasks = dataclasses.replace(env, task_names=("push", "door-close")).tasks()
    learned_from = [LearnedStates("metaworld", NAMES.index("reach"), 0, 8), LearnedStates("robosuite", 0, 0, 8)]
    assert not heldout_problems(names, env, tasks[:1]) and not heldout_problems((), env, tasks, learned_from)
    (trained,) = heldout_problems(names, env, tasks)
    assert (trained.flag, trained.reason) == ("heldout_tasks", "contradiction") and "door-close" in str(trained)
    assert "push" not in str(trained)
    (learned,) = heldout_problems(names, env, tasks[:1], learned_from, "demos.hdf5")
    assert learned.reason == "mismatch" and "demos.hdf5 was trained on reach;" in str(learned)
    (unknown,) = heldout_problems(("ML11",), env, tasks)
    assert unknown.reason == "unknown_name" and "ML10" in str(unknown)
