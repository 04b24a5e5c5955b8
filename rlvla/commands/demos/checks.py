"""Checks of the flags of `cli/collect_demos.py`, made before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from rlvla.commands.demos.config import CollectConfig
from rlvla.commands.demos.expert import ExpertPlayer
from rlvla.commands.demos.policy import PolicyPlayer, policy_player
from rlvla.envs.config import EnvConfig, SplitConfig, heldout_problems
from rlvla.envs.experts import ExpertConfig
from rlvla.envs.workers.config import WorkerConfig
from rlvla.models.config import PolicyConfig
from rlvla.utils.cli.flags import no_effect, range_problems
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import output_folder_problem


def checked_player(
    env: EnvConfig,
    config: CollectConfig,
    split: SplitConfig,
    workers: WorkerConfig,
    policy: PolicyConfig,
    expert: Callable[[], ExpertConfig],
) -> ExpertPlayer | PolicyPlayer:
    """What plays the demonstrations.

    Raises:
        ConfigError: all problems.
    """
    problems = [p for part in (env, config, split, workers, policy) for p in range_problems(part)]
    problems += workers.problems(env.env_python)
    folder = output_folder_problem(config.output)
    problems += [Problem("output", "folder_in_use", f"--output: {folder}")] if folder else []
    errors, player = ExpertConfig(), None
    try:
        errors = expert()
    except ConfigError as error:
        problems += error.problems
    problems += _unread_problems(config, policy, errors)
    try:
        if config.policy is None:
            player = ExpertPlayer(env, config, split, errors)
        else:
            player = policy_player(policy, env, config, split)
        tasks = player.env.tasks()
        problems += config.problems(tasks) + split.problems(tasks, 1) + player.problems()
        problems += heldout_problems(split.heldout_tasks, player.env, tasks)
    except ConfigError as error:
        problems += error.problems
    if problems or player is None:
        raise ConfigError(dict.fromkeys(problems))
    return player


def _unread_problems(config: CollectConfig, policy: PolicyConfig, errors: ExpertConfig) -> list[Problem]:
    """Flags of the expert where a policy plays, and the other way round."""
    if config.policy is not None:
        return [no_effect(name, value, "--policy plays, not the scripted expert") for name, value in _given(errors)]
    sampling = [] if config.temperature is None else [("temperature", config.temperature)]
    return [no_effect(name, value, "there is no --policy") for name, value in sampling + _given(policy)]


def _given(group: Any) -> list[tuple[str, Any]]:
    """Names and values of the flags of a group that are not at their defaults."""
    return [(f.name, value) for f in fields(group) if (value := getattr(group, f.name)) != f.default]
