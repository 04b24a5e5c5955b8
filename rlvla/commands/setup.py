"""Checks and construction shared by training and evaluation: checkpoint, environment, workers.

Configuration problems are detected here, before a model is loaded or an episode is played.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlvla.checkpoints.policy_folder import MACHINE_STATE, learned_states, recorded_environment
from rlvla.envs.base import Observation, TaskSpec
from rlvla.envs.config import (
    INSTRUCTION_SETTINGS,
    MACHINE,
    PLANNER,
    TASK,
    EnvConfig,
    ResolvedEnv,
    SplitConfig,
    resolve_env,
)
from rlvla.envs.pictures import NATIVE
from rlvla.envs.registry import get_suite, suite_names
from rlvla.envs.workers.answer_checks import AnswerChecker
from rlvla.envs.workers.config import WorkerConfig, start_pool
from rlvla.envs.workers.messages import EnvSpec, Reset
from rlvla.envs.workers.watchdog import WatchedPool, run_everywhere
from rlvla.models.config import PolicyConfig
from rlvla.models.families import Checkpoint, check_checkpoint, checkpoint_overrides, start_warnings
from rlvla.models.policy import PolicySpec
from rlvla.rewards import RewardConfig, StateInput, StateInputSettings, SuccessConfig
from rlvla.rewards.instructions import InstructionSource, MachineInstructions, PlannerInstructions
from rlvla.rewards.success_source import SIMULATOR
from rlvla.rewards.vlm.propositions import parse_sentences
from rlvla.utils.cli.flags import no_effect
from rlvla.utils.errors import ConfigError, Problem, as_problems

_PLANNER_INTERVAL = 10  # environment steps


@dataclass(frozen=True)
class CheckedRun:
    """A checked configuration.

    Attributes:
        resolved: environment, tasks and split, with defaults from the record of the checkpoint.
        checkpoint: the checkpoint of the policy.
        overrides: settings that replace those of the checkpoint's config.json.
        state_input: adds the state of a reward machine to the observations, or None.
        success_source: value of --success_source.
        instructions: replaces the task's instruction at each decision, or None.
        privileged: options of the environment that show more in training than the policy reads.
    """

    resolved: ResolvedEnv
    checkpoint: Checkpoint
    overrides: dict[str, object]
    state_input: StateInput | None = None
    success_source: str = SIMULATOR
    instructions: InstructionSource | None = None
    privileged: Mapping[str, Any] = field(default_factory=dict)

    @property
    def env(self) -> EnvConfig:
        """The environment's completed flags."""
        return self.resolved.config

    @property
    def tasks(self) -> list[TaskSpec]:
        """The selected tasks."""
        return self.resolved.tasks

    @property
    def shown_env(self) -> EnvConfig:
        """The environment with its privileged observations in training."""
        if not self.privileged:
            return self.env
        return replace(self.env, use_proprio=True, options={**self.env.options, **self.privileged})

    @property
    def policy_proprio(self) -> int | None:
        """Leading numbers of the environment's proprio that the policy reads; None: all."""
        return self.spec.proprio_dim - self.state_width if self.privileged else None

    @property
    def state_width(self) -> int:
        """Numbers of a reward machine's state that follow the environment's proprio."""
        return self.state_input.settings.width if self.state_input is not None else 0

    def with_privileged_state(self) -> CheckedRun:
        """With all privileged state that the suite can append to proprio, for `--critic_input state`.

        Raises:
            ConfigError: it has none.
        """
        names = _privileged_options(self.env.suite)
        if not names:
            others = ", ".join(name for name in suite_names() if _privileged_options(name))
            text = f"--critic_input state: {self.env.suite} has no privileged state for a critic ({others} have some)"
            raise ConfigError.of("critic_input", "unavailable", f"{text}; leave it out")
        shown = replace(self, privileged=dict.fromkeys(names, True))
        return replace(shown, resolved=replace(self.resolved, tasks=shown.shown_env.tasks()))

    @property
    def played_env(self) -> EnvConfig:
        """The environment in which episodes are played; only the simulator as source of success ends them."""
        if self.success_source == SIMULATOR:
            return self.shown_env
        return replace(self.shown_env, success_hold_steps=max(task.max_steps for task in self.tasks) + 1)

    def options(self, *, watched: bool) -> dict[str, Any]:
        """Options of the environment in which episodes are played.

        Args:
            watched: images are read by something other than the policy; if nothing reads them, there are no cameras.
        """
        options = self.played_env.env_kwargs()
        watched = watched or self.env.instruction_source == PLANNER
        if not watched and not self.spec.reads_images and not self.resolved.needs_camera:
            options["cameras"] = ()
        return options

    @property
    def spec(self) -> PolicySpec:
        """Dimensions and properties of the policy."""
        return self.checkpoint.spec


