"""Which environment, and what the policy sees of it: flags shared by every command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.envs.interpreter import (
    installed_versions,
    path_of_interpreter,
    tasks_of_interpreter,
    versions_of_interpreter,
)
from rlvla.envs.registry import get_suite, list_tasks, ships_with_rlvla, suite_names
from rlvla.envs.splits import (
    EVAL_PROTOCOLS,
    LearnedStates,
    check_disjoint,
    eval_init_states,
    read_state_file,
    states_of_task,
    train_init_states,
)
from rlvla.utils.arguments import arg
from rlvla.utils.errors import ConfigError

# Where files lie on this machine: nothing that a checkpoint should remember.
_OF_THIS_MACHINE = ("libero_assets", "robotwin_root", "env_python")
# What another suite than the recorded one does not take over: its tasks, limits and options are its own.
_OF_THE_SUITE = ("task_ids", "max_steps", "success_hold_steps", "control_freq", "robotwin_config")


@dataclass(frozen=True)
class EnvConfig:
    """The task suite and the observations.

    A command that starts from a checkpoint or a file of demonstrations takes what is not given from there.
    """

    task_suite_name: str | None = arg(
        None, lambda: f"task suite (default: that of the checkpoint); known: {', '.join(suite_names())}"
    )
    task_ids: tuple[int, ...] = arg(
        (), "tasks of the suite (default: all; robosuite: 0, Lift)", minimum=0, metavar="ID"
    )
    cameras: tuple[str, ...] = arg(
        (),
        "cameras in the order the policy sees them (default: the checkpoint's, else the suite's first)",
        metavar="NAME",
    )
    image_size: int | None = arg(
        None, "side of the square camera images in pixels (default: the checkpoint's, else 64; LIBERO: 256)", minimum=8
    )
    use_proprio: bool | None = arg(
        None, "observations hold the proprioceptive state (default: the checkpoint's, else no)"
    )
    max_steps: int | None = arg(
        None, "environment steps after which an episode is truncated (default: the suite's)", minimum=1
    )
    success_hold_steps: int | None = arg(
        None,
        "successful environment steps in a row that end an episode as a success (default: the checkpoint's, else the "
        "suite's)",
        minimum=1,
    )
    render_quality: str | None = arg(
        None,
        "fast leaves out shadows, reflections and fine visual meshes (default: the checkpoint's, else fast)",
        choices=("fast", "full"),
    )
    control_freq: float | None = arg(
        None, "control steps per simulated second, robosuite only (default: the checkpoint's, else 20)", above=0
    )

    libero_assets: str | None = arg(
        None,
        "folder of LIBERO's meshes and textures, LIBERO only (default: $RLVLA_LIBERO_ASSETS, else LIBERO's own)",
        metavar="DIR",
    )
    env_python: str | None = arg(
        None,
        "Python interpreter of the environment workers; needs numpy and the simulator only (default: that of this "
        "process)",
        metavar="PATH",
    )
    robotwin_root: str | None = arg(
        None, "folder of a RoboTwin 2.0 checkout, RoboTwin only (default: $ROBOTWIN_ROOT)", metavar="DIR"
    )
    robotwin_config: str | None = arg(
        None,
        "RoboTwin's task configuration, RoboTwin only (default: the checkpoint's, else demo_clean)",
        metavar="NAME",
    )

    def completed(self, recorded: dict[str, Any]) -> EnvConfig:
        """Fill what is not given from what a checkpoint or a file of demonstrations recorded (`as_dict`).

        Where another suite is given than the recorded one, only what the policy sees is taken.
        """
        if self.task_suite_name not in (None, recorded.get("task_suite_name")):
            recorded = {name: value for name, value in recorded.items() if name not in _OF_THE_SUITE}
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        merged = {name: own[name] if own[name] not in (None, ()) else recorded.get(name, own[name]) for name in own}
        merged = {name: tuple(v) if isinstance(v, list) else v for name, v in merged.items()}
        return EnvConfig(**merged)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `completed` reads it back. Where files lie on this machine is left out."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _OF_THIS_MACHINE}

    @property
    def camera_names(self) -> tuple[str, ...]:
        """The cameras, by default the suite's first."""
        return self.cameras or get_suite(self.suite).cameras[:1]

    @property
    def suite(self) -> str:
        """The suite's name; ConfigError if none is known."""
        if self.task_suite_name is None:
            raise ConfigError("no task suite is given; name one with --task_suite_name")
        return self.task_suite_name

    def env_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `make_env`."""
        given = {
            "cameras": self.camera_names,
            "image_size": self.image_size,
            "use_proprio": self.use_proprio,
            "max_steps": self.max_steps,
            "success_hold_steps": self.success_hold_steps,
            "render_quality": self.render_quality,
            "control_freq": self.control_freq,
            "libero_assets": self.libero_assets,
            "robotwin_root": self.robotwin_root,
            "robotwin_config": self.robotwin_config,
        }
        return {name: value for name, value in given.items() if value is not None}

    def tasks(self) -> list[TaskSpec]:
        """The chosen tasks; ConfigError for unknown suite, task, camera or option, or an unfit `--env_python`."""
        problems = []
        try:
            specs = self.suite_tasks(self.env_kwargs())
        except ConfigError as error:
            if self.suite not in suite_names():
                raise
            problems += error.problems
            specs = self.suite_tasks({})  # the task ids can be checked all the same
        tasks = {task.task_id: task for task in specs}
        unknown = [i for i in self.task_ids if i not in tasks]
        if unknown:
            known = ", ".join(f"{task.task_id} ({task.name})" for task in tasks.values())
            problems.append(f"{self.suite} has no task {', '.join(map(str, unknown))}; its tasks: {known}")
        if problems:
            raise ConfigError(problems)
        return [tasks[i] for i in self.task_ids or get_suite(self.suite).default_tasks or sorted(tasks)]

    def suite_tasks(self, options: dict[str, Any]) -> list[TaskSpec]:
        """All tasks of the suite with these options of `make_env`, as the workers' interpreter lists them."""
        get_suite(self.suite)  # an unknown one is no matter of interpreters
        if self.env_python is None:
            return list_tasks(self.suite, **options)
        if ships_with_rlvla(self.suite):
            return tasks_of_interpreter(self.env_python, self.suite, options)
        path_of_interpreter(self.env_python)
        return list_tasks(self.suite, **options)  # a user's own module is imported here as well

    def simulator_versions(self) -> dict[str, str]:
        """Versions of what the suite's simulator consists of, where the workers play."""
        if self.env_python is not None and ships_with_rlvla(self.suite):
            return versions_of_interpreter(self.env_python, self.suite, self.env_kwargs())
        return installed_versions(get_suite(self.suite).requires)


