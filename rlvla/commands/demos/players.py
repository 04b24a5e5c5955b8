"""Players of demonstrations: scripted experts, trained policies, and policies that the expert corrects.

A policy plays an episode as it was trained, without images if it reads none. Its actions are then replayed in the
environment of the recording, which has the images and proprio that another policy reads before each step. Primitives
are recorded as the actions that they consist of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from rlvla.checkpoints.policy_folder import recorded_environment
from rlvla.commands.demos.config import CollectConfig
from rlvla.commands.demos.record import Attempt, Player, complete_episodes, planned_episodes, replay_actions
from rlvla.commands.run_policies import policy_folder
from rlvla.commands.setup import CheckedRun, check_run, instructions_of
from rlvla.commands.teleoperate import checked_bindings, serve_page
from rlvla.data.demonstrations import POLICY
from rlvla.data.robomimic import INTERVENTIONS
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig, heldout_problems
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.registry import get_suite
from rlvla.envs.workers.answer_checks import AnswerChecker
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.messages import EnvSpec, RunExpert
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.experience import Sample
from rlvla.models.config import PolicyConfig
from rlvla.models.policy import Policy
from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine
from rlvla.rollout.interventions import InterventionRule
from rlvla.teleoperation.config import TeleoperationConfig
from rlvla.teleoperation.controls import RESERVED_BESIDE_POLICY, Binding
from rlvla.teleoperation.pilot import Pilot
from rlvla.utils.cli.flags import as_typed, no_effect, no_effect_problems, range_problems
from rlvla.utils.errors import ConfigError, Problem, collected, require
from rlvla.utils.files import output_folder_problem
from rlvla.utils.seeding import derive_rng
from rlvla.utils.terminal import passing_note

_BLOCK = 64  # episodes that are played before the first of them is recorded


def checked_player(
    env: EnvConfig,
    config: CollectConfig,
    split: SplitConfig,
    workers: WorkerConfig,
    policy: PolicyConfig,
    expert: Callable[[], ExpertConfig],
    page: TeleoperationConfig | None = None,
) -> Player:
    """The player of a checked configuration.

    Args:
        env: flags of the environment.
        config: what is recorded, and by whom.
        split: initial states.
        workers: the worker processes.
        policy: further settings of the policy.
        expert: makes the expert's errors, or raises ConfigError.
        page: flags of the page; None: their defaults.

    Raises:
        ConfigError: all problems.
    """
    page = page or TeleoperationConfig()
    problems = [p for part in (env, config, split, workers, policy, page) for p in range_problems(part)]
    problems += workers.problems(env.env_python)
    if folder := output_folder_problem(config.output):
        problems.append(Problem("output", "folder_in_use", f"--output: {folder}"))
    errors = ExpertConfig()
    player: Player | None = None
    try:
        errors = expert()
    except ConfigError as error:
        problems += error.problems
    corrected = config.corrections or config.intervene == "expert"
    if config.policy is not None:
        unread = {} if corrected else _changed(errors)
        why = "--policy plays, not the scripted expert"
    else:
        unread, why = _changed(policy), "there is no --policy"
        for name in ("temperature", "corrections", "intervene"):
            unread |= {name: value} if (value := getattr(config, name)) else {}
    if config.corrections and config.intervene:
        text = "--corrections: the expert takes over once, at a random step; with --intervene, leave it out"
        problems.append(Problem("corrections", "contradiction", text))
    problems += no_effect_problems([config], {}, ())
    if config.policy is None or corrected:
        problems += no_effect_problems([errors], {}, ())
    problems += [no_effect(name, value, why) for name, value in unread.items()]
    if config.intervene != "page":
        problems += [no_effect(name, value, "there is no --intervene page") for name, value in _changed(page).items()]
    try:
        if config.policy is None:
            player = ExpertPlayer(env, config, split, errors)
        else:
            player = policy_player(policy, env, config, split)
            if config.intervene == "page":
                player = PagePlayer(player.env, config, split, player.setting, page)
            elif config.corrections:
                player = CorrectionPlayer(player.env, config, split, player.setting, errors)
            elif config.intervene == "expert":
                player = InterventionPlayer(player.env, config, split, player.setting, errors)
        tasks = player.env.tasks()
        problems += config.problems(tasks) + split.problems(tasks, 1) + player.problems()
        problems += instructions_of(player.env, tasks)[1]
        problems += heldout_problems(split.heldout_tasks, player.env, tasks)
    except ConfigError as error:
        problems += error.problems
    if problems or player is None:
        raise ConfigError(dict.fromkeys(problems))
    return player


def _changed(group: Any) -> dict[str, Any]:
    """The flags of a group that are not at their defaults, by name."""
    return {f.name: value for f in fields(group) if (value := getattr(group, f.name)) != f.default}


@dataclass
class ExpertPlayer(Player):
    """Plays the scripted expert of each task.

    Attributes:
        expert: the expert's errors.
    """

    name: ClassVar[str] = "expert"
    advice: ClassVar[str] = "lower its errors"
    expert: ExpertConfig

    def problems(self) -> list[Problem]:
        """Tasks that the expert cannot play."""
        return _expert_problems(self.env, self.expert)

    def attempts(self, pool: WatchedPool, task: TaskSpec) -> Iterator[Attempt | EnvWorkerError]:
        """See `Player.attempts`."""
        options = self.env.env_kwargs()
        spec = EnvSpec(task.suite, task.task_id, options)
        planned = planned_episodes(task, self.split, self.config.seed, self.name, self.most_attempts(task))
        commands = (RunExpert(spec, init_state_id, number, self.expert) for init_state_id, number in planned)
        return complete_episodes(pool, commands, AnswerChecker(task, options))


def _expert_problems(env: EnvConfig, expert: ExpertConfig) -> list[Problem]:
    """Tasks that the scripted expert cannot play."""
    problems = []
    for task in env.tasks():
        if task.primitives:
            text = f"the scripted expert of {task.name} gives actions of the controller, not primitives; leave "
            problems.append(Problem("task_suite_name", "primitives", f"{text}--action_space out"))
        try:
            make_expert(env.suite, task, expert)
        except ConfigError as error:
            problems += error.problems
    return problems


@dataclass
class PolicyPlayer(Player):
    """Plays a trained policy.

    Attributes:
        setting: the policy and the environment that it plays in.
    """

    name: ClassVar[str] = POLICY
    advice: ClassVar[str] = "train it for longer"
    setting: CheckedRun

    @property
    def _repeats(self) -> bool:
        """Whether all episodes from an initial state are the same."""
        return self.config.temperature is None and not self.setting.spec.greedy_noise

    def problems(self) -> list[Problem]:
        """Too few initial states."""
        problems = []
        for task in self.env.tasks() if self._repeats else ():
            states, number = len(self.split.train_states(task)), self.config.wanted(task)
            if states < number:
                of_task = number != self.config.num_demos
                flag, value = ("task_demos", f"{task.name}:{number}") if of_task else ("num_demos", number)
                text = (
                    f"--{flag} {value}: greedy actions are the same in every episode from a state, and {task.name} "
                    f"has {states} to record from; ask for fewer, or give --temperature"
                )
                problems.append(Problem(flag, "too_few_states", text))
        return problems

    def most_attempts(self, task: TaskSpec) -> int:
        """See `Player.most_attempts`."""
        most = super().most_attempts(task)
        return min(most, len(self.split.train_states(task))) if self._repeats else most

    def attempts(self, pool: WatchedPool, task: TaskSpec) -> Iterator[Attempt | EnvWorkerError]:
        """See `Player.attempts`."""
        config = self.config
        planned = planned_episodes(task, self.split, config.seed, self.name, self.most_attempts(task))
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
                    kept += attempt.episode is not None and (attempt.success or config.keep == "all")
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
            instructions=setting.instructions,
        )
        temperature = config.temperature or 1.0
        samples = engine.run(
            requests,
            self._policy,
            temperature=temperature,
            greedy=config.temperature is None,
            interventions=self._interventions,
        )
        played = {sample.uid: sample for sample in samples}
        lost = {dropped.request.uid: dropped.error for dropped in engine.stats.dropped}
        (limit,) = (other.max_steps for other in setting.tasks if other.task_id == task.task_id)
        recorded = self._recorded(pool, task, limit, [s for s in samples if self._is_recorded(s)])
        for request in requests:
            sample = played.get(request.uid)
            if sample is None:
                yield lost[request.uid]
            elif self._is_recorded(sample):
                yield next(recorded)
            else:
                yield Attempt(False, None)

    @property
    def _interventions(self) -> InterventionRule | None:
        """When the scripted expert takes over; None: never."""
        return None

    def _is_recorded(self, sample: Sample) -> bool:
        return sample.success_at_end or self.config.keep == "all"

    def _recorded(
        self, pool: WatchedPool, task: TaskSpec, max_steps: int, samples: Sequence[Sample]
    ) -> Iterator[Attempt | EnvWorkerError]:
        """The episodes again, in the environment of the recording."""
        return replay_actions(pool, self.env, task.task_id, max_steps, samples)

    @cached_property
    def _policy(self) -> Policy:
        with passing_note(f"loading {self.setting.checkpoint.folder}"):
            actor: Any = self.setting.checkpoint.load_policy()
            return actor.eval().to("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class CorrectionPlayer(PolicyPlayer):
    """Plays a trained policy until the scripted expert takes over, at a random step.

    So the expert's actions are recorded in the states that the policy visits (DAgger, Ross et al. 2011). Its whole
    chunks are recorded, as it keeps control until the end (HG-DAgger, Kelly et al. 2019).

    Attributes:
        expert: the expert's errors.
    """

    name: ClassVar[str] = "expert after its takeover"
    advice: ClassVar[str] = "lower the expert's errors, or train the policy for longer"
    expert: ExpertConfig

    def problems(self) -> list[Problem]:
        """Too few initial states, or tasks that the expert cannot play."""
        return super().problems() + _expert_problems(self.env, self.expert)

    @property
    def _repeats(self) -> bool:
        return False  # the expert takes over at other steps

    def _is_recorded(self, sample: Sample) -> bool:
        return True

    def _recorded(
        self, pool: WatchedPool, task: TaskSpec, max_steps: int, samples: Sequence[Sample]
    ) -> Iterator[Attempt | EnvWorkerError]:
        """The episodes with the expert's part."""
        seeds = [(self.config.seed, "takeover", task.task_id, s.init_state_id, s.seed) for s in samples]
        steps = [int(derive_rng(*seed).integers(len(s.played_actions))) for seed, s in zip(seeds, samples)]
        episodes = replay_actions(pool, self.env, task.task_id, max_steps, samples, takeovers=steps, expert=self.expert)
        for attempt, step in zip(episodes, steps):
            yield _expert_part(attempt, step) if isinstance(attempt, Attempt) else attempt


