"""Non-blocking client for VLM servers; requests run on a separate event loop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.rewards.remote import encode_png
from rlvla.rewards.vlm.scorers import Score, Scorer
from rlvla.utils.errors import require

if TYPE_CHECKING:
    from rlvla.rewards.vlm.config import VLMConfig

_TOP_LOG_PROBS = 10


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
        config: server, model, limits.
        scorer: prompt and parser of the answers.

    Raises:
        MissingExtraError: the `openai` package is not installed.
    """

    def __init__(self, config: VLMConfig, scorer: Scorer):
        self._openai = require("openai", extra="vlm")
        self._config, self._scorer = config, scorer
        self._cache: OrderedDict[bytes, Future[VLMResult]] = OrderedDict()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vlm", daemon=True)
        self._thread.start()
        self._slots = asyncio.Semaphore(config.vlm_concurrency)
        self._client: Any = None
        self.last_failure: FailedAnswer | None = None

    def ask(self, task: str, images: Sequence[np.ndarray]) -> Future[VLMResult]:
        """Request a score for images [H, W, 3] uint8 of a task; returns immediately.

        Equal requests share one answer; successful answers are cached.
        """
        prompt = self._scorer.prompt(task)
        key = self._key(prompt, images)
        with self._lock:
            known = self._cache.get(key)
            if known is not None and not (known.done() and isinstance(known.result(), FailedAnswer)):
                self._cache.move_to_end(key)
                self._counts["cache_hits"] += 1
                return known
            answer = asyncio.run_coroutine_threadsafe(self._ask(prompt, list(images)), self._loop)
            self._counts["requests"] += 1
            if self._config.vlm_cache_size:
                self._cache[key] = answer
                while len(self._cache) > self._config.vlm_cache_size:
                    self._cache.popitem(last=False)
        return answer

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call: requests, failures, cache_hits, tokens, seconds of waiting for the server."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, 0.0
        names = ("requests", "failures", "cache_hits", "prompt_tokens", "completion_tokens")
        return {**{name: float(counts[name]) for name in names}, "seconds": seconds}

    def close(self) -> None:
        """Cancel pending requests and stop the event loop."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _end(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        if self._client is not None:
            await self._client.close()

    def _key(self, prompt: str, images: Sequence[np.ndarray]) -> bytes:
        digest = hashlib.sha256(f"{self._config.vlm_model}\0{self._scorer.name}\0{prompt}".encode())
        for image in images:
            digest.update(f"\0{image.shape}\0".encode() + np.ascontiguousarray(image).tobytes())
        return digest.digest()

    async def _ask(self, prompt: str, images: list[np.ndarray]) -> VLMResult:
        async with self._slots:
            start = time.perf_counter()
            try:
                return await self._once(prompt, images)
            except (self._openai.OpenAIError, ValueError) as error:
                failure = FailedAnswer(type(error).__name__, " ".join(str(error).split())[:300])
                self.last_failure = failure
                with self._lock:
                    self._counts["failures"] += 1
                return failure
            finally:
                with self._lock:
                    self._seconds += time.perf_counter() - start

    async def _once(self, prompt: str, images: list[np.ndarray]) -> Score:
        config = self._config
        if self._client is None:
            self._client = self._openai.AsyncOpenAI(
                base_url=config.vlm_url,
                api_key=os.environ.get("OPENAI_API_KEY", "none"),
                timeout=config.vlm_timeout,
                max_retries=config.vlm_retries,
            )
        options: dict[str, Any] = {}
        if self._scorer.wants_log_probs:
            options = {"logprobs": True, "top_logprobs": _TOP_LOG_PROBS}
        elif config.vlm_structured_output:
            schema = {"name": self._scorer.name, "schema": self._scorer.schema, "strict": True}
            options = {"response_format": {"type": "json_schema", "json_schema": schema}}
        completion = await self._client.chat.completions.create(
            model=config.vlm_model,
            messages=[{"role": "user", "content": _content(prompt, images)}],
            max_tokens=1 if self._scorer.wants_log_probs else config.vlm_max_tokens,
            temperature=0.0,
            **options,
        )
        usage = getattr(completion, "usage", None)
        if usage is not None:
            with self._lock:
                self._counts["prompt_tokens"] += usage.prompt_tokens or 0
                self._counts["completion_tokens"] += usage.completion_tokens or 0
        choices = getattr(completion, "choices", None)
        if not choices:
            raise ValueError(f"the server's answer is no chat completion: {str(completion)[:80]!r}")
        return self._scorer.read(choices[0])


def _content(prompt: str, images: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    shown = [{"url": f"data:image/png;base64,{encode_png(np.asarray(image))}"} for image in images]
    return [{"type": "text", "text": prompt}, *({"type": "image_url", "image_url": url} for url in shown)]
