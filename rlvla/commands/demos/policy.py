"""Demonstrations played by a trained policy.

An episode is played as the policy was trained, without images if it reads none. Its actions are then played again in
the environment of the recording, which shows what another policy is to read: images and the robot's proprio before each
step. Of primitives, the actions that they consist of are played.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from rlvla.checkpoints.policy_folder import recorded_environment
from rlvla.commands.demos.config import CollectConfig
from rlvla.commands.demos.record import Attempt, complete_episodes, planned_episodes
from rlvla.commands.run_policies import policy_folder
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.registry import get_suite
from rlvla.envs.workers.answer_checks import AnswerChecker
from rlvla.envs.workers.messages import EnvSpec, PlayActions
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.experience import Sample
from rlvla.models.config import PolicyConfig
from rlvla.models.policy import Policy
from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.terminal import passing_note

_BLOCK = 64  # episodes that are played before the first of them is recorded


@dataclass
class PolicyPlayer:
    """Plays a trained policy.

    Attributes:
        env: the environment of the recording.
        setting: the policy and the environment that it plays in.
        config: what is recorded.
        split: initial states.
    """

    name: ClassVar[str] = "policy"
    advice: ClassVar[str] = "train it for longer"

    env: EnvConfig
    setting: CheckedRun
    config: CollectConfig
    split: SplitConfig

    def problems(self) -> list[Problem]:
        """Initial states that are too few."""
        if self.config.temperature is not None or self.setting.spec.greedy_noise:
            return []
        found = []
        for task in self.env.tasks():
            states, wanted = len(self.split.train_states(task)), self.config.wanted(task)
            if states < wanted:
                own = wanted != self.config.num_demos
                flag, value = ("task_demos", f"{task.name}:{wanted}") if own else ("num_demos", wanted)
                text = (
                    f"--{flag} {value}: greedy actions are the same in every episode from a state, and "
                    f"{task.name}"
                    f" has {states} to record from; ask for fewer, or give --temperature"
                )
                found.append(Problem(flag, "too_few_states", text))
        return found

    def most_attempts(self, task: TaskSpec) -> int:
        """See `Player.most_attempts`; greedy actions from a state are always the same."""
        most = self.config.wanted(task) * self.config.max_attempts
        if self.config.temperature is not None or self.setting.spec.greedy_noise:
            return most
        return min(most, len(self.split.train_states(task)))

    def attempts(self, pool: WatchedPool, task: TaskSpec) -> Iterator[Attempt | EnvWorkerError]:
        """See `Player.attempts`."""
        config, most = self.config, self.most_attempts(task)
        states = self.split.train_states(task)
        planned = planned_episodes(task, states, config.seed, self.name, most)
        requests = [
            EpisodeRequest(task.suite, task.task_id, init_state_id, seed, str(number))
            for number, (init_state_id, seed) in enumerate(planned)
        ]
        played = kept = 0
        while requests:
            rate = 1.0 if config.keep == "all" else (kept + 1) / (played + 1)
            size = min(max(math.ceil((config.wanted(task) - kept) / rate), pool.num_slots), _BLOCK)
            block, requests = requests[:size], requests[size:]
            for attempt in self._play(pool, task, block):
                if isinstance(attempt, Attempt):
                    played += 1
                    kept += attempt.episode is not None
                yield attempt

    def _play(
        self, pool: WatchedPool, task: TaskSpec, requests: Sequence[EpisodeRequest]
    ) -> Iterator[Attempt | EnvWorkerError]:
        """Play these episodes, then record those that are to be kept."""
        config, setting = self.config, self.setting
        engine = RolloutEngine(
            pool,
            setting.options(watched=False),
            {"success": 1.0},
            RolloutConfig(deterministic_rollout=True, max_dropped_fraction=1.0),
            setting.tasks,
            setting.state_input,
        )
        temperature = config.temperature or 1.0
        samples = engine.run(requests, self._policy, temperature=temperature, greedy=config.temperature is None)
        played = {sample.uid: sample for sample in samples}
        lost = {dropped.request.uid: dropped.error for dropped in engine.stats.dropped}
        recorded = self._record(pool, task, [s for s in samples if s.success_at_end or config.keep == "all"])
        for request in requests:
            sample = played.get(request.uid)
            if sample is None:
                yield lost[request.uid]
            elif sample.success_at_end or config.keep == "all":
                yield next(recorded)
            else:
                yield Attempt(False, None)

    def _record(
        self, pool: WatchedPool, task: TaskSpec, samples: Sequence[Sample]
    ) -> Iterator[Attempt | EnvWorkerError]:
        """Play the actions of these episodes again, and record what is seen."""
        (played,) = (other for other in self.setting.tasks if other.task_id == task.task_id)
        options = self.env.env_kwargs()
        if task.max_steps != played.max_steps:  # several tasks, whose limits differ
            options |= {"max_steps": played.max_steps}
        spec = EnvSpec(task.suite, task.task_id, options)
        limit = task.action_limit
        commands = (
            PlayActions(spec, s.init_state_id, s.seed, np.clip(s.played_actions.numpy(), -limit, limit))
            for s in samples
        )
        checker = AnswerChecker(replace(task, max_steps=played.max_steps), options)
        return complete_episodes(pool, commands, checker)

    @cached_property
    def _policy(self) -> Policy:
        with passing_note(f"loading {self.setting.checkpoint.folder}"):
            actor: Any = self.setting.checkpoint.load_policy()
            return actor.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def policy_player(policy: PolicyConfig, asked: EnvConfig, config: CollectConfig, split: SplitConfig) -> PolicyPlayer:
    """The player of the policy in `config.policy`.

    Args:
        policy: further settings of the policy.
        asked: flags of the environment; those of what is seen are for the recording, see `recorded_env`.
        config: what is recorded.
        split: initial states.

    Raises:
        ConfigError: the folder cannot be read, is of another suite or task, or does not fit its environment.
    """
    assert config.policy is not None
    folder = policy_folder(config.policy, "policy")
    try:
        record = recorded_environment(folder)
    except ConfigError as error:
        raise ConfigError([p.of_flag("policy", config.policy) for p in error.problems]) from error
    played = asked
    if suite := record.get("task_suite_name"):  # else a foreign folder: what is recorded is what the policy reads
        if problems := _other_tasks(asked, record, config.policy):
            raise ConfigError(problems)
        options = {name: value for name, value in asked.options.items() if name not in sum(_roles(suite), ())}
        played = replace(asked, cameras=(), image_size=None, use_proprio=None, render_quality=None, options=options)
    setting, problems = check_run(replace(policy, pretrain=folder), played, SplitConfig("shared"), 1)
    if setting is None or problems:
        raise ConfigError([p if p.flag else p.of_flag("policy", config.policy) for p in problems])
    return PolicyPlayer(recorded_env(asked, setting.env), setting, config, split)


def _roles(suite: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A suite's options that say what an action is, and those that show what a robot cannot know."""
    options = get_suite(suite).options
    return ((), ()) if options is None else (options.action_options, options.privileged_options)


