"""Queue of episodes that have not started, ordered to avoid rebuilding environments."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

Task = tuple[str, int]


class PendingEpisodes:
    """Request indices queued by task.

    A slot gets an episode of the task whose environment it already has, if any is left: building an environment takes
    seconds, a reset a fraction of one. Otherwise it gets the task with the most episodes left. The order does not
    affect results, because the outcome of an episode depends on its request alone.

    Args:
        tasks: task of each request.
    """

    def __init__(self, tasks: Sequence[Task]):
        self._tasks = list(tasks)
        self._queues: OrderedDict[Task, deque[int]] = OrderedDict()
        for index, task in enumerate(tasks):
            self._queues.setdefault(task, deque()).append(index)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def take(self, current: Task | None) -> int:
        """The next request for a slot that has the environment of task `current`."""
        queue = self._queues.get(current) if current is not None else None
        if not queue:
            queue = max(self._queues.values(), key=len)
        return queue.popleft()

    def put_back(self, index: int) -> None:
        """Return a request to the front of its task's queue."""
        self._queues[self._tasks[index]].appendleft(index)
