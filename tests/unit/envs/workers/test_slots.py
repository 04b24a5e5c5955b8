"""Workers with several slots: with an environment in each, and with a batched one."""

import numpy as np
import pytest

from rlvla.envs import make_env
from rlvla.envs.testing import assert_same_observation, assert_same_result
from rlvla.envs.workers.messages import EnvSpec, Hello, Make, PrivilegedState, Reset, StepChunk
from rlvla.envs.workers.pool import EnvPool, EnvWorkerError, WorkerState
from rlvla.envs.workers.watchdog import WatchdogLimits, WatchedPool
from rlvla.utils.errors import ConfigError
from tests.support import fake_suites  # a trainer's process knows the suites, too
from tests.support.pool_contract import (  # noqa: F401
    NOOP,
    test_arrays_stay_valid_after_the_worker_has_gone_on,
    test_busy_worker_takes_no_command,
    test_config_error_arrives_as_one,
    test_environment_is_kept_until_another_is_asked_for,
    test_environment_is_rebuilt_after_an_exception,
    test_exception_reaches_the_caller_with_its_traceback,
    test_expert_episode_equals_one_played_in_process,
    test_hanging_worker_can_be_restarted_at_once,
    test_shared_memory_grows_with_what_is_sent,
    test_worker_gives_what_the_environment_gives_in_process,
    test_workers_hold_no_deep_learning_library_and_one_thread,
)
from tests.support.workers import TOY, fake, wait_until_gone


def fake_batch(**options):
    return EnvSpec("fake_batch", 0, options)


@pytest.fixture
def pool():
    """Slots 0, 1 and 2 on one worker, 3 and 4 on another."""
    with EnvPool(5, envs_per_worker=3, custom_modules=[fake_suites.__file__]) as pool:
        yield pool


def wait_for(pool, count):
    results = []
    while len(results) < count:
        fresh = pool.wait(timeout=300)
        assert fresh, "nothing came"
        results += fresh
    assert len(results) == count
    return dict(results)


def begin(pool, specs):
    """Start an episode in each of these slots, slot s with seed s."""
    pool.submit_all([(slot, Reset(spec, 1, slot)) for slot, spec in specs.items()])
    return wait_for(pool, len(specs))


def test_slots_share_the_processes(pool):
    assert (pool.num_slots, pool.num_workers) == (5, 2)
    assert [pool.worker_of(slot) for slot in range(5)] == [0, 0, 0, 1, 1]
    assert [pool.pid(slot) == pool.pid(0) for slot in range(5)] == [True, True, True, False, False]
    assert (list(pool.slots_of(0)), list(pool.slots_of(1))) == ([0, 1, 2], [3, 4])
    with pytest.raises(IndexError, match=r"0\.\.4"):
        pool.state(5)


@pytest.mark.parametrize("options", [{}, {"image_size": 32}], ids=["one task", "two specs"])
def test_slots_give_what_environments_in_this_process_give(pool, options):
    """Chunks of different lengths, with and without frames, in several slots at once."""
    specs = {slot: EnvSpec("toy_reach", 0, {"use_proprio": True, **(options if slot % 2 else {})}) for slot in range(5)}
    envs = {slot: make_env("toy_reach", 0, **spec.options) for slot, spec in specs.items()}
    for slot, observation in begin(pool, specs).items():
        assert_same_observation(observation, envs[slot].reset(1, slot))
    rng = np.random.default_rng(0)
    for turn in range(3):
        chunks = {
            slot: StepChunk(rng.uniform(-1, 1, (2 + (slot + turn) % 2, 2)).astype(np.float32), slot == 2)
            for slot in specs
        }
        pool.submit_all(list(chunks.items()))
        for slot, result in wait_for(pool, 5).items():
            assert_same_result(result, envs[slot].step_chunk(chunks[slot].actions, record_frames=slot == 2))


def test_an_exception_in_one_environment_leaves_the_others_alone(pool):
    begin(pool, {0: fake(), 1: fake(step="raise"), 2: fake()})
    pool.submit_all([(slot, NOOP) for slot in range(3)])
    results = wait_for(pool, 3)
    assert isinstance(results[1], EnvWorkerError) and "deliberate failure" in str(results[1])
    assert (results[1].worker_id, results[1].slot, results[1].seed) == (0, 1, 1)
    assert "environment worker 0 (slot 1)" in str(results[1])
    assert results[0].steps_executed == results[2].steps_executed == 2
    pool.submit_all([(0, NOOP), (2, NOOP)])  # their episodes go on
    assert all(result.steps_executed == 2 for result in wait_for(pool, 2).values())
    assert pool.holds(1) is None and pool.holds(0) == fake()


