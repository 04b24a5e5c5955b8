"""Prompts for vision-language models, and parsing of their chat completions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rlvla.rewards.vlm.questions import Line, Number, OneOf, Question, Score, question_named
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.http.exchange import MalformedAnswer
from rlvla.utils.terminal import printable

if TYPE_CHECKING:
    from pydantic import BaseModel

_READ = 50_000  # last characters of an answer that are searched
_MOST_TRIES = 500  # braces at which an object may begin
_END_OF_REASONING = "</think>"
_MOST_TOKENS = 10**9  # in a plausible count
_ROUNDING = 1e-3  # by which a log-prob may exceed 0


class AnswerError(MalformedAnswer):
    """An answer in the wrong format."""


class AnswerCutOff(AnswerError):
    """An answer cut off by the token limit; another attempt would be, too."""

    retry = False


@dataclass(frozen=True)
class Completion:
    """A chat completion.

    Attributes:
        text: content of the message; "" if empty.
        cut_off: it ended at the token limit.
        first_tokens: candidates for the first token with their log-probs, including the chosen one; None if the server
            returns none.
        prompt_tokens, completion_tokens: as counted by the server; 0 if it reports none.
    """

    text: str = ""
    cut_off: bool = False
    first_tokens: tuple[tuple[str, float], ...] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_completion(answer: Any) -> Completion:
    """Parse the JSON of a chat completion.

    Raises:
        MalformedAnswer: it is not a chat completion.
        AnswerError: its content or log-probs have the wrong type.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise MalformedAnswer(f"the server's answer is not a chat completion: {str(answer)[:80]!r}")
    text = message.get("content")
    if text is not None and not isinstance(text, str):
        raise AnswerError(f"the content of the answer is not text: {str(text)[:80]!r}")
    usage = answer.get("usage")
    return Completion(
        text=text or "",
        cut_off=choice.get("finish_reason") == "length",
        first_tokens=_first_tokens(choice.get("logprobs")),
        prompt_tokens=_tokens(usage, "prompt_tokens"),
        completion_tokens=_tokens(usage, "completion_tokens"),
    )


