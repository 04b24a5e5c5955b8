"""The VLM server of a run: one client, one concurrency limit and one set of counts for all questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from rlvla.rewards.remote import url_problem
from rlvla.rewards.vlm.client import FailedAnswer, VLMClient, VLMResult
from rlvla.rewards.vlm.config import VLMServerConfig
from rlvla.rewards.vlm.scorers import Scorer
from rlvla.rewards.vlm.server_check import EXAMPLE, example_picture, first_limit, server_problem
from rlvla.utils.errors import Problem, TrainingHalted
from rlvla.utils.terminal import log, passing_note

if TYPE_CHECKING:
    from rlvla.envs.base import Observation


class VLMFailuresError(TrainingHalted):
    """Too many requests failed for meaningful rewards."""


class VLMServer:
    """Sends questions to the server; the client is created on first use.

    Args:
        config: the server and its limits.
        asked_by: the flag that needs the server, for messages.

    Attributes:
        key: equal for servers that can share a client.
    """

    def __init__(self, config: VLMServerConfig, asked_by: str):
        self.key = self._config = VLMServerConfig(**{f.name: getattr(config, f.name) for f in fields(VLMServerConfig)})
        self._asked_by = asked_by
        self._scorers: dict[str, Scorer] = {}
        self._client: VLMClient | None = None

    def problems(self, scorer: Scorer | None, *, episode_frames: int = 1) -> list[Problem]:
        """Why the server cannot answer a question (None: the question itself is invalid)."""
        config = self._config
        problems = [
            Problem(name, "needs_flag", f"{self._asked_by} needs --{name}")
            for name in ("vlm_url", "vlm_model")
            if not getattr(config, name)
        ]
        if config.vlm_url:
            problem = url_problem(config.vlm_url, "vlm_url")
            if problem is None and config.vlm_model and scorer is not None:
                problem = server_problem(config, scorer, episode_frames=episode_frames)
            problems += [problem] if problem else []
        return problems

    def register(self, scorer: Scorer) -> None:
        """Register a question for the warm-up."""
        self._scorers[scorer.name] = scorer

    def shared(self, other: VLMServer) -> VLMServer:
        """This server, with the registered questions of another one added."""
        self._scorers |= other._scorers
        return self

    @property
    def client(self) -> VLMClient:
        """The client, created on first use."""
        if self._client is None:
            self._client = VLMClient(self._config)
        return self._client

    def ask(self, scorer: Scorer, fields: Mapping[str, str], images: Sequence[np.ndarray]) -> Future[VLMResult]:
        """Ask about images [H, W, 3] uint8; returns immediately.

        Args:
            scorer: the question.
            fields: of the prompt, see `Scorer.prompt`.
            images: the images, upright.
        """
        return self.client.ask(scorer, scorer.prompt(**fields), images)

    def start(self) -> None:
        """Warm up: `vlm_concurrency` requests of every question, with the time limit `vlm_warmup`."""
        config = self._config
        if not config.vlm_warmup or not self._scorers:
            return
        client = VLMClient(replace(config, vlm_timeout=first_limit(config), vlm_cache_size=0))
        with passing_note(f"warming up {config.vlm_url}"):
            asked = [
                client.ask(scorer, scorer.prompt(**EXAMPLE), [example_picture(number)] * max(1, scorer.frames))
                for scorer in self._scorers.values()
                for number in range(config.vlm_concurrency)
            ]
            failures = [answer for answer in (future.result() for future in asked) if isinstance(answer, FailedAnswer)]
        client.close()
        if failures:
            log.warning(
                "%d of %d warm-up requests to %s failed, the last one: %s: %s",
                *(len(failures), len(asked), config.vlm_url, failures[-1].kind, failures[-1].message),
            )

    def metrics(self) -> dict[str, float]:
        """Requests, failures, cache hits, tokens, seconds since the last call."""
        return {f"reward/vlm_{name}": value for name, value in self.client.take_metrics().items()}

    def check(self, metrics: Mapping[str, float]) -> None:
        """VLMFailuresError if too many of the iteration's requests failed."""
        requests, failures = metrics["reward/vlm_requests"], metrics["reward/vlm_failures"]
        if failures > self._config.vlm_max_failures * requests:
            last = self.client.last_failure
            why = f"{last.kind}: {last.message}" if last else "see the warnings of the other ranks"
            if last:  # the error is reported by one rank, which may have had no failure itself
                log.warning("the last failing request to %s: %s: %s", self._config.vlm_url, last.kind, last.message)
            raise VLMFailuresError(
                f"{failures:.0f} of {requests:.0f} requests to --vlm_url {self._config.vlm_url} failed, "
                f"more than --vlm_max_failures {self._config.vlm_max_failures} allows. The last one: {why}"
            )

    def close(self) -> None:
        """Cancel pending requests."""
        if self._client is not None:
            self._client.close()
            self._client = None


def prompt_fields(task_name: str, first: Observation) -> dict[str, str]:
    """The fields of prompts for an episode: its instruction, and the task's name in words."""
    return {"task": first.instruction, "skill": task_name.replace("_", " ").replace("-", " ")}