def _expert_part(attempt: Attempt, takeover: int) -> Attempt:
    """An episode whose observations, and so its training rows, begin at the step where the expert takes over."""
    episode = attempt.episode
    assert episode is not None
    steps = len(episode["actions"])
    if steps <= takeover:  # it ended before
        return Attempt(False, None)
    proprio = None if episode["proprio"] is None else episode["proprio"][takeover:]
    part = episode | {"images": episode["images"][takeover:], "proprio": proprio}
    return Attempt(attempt.success, part | {"more": {"decision_steps": np.arange(takeover, steps)}})


@dataclass
class InterventionPlayer(PolicyPlayer):
    """Plays a trained policy, from which the scripted expert takes over as `InterventionRule` says.

    So that interventions can be measured without people (HG-DAgger, Kelly et al. 2019). The steps of both are recorded,
    with flags.

    Attributes:
        expert: the expert's errors.
    """

    name: ClassVar[str] = "corrected policy"
    advice: ClassVar[str] = "lower the expert's errors, let it take over earlier (--intervene_reserve)"
    expert: ExpertConfig
    _flags: list[np.ndarray] = field(default_factory=list, init=False)  # of the recorded episodes

    def problems(self) -> list[Problem]:
        """Too few initial states, or tasks that the expert cannot play."""
        problems = super().problems() + _expert_problems(self.env, self.expert)
        if any(task.primitives for task in self.setting.tasks):
            text = "--intervene expert: the expert gives actions of the controller, and --policy plays primitives"
            problems.append(Problem("intervene", "primitives", f"{text}; take --corrections"))
        return problems

    @property
    def _repeats(self) -> bool:
        return super()._repeats and self.expert == ExpertConfig()

    @property
    def _interventions(self) -> InterventionRule:
        return InterventionRule(self.config.intervene_patience, self.config.intervene_reserve, self.expert)

    def _recorded(
        self, pool: WatchedPool, task: TaskSpec, max_steps: int, samples: Sequence[Sample]
    ) -> Iterator[Attempt | EnvWorkerError]:
        """The episodes with flags."""
        for sample, attempt in zip(samples, super()._recorded(pool, task, max_steps, samples)):
            if isinstance(attempt, Attempt):
                assert sample.interventions is not None
                episode: Any = attempt.episode
                self._flags.append(sample.interventions.numpy())
                attempt = Attempt(attempt.success, episode | {"more": {INTERVENTIONS: self._flags[-1]}})
            yield attempt

    def summary(self) -> str:
        """See `Player.summary`."""
        share, unaided = np.concatenate(self._flags).mean(), sum(not flags.any() for flags in self._flags)
        return f"{share:.0%} of the recorded steps are the expert's; {unaided} of {len(self._flags)} episodes have none"


