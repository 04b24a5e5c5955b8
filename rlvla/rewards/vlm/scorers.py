"""Prompts for vision-language models and parsing of their answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlvla.utils.errors import ConfigError, require

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True)
class Score:
    """A valid answer: progress in [0, 1] ([-1, 1] for a comparison), and an action score in [0, 1]."""

    progress: float
    action_score: float = 0.0


class AnswerError(ValueError):
    """An answer in the wrong format."""


def _answer_model(scorer: str) -> type[BaseModel]:
    """Pydantic model of a scorer's answer."""
    pydantic = require("pydantic", extra="vlm")
    share = (float, pydantic.Field(ge=0, le=1))
    fields: dict[str, dict[str, Any]] = {
        "progress": {"action_score": share, "progress": share},
        "success": {"success": share},
        "grasp": {"grasp": share},
        "affordance": {"affordance": share},
        "pairwise": {"closer": (Literal[-1, 0, 1], ...)},
        "episode": {"score": (int, pydantic.Field(ge=1, le=5))},
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

    def read(self, choice: Any) -> Score:
        """Parse the score from a choice of a chat completion; AnswerError if it is invalid."""
        if self.wants_log_probs:
            return Score(_probability_of_true(choice))
        content = choice.message.content or ""
        start, end = content.find("{"), content.rfind("}")
        if start < 0 or end < start:
            raise AnswerError(f"no JSON object in {content[:80]!r}")
        assert self._model is not None
        try:  # pydantic's errors are ValueErrors
            answer = self._model.model_validate_json(content[start : end + 1]).model_dump()
        except ValueError as error:
            raise AnswerError(f"{content[:80]!r} is not a valid answer: {' '.join(str(error).split())[:200]}") from None
        if self.name == "progress":
            return Score(answer["progress"], answer["action_score"])
        if self.name == "episode":
            return Score((answer["score"] - 1) / 4)
        (value,) = answer.values()
        return Score(float(value))


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


def _probability_of_true(choice: Any) -> float:
    """P("True") / (P("True") + P("False")) for the first token."""
    tokens = choice.logprobs.content if choice.logprobs is not None else None
    if not tokens:
        raise AnswerError("the server gives no log-probs; take another scorer, or a server that does (vLLM)")
    mass = {"true": 0.0, "false": 0.0}
    for candidate in tokens[0].top_logprobs or [tokens[0]]:
        word = candidate.token.strip().lower()
        if word in mass:
            mass[word] += math.exp(candidate.logprob)
    if sum(mass.values()) == 0:
        raise AnswerError(f"neither True nor False among the likely first tokens (first: {tokens[0].token!r})")
    return mass["true"] / sum(mass.values())
