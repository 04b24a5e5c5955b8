"""Workers that are lost between their start and the first rollout."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from rlvla.envs.workers.config import WorkerConfig, start_pool
from rlvla.envs.workers.messages import EnvSpec, Reset
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.envs.workers.processes import egl_device
from rlvla.envs.workers.watchdog import run_everywhere
from rlvla.utils.errors import RunEnded
from tests.support import faulty_suite


def spec(folder: Path, **faults: list) -> EnvSpec:
    (folder / "faults.json").write_text(json.dumps(faults))
    return EnvSpec("faulty", 0, {"plan": str(folder)})


@pytest.mark.parametrize("fault", ["kill", "sleep"])
def test_a_worker_lost_while_it_builds_is_replaced(tmp_path: Path, fault: str) -> None:
    config = WorkerConfig(env_create_timeout=2.0 if fault == "sleep" else 300.0)
    first = spec(tmp_path, make=[fault, None, fault])
    with start_pool(2, config, first, [faulty_suite.__file__]) as pool:
        assert pool.restarts == 2


def test_a_worker_lost_before_its_greeting_is_replaced(tmp_path: Path) -> None:
    python = tmp_path / "python"
    once = f'mkdir "{tmp_path}/killed" 2>/dev/null && kill -9 $$\n'
    python.write_text(f'#!/bin/sh\n{once}exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    first = spec(tmp_path)
    with start_pool(2, WorkerConfig(), first, [faulty_suite.__file__], str(python)) as pool:
        assert pool.restarts == 1 and [pool.holds(slot) for slot in range(2)] == [first, first]


@pytest.mark.parametrize(
    ("gpus", "variables", "device"),
    [
        (1, {"LOCAL_RANK": "0"}, None),
        (4, {}, "0"),
        (4, {"LOCAL_RANK": "2"}, "2"),
        (4, {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, "3"),
        (4, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}, "1"),
        (4, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-8f"}, None),
        (2, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"}, None),
        (4, {"LOCAL_RANK": "2", "MUJOCO_EGL_DEVICE_ID": "0"}, None),
    ],
)
def test_workers_render_on_the_gpu_of_their_rank(
    gpus: int, variables: dict[str, str], device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    devices = [f"/dev/nvidia{number}" for number in range(gpus)]
    assert egl_device(devices) == ({} if device is None else {"MUJOCO_EGL_DEVICE_ID": device})


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_between_building_and_the_first_episode_is_replaced(tmp_path: Path, end: int) -> None:
    first = spec(tmp_path)
    with start_pool(2, WorkerConfig(env_reset_timeout=2.0), first, [faulty_suite.__file__]) as pool:
        os.kill(pool._pool.pid(1), end)
        observations = run_everywhere(pool, lambda slot: Reset(first, 0, slot))
        assert [int(observation.images[0, 0, 0, 0]) for observation in observations] == [0, 1]
        assert pool.restarts == 1


def test_what_is_lost_again_and_again_ends_the_run_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(EnvWorkerError, match="SIGKILL") as error:
        start_pool(1, WorkerConfig(), spec(tmp_path, make=["kill"] * 9), [faulty_suite.__file__])
    assert error.value.kind == "ended" and error.value.phase == "make"
    assert isinstance(error.value, RunEnded), "shown as one message"
    assert len(list(tmp_path.glob("make.*"))) == 3


def test_an_exception_while_building_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(EnvWorkerError, match="deliberate failure") as error:
        start_pool(1, WorkerConfig(), spec(tmp_path, make=["raise"] * 9), [faulty_suite.__file__])
    assert error.value.kind == "exception" and len(list(tmp_path.glob("make.*"))) == 1