def test_an_answer_waits_for_no_later_command_of_another_slot(pool):
    begin(pool, {0: fake(), 1: fake(step="sleep"), 2: fake()})
    pool.submit_all([(0, NOOP), (1, NOOP), (2, NOOP)])
    assert list(wait_for(pool, 1)) == [0]
    assert pool.wait(timeout=0.3) == []
    states = [pool.state(slot) for slot in range(3)]
    assert states == [WorkerState.IDLE, WorkerState.BUSY, WorkerState.BUSY]
    assert pool.busy_seconds(1) >= 0.3 and pool.busy_seconds(2) == 0.0, "only slot 1 is executed"


@pytest.mark.parametrize(("fault", "words"), [("kill", "SIGKILL"), ("exit", "exit code 3")])
def test_a_process_that_dies_fails_every_slot_that_owes_an_answer(pool, fault, words):
    begin(pool, {0: fake(), 1: fake(step=fault), 2: fake(), 3: fake()})
    pool.submit_all([(1, NOOP), (2, NOOP), (3, NOOP)])
    results = wait_for(pool, 3)
    assert results[3].steps_executed == 2
    for slot in (1, 2):
        assert isinstance(results[slot], EnvWorkerError) and words in str(results[slot])
        assert (results[slot].slot, results[slot].seed, results[slot].collateral) == (slot, slot, slot == 2)
    assert [pool.state(slot) for slot in range(4)] == [WorkerState.DEAD] * 3 + [WorkerState.IDLE]
    pool.restart(2)
    assert [pool.state(slot) for slot in range(3)] == [WorkerState.IDLE] * 3
    assert pool.call(0, Reset(TOY, 0, 0)).instruction.startswith("reach the")


def test_what_was_answered_before_the_process_died_is_no_failure(pool):
    """The pool notices the end when it sends a command, before it has read the answer of slot 0."""
    begin(pool, {0: fake(), 1: fake(step="kill"), 2: fake()})
    process = pool.pid(0)
    pool.submit_all([(0, NOOP), (1, NOOP)])
    wait_until_gone([process])
    pool.submit(2, NOOP)
    results = wait_for(pool, 3)
    assert results[0].steps_executed == 2
    assert [results[slot].collateral for slot in (1, 2)] == [False, True]


def test_a_batched_environment_whose_process_dies_fails_for_all_that_took_part(pool):
    spec = fake_batch(step="kill")
    begin(pool, {0: spec, 1: spec, 2: fake()})
    pool.submit_all([(2, NOOP), (0, NOOP), (1, NOOP)])
    results = wait_for(pool, 3)
    assert results[2].steps_executed == 2 and [results[slot].collateral for slot in (0, 1)] == [False, False]
    pool.restart(0)
    begin(pool, {0: spec, 1: spec, 2: fake()})
    pool.submit_all([(1, NOOP), (2, NOOP), (0, NOOP)])
    results = wait_for(pool, 3)
    assert [results[slot].collateral for slot in range(3)] == [False, False, True]


def test_a_batched_environment_that_hangs_fails_for_all_that_took_part(pool):
    spec = fake_batch(step="sleep")
    begin(pool, {0: spec, 1: spec, 2: fake()})
    watching = watched(pool, step=0.5)
    watching.submit_all([(0, NOOP), (1, NOOP), (2, NOOP)])
    results = collect(watching, 3)
    assert [results[slot].collateral for slot in range(3)] == [False, False, True]
    assert all("no answer within 0.5 s" in str(results[slot]) for slot in (0, 1)) and watching.restarts == 1


def test_messages_name_the_worker_and_its_slot(pool):
    begin(pool, {0: fake(step="raise"), 4: fake(step="sleep")})
    pool.submit_all([(0, NOOP), (4, NOOP)])
    assert "environment worker 0 (slot 0), phase step_chunk" in str(wait_for(pool, 1)[0])
    with pytest.raises(RuntimeError, match=r"environment worker 1 \(slot 4\) is busy"):
        pool.submit(4, NOOP)


def test_a_batched_environment_gets_what_is_ready_together(pool):
    spec = fake_batch()
    seen = begin(pool, dict.fromkeys(range(5), spec))
    built = seen[0].instruction.split()[0]
    assert {seen[slot].instruction for slot in range(3)} == {f"{built} together=3 of 3"}
    assert seen[3].instruction.endswith("together=2 of 2"), "the last worker has two slots"
    assert [int(seen[slot].images[0, 0, 0, 0]) for slot in range(5)] == [0, 1, 2, 0, 1]
    pool.submit_all([(0, NOOP), (2, NOOP)])
    assert {result.observation.instruction for result in wait_for(pool, 2).values()} == {f"{built} together=2 of 3"}
    other = StepChunk(np.zeros((3, 2), np.float32))  # a longer chunk is executed by itself
    pool.submit_all([(0, NOOP), (1, other), (2, NOOP)])
    together = [result.observation.instruction.split()[1] for _, result in sorted(wait_for(pool, 3).items())]
    assert together == ["together=2", "together=1", "together=2"]
    assert int(pool.call(2, PrivilegedState())["slot"]) == 2