def _tokens(usage: Any, name: str) -> int:
    """A token count; 0 if the server reports none or an implausible one."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MOST_TOKENS else 0


def _first_tokens(log_probs: Any) -> tuple[tuple[str, float], ...] | None:
    content = log_probs.get("content") if isinstance(log_probs, dict) else None
    if not content:
        return None
    first = content[0] if isinstance(content, list) else None
    several = first.get("top_logprobs") if isinstance(first, dict) else None
    candidates = several if isinstance(several, list) and several else [first]
    return tuple(_candidate(candidate) for candidate in candidates)


def _candidate(candidate: Any) -> tuple[str, float]:
    token = candidate.get("token") if isinstance(candidate, dict) else None
    log_prob = candidate.get("logprob") if isinstance(candidate, dict) else None
    is_number = isinstance(log_prob, (int, float)) and not isinstance(log_prob, bool)
    if isinstance(token, str) and is_number and log_prob <= _ROUNDING:  # type: ignore[operator]
        return token, min(0.0, float(log_prob))  # type: ignore[arg-type]
    raise AnswerError(f"{str(candidate)[:80]!r} is not a token with its log-prob")


def _answer_model(question: Question) -> type[BaseModel] | None:
    """Pydantic model of the answer, strict about numbers (no strings, no booleans); None: a single word."""
    if question.entries is None:
        return None
    pydantic = require("pydantic", extra="vlm")

    def number(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("not a number")
        return value

    def line(value: object) -> object:
        text = value.strip() if isinstance(value, str) else ""
        if not text or not text.isprintable():
            raise ValueError("not a line of text")
        return text

    def entry(kind: Number | OneOf | Line) -> Any:
        if isinstance(kind, Line):
            return Annotated[str, pydantic.Field(max_length=kind.longest), pydantic.BeforeValidator(line)], ...
        if isinstance(kind, Number):
            limits = pydantic.Field(ge=kind.low, le=kind.high)
            return Annotated[int if kind.whole else float, limits, pydantic.BeforeValidator(number)], ...
        choice: Any = Literal[kind.values]  # type: ignore[valid-type]
        return (choice if isinstance(kind.values[0], str) else Annotated[choice, pydantic.BeforeValidator(number)]), ...

    entries = {name: entry(kind) for name, kind in question.entries.items()}
    return pydantic.create_model(f"{question.name.title()}Answer", **entries)


class Scorer:
    """A question and the parser of its answers.

    Args:
        question: the question, or its registered name.
        prompt_file: file with a custom prompt.

    Raises:
        ConfigError: invalid prompt file.
        MissingExtraError: pydantic is not installed.
    """

    def __init__(self, question: str | Question, prompt_file: str | None = None):
        self.question = question_named(question) if isinstance(question, str) else question
        self.name = self.question.name
        self.wants_log_probs = self.question.entries is None
        self.frames = self.question.frames
        self._template = self.question.template if prompt_file is None else _read_prompt(prompt_file)
        self._model = _answer_model(self.question)

    def prompt(self, task: str, *, skill: str = "", statement: str = "") -> str:
        """The prompt for a task: its instruction, its name, and the sentence of a proposition."""
        return self._template.format(task=task, skill=skill, statement=statement)

    @property
    def schema(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None if the answer is a single word."""
        return None if self._model is None else self._model.model_json_schema() | {"additionalProperties": False}

    def read(self, completion: Completion) -> Score:
        """The score in a chat completion: the last valid JSON object after any reasoning.

        Raises:
            AnswerError: there is no valid object.
            AnswerCutOff: likewise, because the answer was cut off.
        """
        if self.wants_log_probs:
            return Score(_probability_of_true(completion))
        try:
            answer = self._valid_object(completion.text)
        except AnswerError as error:
            if completion.cut_off:
                raise AnswerCutOff(f"the answer was cut off; raise --vlm_max_tokens ({error})") from None
            raise
        return self.question.score(answer)

    def _valid_object(self, text: str) -> dict[str, Any]:
        assert self._model is not None
        pydantic = require("pydantic", extra="vlm")
        _, ended, answer = text.rpartition(_END_OF_REASONING)
        valid, problem = None, f"no JSON object in {printable(answer, 80)!r}"
        if not ended and "<think>" in text:
            problem = f"the reasoning has no end: {printable(text, 80)!r}"
            answer = ""
        for candidate in _objects(answer[-_READ:]):
            try:
                valid = self._model.model_validate(candidate).model_dump()
            except pydantic.ValidationError as error:
                reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
                problem = f"{printable(str(candidate), 80)!r} is not a valid answer: {printable(reasons)}"
        if valid is None:
            raise AnswerError(problem)
        return valid


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Top-level JSON objects in a text, in order; braces in prose are skipped."""
    decoder, start = json.JSONDecoder(), text.find("{")
    for _ in range(_MOST_TRIES):
        if start < 0:
            return
        try:
            candidate, end = decoder.raw_decode(text, start)
            yield candidate
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)


def _read_prompt(prompt_file: str) -> str:
    path = Path(prompt_file)
    if not path.is_file():
        raise ConfigError(f"--vlm_prompt {prompt_file} does not exist")
    template = path.read_text(encoding="utf-8")
    try:
        filled = template.format(task="\0", skill="")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"--vlm_prompt {prompt_file} has braces that are neither {{task}} nor {{skill}} ({error}); write other "
            "braces twice"
        ) from None
    if "\0" not in filled:
        raise ConfigError(f"--vlm_prompt {prompt_file} lacks {{task}}, the place of the instruction")
    return template


def _probability_of_true(completion: Completion) -> float:
    """P("True") / (P("True") + P("False")) for the first token."""
    if completion.first_tokens is None:
        raise AnswerError("the server gives no log-probs; take another scorer, or a server that does (vLLM)")
    mass = {"true": 0.0, "false": 0.0}
    for token, log_prob in completion.first_tokens:
        word = token.strip().lower()
        if word in mass:
            mass[word] += math.exp(log_prob)
    if sum(mass.values()) == 0:
        first = completion.first_tokens[0][0]
        raise AnswerError(f"neither True nor False among the likely first tokens (first: {printable(first, 20)!r})")
    return mass["true"] / sum(mass.values())
