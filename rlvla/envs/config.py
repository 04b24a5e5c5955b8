"""Flags of the environment, its observations and the split of initial states."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.envs.options import AFTER_SUCCESS, ENV_IMAGE_FITS, own_flags
from rlvla.envs.registry import get_suite, list_tasks, ships_with_rlvla, suite_names_in_short
from rlvla.envs.splits import (
    EVAL_PROTOCOLS,
    LearnedStates,
    check_disjoint,
    eval_init_states,
    read_state_file,
    states_of_task,
    train_init_states,
)
from rlvla.envs.suite_flags import given_options, option_problems, recorded_options, suite_flags
from rlvla.envs.workers.interpreter import (
    installed_versions,
    path_of_interpreter,
    tasks_of_interpreter,
    versions_of_interpreter,
)
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import ConfigError, Problem

TASK, MACHINE, PLANNER = "task", "machine", "vlm"
INSTRUCTION_SOURCES = (TASK, MACHINE, PLANNER)
# Settings of each source.
INSTRUCTION_SETTINGS = {
    MACHINE: ("instruction_formula", "instruction_stages", "instruction_texts"),
    PLANNER: ("instruction_url", "instruction_model", "instruction_interval"),
}
_OF_INSTRUCTIONS = tuple(name for names in INSTRUCTION_SETTINGS.values() for name in names)
INSTRUCTION_FLAGS = ("instruction_source", *_OF_INSTRUCTIONS)
# Suite-specific settings, not taken from the record of another suite.
_OF_THE_SUITE = (
    *("task_ids", "max_steps", "success_hold_steps", "after_success"),
    *INSTRUCTION_FLAGS,
)


@dataclass(frozen=True)
class EnvConfig:
    """The task suite and the observations.

    Commands that start from a checkpoint or demonstrations take missing values from their record.

    Attributes:
        options: suite-specific options, which are also flags, see `rlvla.envs.suite_flags`.
    """

    task_suite_name: str | None = arg(
        None,
        lambda: f"task suite (default: that of the checkpoint); known: {suite_names_in_short()}",
        essential=True,
    )
    task_ids: tuple[int, ...] = arg(
        (),
        "tasks of the suite (default: all; robosuite: 0, Lift)",
        minimum=0,
        metavar="ID",
        essential=True,
    )
    task_names: tuple[str, ...] = arg(
        (),
        "tasks and task groups of the suite by name (metaworld: MT10, MT50, ML10, ML10-test, ML45, ML45-test), instead "
        "of --task_ids",
        metavar="NAME",
        recorded=False,
    )
    cameras: tuple[str, ...] = arg(
        (),
        "cameras in the order the policy sees them (default: the checkpoint's, else the suite's)",
        metavar="NAME",
    )
    image_size: int | None = arg(
        None,
        "side of the square camera images in pixels (default: the checkpoint's, else the suite's: 64; LIBERO: 256)",
        minimum=8,
        maximum=4096,
    )
    image_fit: str | None = arg(
        None,
        "how images that are not square become so: crop the center, pad with black, stretch; native keeps the camera's "
        "shape, for policies that pad (default: the checkpoint's, else the suite's)",
        choices=ENV_IMAGE_FITS,
    )
    use_proprio: bool | None = arg(
        None, "add the proprioceptive state to observations (default: the checkpoint's, else no)"
    )
    max_steps: int | None = arg(
        None,
        "environment steps after which an episode is truncated (default: the suite's)",
        minimum=1,
        maximum=1_000_000,
    )
    success_hold_steps: int | None = arg(
        None,
        "consecutive successful environment steps that end an episode (default: the checkpoint's, else the suite's)",
        minimum=1,
        maximum=1_000_000,
    )
    after_success: str | None = arg(
        None,
        "once success has been held: end the episode, or continue to the step limit, where success must hold (default: "
        "the checkpoint's, else end)",
        choices=AFTER_SUCCESS,
    )
    render_quality: str | None = arg(
        None,
        "fast skips shadows, reflections and fine visual meshes (default: the checkpoint's, else fast)",
        choices=("fast", "full"),
    )
    instruction_source: str | None = arg(
        None,
        "instruction at each decision: task: that of the task; machine: the next proposition of the task's reward "
        "machine; vlm: the answers of a planner (default: the checkpoint's, else task)",
        choices=INSTRUCTION_SOURCES,
    )
    instruction_formula: str | None = arg(
        None,
        "instruction_source machine: an LTLf formula over the environment's events, e.g. 'F(grasped & F lifted)', "
        "whose next proposition is the instruction (default: the checkpoint's, else the task's machine)",
    )
    instruction_stages: str | None = arg(
        None,
        "instruction_source machine: stages of LIBERO's goals, see --rm_goal_stages (default: the checkpoint's, else "
        "predicates)",
        choices=("predicates", "manipulation"),
    )
    instruction_texts: tuple[str, ...] = arg(
        (),
        "instruction_source machine: texts of propositions; {task} stands for the task's instruction (default: the "
        "checkpoint's, else built-in ones)",
        metavar="NAME=TEXT",
    )
    instruction_url: str | None = arg(
        None,
        "instruction_source vlm: base URL of the planner's OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1 "
        "(default: none)",
        metavar="URL",
        recorded=False,
    )
    instruction_model: str | None = arg(
        None, "instruction_source vlm: name of the model there (default: the checkpoint's, else none)"
    )
    instruction_interval: int | None = arg(
        None,
        "instruction_source vlm: environment steps between questions to the planner (default: the checkpoint's, else "
        "10)",
        minimum=1,
        maximum=1_000_000,
    )
    env_python: str | None = arg(
        None,
        "Python interpreter of the environment workers; needs numpy and the simulator only (default: that of this "
        "process)",
        metavar="PATH",
        recorded=False,
    )
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_suite_flags(self, namespace: Namespace) -> EnvConfig:
        """With the suite-specific flags; `tasks` rejects flags of other suites."""
        return replace(self, options=given_options(namespace))

    def completed(self, recorded: dict[str, Any]) -> EnvConfig:
        """Fill missing values from the record of a checkpoint or of demonstrations (`as_dict`).

        Machine-dependent flags are never taken from the record. If the suite differs from the recorded one, only
        settings of the observations are taken.
        """
        options: dict[str, Any] = {}
        if self.instruction_source not in (None, recorded.get("instruction_source")):
            recorded = {name: value for name, value in recorded.items() if name not in _OF_INSTRUCTIONS}
        if self.task_names:
            recorded = {name: value for name, value in recorded.items() if name != "task_ids"}
        if self.task_suite_name not in (None, recorded.get("task_suite_name")):
            recorded = {name: value for name, value in recorded.items() if name not in _OF_THE_SUITE}
        else:
            options = recorded_options(recorded.get("task_suite_name"), recorded)
        given = {name: getattr(self, name) for name in _COMMON}
        recorded = {name: value for name, value in recorded.items() if name not in _COMMON or name in RECORDED_FLAGS}
        merged = {name: v if v not in (None, ()) else recorded.get(name, v) for name, v in given.items()}
        merged = {name: tuple(v) if isinstance(v, list) else v for name, v in merged.items()}
        options = {name: value for name, value in options.items() if value is not None and name not in merged}
        return EnvConfig(**merged, options={**options, **self.options})

    def as_dict(self) -> dict[str, Any]:
        """Flat dict for JSON, read back by `completed`. Machine-dependent values are omitted.

        Missing options of the suite are None. Task names are omitted, see `numbered`.
        """
        flags = suite_flags()
        given = {name: value for name, value in self.options.items() if name not in flags or flags[name].recorded}
        common = {name: getattr(self, name) for name in RECORDED_FLAGS}
        return common | recorded_options(self.task_suite_name, given) | given

    def numbered(self, tasks: Sequence[TaskSpec]) -> EnvConfig:
        """With the ids of the selected `tasks` in place of their names, if given."""
        if not self.task_names:
            return self
        return replace(self, task_ids=tuple(task.task_id for task in tasks), task_names=())

    def with_ordinary_actions(self) -> EnvConfig:
        """The environment whose actions are `ChunkResult.step_actions`; itself without primitives.

        Raises:
            ConfigError: as `tasks`, or the primitives of the suite do not report their step actions.
        """
        tasks = self.tasks()
        if not any(task.primitives for task in tasks):
            return self
        suite = get_suite(self.suite).options
        chosen = () if suite is None else suite.action_options
        options = {name: value for name, value in self.options.items() if name not in chosen}
        ordinary = replace(self, options=options, max_steps=max(task.max_steps for task in tasks))
        for task, plain in zip(tasks, ordinary.tasks()):
            if plain.primitives or plain.action_dim != task.step_action_dim:
                text = f"the primitives of {self.suite} ({task.name}) do not report the actions of their steps"
                raise ConfigError.of("task_suite_name", "unavailable", text)
        return ordinary

    @property
    def played_options(self) -> dict[str, Any]:
        """Non-default options that affect episodes, except `perturb`, see `SuiteOptions`."""
        options = get_suite(self.suite).options
        if options is None:
            return {}
        free = {"perturb", *options.action_options, *options.privileged_options, *options.unplayed_options}
        recorded = {name: field for name, field in own_flags(options).items() if field.metadata.get("recorded", True)}
        return {
            name: list(value) if isinstance(value, tuple) else value  # as in JSON
            for name in sorted(recorded.keys() & self.options.keys() - free)
            if (value := self.options[name]) != recorded[name].default
        }

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Camera names, by default those of the suite."""
        return self.cameras or get_suite(self.suite).default_cameras

    @property
    def suite(self) -> str:
        """Name of the suite; ConfigError if not set."""
        if self.task_suite_name is None:
            text = "no task suite is given; name one with --task_suite_name"
            raise ConfigError.of("task_suite_name", "needs_flag", text)
        return self.task_suite_name

    def env_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `make_env`."""
        given = {
            "cameras": self.camera_names,
            "image_size": self.image_size,
            "image_fit": self.image_fit,
            "use_proprio": self.use_proprio,
            "max_steps": self.max_steps,
            "success_hold_steps": self.success_hold_steps,
            "after_success": self.after_success,
            "render_quality": self.render_quality,
            **self.options,
        }
        return {name: value for name, value in given.items() if value is not None}

    def tasks(self) -> list[TaskSpec]:
        """Selected tasks; ConfigError for an unknown suite, task, camera or option, or an unusable `--env_python`."""
        get_suite(self.suite)  # ConfigError if unknown
        problems: list[str | Problem] = list(option_problems(self.suite, self.options))
        try:
            specs = self.suite_tasks({} if problems else self.env_kwargs())
        except ConfigError as error:
            problems += error.problems
            try:
                specs = self.suite_tasks({})  # to check the task ids as well
            except ConfigError:  # tasks cannot be listed without the invalid option
                raise ConfigError(problems) from None
        chosen, unknown = self._select(specs)
        problems += [*unknown, *self._proprio_problems(chosen)]
        problems += [] if problems else get_suite(self.suite).task_problems(chosen, self.env_kwargs())
        if problems:
            raise ConfigError(problems)
        return chosen

    def _select(self, specs: Sequence[TaskSpec]) -> tuple[list[TaskSpec], list[Problem]]:
        """Select from all tasks of the suite; returns the tasks and the problems of the selection."""
        if self.task_names and self.task_ids:
            text = "--task_names and --task_ids both select the tasks; give one of them"
            return [], [Problem("task_names", "contradiction", text)]
        if self.task_names:
            return tasks_by_name(self.suite, specs, self.task_names)
        tasks = {task.task_id: task for task in specs}
        problems, unknown = [], [i for i in self.task_ids if i not in tasks]
        if unknown:
            available = ", ".join(f"{task.task_id} ({task.name})" for task in tasks.values())
            text = f"{self.suite} has no task {', '.join(map(str, unknown))}; its tasks: {available}"
            problems.append(Problem("task_ids", "unknown_name", text))
        selected = self.task_ids or get_suite(self.suite).default_tasks or sorted(tasks)
        return [tasks[i] for i in selected if i in tasks], problems

    def _proprio_problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        without = [task.name for task in tasks if not task.proprio_dim]
        if not self.use_proprio or not without:
            return []
        text = (
            f"--use_proprio: {self.suite} has none ({', '.join(without)}: TaskSpec.proprio_dim is 0); leave "
            "it out (in a recipe: use_proprio: false, e.g. --set demos.use_proprio=false)"
        )
        return [Problem("use_proprio", "unavailable", text)]

    def suite_tasks(self, options: dict[str, Any]) -> list[TaskSpec]:
        """All tasks of the suite with these options of `make_env`, from the workers' interpreter."""
        get_suite(self.suite)  # ConfigError if unknown
        if self.env_python is None:
            return list_tasks(self.suite, **options)
        if ships_with_rlvla(self.suite):
            return tasks_of_interpreter(self.env_python, self.suite, options)
        path_of_interpreter(self.env_python)
        return list_tasks(self.suite, **options)  # custom modules are imported in this process as well

    def simulator_versions(self) -> dict[str, str]:
        """Module -> version of the simulator's packages in the workers' interpreter."""
        if self.env_python is not None and ships_with_rlvla(self.suite):
            return versions_of_interpreter(self.env_python, self.suite, self.env_kwargs())
        return installed_versions(get_suite(self.suite).requires)