def _privileged_options(suite: str) -> tuple[str, ...]:
    options = get_suite(suite).options
    return () if options is None else options.privileged_options


def check_run(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    eval_episodes: int,
    rewards: RewardConfig | None = None,
    success: SuccessConfig | None = None,
    scores: str | None = None,
    *,
    plays: bool = True,
) -> tuple[CheckedRun | None, list[Problem]]:
    """Check checkpoint, environment and split against each other; returns the checked run, or None and all problems.

    `rewards` are those of a training run; an evaluation passes None and uses the checkpoint's record. `success` is by
    default the simulator's. `scores` is what training reads, see `checkpoint_overrides`. Without `plays`, no
    episodes are played, and the source of instructions is not needed.
    """
    problems: list[str | Problem] = []
    source = SIMULATOR if success is None else success.success_source
    folder, recorded = Path(policy.pretrain), {}
    try:
        recorded = recorded_environment(folder)
    except ConfigError as error:
        problems += error.problems
    given, env = env, env.completed(recorded)
    problems = [*success_problems(given, env, source), *problems]
    resolved: ResolvedEnv | None = None
    checkpoint, overrides = None, {}
    try:
        overrides = checkpoint_overrides(folder, policy, cameras_of(env), scores)
        checkpoint = check_checkpoint(folder, policy.unnorm_key, env.task_suite_name, overrides)
    except ConfigError as error:
        problems += error.problems
    problems += start_warnings(folder, checkpoint)
    if checkpoint is not None and checkpoint.guidance is not None and rewards is not None:
        text = f"{folder} is advantage-conditioned, which reinforcement learning does not support; start from an"
        problems.append(Problem("pretrain", "conditioned", f"{text} unconditioned policy"))
    if checkpoint is not None and env.use_proprio is None:  # a foreign checkpoint: its tensors decide
        env = replace(env, use_proprio=bool(checkpoint.spec.proprio_dim))
    try:
        # A missing checkpoint leaves the suite unknown: one problem, not two.
        if env.task_suite_name is not None or checkpoint is not None:
            resolved, more = resolve_env(
                env,
                split,
                eval_episodes,
                trains=rewards is not None,
                learned_from=learned_states(recorded) or (),
                of=f"the policy {folder}",
            )
            problems += more
    except ConfigError as error:
        problems += error.problems
    state_input, instructions = None, None
    if checkpoint is not None and resolved is not None:
        env, tasks, spec = resolved.config, resolved.tasks, checkpoint.spec
        problems += _contradictions(policy, env, spec, tasks)
        instructions, more = instructions_of(env, tasks) if plays else (None, [])
        if instructions is not None and not spec.reads_instruction:
            text = (
                f"--instruction_source {env.instruction_source}: the policy {folder} reads no instruction; leave it out"
            )
            more = [Problem("instruction_source", "no_effect", text)]
        problems += more
        state_input, more = state_input_of(recorded, rewards, spec, tasks)
        one_hot = state_input is not None and bool(state_input.settings.width)  # its length is already checked
        problems += more if more or one_hot else _proprio_problems(env, spec, tasks)
    if problems or checkpoint is None or resolved is None:
        return None, as_problems(problems)
    return CheckedRun(resolved, checkpoint, overrides, state_input, source, instructions), []


def instructions_of(env: EnvConfig, tasks: Sequence[TaskSpec]) -> tuple[InstructionSource | None, list[Problem]]:
    """The result of `instruction_source`, and all problems with it."""
    used = env.instruction_source or TASK
    problems = [
        no_effect(name, value, f"it belongs to --instruction_source {source}")
        for source, names in INSTRUCTION_SETTINGS.items()
        for name in names
        if source != used and (value := getattr(env, name))
    ]
    try:
        source = instruction_source(env)
    except ConfigError as error:
        return None, [*problems, *error.problems]
    return source, problems + ([] if source is None else source.problems(tasks))


