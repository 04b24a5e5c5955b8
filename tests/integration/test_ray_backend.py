"""Workers on a Ray cluster of two nodes: the contract of pools, and what only several machines can suffer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cli import collect_demos
from rlvla.envs.workers.messages import EnvSpec, Make, Reset
from rlvla.envs.workers.pool import EnvPool, EnvWorkerError, WorkerState
from rlvla.envs.workers.ray_backend import RayBackend
from rlvla.envs.workers.watchdog import WatchdogLimits, WatchedPool
from rlvla.rollout import EpisodeRequest, RolloutEngine
from tests.support import faulty_suite
from tests.support import pool_contract as contract
from tests.support.policies import ScriptedPolicy
from tests.support.ray_cluster import TwoNodes, two_nodes
from tests.support.workers import FAKE_SUITES, TOY, fake, is_running, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 200.0  # on a machine that is busy with other things

# The tests of worker processes, run with the pool of this file.
test_arrays_stay_valid = contract.test_arrays_stay_valid_after_the_worker_has_gone_on
test_busy_worker = contract.test_busy_worker_takes_no_command
test_config_error = contract.test_config_error_arrives_as_one
test_environment_is_kept = contract.test_environment_is_kept_until_another_is_asked_for
test_environment_is_rebuilt = contract.test_environment_is_rebuilt_after_an_exception
test_exception_reaches_the_caller = contract.test_exception_reaches_the_caller_with_its_traceback
test_expert_episode = contract.test_expert_episode_equals_one_played_in_process
test_hanging_worker = contract.test_hanging_worker_can_be_restarted_at_once
test_arrays_of_any_size = contract.test_shared_memory_grows_with_what_is_sent
test_submit_does_not_wait = contract.test_submit_does_not_wait_and_wait_has_a_timeout
test_same_as_in_process = contract.test_worker_gives_what_the_environment_gives_in_process
test_workers_are_light = contract.test_workers_hold_no_deep_learning_library_and_one_thread


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def module_pool(cluster: TwoNodes) -> Iterator[EnvPool]:
    backend = RayBackend(cluster.address)
    with EnvPool(2, backend=backend, custom_modules=[FAKE_SUITES], start_timeout=START_SECONDS) as pool:
        yield pool


@pytest.fixture
def pool(module_pool: EnvPool) -> EnvPool:
    """Two idle workers: a process of Ray takes too long to start for new ones in each test."""
    pool = module_pool
    ended = [worker for worker in range(pool.num_workers) if pool.state(worker) is not WorkerState.IDLE]
    for worker in ended:
        pool.restart(worker, wait=False)
    while any(pool.state(worker) is WorkerState.BUSY for worker in ended):
        assert pool.wait(timeout=START_SECONDS)
    return pool


def nodes_of(pool: EnvPool) -> list[str]:
    """The Ray node of each worker."""
    import ray

    own_node = lambda actor: __import__("ray").get_runtime_context().get_node_id()  # noqa: E731 (sent as code)
    return ray.get([w.channel.actor.__ray_call__.remote(own_node) for w in pool._workers], timeout=300)


class Drift(ScriptedPolicy):
    """Its actions follow from what it sees and from its random numbers."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def actions(self, images, proprio, noise):
        return (noise + images.mean(axis=(1, 2, 3, 4))[:, None] / 255 - 1).reshape(-1, 2, 2)

    def tokens(self, images, proprio, noise):
        return noise * 256


def play(pool: EnvPool, count: int, **options: Any) -> tuple[list[Any], RolloutEngine]:
    requests = [EpisodeRequest("toy_reach", 0, i, 1000 + i, f"group {i // 4}") for i in range(count)]
    engine = RolloutEngine(WatchedPool(pool), {"use_proprio": True}, {"success": 1.0})
    return engine.run(requests, Drift(), temperature=1.0, **options), engine


