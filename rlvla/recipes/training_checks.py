"""Validate later stages before running earlier ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlvla.commands.ppo_checks import (
    algorithm_problems,
    backend_problems,
    batch_problems,
    early_stopping_problems,
    sampler_problems,
)
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.runs.asynchronous import async_problems
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig, resolve_env
from rlvla.models.compact.config import HEADS, MODEL_TYPE
from rlvla.models.families import SETTINGS, checkpoint_overrides
from rlvla.models.flow.settings import FLOW_SETTINGS
from rlvla.models.lerobot.new import TINY_FAMILIES
from rlvla.models.lerobot.settings import LEROBOT_SETTINGS
from rlvla.recipes.recipe import KINDS, Parsers, Stage
from rlvla.trainer.reward_sources import reward_problems
from rlvla.utils.cli.flags import from_namespace, no_effect_problems
from rlvla.utils.errors import ConfigError, Problem, require


def training_problems(stages: Sequence[Stage], parsers: Parsers) -> list[Problem]:
    """Problems of training and evaluations that can be checked before their policy exists.

    The environment is that of the stage `demos`. Checks that need its tasks are left out for existing demonstrations,
    for those of a policy, whose folder names the environment, and for evaluations in other suites.
    """
    flags = {stage.name: _flags_of(stage, parsers) for stage in stages}
    problems, recorded = [], None
    if "demos" in flags and flags["demos"].policy is None:
        env = _env_of(flags["demos"])
        try:
            tasks = env.tasks()
            recorded = env.as_dict() | {"task_suite_name": env.suite, "task_ids": [task.task_id for task in tasks]}
        except ConfigError as error:
            problems += [_of_stage("demos", problem) for problem in error.problems]
    if {"sft", "rl"} <= flags.keys():
        problems += [_of_stage("rl", problem) for problem in _policy_problems(flags["sft"], flags["rl"])]
    for stage in stages:
        if stage.name in ("eval_sft", "rl", "eval_rl"):
            for problem in _problems_of(stage, flags[stage.name], recorded):
                problems.append(_of_stage(stage.name, problem))
    return list(dict.fromkeys(problems))


def _policy_problems(sft: argparse.Namespace, rl: argparse.Namespace) -> Iterator[Problem]:
    """Settings of reinforcement learning that the policy of the stage `sft` does not have."""
    given = rl.given.intersection(SETTINGS)
    supported: Collection[str] = SETTINGS
    if sft.pretrain == MODEL_TYPE:
        head = sft.compact_head
        policy, supported = f"compact policy with --compact_head {head}", HEADS.attribute(head, "settings")
    elif sft.pretrain == "tiny" and sft.model_family != TINY_FAMILIES[0]:
        policy, supported = f"{sft.model_family} policy", (*FLOW_SETTINGS, *LEROBOT_SETTINGS)
    elif given and Path(sft.pretrain).is_dir():
        try:
            checkpoint_overrides(sft.pretrain, rl)
        except ConfigError as error:
            yield from error.problems
    for name in sorted(given.difference(supported)):
        yield Problem(name, "mismatch", f"--{name}: a {policy} has no such setting; leave it out")


def require_extras(stages: Sequence[Stage]) -> None:
    """Raise MissingExtraError if a stage records videos and the encoder is not installed."""
    if any(KINDS[stage.name].command == "eval_vla" and stage.settings.get("num_videos") for stage in stages):
        require("av", extra="video")


def _flags_of(stage: Stage, parsers: Parsers) -> argparse.Namespace:
    namespace = argparse.Namespace()
    parsers[KINDS[stage.name].command].read_flags(stage.argv, namespace)
    namespace.given = frozenset(name for name, value in stage.settings.items() if value is not None)
    return namespace


def _env_of(namespace: argparse.Namespace) -> EnvConfig:
    return from_namespace(EnvConfig, namespace).with_suite_flags(namespace)


def _of_stage(name: str, problem: Problem) -> Problem:
    return Problem(f"{name}.{problem.flag}", problem.reason, f"stage {name}: {problem}")


def _problems_of(stage: Stage, namespace: argparse.Namespace, recorded: dict[str, Any] | None) -> list[Problem]:
    """Problems of a stage that trains or evaluates.

    Args:
        stage: the stage.
        namespace: its flags.
        recorded: environment of the demonstrations; None if unknown.
    """
    trains = stage.name == "rl"
    tasks: Sequence[TaskSpec] = ()
    problems: list[Problem] = []
    others = [] if trains else namespace.task_suite_name or []
    if recorded is not None and all(suite == recorded["task_suite_name"] for suite in others):
        env, split = _env_of(namespace) if trains else EnvConfig(), from_namespace(SplitConfig, namespace)
        try:
            resolved, problems = resolve_env(env.completed(recorded), split, namespace.eval_episodes, trains=trains)
            tasks = resolved.tasks
        except ConfigError as error:
            problems = list(error.problems)
    if not trains:
        return problems
    flags = PPORun.from_namespace(namespace)
    with _launched_on(stage.processes):
        problems += [
            *batch_problems(flags),
            *no_effect_problems(flags.groups.values(), flags.unselected, flags.given),
            *algorithm_problems(flags),
            *async_problems(flags),
            *backend_problems(flags, None),
            *early_stopping_problems(flags.schedule, len(tasks), flags.batch),
        ]
        if tasks:
            problems += reward_problems(flags.rewards, flags.algorithm, tasks, flags.success)
            problems += sampler_problems(flags.batch, tasks, flags.split, flags.run.seed)
    return problems


@contextmanager
def _launched_on(ranks: int) -> Iterator[None]:
    """Set the number of ranks for checks within the block."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before