def policy_player(policy: PolicyConfig, asked: EnvConfig, config: CollectConfig, split: SplitConfig) -> PolicyPlayer:
    """The player of the policy in `config.policy`.

    Args:
        policy: further settings of the policy.
        asked: flags of the environment; cameras, proprio and rendering apply to the recording, see `recorded_env`.
        config: what is recorded.
        split: initial states.

    Raises:
        ConfigError: the folder cannot be read, is of another suite or task, or does not fit its environment.
    """
    assert config.policy is not None
    folder = policy_folder(config.policy, "policy", asked.env_python)
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
    return PolicyPlayer(recorded_env(asked, setting.env), config, split, setting)


def _roles(suite: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A suite's options that define its actions, and its privileged options."""
    options = get_suite(suite).options
    return ((), ()) if options is None else (options.action_options, options.privileged_options)


def _other_tasks(asked: EnvConfig, record: dict[str, Any], folder: str) -> list[Problem]:
    """A suite or tasks that the policy was not trained for."""
    suite = record["task_suite_name"]
    if asked.task_suite_name not in (None, suite):
        text = f"--policy {folder} was trained in {suite}, not in --task_suite_name {asked.task_suite_name}"
        return [Problem("policy", "other_suite", f"{text}; leave that out")]
    trained = {task.task_id: task.name for task in EnvConfig(env_python=asked.env_python).completed(record).tasks()}
    named = replace(asked, task_suite_name=suite).tasks() if asked.task_names else ()
    others = [str(n) for n in (*asked.task_ids, *(task.task_id for task in named)) if n not in trained]
    if not others:
        return []
    names = ", ".join(f"{task_id} ({name})" for task_id, name in trained.items())
    text = f"--policy {folder} was trained on {names}, and --task_ids names {' '.join(others)}; name some of its tasks"
    return [Problem("policy", "other_tasks", f"{text}, or leave that out")]


def recorded_env(asked: EnvConfig, played: EnvConfig) -> EnvConfig:
    """The environment of the recording: that of the policy, with ordinary actions and nothing privileged.

    Args:
        asked: flags; cameras, image size, proprio, rendering and privileged options take precedence if given.
        played: that of the policy.

    Raises:
        ConfigError: the actions that primitives consist of are not known, or an option defines the actions.
    """
    actions, privileged = _roles(played.suite)
    given = [name for name in actions if name in asked.options]
    if given:
        text = "the actions are those of --policy, and demonstrations hold ordinary ones; leave it out"
        raise ConfigError([Problem(name, "of_policy", f"--{name}: {text}") for name in given])
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


@dataclass
class PagePlayer(PolicyPlayer):
    """Plays a trained policy on a page of the browser, where a person takes over and gives back (HG-DAgger).

    The policy plays in the environment of the recording, which shows it what it was trained on.

    Attributes:
        page: flags of the page.
    """

    page: TeleoperationConfig

    @property
    def _bindings(self) -> list[Binding]:
        return checked_bindings(self.page, self.env.tasks(), RESERVED_BESIDE_POLICY)

    def problems(self) -> list[Problem]:
        """Controls that are malformed, and a policy that cannot play in the environment of the recording."""
        require("websockets.asyncio.server", extra="serve")
        if any(task.primitives for task in self.setting.tasks):
            text = "--intervene page: --policy plays primitives, and keys command actions of the controller; take one"
            return [Problem("intervene", "primitives", f"{text} with ordinary actions")]
        problems = self._observation_problems()
        collected(problems, lambda: self._bindings)
        return problems

    def _observation_problems(self) -> list[Problem]:
        """Mismatches between the observations of the recording and those that the policy was trained on."""
        recorded, trained, spec = self.env, self.setting.env, self.setting.spec
        size, problems = get_suite(trained.suite).default_image_size, []
        values: dict[str, tuple[Any, Any]] = {}
        if spec.reads_images:
            values["cameras"] = recorded.camera_names, trained.camera_names
            values["image_size"] = recorded.image_size or size, trained.image_size or size
            values["render_quality"] = recorded.render_quality or "fast", trained.render_quality or "fast"
        if spec.proprio_dim:
            values["use_proprio"] = recorded.use_proprio, trained.use_proprio
        for name, (asked, needed) in values.items():
            if asked != needed:
                text = f"{as_typed(name, asked)}: with --intervene page the policy acts on the recorded observations"
                text += f", and it was trained with {as_typed(name, needed)}; leave it out"
                problems.append(Problem(name, "of_policy", text))
        for name in _roles(trained.suite)[1]:
            if trained.options.get(name) and not recorded.options.get(name):
                text = f"--policy {self.config.policy} reads privileged state, which is recorded with --{name} only"
                problems.append(Problem("policy", "needs_flag", f"{text}; give --{name}"))
        return problems

    def record(self, workers: WorkerConfig, custom_modules: Sequence[str] = ()) -> Path | None:
        """Serve the page until the person finishes; the HDF5 file, or None without kept episodes."""
        config, tasks = self.config, self.env.tasks()
        page = replace(self.page, output=config.output, num_demos=config.num_demos * len(tasks), seed=config.seed)
        return serve_page(
            self.env,
            tasks,
            self._bindings,
            page,
            split=self.split,
            workers=workers,
            custom_modules=custom_modules,
            pilot=Pilot(self._policy, config.temperature, self.setting.state_input, self.setting.instructions),
            keep_failures=config.keep == "all",
        )
