"""Propositions of reward machines, judged by a vision-language model: yes or no for the sentence of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rlvla.rewards.vlm.client import VLMResult
from rlvla.rewards.vlm.questions import PROPOSITION, Score
from rlvla.rewards.vlm.scorers import Scorer
from rlvla.rewards.vlm.sentences import parse_sentences, sentence_of
from rlvla.rewards.vlm.server import VLMServer, words_of
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.video import upright

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig


class VLMPropositions:
    """Asks about propositions.

    Attributes:
        sentences: sentences given by `--rm_sentences`, by proposition.
        server: where questions are asked.

    Raises:
        ConfigError: the server is not given or cannot judge, or a sentence is malformed.
    """

    def __init__(self, config: RewardConfig):
        problems: list[Problem] = []
        try:
            self.sentences = parse_sentences(config.rm_sentences)
        except ConfigError as error:
            problems += error.problems
        self._scorer = Scorer(PROPOSITION)
        self.server = VLMServer(config, "--rm_propositions vlm")
        problems += self.server.problems(self._scorer)
        if problems:
            raise ConfigError(problems)
        self.server.register(self._scorer)

    def begin(self, task: TaskSpec, first: Observation, names: Sequence[str]) -> EpisodePropositions:
        """Start an episode; its first frame is judged at once.

        Args:
            task: the task.
            first: observation after the reset.
            names: the propositions.
        """
        statements = {name: self.sentences.get(name) or sentence_of(name) for name in names}
        return EpisodePropositions(self.server, self._scorer, task, first, statements)


class EpisodePropositions:
    """The answers about the frames of one episode.

    Args:
        server: where questions are asked.
        scorer: the question.
        task: the task.
        first: observation after the reset.
        statements: proposition -> sentence.

    Attributes:
        unanswered: questions that could not be answered, of those read so far.
    """

    def __init__(
        self, server: VLMServer, scorer: Scorer, task: TaskSpec, first: Observation, statements: Mapping[str, str]
    ):
        self._server, self._scorer, self._statements = server, scorer, dict(statements)
        self._words, self._flipped = words_of(task.name, first), task.images_flipped_vertically
        self._asked: list[dict[str, Future[VLMResult]]] = []
        self._read = 0  # frames whose answers have been read
        self._known: dict[str, bool] = dict.fromkeys(statements, False)
        self.unanswered = 0
        self.ask(first)

    @property
    def frames(self) -> int:
        """Frames asked about so far, that after the reset included."""
        return len(self._asked)

    @property
    def unread(self) -> list[Future[VLMResult]]:
        """The answers that `holding` has not read yet, about whichever frame."""
        return [answer for answers in self._asked[self._read :] for answer in answers.values()]

    def ask(self, observation: Observation) -> None:
        """Ask about each proposition in the first image of an observation; returns immediately."""
        image = upright(observation.images[0], self._flipped)
        answers = {
            name: self._server.ask(self._scorer, {**self._words, "statement": statement}, [image])
            for name, statement in self._statements.items()
        }
        self._asked.append(answers)

    def holding(self, frame: int | None) -> frozenset[str]:
        """The propositions that hold in a frame (None: as in the last one read); waits for the answers up to it."""
        last = 0 if frame is None else frame
        while self._read <= last:
            for name, future in self._asked[self._read].items():
                answer = future.result()
                if isinstance(answer, Score):
                    self._known[name] = answer.progress > 0.5
                else:
                    self.unanswered += 1
            self._read += 1
        return frozenset(name for name, holds in self._known.items() if holds)