def assert_same_episodes(ours: list[Any], theirs: list[Any]) -> None:
    assert [sample.seed for sample in ours] == [sample.seed for sample in theirs]
    for one, other in zip(ours, theirs):
        assert one.images.equal(other.images) and one.proprio.equal(other.proprio)
        assert one.action_tokens.equal(other.action_tokens) and one.rewards.equal(other.rewards)
        assert (one.finish_step, one.success_at_end) == (other.finish_step, other.success_at_end)


def test_workers_lie_on_both_nodes_and_tell_their_memory(pool: EnvPool) -> None:
    assert len(set(nodes_of(pool))) == 2
    for worker in range(2):
        pool.call(worker, Make(TOY))
        assert is_running(pool.pid(worker)) and 20e6 < pool.rss_bytes(worker) < 1e9


@pytest.mark.parametrize("phase", ["make", "reset", "step"])
def test_killed_worker_is_reported_and_replaced(pool: EnvPool, phase: str) -> None:
    pool.call(0, Reset(TOY, 0, 0))
    pid = pool.pid(0)
    spec = fake(**{phase: "kill"})
    if phase == "step":
        pool.call(0, Reset(spec, 3, 5))
    pool.submit(0, contract.NOOP if phase == "step" else Reset(spec, 3, 5))
    [(worker, error)] = pool.wait()
    assert worker == 0 and isinstance(error, EnvWorkerError) and wait_until_gone([pid])
    for part in ("the process on", "has ended", "fake task 0", "initial state 3", "seed 5"):
        assert part in str(error)
    assert pool.state(0) is WorkerState.DEAD and pool.state(1) is WorkerState.IDLE
    pool.restart(0)
    assert pool.call(0, Reset(TOY, 0, 0)).instruction.startswith("reach the")


def test_a_killed_workers_episode_is_played_again_and_all_are_those_of_processes(pool: EnvPool) -> None:
    killed: list[int] = []

    def kill_one(_: Any) -> None:
        if not killed:
            killed.append(pool.pid(0))
            os.kill(killed[0], signal.SIGKILL)

    samples, engine = play(pool, 24, on_episode=kill_one)
    assert killed and engine.stats.retries >= 1 and engine.stats.dropped == []
    with EnvPool(2) as processes:
        assert_same_episodes(samples, play(processes, 24)[0])


@pytest.mark.nightly
def test_faults_of_environments_cost_an_attempt_each(cluster: TwoNodes, tmp_path: Path) -> None:
    faults = {"kill": "ended", "raise": "exception", "long_error": "exception"}
    faults |= dict.fromkeys(("megabytes", "events_text", "events_nested", "absurd_reward"), "bad_answer")
    plan = {str(1000 + index): [["step", fault]] for index, fault in enumerate(faults)}
    (tmp_path / "faults.json").write_text(json.dumps(plan))
    kwargs = {"use_proprio": True, "image_size": faulty_suite.SIZE, "plan": str(tmp_path)}
    requests = [EpisodeRequest("faulty", 0, i, 1000 + i, "group") for i in range(len(faults) + 2)]
    options = {"custom_modules": [faulty_suite.__file__], "start_timeout": START_SECONDS}
    with EnvPool(2, backend=RayBackend(cluster.address), **options) as pool:
        watched = WatchedPool(pool, WatchdogLimits(start=START_SECONDS))
        engine = RolloutEngine(watched, kwargs, {"success": 1.0}, tasks=[faulty_suite.task()])
        samples = engine.run(requests, ScriptedPolicy(faulty_suite.CHUNK, 1), temperature=1.0)
    assert engine.stats.faults == Counter(faults.values()) and engine.stats.dropped == []
    assert [sample.seed for sample in samples] == [request.seed for request in requests]
    for sample in samples:
        assert sample.success_at_end == faulty_suite.succeeds(sample.seed)
        assert sample.finish_step == faulty_suite.length_of(sample.seed)


def test_what_a_simulator_has_started_ends_with_its_actor(pool: EnvPool, tmp_path: Path) -> None:
    pool.call(0, Reset(fake(children=str(tmp_path)), 0, 0))
    children = [int(path.name) for path in tmp_path.iterdir()]
    assert len(children) == 2 and all(map(is_running, children))
    os.kill(pool.pid(0), signal.SIGKILL)
    assert wait_until_gone(children)
    pool.restart(0)


