"""The reward source `vlm`: frames are scored during the episode, rewards are available when it is over."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.rewards.base import EpisodeStart, StepInfo, register_reward
from rlvla.rewards.remote import url_problem
from rlvla.rewards.vlm.chain import ChainSettings, FrameJudgment, chain_rewards
from rlvla.rewards.vlm.client import FailedAnswer, VLMClient, VLMResult
from rlvla.rewards.vlm.config import WITHOUT_PROGRESS_TERM
from rlvla.rewards.vlm.scorers import Score, Scorer
from rlvla.rewards.vlm.server_check import server_problem
from rlvla.utils.errors import ConfigError, Problem, TrainingHalted
from rlvla.utils.terminal import log
from rlvla.utils.video import upright

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig


class VLMFailuresError(TrainingHalted):
    """Too many requests failed for meaningful rewards."""


@register_reward("vlm")
class VLMSource:
    """Scores frames with a vision-language model.

    Attributes:
        gamma: discount of the potential term; the trainer sets it to the learner's.
        bootstraps: the learner bootstraps from truncated episodes; otherwise their potential ends at 0 as well.
    """

    def __init__(self, config: RewardConfig):
        problems = [
            Problem(name, "needs_flag", f"--reward vlm needs --{name}")
            for name in ("vlm_url", "vlm_model")
            if not getattr(config, name)
        ]
        if config.vlm_scorer in WITHOUT_PROGRESS_TERM and config.vlm_progress_term != "delta":
            text = (
                f"--vlm_progress_term {config.vlm_progress_term} has no effect with --vlm_scorer {config.vlm_scorer}; "
                "leave it out"
            )
            problems.append(Problem("vlm_progress_term", "no_effect", text))
        scorer, of_the_prompt = None, []
        try:
            scorer = Scorer(config.vlm_scorer, config.vlm_prompt)
        except ConfigError as error:
            of_the_prompt = error.problems
        if config.vlm_url:
            problem = url_problem(config.vlm_url, "vlm_url")
            if problem is None and config.vlm_model and scorer is not None:
                problem = server_problem(config, scorer)
            problems += [problem] if problem else []
        problems += of_the_prompt
        if problems or scorer is None:
            raise ConfigError(problems)
        self._config, self._scorer = config, scorer
        self._client: VLMClient | None = None
        self._weight = config.vlm_curriculum[0]
        self.gamma = 0.99 if config.gamma_shaping is None else config.gamma_shaping
        self.bootstraps = True

    @property
    def client(self) -> VLMClient:
        """The client, created on first use."""
        if self._client is None:
            self._client = VLMClient(self._config, self._scorer)
        return self._client

    def start_iteration(self, fraction: float) -> None:
        """Advance the curriculum, linear in training progress."""
        first, last = self._config.vlm_curriculum
        self._weight = first + fraction * (last - first)

    def create(self, task: TaskSpec, episode: EpisodeStart) -> VLMReward:
        """Create the reward of one episode; its first frame is scored at once."""
        return VLMReward(
            self.client,
            self._scorer,
            self._settings(),
            self._config,
            self._weight,
            episode.observation,
            bootstraps=self.bootstraps,
            images_flipped_vertically=task.images_flipped_vertically,
        )

    def _settings(self) -> ChainSettings:
        config = self._config
        return ChainSettings(
            term="change" if config.vlm_scorer == "pairwise" else config.vlm_progress_term,
            gamma=self.gamma,
            action_weight=config.vlm_action_weight,
            progress_weight=config.vlm_progress_weight,
            scale=config.vlm_reward_scale,
            weight_inside=config.vlm_curriculum_inside,
        )

    def metrics(self) -> dict[str, float]:
        """Requests, failures, cache hits, tokens, seconds of the iteration."""
        return {f"reward/vlm_{name}": value for name, value in self.client.take_metrics().items()}

    def check(self, metrics: Mapping[str, float]) -> None:
        """VLMFailuresError if too many of the iteration's requests failed."""
        requests, failures = metrics["reward/vlm_requests"], metrics["reward/vlm_failures"]
        if failures > self._config.vlm_max_failures * requests:
            last = self.client.last_failure
            why = f"{last.kind}: {last.message}" if last else "see the warnings of the other ranks"
            if last:  # the error is reported by one rank, which may have had no failure itself
                log.warning("the last failing request to %s: %s: %s", self._config.vlm_url, last.kind, last.message)
            raise VLMFailuresError(
                f"{failures:.0f} of {requests:.0f} requests to --vlm_url {self._config.vlm_url} failed in this "
                f"iteration, more than --vlm_max_failures {self._config.vlm_max_failures} allows. The last one: {why}"
            )

    def close(self) -> None:
        """Cancel pending requests."""
        if self._client is not None:
            self._client.close()
            self._client = None


