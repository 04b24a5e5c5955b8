"""What every pool of workers must do, wherever they run; a test file brings the fixture `pool`."""

import re

import numpy as np
import pytest

from rlvla.envs import make_env
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import play_expert_episode
from rlvla.envs.testing import assert_same_observation, assert_same_result
from rlvla.envs.workers.messages import EnvSpec, Make, Reset, RunExpert, StepChunk
from rlvla.envs.workers.pool import EnvWorkerError, WorkerState
from rlvla.utils.errors import ConfigError, Problem
from tests.support.workers import TOY, fake, wait_until_gone

NOOP = StepChunk(np.zeros((2, 2), dtype=np.float32))


def built_by(pool, spec):
    """How many environments worker 0 has built, this one included."""
    return int(re.search(r"built=(\d+) ", pool.call(0, Reset(spec, 0, 0)).instruction)[1])


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
    assert ours.pop("events") == theirs["events"]  # sets of propositions
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


def test_workers_hold_no_deep_learning_library_and_one_thread(pool):
    pool.call(0, RunExpert(TOY, 0, 0))  # everything a worker imports, the expert included
    text = pool.call(0, Reset(fake(), 0, 0)).instruction
    assert "heavy=[]" in text and "omp=1" in text


def test_submit_does_not_wait_and_wait_has_a_timeout(pool):
    assert pool.wait() == []  # nobody is busy
    pool.submit(0, Reset(fake(reset="sleep"), 0, 0))  # it would sleep for ten minutes
    assert pool.wait(timeout=0.2) == []
    assert pool.state(0) is WorkerState.BUSY and pool.busy_seconds(0) >= 0.2
    pool.submit(1, Reset(TOY, 0, 0))  # a worker that hangs is in nobody's way
    [(worker_id, observation)] = pool.wait()
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
    [(worker_id, error)] = pool.wait()
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
    assert error.value.problems == [
        Problem("image_size", "out_of_range", "first mistake"),
        Problem(None, "", "second mistake"),
    ]
    with pytest.raises(ConfigError, match="no task 9"):
        pool.call(0, Make(EnvSpec("toy_reach", 9)))


def test_hanging_worker_can_be_restarted_at_once(pool):
    pool.submit(0, Reset(fake(reset="sleep"), 0, 0))
    pool.wait(timeout=0.3)
    old = pool.pid(0)
    pool.restart(0)
    assert wait_until_gone([old])  # it would sleep for ten minutes
    assert pool.wait(timeout=0.0) == []  # the answer that never came is not waited for
    assert pool.call(0, Reset(TOY, 0, 0)).instruction.startswith("reach the")
