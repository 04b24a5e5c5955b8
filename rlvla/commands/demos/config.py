"""The settings of a recording. Each field is a flag of `cli/collect_demos.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlvla.envs.base import TaskSpec
from rlvla.envs.task_values import TaskValues
from rlvla.options import Condition, arg
from rlvla.utils.cli.flags import MAX_SEED
from rlvla.utils.errors import Problem

_BY_EXPERT = Condition(lambda flags: flags["intervene"] == "expert", "it belongs to --intervene expert")
_NOT_ON_PAGE = Condition(
    lambda flags: flags["intervene"] != "page",
    "with --intervene page a person chooses and ends the episodes, which are played one by one",
)
_COUNTS = TaskValues("task_demos", int, (1, math.inf), "TASK:NUMBER, e.g. push:20")


@dataclass(frozen=True)
class CollectConfig:
    """Player, number of episodes and output folder of a recording."""

    output: str = arg(
        "runs/demos",
        "folder for demos.hdf5 and dataset_statistics.json",
        metavar="DIR",
        writes="folder",
        essential=True,
    )
    policy: str | None = arg(
        None,
        "folder of a trained policy or of its run, which plays instead of the scripted expert, in the environment that "
        "its folder names",
        metavar="DIR",
        essential=True,
    )
    temperature: float | None = arg(
        None, "sample the actions of --policy at this temperature (default: greedy actions)", above=0
    )
    corrections: bool = arg(
        False,
        "the scripted expert takes over from --policy at a random step of each episode; only its steps become training "
        "rows (DAgger, with the whole actions of an expert as in HG-DAgger)",
    )
    intervene: str | None = arg(
        None,
        "--policy plays, corrected by the scripted expert, where an episode makes no progress or its step limit is "
        "near, or by a person on a page of the browser; each step records who acted",
        choices=("expert", "page"),
    )
    intervene_patience: int | None = arg(
        None,
        "the expert takes over after this many steps without progress, and hands control back at the next progress, "
        "i.e. when a proposition of the task becomes true for the first time (default: a quarter of the step limit)",
        minimum=1,
        read_if=_BY_EXPERT,
    )
    intervene_reserve: int | None = arg(
        None,
        "the expert has control of this many steps before the step limit (default: half of the limit)",
        minimum=0,
        read_if=_BY_EXPERT,
    )
    num_demos: int = arg(200, "episodes to keep, per task", minimum=1, essential=True)
    task_demos: tuple[str, ...] = arg(
        (),
        "episodes to keep of some of the tasks, instead of num_demos, e.g. push:20 pick-place:20",
        metavar="TASK:NUMBER",
        read_if=_NOT_ON_PAGE,
    )
    keep: str = arg("success", "keep successful episodes only, or all", choices=("success", "all"), essential=True)
    max_attempts: int = arg(
        20,
        "give up after this many times the wanted number of episodes of a task",
        minimum=1,
        read_if=_NOT_ON_PAGE,
    )
    max_minutes: float | None = arg(
        None,
        "time limit, shared by the tasks; fewer episodes are recorded when it is reached (default: none)",
        above=0,
        read_if=_NOT_ON_PAGE,
    )
    num_envs: int = arg(2, "worker processes", minimum=1, maximum=10_000, essential=True, read_if=_NOT_ON_PAGE)
    seed: int = arg(
        0,
        "seed of the choice of states, and of the expert's noise or the samples of --policy",
        minimum=0,
        maximum=MAX_SEED,
        essential=True,
    )

    def wanted(self, task: TaskSpec) -> int:
        """Number of episodes of a task to keep."""
        return _COUNTS.parse(self.task_demos, [task])[0].get(task.task_id, self.num_demos)

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Entries of `task_demos` that are malformed, given twice, out of range, or of no task."""
        return _COUNTS.parse(self.task_demos, tasks)[1]