# Fields common to all suites.
_COMMON = tuple(f.name for f in fields(EnvConfig) if f.name != "options")
# Fields saved with demonstrations and checkpoints; the others depend on the machine.
RECORDED_FLAGS = tuple(f.name for f in fields(EnvConfig) if f.name in _COMMON and f.metadata.get("recorded", True))


def tasks_by_name(
    suite: str, tasks: Sequence[TaskSpec], names: Sequence[str], flag: str = "task_names"
) -> tuple[list[TaskSpec], list[Problem]]:
    """Distinct tasks with these names or in these groups, in order, and a problem of `flag` per unknown name."""
    groups = get_suite(suite).groups
    by_name = {task.name: task for task in tasks}
    chosen: dict[str, TaskSpec] = {}
    problems = []
    for name in names:
        members = [member for member in groups.get(name, (name,)) if member in by_name]
        chosen |= {member: by_name[member] for member in members}
        if members:
            continue
        lower = {valid.lower(): valid for valid in [*groups, *by_name]}
        near = [lower[match] for match in get_close_matches(name.lower(), lower, n=4, cutoff=0.5)]
        others = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join([*groups, *by_name])}"
        problems.append(Problem(flag, "unknown_name", f"--{flag}: {suite} has no task {name}; {others}"))
    return list(chosen.values()), problems


