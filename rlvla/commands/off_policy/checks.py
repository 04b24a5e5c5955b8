"""Checks of the flags of `cli/train_sac_vla.py`, made before anything is started."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvla.commands.model_checks import ObservationSpec, mismatch_with_policy, source_problems
from rlvla.commands.off_policy.dsrl import check_base, noise_problems
from rlvla.commands.off_policy.flags import SACRun
from rlvla.commands.off_policy.learner_checks import learner_problems
from rlvla.commands.ppo_checks import early_stopping_problems, sampler_problems
from rlvla.commands.runs.checks import changed_flags, dump_problems, flag_problems, length_problems, rank_problems
from rlvla.commands.setup import CheckedRun, instructions_of, state_input_of, success_problems
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.options import options_like
from rlvla.data.reading import check_options, read_demonstrations
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import TASK, EnvConfig, heldout_problems, resolve_env
from rlvla.envs.registry import get_suite
from rlvla.models.soft_actor.config import CriticView, SoftActorConfig
from rlvla.models.soft_actor.family import SoftActorCheckpoint
from rlvla.models.soft_actor.policy import soft_actor_spec
from rlvla.rewards import StateInput
from rlvla.rewards.base import component_of, parse_rewards, source_of
from rlvla.rewards.machine_source import MachineSource
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.off_policy.config import DSRL, FLOW, SACConfig
from rlvla.trainer.reward_sources import reward_problems
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.errors import ConfigError, Problem, as_problems

_TEXT_WIDTH, _FLOW_STEPS = 32, 4


@dataclass(frozen=True)
class CheckedSAC:
    """A checked configuration.

    Attributes:
        run: environment, tasks and actor.
        demos: demonstrations, or None.
    """

    run: CheckedRun
    demos: Demonstrations | None


def learner_of(flags: SACRun) -> AlgorithmConfig:
    """An on-policy configuration equivalent for reward sources: same discount, truncated episodes bootstrapped."""
    return AlgorithmConfig(gamma=flags.sac.gamma)


def check(flags: SACRun) -> CheckedSAC:
    """Check all flags.

    Raises:
        ConfigError: with all problems.
    """
    problems = flag_problems(flags, _batch_problems(flags), learner_problems(flags) + noise_problems(flags))
    setting, more = _check_environment(flags)
    problems += more
    tasks = setting.run.tasks if setting is not None else []
    problems += early_stopping_problems(flags.schedule, len(tasks), flags.batch)
    problems += reward_problems(flags.rewards, learner_of(flags), tasks, flags.success)
    if setting is not None:
        problems += changed_flags(flags, setting.run) + dump_problems(flags, setting.run.env)
        shown = ObservationSpec(setting.run.env, tasks[0].proprio_dim if setting.run.env.use_proprio else 0)
        problems += source_problems(flags.rewards, shown, flags.success.success_source)
    if problems or setting is None:
        raise ConfigError(dict.fromkeys(problems))
    return setting


def _batch_problems(flags: SACRun) -> list[Problem]:
    """Numbers of episodes and rows that do not fit each other."""
    batch, problems = flags.batch, rank_problems(flags) + length_problems(flags)
    if batch.exploring_episodes >= batch.num_episodes:
        text = (
            f"--random_episodes {batch.random_episodes} leaves none of the --num_episodes {batch.num_episodes} to "
            "learn in; take fewer"
        )
        problems.append(Problem("random_episodes", "out_of_range", text))
    return problems


def _no_state(problem: Problem, suite: str, sac: SACConfig) -> Problem:
    """Reword a problem of --use_proprio when that flag was not given."""
    if (problem.flag, problem.reason) != ("use_proprio", "unavailable"):
        return problem
    if sac.read_images:
        text = f"--critic_state: {suite} has no proprio; leave it out"
        return Problem("critic_state", "unavailable", text)
    text = f"{suite} has no proprio, which the policy reads without --read_images; give --read_images"
    return Problem("read_images", "needs_flag", text)


def _check_environment(flags: SACRun) -> tuple[CheckedSAC | None, list[Problem]]:
    """Environment, tasks and sizes of the networks, and all problems with them."""
    if flags.sac.policy == DSRL:
        return _check_with_base(flags)
    shown, sac, problems = flags.env.completed({}), flags.sac, list[str | Problem]()
    unasked = shown.use_proprio is None
    if unasked:
        shown = replace(shown, use_proprio=not sac.read_images or sac.critic_state)
    env, privileged = _seen_by_policy(flags, shown)
    try:
        resolved, more = resolve_env(env, flags.split, flags.schedule.eval_episodes, trains=True)
        env, tasks, shown_tasks = resolved.config, resolved.tasks, shown.tasks()
        shown = shown.numbered(tasks)
        problems += more
    except ConfigError as error:
        return None, [_no_state(p, shown.suite, sac) if unasked else p for p in error.problems]
    problems += _task_problems(flags, shown, shown_tasks) + _view_problems(flags, env, privileged)
    problems += success_problems(flags.env, env, flags.success.success_source)
    instructions, more = instructions_of(env, tasks)
    problems += more
    problems += sampler_problems(flags.batch, tasks, flags.split, flags.run.seed)
    try:
        asked = StateInput.from_config(flags.rewards, tasks)
    except ConfigError as error:
        return None, as_problems([*problems, *error.problems])
    if problems:
        return None, as_problems(problems)
    width = asked.settings.width if asked is not None else 0
    config = _sizes(flags, env, tasks, tasks[0].proprio_dim + width if env.use_proprio else 0, width)
    problems += _goal_problems(flags, tasks)
    problems += [Problem(None, "mismatch", text) for text in config.problems()]
    view = None
    if privileged:
        less, more_of_it = tasks[0].proprio_dim, shown_tasks[0].proprio_dim
        view = CriticView(more_of_it + width, (*range(less), *range(more_of_it, more_of_it + width)))
    checkpoint = SoftActorCheckpoint(Path(flags.run.save_path) / "policy", config, new=True, view=view)
    state_input, more = state_input_of({}, flags.rewards, checkpoint.spec, tasks)
    problems += more
    if problems:
        return None, as_problems(problems)
    stored = config if view is None else view.stored_config(config)
    demos, more = _demonstrations(flags, env, tasks, stored)
    if more:
        return None, more
    source = flags.success.success_source
    resolved = replace(resolved, tasks=shown_tasks)
    return CheckedSAC(CheckedRun(resolved, checkpoint, {}, state_input, source, instructions, privileged), demos), []


def _seen_by_policy(flags: SACRun, shown: EnvConfig) -> tuple[EnvConfig, dict[str, Any]]:
    """The environment as the policy sees it, and the options that show more to the critics."""
    options = get_suite(shown.suite).options
    if not flags.sac.critic_state or options is None:
        return shown, {}
    privileged = {name: shown.options[name] for name in options.privileged_options if shown.options.get(name)}
    kept = {name: value for name, value in shown.options.items() if name not in privileged}
    return replace(shown, options=kept), privileged


def _view_problems(flags: SACRun, env: EnvConfig, privileged: Mapping[str, Any]) -> list[Problem]:
    """Critics that see nothing else than the policy."""
    if not flags.sac.critic_state or privileged:
        return []
    suite = get_suite(env.suite).options
    names = ", ".join(f"--{name}" for name in suite.privileged_options) if suite is not None else ""
    if names:
        text = f"--critic_state: give what the critics are to see as well ({names})"
        return [Problem("critic_state", "needs_flag", text)]
    text = f"--critic_state: {env.suite} has nothing that a robot cannot know; leave it out"
    return [Problem("critic_state", "unavailable", text)]


def _check_with_base(flags: SACRun) -> tuple[CheckedSAC | None, list[Problem]]:
    """`_check_environment` with the observations and actions of a flow policy."""
    if noise_problems(flags):  # reported already
        return None, []
    run, problems = check_base(flags)
    if run is None:
        return None, problems
    problems += sampler_problems(flags.batch, run.tasks, flags.split, flags.run.seed)
    problems += _capacity_problems(flags, run.tasks, run.spec.action_chunk_len)
    return (None, problems) if problems else (CheckedSAC(run, None), [])


def _sizes(flags: SACRun, env: EnvConfig, tasks: Sequence[TaskSpec], proprio_dim: int, states: int) -> SoftActorConfig:
    sac = flags.sac
    assert sac.action_chunk_len is not None  # see `SACRun.completed`
    varies = len(tasks) > 1 or any("{" in task.instruction for task in tasks)
    varies |= flags.rewards.rm_state_input == "prompt" or env.instruction_source not in (None, TASK)
    task, cameras = tasks[0], len(env.camera_names) if sac.read_images else 0
    return SoftActorConfig(
        action_dim=task.action_dim,
        action_chunk_len=task.macro_steps or sac.action_chunk_len,
        proprio_dim=proprio_dim,
        num_images_in_input=cameras,
        image_size=(env.image_size or get_suite(env.suite).default_image_size or 0) if cameras else 0,
        hidden_sizes=sac.hidden_sizes,
        text_width=_TEXT_WIDTH if varies else 0,
        primitives=tuple(name for name, _ in task.primitives),
        primitive_sizes=tuple(size for _, size in task.primitives),
        goals=states if flags.replay.her_ratio else 0,
        flow_steps=(flags.noise.flow_steps or _FLOW_STEPS) if sac.policy == FLOW else 0,
    )


def _goal_problems(flags: SACRun, tasks: Sequence[TaskSpec]) -> list[Problem]:
    """Machines without a state that could be a goal in hindsight."""
    if not flags.replay.her_ratio or flags.rewards.rm_state_input != "proprio":
        return []
    machines = MachineSource(flags.rewards)
    if any(machines.graph(task).stages for task in tasks):
        return []
    text = "--her_ratio: the reward machine has no state on the way to its goal that could be one itself; leave it out"
    return [Problem("her_ratio", "no_effect", text)]


def _task_problems(flags: SACRun, env: EnvConfig, tasks: Sequence[TaskSpec]) -> list[Problem]:
    """Tasks whose actions or observations do not fit the policy, or each other."""
    problems, suite = [], env.suite
    for what in ("action_dim", "proprio_dim", "primitives"):
        if len({getattr(task, what) for task in tasks}) > 1:
            text = f"the tasks of {suite} differ in {what}; choose some that agree with --task_ids"
            problems.append(Problem("task_ids", "mismatch", text))
    offers = bool(tasks[0].primitives)
    if flags.sac.policy == "primitives" and not offers:
        text = "--policy primitives: the environment has none; robosuite has with --action_space primitives"
        problems.append(Problem("policy", "unavailable", text))
    if flags.sac.policy != "primitives" and offers:
        text = f"--policy {flags.sac.policy}: the environment takes action primitives; give --policy primitives"
        problems.append(Problem("policy", "mismatch", text))
    if flags.sac.policy == "primitives" and "action_chunk_len" in flags.given:
        text = "--action_chunk_len: a primitive takes as many steps as it needs; leave it out"
        problems.append(Problem("action_chunk_len", "no_effect", text))
    if flags.sac.read_images and not env.camera_names:
        problems.append(
            Problem("read_images", "needs_flag", "--read_images: there are no cameras; name some with --cameras")
        )
    if not flags.sac.read_images and not env.use_proprio:
        text = "without --read_images the policy reads proprio; leave --no-use_proprio out, or give --read_images"
        problems.append(Problem("use_proprio", "contradiction", text))
    assert flags.sac.action_chunk_len is not None  # see `SACRun.completed`
    problems += _capacity_problems(flags, tasks, 1 if offers else flags.sac.action_chunk_len)
    limits = {task.action_limit for task in tasks}
    if limits != {1.0} and not offers:
        text = f"the action limit of {suite} is {max(limits):g}; --policy {flags.sac.policy} has actions in [-1, 1]"
        problems.append(Problem("task_suite_name", "mismatch", text))
    return problems


def _capacity_problems(flags: SACRun, tasks: Sequence[TaskSpec], chunk: int) -> list[Problem]:
    """A buffer that is smaller than an episode with this many actions per decision."""
    longest = max(math.ceil(task.max_steps / chunk) for task in tasks) + 1
    if flags.replay.replay_capacity >= longest:
        return []
    text = (
        f"--replay_capacity {flags.replay.replay_capacity}: an episode takes up to {longest} rows, one of them for "
        "what is seen after its end; give more"
    )
    return [Problem("replay_capacity", "too_few", text)]


def _demonstrations(
    flags: SACRun, env: EnvConfig, tasks: Sequence[TaskSpec], config: SoftActorConfig
) -> tuple[Demonstrations | None, list[Problem]]:
    """The demonstrations, or None without any, and everything that does not fit."""
    path = flags.replay.demos
    if path is None:
        return None, []
    if config.primitives:
        text = "--demos: demonstrations hold actions, no primitives; take --policy gaussian or flow"
        return None, [Problem("demos", "contradiction", text)]
    try:
        options = options_like(env, flags.replay.dataset_camera)
        check_options(options, [path])
        demos = read_demonstrations(path, env.camera_names, options)
    except ConfigError as error:
        return None, [p.of_flag("demos") for p in error.problems]
    problems = mismatch_with_policy(demos, path, soft_actor_spec(config), "the policy")
    problems += flags.split.problems(tasks, flags.schedule.eval_episodes, demos.states_learned_from)
    problems = [p.of_flag("demos") for p in problems]
    problems += heldout_problems(flags.split.heldout_tasks, env, (), demos.states_learned_from, path)
    demonstrated, ranks = demos.demonstrated_episodes, launched_world_size()
    if len(demonstrated) < ranks:
        text = f"--demos {path}: {len(demonstrated)} episodes with actions of a person or an expert are fewer than the"
        problems.append(Problem("demos", "too_few", f"{text} {ranks} rank(s); give more"))
    if not demos.success_recorded:
        text = f"--demos {path}: success of the episodes is not recorded, for which demonstrations are rewarded"
        problems.append(Problem("demos", "mismatch", text))
    ends = [demos.demonstrated(index)[-1][1] == len(demos.actions[index]) for index in demonstrated]
    if demonstrated and not any(demos.success[index] and end for index, end in zip(demonstrated, ends)):
        text = f"--demos {path}: none of the episodes ends in success by a person or an expert, and nothing else of "
        problems.append(Problem("demos", "mismatch", f"{text}their rewards is known"))
    rewarded = ("success",) if any(task.dense_reward for task in tasks) else ("success", "env")
    other = [spec for spec in flags.rewards.reward if source_of(component_of(spec))[0] not in rewarded]
    if demos.decision_steps is not None:
        why = "corrections are no whole episodes" if demos.has_corrections else "recorded at decisions only"
        text = f"--demos {path}: {why}; chunks of actions may begin at every step"
        problems.append(Problem("demos", "mismatch", text))
    if flags.rewards.rm_state_input == "prompt":
        text = "--demos: what a machine would say of demonstrations is not known; leave --rm_state_input out"
        problems.append(Problem("demos", "contradiction", text))
    if flags.rewards.reward_schedule or flags.rewards.reward_pretrain:
        text = "--demos: demonstrations are paid once, for success; leave --reward_schedule and --reward_pretrain out"
        problems.append(Problem("demos", "contradiction", text))
    paid = [spec for spec in other if parse_rewards([spec])[component_of(spec)]]
    if paid:
        text = f"--demos: what {', '.join(paid)} would pay for demonstrations is not known; take success alone"
        problems.append(Problem("demos", "contradiction", f"{text}, or give it weight 0"))
    return demos, problems
