"""Reward source and success detector `vlm`.

The reward source scores frames during the episode; its rewards are available when the episode is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.rewards.base import EpisodeStart, StepInfo, register_reward
from rlvla.rewards.success_source import register_success_source
from rlvla.rewards.vlm.chain import ChainSettings, FrameJudgment, chain_rewards
from rlvla.rewards.vlm.client import FailedAnswer, VLMResult
from rlvla.rewards.vlm.questions import Score, question_named, question_names
from rlvla.rewards.vlm.scorers import Scorer
from rlvla.rewards.vlm.server import VLMServer, prompt_fields
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.video import upright

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig


@register_reward("vlm", kinds=question_names, scores_decisions=True)
class VLMSource:
    """Scores frames with a vision-language model.

    Args:
        config: settings of the rewards.
        kind: name of the question; default: that of `vlm_scorer`, with the prompt of `vlm_prompt`.

    Attributes:
        gamma: discount of the potential term; the trainer sets it to the learner's.
        bootstraps: the learner bootstraps from truncated episodes; otherwise their potential ends at 0 as well.
        server: the VLM server, shared with the other sources of a plan.
    """

    def __init__(self, config: RewardConfig, kind: str | None = None):
        name = kind or config.vlm_scorer
        problems = []
        if not question_named(name).measures_progress and config.vlm_progress_term != "delta" and kind is None:
            text = (
                f"--vlm_progress_term {config.vlm_progress_term} has no effect with --vlm_scorer {name}; leave it out"
            )
            problems.append(Problem("vlm_progress_term", "no_effect", text))
        scorer, of_the_prompt = None, list[Problem]()
        try:
            scorer = Scorer(name, None if kind else config.vlm_prompt)
        except ConfigError as error:
            of_the_prompt = error.problems
        self.server = VLMServer(config, "--reward vlm")
        problems += self.server.problems(scorer, episode_frames=config.vlm_episode_frames) + of_the_prompt
        if problems or scorer is None:
            raise ConfigError(problems)
        self.server.register(scorer)
        self._config, self._scorer = config, scorer
        self._weight = config.vlm_curriculum[0]
        self.gamma = 0.99 if config.gamma_shaping is None else config.gamma_shaping
        self.bootstraps = True

    def start_iteration(self, fraction: float) -> None:
        """Advance the curriculum, linear in training progress."""
        first, last = self._config.vlm_curriculum
        self._weight = first + fraction * (last - first)

    def create(self, task: TaskSpec, episode: EpisodeStart) -> VLMReward:
        """Create the reward of one episode; its first frame is scored at once."""
        if episode.observation is None:
            raise ValueError("the vlm reward needs the episode's first observation")
        return VLMReward(
            self.server,
            self._scorer,
            prompt_fields(task.name, episode.observation),
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
            term="change" if self._scorer.question.is_change else config.vlm_progress_term,
            gamma=self.gamma,
            action_weight=config.vlm_action_weight,
            progress_weight=config.vlm_progress_weight,
            scale=config.vlm_reward_scale,
            weight_inside=config.vlm_curriculum_inside,
        )


class VLMReward:
    """The frames of one episode and their scores.

    Args:
        server: the VLM server.
        scorer: the question and the parser of its answers.
        fields: of the prompt, see `Scorer.prompt`.
        settings: conversion of scores to rewards.
        config: which frames are scored.
        weight: current curriculum weight.
        first: observation after the reset.
        bootstraps: see `VLMSource`.
        images_flipped_vertically: see `TaskSpec`.
    """

    def __init__(
        self,
        server: VLMServer,
        scorer: Scorer,
        fields: Mapping[str, str],
        settings: ChainSettings,
        config: RewardConfig,
        weight: float,
        first: Observation,
        *,
        bootstraps: bool,
        images_flipped_vertically: bool,
    ):
        self._server, self._scorer, self._settings, self._config = server, scorer, settings, config
        self._weight, self._fields, self._bootstraps = weight, fields, bootstraps
        self._flipped = images_flipped_vertically
        self._latest = upright(first.images[0], images_flipped_vertically)
        self._frames = [self._latest]
        self._since = 0  # steps since the last scored frame
        self._windows: list[int] = []
        self._asked: list[Future[VLMResult]] = []
        self._unread: list[int] = []  # questions whose answers `late_progress` has not returned
        self._ends = False
        if scorer.frames == 1:
            self._ask(self._frames)

    def late_progress(self) -> list[tuple[int, float]]:
        """(steps before the frame, progress) of answers since the last call; [] for questions about changes."""
        if not self._scorer.question.measures_progress:
            return []
        done = [i for i in self._unread if self._asked[i].done()]
        self._unread = [i for i in self._unread if i not in done]
        steps = [0, *accumulate(self._windows)][self._scorer.frames - 1 :]  # two frames: none at the start
        answers = [(steps[i], self._asked[i].result()) for i in done]
        return [(step, answer.progress) for step, answer in answers if isinstance(answer, Score)]

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> None:
        """Count the step, and score its frame if it has one and enough steps have passed."""
        self._since += 1
        if observation is None:
            return
        self._latest = upright(observation.images[0], self._flipped)
        if self._since >= self._config.vlm_eval_frequency:
            self._close_window()

    def end(self, *, terminated: bool, truncated: bool) -> None:
        """Score the last frame, regardless of the number of steps since the previous one."""
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

    def _ask(self, images: Sequence[np.ndarray]) -> None:
        self._unread.append(len(self._asked))
        self._asked.append(self._server.ask(self._scorer, self._fields, images))

    def finish(self) -> dict[str, Any]:
        """Wait for the answers (each has a time limit) and convert them to rewards."""
        answers = [future.result() for future in self._asked]
        progress = [answer.progress if isinstance(answer, Score) else None for answer in answers]
        if self._scorer.frames:
            rewards = self._chain(answers)
        else:  # one score of the whole episode
            score = progress[-1]
            value = 0.0 if score is None else self._config.vlm_reward_scale * self._weight * score
            rewards = [0.0] * (sum(self._windows) - 1) + [value]
        return {
            "rewards": rewards,
            "progress": next((p for p in reversed(progress) if p is not None), 0.0),
            "failed": sum(isinstance(answer, FailedAnswer) for answer in answers),
        }

    def scores(self) -> list[tuple[int, float, float]]:
        """(steps, action score, progress) of the frames after the start; NaN where a request failed.

        [] for questions that do not measure progress.
        """
        if not self._scorer.question.measures_progress:
            return []
        answers = [future.result() for future in self._asked]
        ends = [0, *accumulate(self._windows)][self._scorer.frames - 1 :]
        failed = Score(math.nan, math.nan)
        scores = [answer if isinstance(answer, Score) else failed for answer in answers]
        return [(steps, score.action_score, score.progress) for steps, score in zip(ends, scores) if steps]

    def _chain(self, answers: list[VLMResult]) -> list[float]:
        scores = [answer if isinstance(answer, Score) else None for answer in answers]
        if self._scorer.frames == 2:  # comparisons start with the second frame
            at_start = self._scorer.question.at_start
            scores.insert(0, None if at_start is None else Score(at_start))
        judged = [
            FrameJudgment(n, s.progress if s else None, s.action_score if s else 0.0, self._weight)
            for n, s in zip([0, *self._windows], scores)
        ]
        return chain_rewards(judged[0], judged[1:], self._settings, self._ends)

    def release(self) -> None:
        """Forget the frames."""
        self._frames.clear()


@register_success_source("vlm")
class VLMSuccess:
    """Success detector: asks a vision-language model whether the task is done.

    Attributes:
        server: the VLM server, shared with the reward sources of a plan.

    Raises:
        ConfigError: the server is missing or cannot judge.
    """

    def __init__(self, config: Any):
        self._scorer = Scorer("success")
        self.server = VLMServer(config, "--success_source vlm")
        problems = self.server.problems(self._scorer)
        if problems:
            raise ConfigError(problems)
        self.server.register(self._scorer)

    def ask(self, task: TaskSpec, observation: Observation) -> Future[VLMResult]:
        """Ask about the first image."""
        image = upright(observation.images[0], task.images_flipped_vertically)
        return self.server.ask(self._scorer, prompt_fields(task.name, observation), [image])

    def probability(self, answer: VLMResult) -> float | None:
        """P(success); None if the request failed."""
        return answer.progress if isinstance(answer, Score) else None
