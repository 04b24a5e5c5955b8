"""The parts of a chat completion that are used, whatever else a server sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlvla.utils.http.exchange import MalformedAnswer

_MOST_TOKENS = 10**9  # in a plausible count
_ROUNDING = 1e-3  # by which a log-prob may exceed 0


class AnswerError(MalformedAnswer):
    """An answer in the wrong format."""


class AnswerCutOff(AnswerError):
    """An answer that the limit of tokens ended too early; another attempt would end there, too."""

    retry = False


@dataclass(frozen=True)
class Completion:
    """A chat completion.

    Attributes:
        text: what the model said; "" for nothing.
        cut_off: it was ended by the limit of tokens.
        first_tokens: candidates for the first token with their log-probs, the chosen one included; None if the server
            gives none.
        prompt_tokens, completion_tokens: counted by the server; 0 if it does not say.
    """

    text: str = ""
    cut_off: bool = False
    first_tokens: tuple[tuple[str, float], ...] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_completion(answer: Any) -> Completion:
    """Parse the JSON of a chat completion.

    Raises:
        MalformedAnswer: it is none.
        AnswerError: it is one, with a content or log-probs of the wrong type.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise MalformedAnswer(f"the server's answer is no chat completion: {str(answer)[:80]!r}")
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
    """A count that is not worth failing for."""
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