def instruction_source(env: EnvConfig) -> InstructionSource | None:
    """The source of the instructions of decisions; None: the task's instruction.

    Raises:
        ConfigError: its settings are missing or wrong.
    """
    if env.instruction_source == MACHINE:
        texts = parse_sentences(env.instruction_texts, "instruction_texts")
        return MachineInstructions(env.instruction_formula, env.instruction_stages or "predicates", texts)
    if env.instruction_source != PLANNER:
        return None
    url, model = env.instruction_url, env.instruction_model
    missing = [name for name in ("instruction_url", "instruction_model") if not getattr(env, name)]
    problems = [Problem(n, "needs_flag", f"--instruction_source {PLANNER} needs --{n}") for n in missing]
    if problems or url is None or model is None:
        raise ConfigError(problems)
    return PlannerInstructions(url, model, env.instruction_interval or _PLANNER_INTERVAL)


def success_problems(given: EnvConfig, env: EnvConfig, source: str) -> list[Problem]:
    """Settings of the simulator's success that another source of success does not use.

    Args:
        given: the environment as given by flags.
        env: the same, completed from the record of a checkpoint.
        source: value of --success_source.
    """
    if source == SIMULATOR:
        return []
    problems, steps = [], given.success_hold_steps
    if steps is not None:
        problems.append(no_effect("success_hold_steps", steps, f"--success_source {source} does not use it"))
    if env.after_success == "continue":
        text = "--after_success continue (given, or recorded with the checkpoint)"
        why = f"--success_source {source} ends episodes; give --after_success end"
        problems.append(Problem("after_success", "no_effect", f"{text}: {why}"))
    return problems


def cameras_of(env: EnvConfig) -> Sequence[str]:
    """The cameras of the environment; () if they are unknown, which is reported elsewhere."""
    try:
        return env.camera_names
    except ConfigError:
        return ()


def _contradictions(
    policy: PolicyConfig, env: EnvConfig, spec: PolicySpec, tasks: Sequence[TaskSpec]
) -> Iterator[Problem]:
    cameras, chunk = len(env.camera_names), spec.action_chunk_len
    images = spec.cameras or policy.num_images_in_input or cameras
    if policy.action_chunk_len not in (None, chunk):
        text = f"--action_chunk_len {policy.action_chunk_len}: the checkpoint predicts {chunk}"
        yield Problem("action_chunk_len", "mismatch", text)
    if policy.num_images_in_input not in (None, images):
        text = f"--num_images_in_input {policy.num_images_in_input}: the checkpoint takes {images}"
        yield Problem("num_images_in_input", "mismatch", text)
    if cameras != images:
        text = f"--cameras {' '.join(env.camera_names)}: the checkpoint takes {images} image(s)"
        yield Problem("cameras", "mismatch", text)
    if bool(spec.proprio_dim) != bool(env.use_proprio):
        takes = "takes" if spec.proprio_dim else "does not take"
        text = f"--use_proprio: the checkpoint {takes} proprioception; leave the flag out, or agree with it"
        yield Problem("use_proprio", "mismatch", text)
    if env.image_fit == NATIVE and not spec.keeps_aspect_ratio:
        text = f"--image_fit {NATIVE}: the checkpoint takes square images; take crop, pad or stretch"
        yield Problem("image_fit", "mismatch", text)
    size = env.image_size or get_suite(env.suite).default_image_size
    if spec.image_size not in (None, size):
        text = f"--image_size {size}: the checkpoint takes {spec.image_size} pixels"
        yield Problem("image_size", "mismatch", text)
    dims = {task.action_dim for task in tasks}
    if dims != {spec.action_dim}:
        text = f"suite {env.suite} has {sorted(dims)} action dimensions; the checkpoint predicts {spec.action_dim}"
        yield Problem("task_suite_name", "action_dims", text)
    for length in sorted({task.macro_steps for task in tasks} - {0, chunk}):
        text = f"a primitive of these tasks takes up to {length} steps, and a policy for them predicts chunks of that"
        yield Problem("task_suite_name", "macro_steps", f"{text} length; the checkpoint predicts {chunk}")


def _proprio_problems(env: EnvConfig, spec: PolicySpec, tasks: Sequence[TaskSpec]) -> list[Problem]:
    """Tasks whose proprioception does not fit the projector of the checkpoint."""
    if not spec.proprio_dim or not env.use_proprio:
        return []
    text = f"suite {env.suite} has {{}} numbers of proprioception; the checkpoint takes {spec.proprio_dim}"
    others = sorted({task.proprio_dim for task in tasks} - {spec.proprio_dim})
    return [Problem("task_suite_name", "proprio_dims", text.format(length)) for length in others]