def without_checkpoint(help_text: str) -> str:
    """The help of a flag of `EnvConfig` in a command that starts from no checkpoint."""
    return help_text.replace("the checkpoint's, else ", "").replace(" (default: that of the checkpoint)", "")


@dataclass(frozen=True)
class SplitConfig:
    """Which initial states are learned from, and which are kept for evaluation."""

    eval_protocol: str = arg(
        "heldout",
        "heldout: evaluate on the last 20 % of each task's initial states, never trained on; shared: train and "
        "evaluate on all of them, as most published results do",
        choices=EVAL_PROTOCOLS,
    )
    train_init_states: tuple[int, ...] = arg(
        (), "train on initial states START..STOP-1 instead of the protocol's", minimum=0, nargs=2, metavar="ID"
    )
    eval_init_states: tuple[int, ...] = arg(
        (), "evaluate on initial states START..STOP-1 instead of the protocol's", minimum=0, nargs=2, metavar="ID"
    )
    eval_states_file: str | None = arg(
        None,
        "YAML or JSON file with the initial states to evaluate on: a list for all tasks, or task name: list",
        metavar="FILE",
    )

    @property
    def protocol_name(self) -> str:
        """What reports call the choice of evaluation states."""
        if self.eval_states_file:
            return f"states of {Path(self.eval_states_file).name}, trained on {self.eval_protocol}"
        if self.eval_init_states:
            start, stop = self.eval_init_states
            return f"states {start}..{stop - 1}, trained on {self.eval_protocol}"
        return self.eval_protocol

    def train_states(self, task: TaskSpec) -> range:
        """Ids of the initial states for training and demonstrations."""
        return self._range(task, self.train_init_states) or train_init_states(task, self.eval_protocol)

    def eval_states(self, task: TaskSpec, n: int) -> list[int]:
        """The first n ids for evaluation; ConfigError if there are fewer."""
        if self.eval_states_file:
            if self.eval_init_states:
                raise ConfigError("--eval_states_file and --eval_init_states name the same thing; give one of them")
            return states_of_task(read_state_file(self.eval_states_file), task, n, self.eval_states_file)
        own = self._range(task, self.eval_init_states)
        if not own:
            return eval_init_states(task, self.eval_protocol, n)
        if n > len(own):
            raise ConfigError(
                f"--eval_init_states {own.start} {own.stop} holds {len(own)} initial states, fewer than {n}"
            )
        return list(own[:n])

    @staticmethod
    def _range(task: TaskSpec, bounds: tuple[int, ...]) -> range:
        if not bounds:
            return range(0)
        start, stop = bounds
        if not 0 <= start < stop <= task.num_init_states:
            raise ConfigError(
                f"initial states {start}..{stop - 1} do not exist in {task.suite} task {task.task_id} ({task.name}), "
                f"which has 0..{task.num_init_states - 1}; give START < STOP"
            )
        return range(start, stop)

    def problems(self, tasks: Sequence[TaskSpec], n: int, learned_from: Sequence[LearnedStates] = ()) -> list[str]:
        """What is wrong with the split for these tasks and n evaluation states.

        Args:
            tasks: the tasks.
            n: evaluation states per task.
            learned_from: states that the policy has already seen; those of these tasks are checked as well.
        """
        found = []
        for task in tasks:
            try:
                evaluated, trained = self.eval_states(task, n), self.train_states(task)
                if self.eval_protocol != "shared":
                    for seen in [trained, *(seen.states for seen in learned_from if seen.of(task))]:
                        check_disjoint(seen, evaluated)
            except ConfigError as error:
                found += error.problems
        return found
