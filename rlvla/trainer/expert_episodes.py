"""Expert episodes from worker processes, in the order in which they were asked for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator

from rlvla.envs.experts.episode import ExpertEpisode
from rlvla.envs.messages import RunExpert
from rlvla.envs.pool import EnvWorkerError
from rlvla.envs.watchdog import WatchedPool
from rlvla.utils.errors import ConfigError

log = logging.getLogger(__name__)


def expert_episodes(
    pool: WatchedPool, commands: Iterable[RunExpert], *, retries: int = 2
) -> Iterator[ExpertEpisode | EnvWorkerError]:
    """Play the commands on all workers; yields one result for each, in their order.

    An episode whose environment fails is played again, `retries` times; after that its result is the last failure. A
    caller that stops listening and wants to go on using the pool calls `pool.settle` first.

    Raises:
        ConfigError: what a worker reported.
    """
    source = iter(commands)
    again: deque[tuple[int, RunExpert]] = deque()
    playing: dict[int, tuple[int, RunExpert]] = {}
    finished: dict[int, ExpertEpisode | EnvWorkerError] = {}
    failures: dict[int, int] = {}
    asked = given = 0
    while True:
        for worker in pool.idle():
            job = again.popleft() if again else None
            if job is None and (command := next(source, None)) is not None:
                job, asked = (asked, command), asked + 1
            if job is not None:
                playing[worker] = job
                pool.submit(worker, job[1])
        if not (playing or again or finished):
            return
        for worker, result in pool.wait():
            number, command = playing.pop(worker)
            if isinstance(result, ConfigError):
                raise result
            if isinstance(result, EnvWorkerError):
                log.warning("an expert's episode failed: %s", result)
                failures[number] = failures.get(number, 0) + 1
                if failures[number] <= retries:
                    again.append((number, command))
                    continue
            finished[number] = result  # type: ignore[assignment]
        while given in finished:
            given += 1
            yield finished.pop(given - 1)
