"""Ray backend without a cluster: messages as bytes, addresses, flags."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvla.envs import make_env
from rlvla.envs.testing import assert_same_observation, assert_same_result
from rlvla.envs.workers.codec import encode_answer, join_answers
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.ray_backend import (
    FRAMES,
    ArrayWriter,
    Envelope,
    RayBackend,
    read_reply,
    write_reply,
)
from rlvla.envs.workers.ray_cluster import address_problem
from rlvla.utils.errors import ConfigError


def encode(answer: Any, frames: str) -> bytes:
    """The reply of an actor with one answer."""
    arrays = ArrayWriter(frames)
    message = join_answers([(0, encode_answer(answer, arrays.store))])
    return write_reply(Envelope(4, "here", 5, True), message, arrays.chunks)


def decode(data: bytes) -> Any:
    envelope, [(slot, answer)] = read_reply(data)
    assert (envelope.pid, envelope.host, envelope.rss_bytes, envelope.is_batched, slot) == (4, "here", 5, True, 0)
    return answer


@pytest.mark.parametrize("frames", FRAMES)
def test_nothing_is_lost_on_the_way(frames: str) -> None:
    env = make_env("toy_reach", 0, use_proprio=True, image_size=96)
    observation = env.reset(3, 0)
    observation.images[:] = np.random.default_rng(0).integers(0, 256, observation.images.shape)
    received = decode(encode(observation, frames))
    assert_same_observation(received, observation)
    received.images[:] = 0  # the caller's own: writable
    result = env.step_chunk(np.full((4, 2), 0.1, np.float32), record_frames=True)
    assert_same_result(decode(encode(result, frames)), result)


def test_png_is_smaller() -> None:
    observation = make_env("toy_reach", 0, image_size=128).reset(0, 0)
    assert len(encode(observation, "png")) < 0.5 * len(encode(observation, "raw"))


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (2, 1, 8, 8, 3), (8, 3)])
def test_arrays_that_are_no_usual_picture(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    received = decode(encode({"array": array}, "png"))["array"]
    assert received.dtype == array.dtype and received.shape == shape
    np.testing.assert_array_equal(received, array)


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="Python objects"):
        encode({"array": np.array([object()])}, "raw")


def test_frames_of_a_whole_episode_exceed_the_pixel_limit_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)
    array = np.arange(10 * 8 * 8 * 3, dtype=np.uint8).reshape(10, 8, 8, 3)
    np.testing.assert_array_equal(decode(encode({"array": array}, "png"))["array"], array)


@pytest.mark.parametrize("address", ["host:port", "host:0", ":6379", "host:99999"])
def test_invalid_addresses(address: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    assert f"--ray_address {address}: '{address}' is not an address" in (address_problem(address) or "")


def test_nobody_answers() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    (problem,) = WorkerConfig(env_backend="ray", ray_address=address).problems(None)
    assert f"nothing answers at {address}" in problem and "ray start --head" in problem
    with pytest.raises(ConfigError, match="nothing answers"):
        RayBackend(address)


def test_no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._common.utils.get_ray_address_file", lambda _: "/no/such/file")
    (problem,) = WorkerConfig(env_backend="ray").problems(None)
    assert "no Ray cluster runs on this machine" in problem and "--ray_address local" in problem


def test_ray_that_does_not_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="--ray_address local: .*file") as error:
        RayBackend("local")
    (problem,) = error.value.problems
    assert (problem.flag, problem.reason) == ("ray_address", "unavailable")


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (problem,) = WorkerConfig(env_backend="ray").problems(None)
    assert problem.flag == "env_backend" and "rlvla[ray]" in problem


def test_flags_that_do_not_go_together() -> None:
    interpreter, *_ = WorkerConfig(env_backend="ray", ray_address="local").problems("other/python")
    assert "--env_python other/python" in interpreter and "ray start" in interpreter
    found = WorkerConfig(ray_address="auto", ray_frames="png").problems("other/python")
    assert [(p.flag, p.reason) for p in found] == [("ray_address", "needs_flag"), ("ray_frames", "needs_flag")]
    assert WorkerConfig().problems("other/python") == []
    with pytest.raises(ConfigError, match="ray_frames"):
        WorkerConfig(ray_frames="png").pool(1)