def test_an_exception_in_a_batched_environment_costs_all_its_slots(pool):
    spec = fake_batch(step="raise")
    begin(pool, {0: spec, 1: spec, 2: spec})
    pool.submit_all([(0, NOOP), (1, NOOP)])
    results = wait_for(pool, 2)
    assert all("deliberate failure in a batch" in str(result) for result in results.values())
    assert [pool.holds(slot) for slot in range(3)] == [None] * 3
    assert not any(result.collateral for result in results.values())
    with pytest.raises(EnvWorkerError, match="send Reset first") as error:
        pool.call(2, NOOP)
    assert error.value.collateral, "slot 2 took no part in the call that failed"
    with pytest.raises(EnvWorkerError, match="send Reset first") as error:
        pool.call(2, NOOP)
    assert not error.value.collateral, "the loss was reported before"
    assert "together=1" in pool.call(2, Reset(spec, 0, 0)).instruction


def test_a_batched_environment_that_forgets_a_slot_is_reported(pool):
    begin(pool, dict.fromkeys(range(2), fake_batch(step="forget")))
    pool.submit_all([(0, NOOP), (1, NOOP)])
    assert all("1 results for 2 slots" in str(result) for result in wait_for(pool, 2).values())


def test_one_slot_per_worker_uses_the_environment_for_one():
    with EnvPool(1, custom_modules=[fake_suites.__file__]) as pool:
        assert "heavy" in pool.call(0, Reset(fake_batch(), 0, 0)).instruction, "the text of FakeEnv"


def watched(pool, **limits):
    return WatchedPool(pool, WatchdogLimits(**limits))


def collect(pool, count):
    results = []
    while len(results) < count:
        results += pool.wait()
    assert len(results) == count
    return dict(results)


def test_a_late_slot_fails_its_neighbours_once_and_no_other_worker(pool):
    begin(pool, {0: fake(), 1: fake(step="sleep"), 2: fake(), 3: fake()})
    watching = watched(pool, step=5.0)
    old = pool.pid(0)
    watching.submit_all([(1, NOOP), (2, NOOP), (3, NOOP)])
    results = collect(watching, 3)
    assert "no answer within 5 s" in str(results[1]) and results[3].steps_executed == 2
    assert "replaced after a failure in one of its slots" in str(results[2]) and results[2].seed == 2
    assert results[2].collateral and not results[1].collateral
    assert watching.restarts == 1 and pool.pid(0) != old
    # Slot 0 was between two chunks: its episode is lost as well, which shows when it is to go on.
    watching.submit(0, NOOP)
    lost = collect(watching, 1)[0]
    assert "replaced after a failure" in str(lost) and lost.seed == 0 and lost.collateral
    while 0 not in watching.idle():
        watching.wait()
    watching.submit_all([(slot, Reset(TOY, 0, 0)) for slot in range(3)])
    assert all(result.instruction.startswith("reach the") for result in collect(watching, 3).values())


def test_a_slot_does_not_pay_for_the_time_of_the_others(pool):
    """Slots 1 and 2 wait for slot 0, which builds an environment for longer than a reset may take."""
    begin(pool, {1: fake(), 2: fake()})
    watching = watched(pool, create=30.0, reset=4.0)
    watching.submit_all([(0, Make(fake(make="pause"))), (1, Reset(fake(), 0, 0)), (2, Reset(fake(), 0, 0))])
    results = collect(watching, 3)
    assert not any(isinstance(result, Exception) for result in results.values()) and watching.restarts == 0


def test_a_dead_worker_is_started_once_for_all_its_slots(pool):
    begin(pool, {0: fake(step="kill"), 1: fake()})
    watching = watched(pool)
    watching.submit(0, NOOP)
    assert "SIGKILL" in str(collect(watching, 1)[0])
    assert not {0, 1, 2} & set(watching.idle())
    assert watching.restarts == 1
    watching.submit(1, NOOP)
    assert "replaced after a failure" in str(collect(watching, 1)[1])


def test_a_worker_replaced_for_a_failure_is_not_recycled_for_the_memory_of_the_one_before(pool, monkeypatch):
    monkeypatch.setattr(pool, "rss_bytes", lambda slot: 2e9)
    watching = watched(pool, max_rss_gb=1.0)
    assert not watching.between_episodes(0, playing=[1])  # slot 1 still plays: the worker is recycled after that
    watching.replace(1)
    monkeypatch.setattr(pool, "rss_bytes", lambda slot: 1e8)
    while 0 not in watching.idle():
        watching.wait()
    assert watching.between_episodes(0) and (watching.restarts, watching.recycled) == (1, 0)


def test_only_the_first_slot_tells_of_a_new_process(pool):
    pool.restart(1, wait=False)
    assert [pool.state(slot) for slot in range(3)] == [WorkerState.BUSY] * 3
    [(slot, hello)] = pool.wait(timeout=60)
    assert slot == 0 and isinstance(hello, Hello)


def test_a_pool_needs_slots():
    with pytest.raises(ConfigError, match="at least one slot and one per worker, not 2 and 0"):
        EnvPool(2, envs_per_worker=0)