class VLMReward:
    """The frames of one episode and their scores.

    Args:
        client: client of the server.
        scorer: prompt and parser of the answers.
        settings: conversion of scores to rewards.
        config: which frames are scored.
        weight: current curriculum weight.
        first: observation after the reset.
        bootstraps: see `VLMSource`.
        images_flipped_vertically: see `TaskSpec`.
    """

    def __init__(
        self,
        client: VLMClient,
        scorer: Scorer,
        settings: ChainSettings,
        config: RewardConfig,
        weight: float,
        first: Observation | None,
        *,
        bootstraps: bool,
        images_flipped_vertically: bool,
    ):
        if first is None:
            raise ValueError("the vlm reward needs the episode's first observation")
        self._client, self._scorer, self._settings, self._config = client, scorer, settings, config
        self._weight, self._task, self._bootstraps = weight, first.instruction, bootstraps
        self._flipped = images_flipped_vertically
        self._latest = upright(first.images[0], images_flipped_vertically)
        self._frames = [self._latest]
        self._since = 0  # steps since the last scored frame
        self._windows: list[int] = []
        self._asked: list[Future[VLMResult]] = []
        self._unheard: list[int] = []  # questions whose answers `late_progress` has not returned
        self._ends = False
        if scorer.frames == 1:
            self._ask(self._frames)

    def late_progress(self) -> list[tuple[int, float]]:
        """Scores that have arrived since the last call, each with the steps before its frame; [] for comparisons."""
        known = [] if self._scorer.frames != 1 else [i for i in self._unheard if self._asked[i].done()]
        self._unheard = [i for i in self._unheard if i not in known]
        steps = [0, *accumulate(self._windows)]
        answers = [(steps[i], self._asked[i].result()) for i in known]
        return [(step, answer.progress) for step, answer in answers if isinstance(answer, Score)]

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> None:
        """Count the step; if there is a frame and enough steps have passed, request a score."""
        self._since += 1
        if observation is None:
            return
        self._latest = upright(observation.images[0], self._flipped)
        if self._since >= self._config.vlm_eval_frequency:
            self._close_window()

    def end(self, *, terminated: bool, truncated: bool) -> None:
        """Request a score for the last frame, regardless of the number of steps since the previous one."""
        if self._since:
            self._close_window()
        if not self._scorer.frames:
            self._judge_episode()
        self._ends = terminated or (truncated and not self._bootstraps)

    def _close_window(self) -> None:
        self._frames.append(self._latest)
        if self._scorer.frames:
            self._ask(self._frames[-self._scorer.frames :])
        self._windows.append(self._since)
        self._since = 0

    def _judge_episode(self) -> None:
        count = min(len(self._frames), self._config.vlm_episode_frames)
        chosen = np.linspace(0, len(self._frames) - 1, count).round().astype(int)
        self._ask([self._frames[i] for i in chosen])

    def _ask(self, images: list[np.ndarray]) -> None:
        self._unheard.append(len(self._asked))
        self._asked.append(self._client.ask(self._task, images))

    def finish(self) -> dict[str, Any]:
        """Wait for the answers (each has a time limit) and convert them to rewards."""
        answers = [future.result() for future in self._asked]
        progress = [answer.progress if isinstance(answer, Score) else None for answer in answers]
        rewards = self._whole_episode(progress[-1]) if not self._scorer.frames else self._chain(answers)
        known = [p for p in progress if p is not None]
        return {
            "rewards": rewards,
            "progress": known[-1] if known else 0.0,
            "failed": sum(isinstance(answer, FailedAnswer) for answer in answers),
        }

    def _chain(self, answers: list[VLMResult]) -> list[float]:
        scores = [answer if isinstance(answer, Score) else None for answer in answers]
        if self._scorer.frames == 2:  # comparisons start with the second frame
            scores.insert(0, None)
        judged = [
            FrameJudgment(n, s.progress if s else None, s.action_score if s else 0.0, self._weight)
            for n, s in zip([0, *self._windows], scores)
        ]
        return chain_rewards(judged[0], judged[1:], self._settings, self._ends)

    def _whole_episode(self, score: float | None) -> list[float]:
        value = 0.0 if score is None else self._config.vlm_reward_scale * self._weight * score
        return [0.0] * (sum(self._windows) - 1) + [value]

    def release(self) -> None:
        """Forget the frames."""
        self._frames.clear()
