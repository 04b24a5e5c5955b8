"""Propositions of reward machines, judged by a vision-language model: a yes-or-no question about a sentence each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rlvla.rewards.vlm.client import VLMResult
from rlvla.rewards.vlm.questions import PROPOSITION, Score
from rlvla.rewards.vlm.scorers import Scorer
from rlvla.rewards.vlm.server import VLMServer, prompt_fields
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.video import upright

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig

_OBJECT = "the object that the task is about"
_SENTENCES = {
    "near": "The gripper or marker of the robot is close to its target.",
    "reached": "The gripper or marker of the robot is at its target.",
    "grasped": f"The gripper holds {_OBJECT}.",
    "lifted": f"The robot has lifted {_OBJECT} clearly off the surface.",
    "above_bin": f"The robot holds {_OBJECT} above the bin where it belongs.",
    "in_bin": "The object lies in the bin.",
    "pushed": "The other object has been pushed to its place.",
    "placed": f"{_OBJECT.capitalize()} is where it belongs, and the gripper has let go of it.",
    "aligned": f"{_OBJECT.capitalize()} is straight above the place where it belongs.",
    "inserted": "The peg is in the hole.",
    "cubeA_grasped": "The gripper holds the red cube.",
    "cubeA_lifted": "The robot has lifted the red cube clearly off the table.",
    "cubes_aligned": "The red cube is lifted and straight above the green cube.",
    "stacked": "The red cube lies on the green cube, and the gripper has let go of it.",
    "unlatched": "The handle of the door is turned.",
    "opened": "The door is open.",
    "contact": "The tool touches the dirt on the table.",
    "w25": "At least a quarter of the dirt is wiped away.",
    "w50": "At least half of the dirt is wiped away.",
    "w100": "All of the dirt is wiped away.",
    "collision": "The robot's arm hits the table.",
    "behind": f"The robot is right behind {_OBJECT}, on the side away from where it belongs.",
    "touching": f"The robot touches {_OBJECT}.",
    "near_zone": f"{_OBJECT.capitalize()} is close to the zone where it belongs.",
    "in_zone": f"{_OBJECT.capitalize()} lies in the zone where it belongs.",
    "touched": "The gripper touches what the task wants to be opened, closed or switched.",
}
# Propositions that begin with a predicate of LIBERO's goals, e.g. on_bowl_1_plate_1.
_PREDICATES = {
    "on": "is on",
    "in": "is in",
    "up": "stands upright",
    "open": "is open",
    "close": "is closed",
    "turnon": "is switched on",
    "turnoff": "is switched off",
}
# Stages of LIBERO's goals: of any object, or of the one that follows, e.g. grasped_bowl_1.
_STAGES = {
    "near": "The gripper of the robot is close to the {}.",
    "grasped": "The gripper holds the {}.",
    "lifted": "The robot has lifted the {} clearly off the surface.",
    "touched": "The gripper touches the {}.",
}
_TWO_THINGS = re.compile(r"(.+?_\d+)_(.+)")  # objects are numbered: bowl_1_plate_1


def sentence_of(proposition: str) -> str:
    """The sentence of a proposition; unknown ones are spelled out from their name."""
    if proposition in _SENTENCES:
        return _SENTENCES[proposition]
    predicate, objects = predicate_of(proposition)
    if predicate in _STAGES and objects:
        return _STAGES[predicate].format(*objects)
    if predicate in _PREDICATES and objects:
        place = f" the {objects[1]}" if len(objects) > 1 else ""
        return f"The {objects[0]} {_PREDICATES[predicate]}{place}."
    return f"This is the case: {proposition.replace('_', ' ')}."


def predicate_of(proposition: str) -> tuple[str, list[str]]:
    """`on_black_bowl_1_plate_1` -> ("on", ["black bowl", "plate"])."""
    predicate, _, names = proposition.partition("_")
    two = _TWO_THINGS.match(names) if predicate in ("on", "in") else None
    return predicate, [_spoken(name) for name in (two.groups() if two else (names,)) if name]


def _spoken(name: str) -> str:
    """`black_bowl_1` -> `black bowl`."""
    return " ".join(part for part in name.split("_") if not part.isdigit())


def parse_sentences(entries: Sequence[str], flag: str = "rm_sentences") -> dict[str, str]:
    """`["near=The marker is close."]` -> `{"near": "The marker is close."}`.

    Raises:
        ConfigError: malformed entries and duplicates (all reported at once).
    """
    sentences: dict[str, str] = {}
    problems = []
    for entry in entries:
        name, _, sentence = entry.partition("=")
        name, sentence = name.strip(), sentence.strip()
        if not name.isidentifier() or not sentence:
            text = f"--{flag} {entry!r}: write NAME=SENTENCE, e.g. 'grasped=The gripper holds the cube.'"
            problems.append(Problem(flag, "out_of_range", text))
        elif name in sentences:
            problems.append(Problem(flag, "duplicate", f"--{flag}: '{name}' is given twice"))
        sentences[name] = sentence
    if problems:
        raise ConfigError(problems)
    return sentences


class VLMPropositions:
    """Asks about propositions.

    Attributes:
        sentences: proposition -> sentence, from `--rm_sentences`.
        server: the VLM server.

    Raises:
        ConfigError: the server is missing or cannot judge, or a sentence is malformed.
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
        server: the VLM server.
        scorer: the question.
        task: the task.
        first: observation after the reset.
        statements: proposition -> sentence.

    Attributes:
        unanswered: questions without an answer, among the frames read so far.
    """

    def __init__(
        self, server: VLMServer, scorer: Scorer, task: TaskSpec, first: Observation, statements: Mapping[str, str]
    ):
        self._server, self._scorer, self._statements = server, scorer, dict(statements)
        self._fields, self._flipped = prompt_fields(task.name, first), task.images_flipped_vertically
        self._asked: list[dict[str, Future[VLMResult]]] = []
        self._read = 0  # frames whose answers have been read
        self._holds: dict[str, bool] = dict.fromkeys(statements, False)
        self.unanswered = 0
        self.ask(first)

    @property
    def frames(self) -> int:
        """Number of frames queried so far, including the one after the reset."""
        return len(self._asked)

    @property
    def unread(self) -> list[Future[VLMResult]]:
        """Answers that `holding` has not read yet."""
        return [answer for answers in self._asked[self._read :] for answer in answers.values()]

    def ask(self, observation: Observation) -> None:
        """Ask about each proposition in the first image of an observation; returns immediately."""
        image = upright(observation.images[0], self._flipped)
        answers = {
            name: self._server.ask(self._scorer, {**self._fields, "statement": statement}, [image])
            for name, statement in self._statements.items()
        }
        self._asked.append(answers)

    def holding(self, frame: int | None) -> frozenset[str]:
        """Propositions that hold in a frame (None: in the last one read); waits for the answers up to it."""
        last = 0 if frame is None else frame
        while self._read <= last:
            for name, future in self._asked[self._read].items():
                answer = future.result()
                if isinstance(answer, Score):
                    self._holds[name] = answer.progress > 0.5
                else:
                    self.unanswered += 1
            self._read += 1
        return frozenset(name for name, holds in self._holds.items() if holds)