def start_workers(
    num_envs: int,
    env: EnvConfig,
    tasks: Sequence[TaskSpec],
    custom_modules: Sequence[str] = (),
    config: WorkerConfig | None = None,
) -> WatchedPool:
    """Start the worker processes for these tasks and build the environment of the first one in each of them.

    Raises:
        ConfigError: the environment cannot be built here (no working GL, extra not installed).
    """
    first = EnvSpec(tasks[0].suite, tasks[0].task_id, env.env_kwargs())
    try:
        return start_pool(num_envs, config or WorkerConfig(), first, custom_modules, env.env_python, len(tasks))
    except ConfigError as error:
        raise ConfigError(error.problems, one_rank=True) from None


def first_observations(pool: WatchedPool, setting: CheckedRun) -> list[Observation]:
    """Observations of the first task at the start of an episode, one per worker slot.

    Raises:
        EnvWorkerError, ConfigError: see `run_everywhere`.
    """
    task = setting.tasks[0]
    options = setting.played_env.env_kwargs()
    checker, spec = AnswerChecker(task, options), EnvSpec(task.suite, task.task_id, options)
    observations: list[Observation] = run_everywhere(
        pool, lambda slot: Reset(spec, slot % task.num_init_states, slot), checker.observation
    )
    if setting.policy_proprio is not None:
        observations = [observation.for_policy(setting.policy_proprio) for observation in observations]
    if setting.instructions is not None:
        instructions = setting.instructions.begin(task)
        observations = [instructions.observe(observation) for observation in observations]
    if setting.state_input is not None:
        state = setting.state_input.begin(task)
        observations = [state.observe(observation) for observation in observations]
    return observations


def state_input_of(
    recorded: dict[str, Any], rewards: RewardConfig | None, spec: PolicySpec, tasks: Sequence[TaskSpec]
) -> tuple[StateInput | None, list[Problem]]:
    """How the policy observes the state of a reward machine (None if it does not), and all problems with it.

    Args:
        recorded: the checkpoint's record of its environment.
        rewards: rewards of a training run; None to use those that the checkpoint recorded.
        spec: dimensions and properties of the policy.
        tasks: the selected tasks.
    """
    try:
        before = StateInputSettings.from_dict(recorded[MACHINE_STATE]) if MACHINE_STATE in recorded else None
        if rewards is None:
            now = None if before is None else StateInput(before)
        else:
            now = StateInput.from_config(rewards, tasks)
        if now is None:
            return None, [] if before is None else [_forgotten(before)]
        if before is not None and rewards is not None:
            width = before.width if now.settings.width else 0  # may be larger than the number of states of these tasks
            now = StateInput(replace(now.settings, width=max(width, now.settings.width)))
            if now.settings != before:
                return None, [_different(before, now.settings)]
        return now, now.problems(tasks) + _width_problems(now.settings.width, spec, tasks)
    except ConfigError as error:
        # Without a machine there is no state; the reward source `rm` of a training run reports the same elsewhere.
        return None, [] if rewards is not None else error.problems


def _forgotten(before: StateInputSettings) -> Problem:
    text = f"the checkpoint was trained with --rm_state_input {before.rm_state_input}: repeat it, with rm in --reward"
    return Problem("rm_state_input", "needs_flag", f"{text} (rm:0 pays nothing)")


def _different(before: StateInputSettings, settings: StateInputSettings) -> Problem:
    now, then = settings.as_dict(), before.as_dict()
    differences = "; ".join(
        f"--{name} is {now[name]}, it was {then[name]}" if name != "width" else f"{now[name]} states, not {then[name]}"
        for name in now
        if now[name] != then[name]
    )
    text = f"the checkpoint was trained with another machine's state: {differences}"
    return Problem("rm_state_input", "changed", text)


def _width_problems(width: int, spec: PolicySpec, tasks: Sequence[TaskSpec]) -> list[Problem]:
    """Problems if the one-hot vector of this length does not fit the projector of the checkpoint."""
    if not width:
        return []
    if not spec.proprio_dim:
        text = "--rm_state_input proprio: the checkpoint takes no proprioception; use --rm_state_input prompt"
        return [Problem("rm_state_input", "no_proprio", text)]
    problems = []
    for length in sorted({task.proprio_dim for task in tasks} - {spec.proprio_dim - width}):
        text = (
            f"--rm_state_input proprio: {length} numbers of the environment and {width} states make {length + width}, "
            f"but the checkpoint's projector takes {spec.proprio_dim}; only a checkpoint trained with it fits: use "
            "--rm_state_input prompt, which always works"
        )
        problems.append(Problem("rm_state_input", "proprio_dims", text))
    return problems
