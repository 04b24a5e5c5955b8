"""When a batch is due, and who gets which episode."""

from __future__ import annotations

from rlvla.rollout.session import Batcher, PendingEpisodes


def test_a_full_batch_is_due_at_once_the_longest_waiting_first() -> None:
    batcher = Batcher(max_batch=2, max_wait_s=10.0)
    for worker, now in ((7, 0.0), (3, 0.1), (5, 0.2)):
        batcher.add(worker, now)
    assert batcher.take(0.2, others=4) == [7, 3]
    assert batcher.take(0.2, others=6) == [] and len(batcher) == 1


def test_a_batch_of_the_target_size_takes_all_waiting_episodes() -> None:
    batcher = Batcher(max_batch=4, max_wait_s=10.0, target=2)
    batcher.add(1, 0.0)
    assert batcher.take(0.0, others=5) == []
    for worker in (2, 3, 4, 5):
        batcher.add(worker, 0.1)
    assert batcher.take(0.1, others=1) == [1, 2, 3, 4]
    assert batcher.take(0.1, others=5) == [] and len(batcher) == 1


def test_a_small_batch_waits_its_time() -> None:
    batcher = Batcher(max_batch=4, max_wait_s=0.5)
    assert batcher.time_until_due(0.0) is None and batcher.take(0.0, others=0) == []
    batcher.add(1, 1.0)
    batcher.add(2, 1.3)
    assert batcher.take(1.4, others=1) == [] and abs(batcher.time_until_due(1.4) - 0.1) < 1e-9
    assert batcher.time_until_due(9.0) == 0.0
    assert batcher.take(1.5, others=1) == [1, 2]


def test_a_batch_does_not_wait_if_no_episode_can_join() -> None:
    batcher = Batcher(max_batch=4, max_wait_s=1e9)
    batcher.add(1, 0.0)
    assert batcher.take(0.0, others=0) == [1]


def test_a_worker_keeps_to_the_task_whose_environment_it_has() -> None:
    pending = PendingEpisodes([("s", 0), ("s", 1), ("s", 1), ("s", 0), ("s", 1)])
    assert pending.take([("s", 0)]) == 0
    assert pending.take() == 1  # most are left of task 1
    assert pending.take([("s", 0)]) == 3
    assert pending.take([("s", 0)]) == 2  # none left of task 0
    pending.put_back(3)
    assert len(pending) == 2 and pending.take([("s", 0)]) == 3 and pending.take([("other", 9)]) == 4


def test_a_worker_turns_to_tasks_whose_environments_it_has_kept() -> None:
    """Before others of which more is left; to the one with the most episodes left."""
    pending = PendingEpisodes([("s", task) for task in (0, 1, 2, 2, 3, 3, 3)])
    assert [pending.take([("s", 0), ("s", 1), ("s", 2)]) for _ in range(4)] == [0, 2, 1, 3]
    assert pending.take([("s", 0), ("s", 1), ("s", 2)]) == 4