@pytest.fixture(scope="module")
def pool_with_slots(cluster: TwoNodes) -> Iterator[EnvPool]:
    """Slots 0 and 1 on one actor, 2 and 3 on another."""
    options = {"custom_modules": [FAKE_SUITES], "start_timeout": START_SECONDS}
    with EnvPool(4, envs_per_worker=2, backend=RayBackend(cluster.address, "png"), **options) as pool:
        yield pool


def collect(pool: EnvPool, count: int) -> dict[int, Any]:
    """That many answers, by slot."""
    results: dict[int, Any] = {}
    while len(results) < count:
        fresh = pool.wait(timeout=60)
        assert fresh, "nothing came within 60 s"
        results |= dict(fresh)
    return results


def begin(pool: EnvPool, specs: dict[int, EnvSpec]) -> None:
    """Start an episode in each of these slots, slot s with seed s."""
    pool.submit_all([(slot, Reset(spec, 1, slot)) for slot, spec in specs.items()])
    collect(pool, len(specs))


def test_slots_of_an_actor_play_the_episodes_of_single_workers(pool_with_slots: EnvPool) -> None:
    """toy_reach is batched where a worker has several slots."""
    pids = [pool_with_slots.pid(slot) for slot in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3] and pool_with_slots.num_workers == 2
    samples, engine = play(pool_with_slots, 16)
    assert engine.stats.dropped == [] and engine.stats.retries == 0
    with EnvPool(2) as processes:
        assert_same_episodes(samples, play(processes, 16)[0])


def test_batched_slots_of_an_actor_get_what_is_ready_together(pool_with_slots: EnvPool) -> None:
    pool, spec = pool_with_slots, EnvSpec("fake_batch", 0)
    begin(pool, {0: spec, 1: spec})
    pool.submit_all([(0, contract.NOOP), (1, contract.NOOP)])
    assert all("together=2 of 2" in result.observation.instruction for result in collect(pool, 2).values())


def test_a_slot_of_an_actor_fails_by_itself_and_waits_for_no_other(pool_with_slots: EnvPool) -> None:
    pool = pool_with_slots
    begin(pool, {0: fake(), 1: fake(step="raise"), 2: fake(), 3: fake(step="sleep")})
    pool.submit_all([(slot, contract.NOOP) for slot in range(4)])
    results = collect(pool, 3)
    assert results[0].steps_executed == results[2].steps_executed == 2
    assert isinstance(results[1], EnvWorkerError) and "deliberate failure" in str(results[1])
    assert (results[1].worker_id, results[1].slot, results[1].seed) == (0, 1, 1)
    states = [pool.state(slot) for slot in range(4)]
    assert states == [WorkerState.IDLE] * 3 + [WorkerState.BUSY] and pool.busy_seconds(3) > 0
    pool.restart(3)
    assert pool.call(2, Reset(TOY, 0, 0)).instruction.startswith("reach the")


def test_an_actor_that_dies_fails_every_slot_that_owes_an_answer(pool_with_slots: EnvPool) -> None:
    pool = pool_with_slots
    begin(pool, {0: fake(step="kill"), 1: fake(), 2: fake()})
    pool.submit_all([(0, contract.NOOP), (1, contract.NOOP), (2, contract.NOOP)])
    results = collect(pool, 3)
    assert results[2].steps_executed == 2
    for slot in (0, 1):
        assert isinstance(results[slot], EnvWorkerError) and "has ended" in str(results[slot])
        assert (results[slot].slot, results[slot].seed) == (slot, slot)
    assert [pool.state(slot) for slot in range(4)] == [WorkerState.DEAD] * 2 + [WorkerState.IDLE] * 2
    pool.restart(0)
    assert pool.call(1, Reset(TOY, 0, 0)).instruction.startswith("reach the")


