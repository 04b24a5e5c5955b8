"""Pre-flight check of the VLM server: the model, image input, the format of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.rewards.vlm.client import authorization, completions_url, question
from rlvla.rewards.vlm.scorers import AnswerCutOff, AnswerError, Scorer, read_completion
from rlvla.utils.errors import Problem
from rlvla.utils.http.client import JsonClient, RequestLimits
from rlvla.utils.http.exchange import (
    NoAnswerInTime,
    NoConnection,
    RedirectRefused,
    RequestError,
    StatusError,
)
from rlvla.utils.terminal import printable

if TYPE_CHECKING:
    from rlvla.rewards.vlm.config import VLMServerConfig

TASK = "push the red disc to the right edge"  # of the picture that the server is shown
EXAMPLE = {"task": TASK, "skill": "push", "statement": "The red disc is at the right edge."}
_MOST_NAMES = 5  # of the server's models, in a message
_LONGEST_NAME = 100  # characters
_MISSING = (400, 404, 405, 422)
_REFUSED = (401, 403)
_RETRIES = 2  # a server that has just come up may drop its first connections
_SIZE = 224  # pixels


def server_problem(config: VLMServerConfig, scorer: Scorer, *, episode_frames: int = 1) -> Problem | None:
    """Why the server at `vlm_url` cannot judge with `vlm_model`, or None.

    Sends a question of training about images of the same kind; only if that fails, simpler questions find the reason.
    The first answers may take `vlm_warmup` seconds.
    """
    headers = authorization()
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        text = "the environment variable OPENAI_API_KEY holds characters that no key has (a line break?)"
        return Problem(None, "unavailable", text)
    client = JsonClient(RequestLimits(first_limit(config), _RETRIES, at_a_time=1), headers)
    try:
        return _ServerCheck(client, config, scorer, scorer.frames or episode_frames).problem()
    finally:
        client.close()


class _ServerCheck:
    def __init__(self, client: JsonClient, config: VLMServerConfig, scorer: Scorer, frames: int):
        self._client, self._config, self._scorer = client, config, scorer
        self._names: list[str] = []
        self._prompt = scorer.prompt(**EXAMPLE)
        self._pictures = [example_picture(i) for i in range(frames)]

    def problem(self) -> Problem | None:
        try:
            self._names = self._ask_for_names()
            self._send(
                lambda: question(self._config, self._scorer, self._prompt, self._pictures),
                lambda answer: self._scorer.read(read_completion(answer)),
            )
        except RequestError as error:
            try:
                return self._explain(error)
            except RequestError as later:  # of a simpler question
                return self._general(later)
        return None

    def _ask_for_names(self) -> list[str]:
        """Names of the server's models; [] if it does not list them."""
        try:
            url = f"{(self._config.vlm_url or '').rstrip('/')}/models"
            return self._client.ask(
                url, None, lambda answer: [printable(m["id"], _LONGEST_NAME) for m in answer["data"]]
            ).result()
        except StatusError as error:
            if error.status in _REFUSED:
                raise
        except (NoAnswerInTime, NoConnection, RedirectRefused):
            raise
        except RequestError:
            pass
        return []

    def _send(self, content: Callable[[], Any], read: Callable[[Any], Any] = read_completion) -> None:
        self._client.ask(completions_url(self._config), content, read).result()

    def _explain(self, error: RequestError) -> Problem:
        """The reason for a failed question, from simpler ones."""
        scorer = self._scorer
        if isinstance(error, AnswerError):
            return self._useless_answer(error)
        if not isinstance(error, StatusError) or error.status in _REFUSED:
            return self._general(error)
        hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0.0}
        try:
            self._send(lambda: {"model": self._config.vlm_model, **hello})
        except StatusError as simpler:
            return self._unknown_model(simpler) if simpler.status in _MISSING else self._general(simpler)
        plain = question(self._config, scorer, self._prompt, self._pictures)
        options = [name for name in ("logprobs", "top_logprobs", "response_format") if plain.pop(name, None)]
        if not options:
            return self._no_pictures(error)
        try:
            self._send(lambda: plain)
        except StatusError as simpler:
            return self._no_pictures(simpler)
        if scorer.wants_log_probs:
            text = f"gives no log-probs ({error}); take another --vlm_scorer, or a server that gives them (vLLM)"
            return self._unavailable("vlm_scorer", text)
        remedy = "switch it off (--no-vlm_structured_output), or take a server that supports it (vLLM)"
        return self._unavailable("vlm_structured_output", f"does not take the JSON schema ({error}); {remedy}")

    def _useless_answer(self, error: AnswerError) -> Problem:
        """The server answers, but not in the expected format."""
        if isinstance(error, AnswerCutOff):
            return self._unavailable("vlm_max_tokens", f"answers a picture, but {error}")
        if self._scorer.wants_log_probs:
            return self._unavailable("vlm_scorer", f"cannot be used with --vlm_scorer logprob: {error}")
        return self._unavailable(
            "vlm_model",
            f"answers a picture in another format than --vlm_scorer {self._scorer.name} needs: {error}; take another "
            "--vlm_model or --vlm_prompt",
        )

    def _no_pictures(self, error: StatusError) -> Problem:
        several = f"{len(self._pictures)} pictures at a time" if len(self._pictures) > 1 else "a picture"
        return self._unavailable(
            "vlm_model", f"takes text, but not {several} ({error}); --vlm_model must be a vision-language model"
        )

    def _unknown_model(self, error: StatusError) -> Problem:
        config, names = self._config, self._names
        if names and config.vlm_model not in names:
            more = ", ..." if len(names) > _MOST_NAMES else ""
            return Problem(
                "vlm_model",
                "unknown_name",
                f"--vlm_model {config.vlm_model}: the server at --vlm_url {config.vlm_url} does not know it; it has "
                f"{', '.join(names[:_MOST_NAMES])}{more}",
            )
        lists = "refuses" if names else "lists no models and refuses"
        return self._unavailable(
            "vlm_url",
            f"{lists} a chat completion of --vlm_model {config.vlm_model} (HTTP {error.status}: {error.beginning}); "
            "the URL usually ends in /v1",
        )

    def _general(self, error: RequestError) -> Problem:
        """The server does not answer, or is not an OpenAI-compatible server."""
        if isinstance(error, NoAnswerInTime):
            flag = "vlm_warmup" if self._config.vlm_warmup > self._config.vlm_timeout else "vlm_timeout"
            text = (
                f"did not answer within --{flag} {first_limit(self._config):g} seconds; wait until the model is "
                "loaded, or allow the first answers longer (--vlm_warmup)"
            )
        elif isinstance(error, NoConnection):
            text = f"does not answer ({error}); start the server first"
        elif isinstance(error, RedirectRefused):
            text = f"is not followed: {error}; give the address of the server itself"
        elif isinstance(error, StatusError) and error.status in _REFUSED:
            text = (
                f"refuses access (HTTP {error.status}: {error.beginning}); put the server's key into the environment "
                "variable OPENAI_API_KEY"
            )
        elif isinstance(error, StatusError):
            text = f"answers with HTTP {error.status}: {error.beginning}"
        else:
            text = f"is not an OpenAI-compatible server ({type(error).__name__}: {error})"
        return self._unavailable("vlm_url", text)

    def _unavailable(self, flag: str, text: str) -> Problem:
        return Problem(flag, "unavailable", f"--vlm_url {self._config.vlm_url} {text}")


def first_limit(config: VLMServerConfig) -> float:
    """Seconds that the first answers may take."""
    return max(config.vlm_timeout, config.vlm_warmup)


def example_picture(number: int) -> np.ndarray:
    """A red disc on a table, [H, W, 3] uint8; further right with each number."""
    y, x = np.mgrid[:_SIZE, :_SIZE]
    image = np.stack([120 + y // 3, 110 + y // 3, 90 + x // 4], axis=-1).astype(np.uint8)
    image[(y - _SIZE // 2) ** 2 + (x - 40 - 8 * (number % 16)) ** 2 < 20**2] = (220, 30, 30)
    return image