def without_checkpoint(help_text: str) -> str:
    """Help text of an `EnvConfig` flag for commands that do not start from a checkpoint."""
    return help_text.replace("the checkpoint's, else ", "").replace(" (default: that of the checkpoint)", "")


def heldout_tasks_flag() -> Any:
    """The field of `--heldout_tasks`."""
    return arg(
        (),
        "held-out tasks, by name or group: an error if they are trained on, recorded as demonstrations, or among the "
        "tasks that the policy was trained on",
        metavar="NAME",
    )


def heldout_problems(
    names: Sequence[str],
    env: EnvConfig,
    trained: Sequence[TaskSpec],
    learned_from: Sequence[LearnedStates] = (),
    of: str = "",
) -> list[Problem]:
    """Problems with held-out tasks that are, or were, trained on.

    Args:
        names: values of `--heldout_tasks`.
        env: the environment with the suite of the tasks.
        trained: tasks to train on.
        learned_from: states that a policy was trained on, or demonstrations were recorded from.
        of: the owner of `learned_from`, for the message.

    Raises:
        ConfigError: the tasks of the suite cannot be listed.
    """
    if not names:
        return []
    heldout, problems = tasks_by_name(env.suite, env.suite_tasks({}), names, "heldout_tasks")
    trained_ids = {(task.suite, task.task_id) for task in trained}
    if overlap := [task.name for task in heldout if (task.suite, task.task_id) in trained_ids]:
        text = (
            f"--heldout_tasks: {', '.join(overlap)} would be trained on; leave them out of --task_names or --task_ids"
        )
        problems.append(Problem("heldout_tasks", "contradiction", text))
    learned = [task.name for task in heldout if any(states.of(task) for states in learned_from if states.recorded)]
    text = ""
    if learned:
        text = f"--heldout_tasks: {of} was trained on {', '.join(learned)}; take another one"
    elif any(states.may_be_of(task) for states in learned_from for task in heldout):
        text = f"--heldout_tasks: {of} does not record its training tasks, which may include these; take one that does"
    if text:
        problems.append(Problem("heldout_tasks", "mismatch", text))
    return problems