def test_a_command_writes_the_same_file_with_both_backends(cluster: TwoNodes, tmp_path: Path) -> None:
    start = [
        "--task_suite_name",
        "toy_reach",
        "--num_demos",
        "6",
        "--use_proprio",
        "--keep",
        "all",
        "--noise_std",
        "0.2",
    ]
    on_cluster = ["--env_backend", "ray", "--ray_address", cluster.address, "--ray_frames", "png"]
    on_cluster += ["--num_envs", "4", "--envs_per_worker", "2"]
    collect_demos.main([*start, "--output", str(tmp_path / "ray"), *on_cluster])
    collect_demos.main([*start, "--output", str(tmp_path / "process")])
    ours, theirs = (h5py.File(tmp_path / name / "demos.hdf5") for name in ("ray", "process"))
    names: list[str] = []
    theirs.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    assert any("rgb" in name or "image" in name for name in names)
    for name in names:
        np.testing.assert_array_equal(ours[name][()], theirs[name][()], err_msg=name)


TRAINER = """
    import signal, sys
    from rlvla.envs.workers.messages import EnvSpec, Reset
    from rlvla.envs.workers.pool import EnvPool
    from rlvla.envs.workers.ray_backend import RayBackend

    pool = EnvPool(2, backend=RayBackend(sys.argv[2]), custom_modules=[sys.argv[1]], start_timeout=200)
    pool.call(0, Reset(EnvSpec("toy_reach", 0), 0, 0))
    pool.submit(1, Reset(EnvSpec("fake", 0, {"reset": "sleep"}), 0, 0))
    pool.wait(timeout=0.5)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print(pool.pid(0), pool.pid(1), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("where", [pytest.param("cluster", marks=pytest.mark.nightly), "local"])
def test_nothing_survives_a_killed_trainer(cluster: TwoNodes, where: str) -> None:
    """One worker is stopped, the other hangs; a cluster of the trainer's own ends with it, too.

    Two helpers of Ray need a minute to notice, which is not waited for here.
    """
    address = "local" if where == "local" else cluster.address
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), FAKE_SUITES, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with trainer:
        try:
            workers = [int(pid) for pid in trainer.stdout.readline().split()]
            assert len(workers) == 2 and all(map(is_running, workers))
            started = {*workers, *descendants(trainer.pid)}
            assert where == "cluster" or len(started) > 6  # Ray's own processes
            started = {pid for pid in started if b"Agent" not in command_line(pid)}
            os.kill(workers[0], signal.SIGSTOP)
            with member_of_its_group(workers[0]) if where == "local" else nullcontext():
                trainer.kill()
                trainer.stdin.close()
                assert trainer.wait(timeout=300) == -signal.SIGKILL
                assert wait_until_gone(started)
        finally:
            trainer.kill()
        assert trainer.stdout.read() == "", "Ray prints"


@contextmanager
def member_of_its_group(pid: int) -> Iterator[None]:
    """Keep its process group from being orphaned, on which the kernel would end a stopped process."""
    group = os.getpgid(pid)
    with subprocess.Popen(["sleep", "600"], preexec_fn=lambda: os.setpgid(0, group)) as member:
        try:
            yield
        finally:
            member.kill()


def command_line(pid: int) -> bytes:
    """Nothing for a process that has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def descendants(pid: int) -> set[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = set(), [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


@pytest.mark.nightly
def test_episodes_of_a_lost_node_are_played_elsewhere(cluster: TwoNodes, pool: EnvPool) -> None:
    """The last test with this cluster."""
    lost = cluster.second_node
    assert lost in nodes_of(pool), "no worker lies on the node that is to be lost"
    victim = nodes_of(pool).index(lost)
    pid, seen = pool.pid(victim), []

    def lose_it(sample: Any) -> None:
        if not seen:
            cluster.lose_second_node()
            assert wait_until_gone([pid])  # a process may outlive its node for a moment, and go on playing
        seen.append(sample)

    samples, engine = play(pool, 24, on_episode=lose_it)
    assert engine.stats.retries >= 1 and engine.stats.dropped == []
    with EnvPool(1) as processes:
        assert_same_episodes(samples, play(processes, 24)[0])
