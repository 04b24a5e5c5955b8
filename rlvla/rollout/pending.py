"""Queue of episodes that have not started, ordered to avoid rebuilding environments."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

Task = tuple[str, int]


class PendingEpisodes:
    """Request indices queued by task.

    A slot gets an episode of the task that it played last, else of one whose environment it has kept, if any is left:
    building an environment takes seconds, a reset a fraction of one. Otherwise, and among those kept, it gets the task
    with the most episodes left. The order does not affect results, because the outcome of an episode depends on its
    request alone.

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

    def take(self, kept: Sequence[Task] = ()) -> int:
        """The next request for a slot that has environments of these tasks, the one that it played last first."""
        left = [queue for task in kept if (queue := self._queues.get(task))]
        if left and left[0] is self._queues.get(kept[0]):
            return left[0].popleft()
        return max(left or self._queues.values(), key=len).popleft()

    def put_back(self, index: int) -> None:
        """Return a request to the front of its task's queue."""
        self._queues[self._tasks[index]].appendleft(index)
