"""Values of single tasks, as flags give them: `push:20`, or `3:0.5` with the number of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Generic, TypeVar

from rlvla.envs.base import TaskSpec
from rlvla.utils.errors import Problem

Value = TypeVar("Value", int, float)


@dataclass(frozen=True)
class TaskValues(Generic[Value]):
    """A flag that takes `TASK:VALUE`, any number of times.

    Attributes:
        flag: without dashes.
        read: of a value; raises ValueError where it is no number.
        allowed: the lowest and the highest value.
        form: how to write it, with an example.
    """

    flag: str
    read: Callable[[str], Value]
    allowed: tuple[float, float]
    form: str

    def parse(self, specs: Sequence[str], tasks: Sequence[TaskSpec]) -> tuple[dict[int, Value], list[Problem]]:
        """`task_id` -> value of the tasks that are named, by name or number; and what is wrong with the others."""
        numbers = {task.name: task.task_id for task in tasks} | {str(task.task_id): task.task_id for task in tasks}
        found, problems, seen = dict[int, Value](), list[Problem](), set[int]()

        def report(reason: str, text: str) -> None:
            problems.append(Problem(self.flag, reason, f"--{self.flag} {text}"))

        for spec in specs:
            name, _, written = spec.rpartition(":")
            try:
                value = self.read(written)
            except ValueError:
                name = ""
            if not name:
                report("malformed", f"{spec}: write {self.form}")
                continue
            number = numbers.get(name)
            if number is None:
                names = [task.name for task in tasks]
                near = [] if name.isdigit() else get_close_matches(name, names, n=3, cutoff=0.5)
                known = ", ".join(f"{task.name} ({task.task_id})" for task in tasks)
                others = f"did you mean {' or '.join(near)}?" if near else f"there are {known}"
                report("unknown_name", f"{spec}: no such task is chosen; {others}")
                continue
            if number in seen:
                report("duplicate", f"{spec}: {name} is given twice")
            elif not self.allowed[0] <= value <= self.allowed[1]:
                report("out_of_range", f"{spec}: must be {self._range()}")
            else:
                found[number] = value
            seen.add(number)
        return found, problems

    def _range(self) -> str:
        low, high = self.allowed
        return f"at least {low:g}" if math.isinf(high) else f"a number from {low:g} to {high:g}"
