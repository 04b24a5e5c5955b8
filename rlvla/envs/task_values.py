"""Per-task flag values: `push:20`, or `3:0.5` with the task id."""

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
    """A repeatable flag `TASK:VALUE`.

    Attributes:
        flag: without dashes.
        read: parses a value; raises ValueError.
        allowed: lowest and highest value.
        form: the expected form, with an example.
    """

    flag: str
    read: Callable[[str], Value]
    allowed: tuple[float, float]
    form: str

    def parse(self, specs: Sequence[str], tasks: Sequence[TaskSpec]) -> tuple[dict[int, Value], list[Problem]]:
        """Parse values of tasks given by name or id into `task_id` -> value, and the problems of invalid ones."""
        numbers = {task.name: task.task_id for task in tasks} | {str(task.task_id): task.task_id for task in tasks}
        values, problems, given_ids = dict[int, Value](), list[Problem](), set[int]()

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
                available = ", ".join(f"{task.name} ({task.task_id})" for task in tasks)
                others = f"did you mean {' or '.join(near)}?" if near else f"there are {available}"
                report("unknown_name", f"{spec}: no such task is selected; {others}")
                continue
            if number in given_ids:
                report("duplicate", f"{spec}: {name} is given twice")
            elif not self.allowed[0] <= value <= self.allowed[1]:
                low, high = self.allowed
                bounds = f"at least {low:g}" if math.isinf(high) else f"a number from {low:g} to {high:g}"
                report("out_of_range", f"{spec}: must be {bounds}")
            else:
                values[number] = value
            given_ids.add(number)
        return values, problems
