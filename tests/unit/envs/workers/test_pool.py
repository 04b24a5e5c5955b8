import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlvla.envs.workers import pool as pool_module
from rlvla.envs.workers.backend import WorkerOptions
from rlvla.envs.workers.messages import Make, Reset
from rlvla.envs.workers.pool import EnvPool, EnvWorkerError, WorkerState
from rlvla.envs.workers.processes import ProcessBackend
from rlvla.envs.workers.worker import hello
from rlvla.utils.errors import ConfigError
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
    test_submit_does_not_wait_and_wait_has_a_timeout,
    test_worker_gives_what_the_environment_gives_in_process,
    test_workers_hold_no_deep_learning_library_and_one_thread,
)
from tests.support.workers import FAKE_SUITES, TOY, fake, is_running, wait_until_gone


@pytest.fixture
def pool():
    with EnvPool(2, custom_modules=[FAKE_SUITES]) as pool:
        yield pool


def test_closing_the_pool_closes_the_environments(tmp_path, monkeypatch):
    monkeypatch.setattr("rlvla.envs.workers.processes._GRACE_SECONDS", 120.0)  # on a busy machine
    closed = tmp_path / "closed"
    with EnvPool(1, custom_modules=[FAKE_SUITES]) as pool:
        pool.call(0, Make(fake(closed_file=str(closed))))
    assert closed.read_text() == "closed\n"


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
    [(worker_id, error)] = pool.wait()
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
    [(worker_id, error)] = pool.wait()
    assert worker_id == 0 and "SIGKILL" in str(error) and error.seed == 6
    assert pool.state(0) is WorkerState.DEAD


def test_close_is_quick_and_may_be_repeated_even_with_a_hanging_worker():
    pool = EnvPool(2, custom_modules=[FAKE_SUITES])
    pids = [pool.pid(0), pool.pid(1)]
    pool.submit(0, Reset(fake(reset="sleep"), 0, 0))
    pool.wait(timeout=0.3)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 60.0  # it would sleep for ten minutes
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
            if ProcessBackend().wait([channel], 0.002):
                break
        assert ProcessBackend().wait([channel], 60)
        assert channel.receive() == hello()
        channel.send([(0, Reset(TOY, 0, 0))])  # the signal is ignored, no longer held back
        assert ProcessBackend().wait([channel], 60)
        [(slot, observation)] = channel.receive()
        assert slot == 0 and observation.instruction
    finally:
        ProcessBackend().close([channel], [])
    assert "KeyboardInterrupt" not in capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


PARENT = """
    import sys, time
    from rlvla.envs.workers.messages import EnvSpec, Reset
    from rlvla.envs.workers.pool import EnvPool

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
        env={**os.environ, "PYTHONPATH": str(Path(pool_module.__file__).parents[3])},
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))  # one idle, one hanging in its simulator
        parent.send_signal(kill)
        try:
            parent.wait(timeout=300)
        finally:
            parent.kill()
    assert wait_until_gone(pids)


OTHER_VERSION = """
    import json, sys
    from multiprocessing.connection import Connection

    hello = {"hello": {"protocol": 999, "rlvla": "0.0.1", "python": "3.10.0", "numpy": "1.26.4"}}
    Connection(int(sys.argv[sys.argv.index("--connection_fd") + 1])).send_bytes(json.dumps(hello).encode())
    sys.stdin.read()
"""


STOPPED = """
    import os, signal, sys, threading, time
    from rlvla.envs.workers.pool import EnvPool

    workers = []

    def start():
        pool = EnvPool(2)
        workers.append(pool)  # not closed when the thread ends
        pool.restart(1, wait=False)
        for slot in range(2):  # one idle, one that has just begun to start
            os.kill(pool.pid(slot), signal.SIGSTOP)
        print(pool.pid(0), pool.pid(1), flush=True)

    thread = threading.Thread(target=start)
    thread.start() if sys.argv[1] == "thread" else start()
    time.sleep(600)
"""


@pytest.mark.parametrize("starter", ["main", "thread"])
def test_no_stopped_worker_survives_the_process_that_started_it(starter):
    command = [sys.executable, "-c", textwrap.dedent(STOPPED), starter]
    environment = {**os.environ, "PYTHONPATH": str(Path(pool_module.__file__).parents[3])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2 and all(map(is_running, pids))
        finally:
            parent.kill()
    try:
        assert wait_until_gone(pids)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def test_other_version_is_refused(tmp_path):
    package = tmp_path / "rlvla" / "envs" / "workers"
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
