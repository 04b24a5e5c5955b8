"""Batches of decisions for the requests of several clients."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rlvla.models.policy import RolloutPolicy, decide
from rlvla.serving.messages import MessageError
from rlvla.serving.observations import Observation


@dataclass
class BatchCounts:
    """Batches, decisions in them, and seconds of the policy."""

    batches: int = 0
    decisions: int = 0
    seconds: float = 0.0


@dataclass
class _Waiting:
    """A request: its observation, its random numbers, and the future of its actions."""

    observation: Observation
    noise: np.ndarray
    answer: asyncio.Future[np.ndarray]


class DecisionBatcher:
    """Decides for all requests that wait while the policy is busy, up to a limit; a single one never waits.

    Args:
        policy: decides on a thread of its own.
        temperature: sampling temperature; None: greedy.
        max_batch: largest batch.
    """

    def __init__(self, policy: RolloutPolicy, temperature: float | None, max_batch: int):
        self._policy, self._temperature, self._max_batch = policy, temperature, max_batch
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self.counts = BatchCounts()

    async def decide(self, observation: Observation, noise: np.ndarray) -> np.ndarray:
        """Actions [A, D] for an observation.

        Args:
            observation: see `Observation`.
            noise: random numbers of the decision, from `PolicySpec.draw`.

        Raises:
            MessageError: the actions hold NaN or infinity.
            Exception: of the policy, for every request of the batch.
        """
        answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(observation, noise, answer))
        self._arrived.set()
        actions = await answer
        if not np.isfinite(actions).all():
            raise MessageError("the policy's actions hold NaN or infinity: its weights or statistics are damaged")
        return actions

    async def run(self) -> None:
        """Decide until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "policy") as thread:
            while True:
                await self._arrived.wait()
                batch = self._take()
                if not batch:
                    self._arrived.clear()
                    continue
                try:
                    actions = await loop.run_in_executor(thread, self._act, batch)
                except Exception as error:  # of a user's policy: its clients learn it, the server goes on
                    for request in batch:
                        if not request.answer.done():
                            request.answer.set_exception(error)
                    continue
                for request, row in zip(batch, actions):
                    if not request.answer.done():
                        request.answer.set_result(row)

    def _take(self) -> list[_Waiting]:
        """The longest waiting request, with those whose images have the same shape."""
        batch: list[_Waiting] = []
        others: deque[_Waiting] = deque()
        while self._waiting and len(batch) < self._max_batch:
            request = self._waiting.popleft()
            if request.answer.done():  # its client is gone
                continue
            alike = not batch or request.observation.images.shape == batch[0].observation.images.shape
            (batch if alike else others).append(request)
        self._waiting.extendleft(reversed(others))
        return batch

    def _act(self, batch: list[_Waiting]) -> np.ndarray:
        """Actions [B, A, D]; on the policy's thread."""
        start = time.perf_counter()
        observations = [request.observation for request in batch]
        decision = decide(
            self._policy,
            [o.images for o in observations],
            [o.proprio for o in observations],
            [o.instruction for o in observations],
            noise=[request.noise for request in batch],
            temperature=self._temperature,
        )
        self.counts.batches += 1
        self.counts.decisions += len(batch)
        self.counts.seconds += time.perf_counter() - start
        return decision.actions
