"""Non-blocking client of a VLM server."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.rewards.remote import encode_png
from rlvla.rewards.vlm.questions import Score
from rlvla.rewards.vlm.scorers import Scorer, read_completion
from rlvla.utils.http.client import JsonClient, RequestLimits
from rlvla.utils.http.exchange import RequestError
from rlvla.utils.terminal import printable

if TYPE_CHECKING:
    from rlvla.rewards.vlm.config import VLMServerConfig

_TOP_LOG_PROBS = 10
_MOST_SHOWN = 300  # characters of an error
COUNTED = (
    "requests",
    "failures",
    "retries",
    "timeouts",
    "cache_hits",
    "prompt_tokens",
    "completion_tokens",
    "seconds",
)


@dataclass(frozen=True)
class FailedAnswer:
    """A request that failed after all retries.

    Attributes:
        kind: class name of the error.
        message: error message.
    """

    kind: str
    message: str


VLMResult = Score | FailedAnswer


class VLMClient:
    """Client of an OpenAI-compatible server.

    Args:
        config: server, model, and limits for all questions together.
    """

    def __init__(self, config: VLMServerConfig):
        self._config = config
        self._cache: OrderedDict[bytes, Future[VLMResult]] = OrderedDict()
        self._lock = threading.RLock()  # a request may be over before `ask` is
        self._counts: Counter[str] = Counter()
        limits = RequestLimits(config.vlm_timeout, config.vlm_retries, config.vlm_concurrency)
        self._http = JsonClient(limits, authorization())
        self.last_failure: FailedAnswer | None = None

    def ask(self, scorer: Scorer, prompt: str, images: Sequence[np.ndarray]) -> Future[VLMResult]:
        """Request a score for images [H, W, 3] uint8; returns immediately.

        Equal requests share one answer; successful answers are cached.
        """
        key = self._key(scorer, prompt, images)
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None and not (cached.done() and isinstance(cached.result(), FailedAnswer)):
                self._cache.move_to_end(key)
                self._counts["cache_hits"] += 1
                return cached
            self._counts["requests"] += 1
            answer = self._send(scorer, prompt, list(images))
            if self._config.vlm_cache_size:
                self._cache[key] = answer
                while len(self._cache) > self._config.vlm_cache_size:
                    self._cache.popitem(last=False)
        return answer

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, named in `COUNTED`; `seconds` is summed over requests."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in COUNTED} | self._http.take_counts()

    def close(self) -> None:
        """Cancel pending requests."""
        self._http.close()

    def _key(self, scorer: Scorer, prompt: str, images: Sequence[np.ndarray]) -> bytes:
        digest = hashlib.sha256(f"{self._config.vlm_model}\0{scorer.name}\0{prompt}".encode())
        for image in images:
            digest.update(f"\0{image.shape}\0".encode() + np.ascontiguousarray(image).tobytes())
        return digest.digest()

    def _send(self, scorer: Scorer, prompt: str, images: list[np.ndarray]) -> Future[VLMResult]:
        """Send a question; a failed request gives a `FailedAnswer` instead of an exception."""
        result: Future[VLMResult] = Future()

        def done(answer: Future[Score]) -> None:
            try:
                result.set_result(answer.result())
            except RequestError as error:
                failure = FailedAnswer(type(error).__name__, printable(str(error), _MOST_SHOWN))
                self.last_failure = failure
                with self._lock:
                    self._counts["failures"] += 1
                result.set_result(failure)
            except BaseException as error:  # a programming error, or the client was closed
                result.set_exception(error)

        def read(answer: Any) -> Score:
            completion = read_completion(answer)
            with self._lock:
                self._counts["prompt_tokens"] += completion.prompt_tokens
                self._counts["completion_tokens"] += completion.completion_tokens
            return scorer.read(completion)

        address = completions_url(self._config)
        sent = self._http.ask(address, lambda: question(self._config, scorer, prompt, images), read)
        sent.add_done_callback(done)
        return result


def authorization() -> dict[str, str]:
    """Authorization header from the environment variable `OPENAI_API_KEY`; {} if it is not set."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def completions_url(config: VLMServerConfig) -> str:
    """URL of chat completions."""
    return f"{(config.vlm_url or '').rstrip('/')}/chat/completions"


def question(config: VLMServerConfig, scorer: Scorer, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Any]:
    """The request for a chat completion about images [H, W, 3] uint8."""
    options: dict[str, Any] = {}
    if scorer.wants_log_probs:
        options = {"logprobs": True, "top_logprobs": _TOP_LOG_PROBS}
    elif config.vlm_structured_output:
        schema = {"name": scorer.name, "schema": scorer.schema, "strict": True}
        options = {"response_format": {"type": "json_schema", "json_schema": schema}}
    urls = [{"url": f"data:image/png;base64,{encode_png(np.asarray(image))}"} for image in images]
    content = [{"type": "text", "text": prompt}, *({"type": "image_url", "image_url": url} for url in urls)]
    return {
        "model": config.vlm_model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1 if scorer.wants_log_probs else config.vlm_max_tokens,
        "temperature": 0.0,
        **options,
    }