def _other_tasks(asked: EnvConfig, record: dict[str, Any], folder: str) -> list[Problem]:
    """A suite or tasks that the policy was not trained for."""
    suite = record["task_suite_name"]
    if asked.task_suite_name not in (None, suite):
        text = (
            f"--policy {folder} was trained in {suite}, and --task_suite_name names "
            f"{asked.task_suite_name}; leave that out"
        )
        return [Problem("policy", "other_suite", text)]
    known = {task.task_id: task.name for task in EnvConfig(env_python=asked.env_python).completed(record).tasks()}
    wanted = replace(asked, task_suite_name=suite).tasks() if asked.task_names else ()
    ids = [*asked.task_ids, *(task.task_id for task in wanted)]
    others = [str(task_id) for task_id in ids if task_id not in known]
    if not others:
        return []
    trained = ", ".join(f"{task_id} ({name})" for task_id, name in known.items())
    text = (
        f"--policy {folder} was trained on {trained}, and --task_ids names {' '.join(others)}; name "
        "some of its tasks, or leave that out"
    )
    return [Problem("policy", "other_tasks", text)]


def recorded_env(asked: EnvConfig, played: EnvConfig) -> EnvConfig:
    """The environment of the recording: that of the policy, with ordinary actions and nothing privileged.

    Args:
        asked: flags; cameras, image size, proprio, rendering and privileged options are taken from there if given.
        played: that of the policy.

    Raises:
        ConfigError: the actions that primitives consist of are not known, or an option says what an action is.
    """
    actions, privileged = _roles(played.suite)
    given = [name for name in actions if name in asked.options]
    if given:
        raise ConfigError(
            [
                Problem(
                    name,
                    "of_policy",
                    f"--{name}: the actions are those of --policy, and demonstrations hold ordinary ones; leave it out",
                )
                for name in given
            ]
        )
    ordinary = played.with_ordinary_actions()
    options = {name: value for name, value in ordinary.options.items() if name not in (*actions, *privileged)}
    return replace(
        ordinary,
        cameras=asked.cameras or ordinary.cameras,
        image_size=asked.image_size or ordinary.image_size,
        use_proprio=ordinary.use_proprio if asked.use_proprio is None else asked.use_proprio,
        render_quality=asked.render_quality or ordinary.render_quality,
        options=options | {name: value for name, value in asked.options.items() if name in privileged},
    )
