"""Prompts for vision-language models and parsing of their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rlvla.rewards.vlm.completion import AnswerCutOff, AnswerError, Completion
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.http.exchange import printable

if TYPE_CHECKING:
    from pydantic import BaseModel

_READ = 50_000  # last characters of an answer that are searched
_MOST_TRIES = 500  # braces at which an object may begin
_END_OF_REASONING = "</think>"


@dataclass(frozen=True)
class Score:
    """A valid answer: progress in [0, 1] ([-1, 1] for a comparison), and an action score in [0, 1]."""

    progress: float
    action_score: float = 0.0


def _answer_model(scorer: str) -> type[BaseModel]:
    """Pydantic model of a scorer's answer; numbers in quotes and truth values are no numbers."""
    pydantic = require("pydantic", extra="vlm")

    def number(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("not a number")
        return value

    def field(kind: Any, **limits: Any) -> Any:
        return Annotated[kind, pydantic.Field(**limits), pydantic.BeforeValidator(number)], ...

    share = field(float, ge=0, le=1)
    fields: dict[str, dict[str, Any]] = {
        "progress": {"action_score": share, "progress": share},
        "success": {"success": share},
        "grasp": {"grasp": share},
        "affordance": {"affordance": share},
        "pairwise": {"closer": field(Literal[-1, 0, 1])},
        "episode": {"score": field(int, ge=1, le=5)},
    }
    return pydantic.create_model(f"{scorer.title()}Answer", **fields[scorer])


class Scorer:
    """A prompt and the format of its answers.

    Args:
        name: one of `SCORERS`.
        prompt_file: file with a custom prompt.

    Raises:
        ConfigError: invalid prompt file.
        MissingExtraError: pydantic is not installed.
    """

    def __init__(self, name: str, prompt_file: str | None = None):
        self.name = name
        self.wants_log_probs = name == "logprob"
        self.frames = {"pairwise": 2, "episode": 0}.get(name, 1)  # 0: frames of the whole episode
        self._template = _read_prompt(name, prompt_file)
        self._model = None if self.wants_log_probs else _answer_model(name)

    def prompt(self, task: str) -> str:
        """The prompt for a task."""
        return self._template.format(task=task)

    @property
    def schema(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None if the answer is a single word."""
        return None if self._model is None else self._model.model_json_schema() | {"additionalProperties": False}

    def read(self, completion: Completion) -> Score:
        """The score in a chat completion: the last valid JSON object after any reasoning.

        Raises:
            AnswerError: there is none.
            AnswerCutOff: there is none, since the answer was cut off.
        """
        if self.wants_log_probs:
            return Score(_probability_of_true(completion))
        try:
            answer = self._valid_object(completion.text)
        except AnswerError as error:
            if completion.cut_off:
                raise AnswerCutOff(f"the answer was cut off; raise --vlm_max_tokens ({error})") from None
            raise
        if self.name == "progress":
            return Score(answer["progress"], answer["action_score"])
        if self.name == "episode":
            return Score((answer["score"] - 1) / 4)
        (value,) = answer.values()
        return Score(float(value))

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
    """All JSON objects in a text, in order, without those inside another; braces in prose are passed over."""
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


def _read_prompt(name: str, prompt_file: str | None) -> str:
    if prompt_file is None:
        return resources.files("rlvla.rewards.vlm").joinpath(f"prompts/{name}.txt").read_text(encoding="utf-8")
    path = Path(prompt_file)
    if not path.is_file():
        raise ConfigError(f"--vlm_prompt {prompt_file} does not exist")
    template = path.read_text(encoding="utf-8")
    try:
        filled = template.format(task="\0")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"--vlm_prompt {prompt_file} has braces that are no {{task}} ({error}); write other braces twice"
        ) from None
    if "\0" not in filled:
        raise ConfigError(f"--vlm_prompt {prompt_file} does not say where the task belongs; write {{task}} there")
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
