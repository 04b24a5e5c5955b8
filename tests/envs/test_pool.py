import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from rlvla.envs import make_env
from rlvla.envs import pool as pool_module
from rlvla.envs.backend import WorkerOptions
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import play_expert_episode
from rlvla.envs.messages import EnvSpec, Make, Reset, RunExpert, StepChunk
from rlvla.envs.pool import EnvPool, EnvWorkerError, WorkerState
from rlvla.envs.processes import ProcessBackend
from rlvla.envs.testing import assert_same_observation, assert_same_result
from rlvla.envs.worker import hello
from rlvla.utils.errors import ConfigError

FAKE_SUITES = str(Path(__file__).parent / "fake_suites.py")
TOY = EnvSpec("toy_reach", 0, {"use_proprio": True})
NOOP = StepChunk(np.zeros((2, 2), dtype=np.float32))


def fake(**options):
    return EnvSpec("fake", 0, options)


def built_by(pool, spec):
    """How many environments worker 0 has built, this one included."""
    return int(re.search(r"built=(\d+) ", pool.call(0, Reset(spec, 0, 0)).instruction)[1])


@pytest.fixture
def pool():
    with EnvPool(2, custom_modules=[FAKE_SUITES]) as pool:
        yield pool


def is_running(pid):
    """False for a process that has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or after
        return False


def wait_until_gone(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def test_worker_gives_what_the_environment_gives_in_process(pool):
    env = make_env("toy_reach", 0, use_proprio=True)
    rng = np.random.default_rng(0)
    assert pool.call(0, Make(TOY)) == env.task
    for init_state_id in range(5):
        assert_same_observation(pool.call(0, Reset(TOY, init_state_id, 0)), env.reset(init_state_id, 0))
        for size, record in ((4, False), (7, True), (9, False)):  # the last one is cut short by the step limit
            actions = rng.uniform(-1, 1, (size, 2)).astype(np.float32)
            ours = env.step_chunk(actions, record_frames=record)
            assert_same_result(pool.call(0, StepChunk(actions, record)), ours)
            if ours.terminated or ours.truncated:
                break


def test_expert_episode_equals_one_played_in_process(pool):
    config = ExpertConfig(noise_std=0.2, offset_prob=0.5, offset_max=0.3)
    ours = play_expert_episode(make_env("toy_reach", 0, use_proprio=True), make_expert("toy_reach", 0, config), 4, 9)
    theirs = pool.call(0, RunExpert(TOY, 4, 9, config))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value, err_msg=name)


def test_arrays_stay_valid_after_the_worker_has_gone_on(pool):
    first = pool.call(0, Reset(TOY, 0, 0))
    kept = first.images.copy()
    pool.call(0, Reset(TOY, 1, 0))
    np.testing.assert_array_equal(first.images, kept)
    first.images[:] = 0  # the caller's own: writable


def test_shared_memory_grows_with_what_is_sent(pool):
    for size in (16, 224, 32):
        spec = EnvSpec("toy_reach", 0, {"image_size": size})
        assert pool.call(0, Reset(spec, 3, 0)).images.shape == (1, size, size, 3)
        frames = pool.call(0, StepChunk(np.zeros((5, 2), dtype=np.float32), record_frames=True)).frames
        assert frames.shape == (5, size, size, 3)
        np.testing.assert_array_equal(frames[0], make_env("toy_reach", 0, image_size=size).reset(3, 0).images[0])


def test_environment_is_kept_until_another_is_asked_for(pool, tmp_path):
    closed = tmp_path / "closed"
    spec = fake(closed_file=str(closed))
    first = built_by(pool, spec)
    assert [built_by(pool, spec) for _ in range(2)] == [first, first]
    assert not closed.exists()
    assert built_by(pool, fake(other=1)) == first + 1
    assert closed.read_text() == "closed\n"


def test_closing_the_pool_closes_the_environments(tmp_path):
    closed = tmp_path / "closed"
    with EnvPool(1, custom_modules=[FAKE_SUITES]) as pool:
        pool.call(0, Make(fake(closed_file=str(closed))))
    assert closed.read_text() == "closed\n"


def test_workers_hold_no_deep_learning_library_and_one_thread(pool):
    pool.call(0, RunExpert(TOY, 0, 0))  # everything a worker imports, the expert included
    text = pool.call(0, Reset(fake(), 0, 0)).instruction
    assert "heavy=[]" in text and "omp=1" in text


def test_submit_does_not_wait_and_wait_has_a_timeout(pool):
    assert pool.wait() == []  # nobody is busy
    start = time.monotonic()
    pool.submit(0, Reset(fake(reset="sleep"), 0, 0))
    assert pool.wait(timeout=0.2) == []
    assert time.monotonic() - start < 5.0
    assert pool.state(0) is WorkerState.BUSY and pool.busy_seconds(0) >= 0.2
    pool.submit(1, Reset(TOY, 0, 0))  # a worker that hangs is in nobody's way
    [(worker_id, observation)] = pool.wait(timeout=30)
    assert worker_id == 1 and observation.images.shape == (1, 64, 64, 3)
    assert pool.state(1) is WorkerState.IDLE and pool.busy_seconds(1) == 0.0


def test_busy_worker_takes_no_command(pool):
    pool.submit(0, Reset(TOY, 0, 0))
    with pytest.raises(RuntimeError, match="busy"):
        pool.submit(0, Reset(TOY, 1, 0))
    with pytest.raises(RuntimeError, match="busy"):
        pool.call(1, Reset(TOY, 1, 0))
    assert len(pool.wait()) == 1


@pytest.mark.parametrize("phase", ["make", "reset", "step_chunk"])
def test_exception_reaches_the_caller_with_its_traceback(pool, phase):
    spec = fake(**{phase.removesuffix("_chunk"): "raise"})
    if phase == "step_chunk":
        pool.call(0, Reset(spec, 3, 5))
        pool.submit(0, NOOP)
    else:
        pool.submit(0, Reset(spec, 3, 5))
    [(worker_id, error)] = pool.wait(timeout=30)
    assert worker_id == 0 and isinstance(error, EnvWorkerError)
    assert (error.phase, error.suite, error.task_id, error.init_state_id, error.seed) == (phase, "fake", 0, 3, 5)
    assert error.error_type == "ZeroDivisionError"
    assert "fake_suites.py" in error.worker_traceback and "in _fault" in error.worker_traceback
    for part in (phase, "fake task 0", "initial state 3", "seed 5", "deliberate failure"):
        assert part in str(error)
    # The process lives on, with a fresh environment.
    assert "heavy" in pool.call(0, Reset(fake(), 0, 0)).instruction


def test_environment_is_rebuilt_after_an_exception(pool):
    spec = fake(step="raise")
    first = built_by(pool, spec)
    with pytest.raises(EnvWorkerError, match="deliberate"):
        pool.call(0, NOOP)
    with pytest.raises(EnvWorkerError, match="send Reset first"):
        pool.call(0, NOOP)
    assert built_by(pool, spec) == first + 1


def test_config_error_arrives_as_one(pool):
    with pytest.raises(ConfigError) as error:
        pool.call(0, Reset(fake(make="config"), 0, 0))
    assert error.value.problems == ["first mistake", "second mistake"]
    with pytest.raises(ConfigError, match="known tasks: 0"):
        pool.call(0, Make(EnvSpec("toy_reach", 9)))


@pytest.mark.parametrize(
    ("fault", "words"), [("kill", "killed by signal SIGKILL"), ("exit", "exit code 3")], ids=["kill", "exit"]
)
@pytest.mark.parametrize("phase", ["make", "reset", "step"])
def test_worker_that_dies_is_reported_and_can_be_replaced(pool, fault, words, phase):
    spec = fake(**{phase: fault})
    if phase == "step":
        pool.call(0, Reset(spec, 3, 5))
        pool.submit(0, NOOP)
    else:
        pool.submit(0, Reset(spec, 3, 5))
    [(worker_id, error)] = pool.wait(timeout=30)
    assert worker_id == 0 and isinstance(error, EnvWorkerError)
    assert words in str(error) and error.suite == "fake" and error.seed == 5
    assert pool.state(0) is WorkerState.DEAD and pool.state(1) is WorkerState.IDLE
    with pytest.raises(RuntimeError, match="restart"):
        pool.submit(0, Reset(fake(), 0, 0))
    pool.restart(0)
    assert pool.state(0) is WorkerState.IDLE
    assert pool.call(0, Reset(TOY, 0, 0)).instruction.startswith("reach the")


def test_idle_worker_that_was_killed_is_reported_at_the_next_command(pool):
    os.kill(pool.pid(0), signal.SIGKILL)
    wait_until_gone([pool.pid(0)])
    pool.submit(0, Reset(TOY, 2, 6))
    [(worker_id, error)] = pool.wait(timeout=30)
    assert worker_id == 0 and "SIGKILL" in str(error) and error.seed == 6
    assert pool.state(0) is WorkerState.DEAD


def test_hanging_worker_can_be_restarted_at_once(pool):
    pool.submit(0, Reset(fake(reset="sleep"), 0, 0))
    pool.wait(timeout=0.3)
    old, start = pool.pid(0), time.monotonic()
    pool.restart(0)
    assert time.monotonic() - start < 60.0 and wait_until_gone([old])  # it would sleep for ten minutes
    assert pool.wait(timeout=0.0) == []  # the answer that never came is not waited for
    assert pool.call(0, Reset(TOY, 0, 0)).instruction.startswith("reach the")


def test_close_is_quick_and_may_be_repeated_even_with_a_hanging_worker():
    pool = EnvPool(2, custom_modules=[FAKE_SUITES])
    pids = [pool.pid(0), pool.pid(1)]
    pool.submit(0, Reset(fake(reset="sleep"), 0, 0))
    pool.wait(timeout=0.3)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 3.0
    assert not any(map(is_running, pids))
    pool.close()
    with pytest.raises(RuntimeError, match="dead"):
        pool.submit(1, Reset(TOY, 0, 0))


def test_pool_leaves_no_descriptor_open():
    def open_descriptors():
        return len(os.listdir("/proc/self/fd"))

    EnvPool(1).close()  # whatever is opened once and for all
    before = open_descriptors()
    with EnvPool(2) as pool:
        pool.call(0, Reset(TOY, 0, 0))
        pool.restart(0)
    assert open_descriptors() == before


def test_worker_ignores_ctrl_c(pool):
    pool.call(0, Reset(TOY, 0, 0))
    os.kill(pool.pid(0), signal.SIGINT)
    assert pool.call(0, NOOP).steps_executed == 2


def test_a_worker_that_is_still_starting_ignores_ctrl_c(capfd):
    channel = ProcessBackend().start(WorkerOptions())
    try:
        for _ in range(200):
            os.kill(channel.pid, signal.SIGINT)
            if channel.connection.poll(0.002):
                break
        assert channel.connection.poll(60)
        assert channel.receive() == hello()
        channel.send(Reset(TOY, 0, 0))  # the signal is ignored, no longer held back
        assert channel.receive().instruction
    finally:
        ProcessBackend().close([channel], [])
    assert "KeyboardInterrupt" not in capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


PARENT = """
    import sys, time
    from rlvla.envs.messages import EnvSpec, Reset
    from rlvla.envs.pool import EnvPool

    pool = EnvPool(2, custom_modules=[sys.argv[1]])
    pool.call(0, Reset(EnvSpec("toy_reach", 0), 0, 0))
    pool.submit(1, Reset(EnvSpec("fake", 0, {"reset": "sleep"}), 0, 0))
    pool.wait(timeout=0.5)
    print(pool.pid(0), pool.pid(1), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_no_worker_survives_the_process_that_started_it(kill):
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), FAKE_SUITES],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(pool_module.__file__).parents[2])},
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))  # one idle, one hanging in its simulator
        parent.send_signal(kill)
        try:
            parent.wait(timeout=30)
        finally:
            parent.kill()
    assert wait_until_gone(pids)


