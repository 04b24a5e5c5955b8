"""Questions for vision-language models: prompts, answer formats, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Score:
    """A valid answer: progress in [0, 1] ([-1, 1] for a comparison), and an action score in [0, 1]; or a text."""

    progress: float
    action_score: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Number:
    """A number of an answer, in [low, high]."""

    low: float = 0.0
    high: float = 1.0
    whole: bool = False


@dataclass(frozen=True)
class OneOf:
    """An enumeration in an answer: all integers, or all strings."""

    values: tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A line of text in an answer, of at most `longest` characters."""

    longest: int


def only_number(answer: Mapping[str, Any]) -> Score:
    """The score of an answer with a single number."""
    (value,) = answer.values()
    return Score(float(value))


@dataclass(frozen=True)
class Question:
    """A question about images.

    Attributes:
        name: name of the question; `--reward vlm:NAME` pays for it, as the component `vlm_NAME`.
        prompt: text in which `{task}` (the instruction) and `{skill}` (the task's name) are replaced; other braces are
            written twice. None: the file `prompts/NAME.txt` of this package.
        answer: name -> format of the entries of the JSON answer; default: a number in [0, 1] named like the question.
            None: the answer is one word, True or False, and its log-prob the score.
        frames: 1: one image; 2: the previously scored image and this one; 0: images of the whole episode, at its end.
        score: maps a valid answer to its score.
        is_change: the score is a change in [-1, 1] rather than progress.
        at_start: progress before the first image; None: unknown, or measured (questions about one image).
    """

    name: str
    prompt: str | None = None
    answer: Mapping[str, Number | OneOf | Line] | None = field(default_factory=dict)
    frames: int = 1
    score: Callable[[Mapping[str, Any]], Score] = only_number
    is_change: bool = False
    at_start: float | None = None

    @property
    def entries(self) -> Mapping[str, Number | OneOf | Line] | None:
        """The entries of the JSON answer; None if the answer is one word."""
        return self.answer if self.answer is None or self.answer else {self.name: Number()}

    @property
    def template(self) -> str:
        """The prompt with its placeholders."""
        if self.prompt is not None:
            return self.prompt
        return resources.files("rlvla.rewards.vlm").joinpath(f"prompts/{self.name}.txt").read_text(encoding="utf-8")

    @property
    def measures_progress(self) -> bool:
        """Whether single answers are progress in [0, 1], which `--vlm_progress_term` converts to rewards."""
        return self.frames > 0 and not self.is_change


_QUESTIONS: dict[str, Question] = {}


def register_question(question: Question) -> Question:
    """Register a question under its name, for `--vlm_scorer NAME` and `--reward vlm:NAME:WEIGHT`.

    Raises:
        ValueError: the name cannot be part of a metric's name, or the prompt is not a valid template.
    """
    if not question.name.isidentifier():
        raise ValueError(f"a question is called by an identifier, not {question.name!r}")
    try:
        question.template.format(task="", skill="")
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"the prompt of the question {question.name} has braces that are neither {{task}} nor {{skill}} ({error}); "
            "write other braces twice"
        ) from None
    _QUESTIONS[question.name] = question
    return question


def question_names() -> list[str]:
    """Names of the registered questions, in the order of registration."""
    return list(_QUESTIONS)


def question_named(name: str) -> Question:
    """The registered question; KeyError if there is none."""
    return _QUESTIONS[name]


for _question in (
    Question(
        "progress",
        answer={"action_score": Number(), "progress": Number()},
        score=lambda answer: Score(answer["progress"], answer["action_score"]),
    ),
    Question("success"),
    Question("grasp"),
    Question("contact", frames=2, at_start=0.0),
    Question("affordance"),
    Question("pairwise", answer={"closer": OneOf((-1, 0, 1))}, frames=2, is_change=True),
    Question(
        "episode",
        answer={"score": Number(1, 5, whole=True)},
        frames=0,
        score=lambda answer: Score((answer["score"] - 1) / 4),
    ),
    Question("logprob", answer=None),
):
    register_question(_question)

# Asked of a planner (`--instruction_source vlm`); `{statement}` is the instruction so far.
INSTRUCTION = Question(
    "instruction",
    answer={"instruction": Line(200)},
    score=lambda answer: Score(0.0, text=answer["instruction"]),
)
# Asked for each proposition of a reward machine (`--rm_propositions vlm`); `{statement}` is its sentence.
PROPOSITION = Question(
    "proposition",
    answer={"answer": OneOf(("yes", "no"))},
    score=lambda answer: Score(float(answer["answer"] == "yes")),
)