@dataclass(frozen=True)
class SplitConfig:
    """The split of initial states into training and evaluation."""

    eval_protocol: str = arg(
        "heldout",
        "heldout: evaluate on the last 20 % of each task's initial states, which are excluded from training; shared: "
        "train and evaluate on all of them, as most published results do",
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

    heldout_tasks: tuple[str, ...] = heldout_tasks_flag()

    @property
    def protocol_name(self) -> str:
        """Name of the protocol in reports."""
        if self.eval_states_file:
            return f"states of {Path(self.eval_states_file).name}, trained on {self.eval_protocol}"
        if self.eval_init_states:
            start, stop = self.eval_init_states
            return f"states {start}..{stop - 1}, trained on {self.eval_protocol}"
        return self.eval_protocol

    def train_states(self, task: TaskSpec) -> range:
        """Ids of the initial states for training and demonstrations."""
        return _range(task, "train_init_states", self.train_init_states) or train_init_states(task, self.eval_protocol)

    def eval_states(self, task: TaskSpec, n: int) -> list[int]:
        """Ids of the first n initial states for evaluation; ConfigError if there are fewer."""
        if self.eval_states_file:
            if self.eval_init_states:
                text = "--eval_states_file and --eval_init_states both select the states; give one of them"
                raise ConfigError.of("eval_states_file", "contradiction", text)
            return states_of_task(read_state_file(self.eval_states_file), task, n, self.eval_states_file)
        states = _range(task, "eval_init_states", self.eval_init_states)
        if not states:
            return eval_init_states(task, self.eval_protocol, n)
        if n > len(states):
            text = f"--eval_init_states {states.start} {states.stop} holds {len(states)} initial states, fewer than {n}"
            raise ConfigError.of("eval_init_states", "too_few", text)
        return list(states[:n])

    def problems(self, tasks: Sequence[TaskSpec], n: int, learned_from: Sequence[LearnedStates] = ()) -> list[Problem]:
        """Problems of the split for these tasks and n evaluation states.

        Args:
            tasks: the tasks.
            n: evaluation states per task.
            learned_from: states the policy was trained on, which must not be evaluated on either.
        """
        problems = []
        for task in tasks:
            try:
                evaluated, trained = self.eval_states(task, n), self.train_states(task)
                if self.eval_protocol != "shared":
                    for states in [trained, *(learned.states for learned in learned_from if learned.of(task))]:
                        check_disjoint(states, evaluated)
            except ConfigError as error:
                problems += error.problems
        return problems


@dataclass(frozen=True)
class ResolvedEnv:
    """An environment resolved from flags and the record of a checkpoint, see `resolve_env`.

    Attributes:
        config: the completed flags, with task ids in place of names.
        suite: name of the suite.
        tasks: the selected tasks.
        split: initial states for training and evaluation.
        options: keyword arguments of `make_env`.
        needs_camera: whether the suite requires at least one camera.
        record: `config` as JSON, see `EnvConfig.as_dict`.
        protocol: settings of the environment in the protocol of an evaluation.
    """

    config: EnvConfig
    suite: str
    tasks: list[TaskSpec]
    split: SplitConfig
    options: Mapping[str, Any]
    needs_camera: bool
    record: dict[str, Any]
    protocol: Mapping[str, Any]


def resolve_env(
    env: EnvConfig,
    split: SplitConfig,
    eval_episodes: int,
    *,
    trains: bool = False,
    learned_from: Sequence[LearnedStates] = (),
    of: str = "",
) -> tuple[ResolvedEnv, list[Problem]]:
    """Resolve an environment, and validate the split and the held-out tasks.

    Args:
        env: flags, completed from a record (`EnvConfig.completed`).
        split: initial states for training and evaluation.
        eval_episodes: evaluation states per task.
        trains: whether the selected tasks are trained on.
        learned_from: states that the policy was trained on.
        of: the owner of `learned_from`, for messages.

    Returns:
        The environment, and the problems of split and held-out tasks.

    Raises:
        ConfigError: as `EnvConfig.tasks`.
    """
    tasks = env.tasks()
    env = env.numbered(tasks)
    problems = split.problems(tasks, eval_episodes, learned_from)
    try:
        problems += heldout_problems(split.heldout_tasks, env, tasks if trains else (), learned_from, of)
    except ConfigError as error:
        problems += error.problems
    suite = get_suite(env.suite).options
    resolved = ResolvedEnv(
        config=env,
        suite=env.suite,
        tasks=tasks,
        split=split,
        options=env.env_kwargs(),
        needs_camera=suite is None or suite.needs_camera,
        record=env.as_dict(),
        protocol={
            "success_hold_steps": env.success_hold_steps,
            "after_success": env.after_success,
            "perturb": env.options.get("perturb", ()),
            "options": env.played_options,
        },
    )
    return resolved, problems


def _range(task: TaskSpec, flag: str, bounds: tuple[int, ...]) -> range:
    """Initial states start..stop - 1 from the value of a flag; empty if it is not given."""
    if not bounds:
        return range(0)
    start, stop = bounds
    if not 0 <= start < stop <= task.num_init_states:
        raise ConfigError.of(
            flag,
            "out_of_range",
            f"initial states {start}..{stop - 1} do not exist in {task.suite} task {task.task_id} ({task.name}), "
            f"which has 0..{task.num_init_states - 1}; give START < STOP",
        )
    return range(start, stop)