OTHER_VERSION = """
    import pickle, sys, types
    from multiprocessing.connection import Connection

    messages = sys.modules["rlvla.envs.messages"] = types.ModuleType("rlvla.envs.messages")
    messages.Hello = type("Hello", (), {"__module__": "rlvla.envs.messages"})
    hello = messages.Hello()
    vars(hello).update(protocol=999, rlvla="0.0.1", python="3.10.0", numpy="1.26.4")
    Connection(int(sys.argv[sys.argv.index("--connection_fd") + 1])).send_bytes(pickle.dumps(hello))
    sys.stdin.read()
"""


def test_other_version_is_refused(tmp_path):
    package = tmp_path / "rlvla" / "envs"
    package.mkdir(parents=True)
    (package / "worker.py").write_text(textwrap.dedent(OTHER_VERSION))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(EnvWorkerError, match=r"rlvla 0\.0\.1 \(worker protocol 999\).*install the same version"):
        EnvPool(1, python=str(python))


def test_interpreter_that_cannot_be_used_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="no_such_python"):
        EnvPool(1, python=str(tmp_path / "no_such_python"))
    with pytest.raises(EnvWorkerError, match=r"phase start.*exit code 1"):
        EnvPool(1, python="/bin/false")


def test_missing_custom_module_is_one_line(tmp_path):
    with (
        EnvPool(1, custom_modules=[str(tmp_path / "absent.py")]) as pool,
        pytest.raises(ConfigError, match="absent.py"),
    ):
        pool.call(0, Reset(TOY, 0, 0))


def test_pool_needs_a_worker():
    with pytest.raises(ConfigError, match="at least one"):
        EnvPool(0)
