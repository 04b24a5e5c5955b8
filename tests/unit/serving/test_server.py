"""The policy server: the same actions as the folder's policy, and an answer to every mistake of a client."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from rlvla.commands.serve import check_serve, listen
from rlvla.models.config import PolicyConfig
from rlvla.models.families import check_checkpoint
from rlvla.models.policy import Decision, PolicySpec
from rlvla.serving.config import API_KEY_VARIABLE, ServeConfig
from rlvla.serving.messages import pack, unpack
from rlvla.serving.observations import NOISE_KEY, SEED_KEY, ObservationReader, request_keys
from rlvla.serving.server import PolicyServer
from rlvla.utils.errors import ConfigError
from rlvla.utils.seeding import derive_rng
from tests.support.policy_server import Running, running, serving

KEY = "a-key-for-these-tests"


@pytest.fixture(scope="module")
def server(policy_folder: Path) -> Iterator[Running]:
    with serving(policy_folder, max_message_mb=1.0, max_batch=4) as run:
        yield run


def open_client(run: Running, **options: Any) -> Any:
    return connect(run.url, compression=None, proxy=None, **options)


def observation(number: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    image = rng.integers(0, 255, (64, 64, 3), np.uint8)
    return {"observation/image": image, "observation/state": rng.random(2, np.float32), "prompt": "reach the target"}


def infer(client: Any, request: Any) -> Any:
    client.send(request if isinstance(request, (str, bytes)) else pack(request))
    answer = client.recv(timeout=20)
    return answer if isinstance(answer, str) else unpack(answer)


def exchange(client: Any, message: Any, times: int = 1) -> None:
    """Send a message several times without reading, then read once."""
    for _ in range(times):
        client.send(message)
        time.sleep(0.05)
    client.recv(timeout=20)


def mistake(run: Running, request: Any) -> str:
    """The text frame after a request; the connection is closed with code 1011."""
    with open_client(run) as client:
        client.recv(timeout=20)
        text = infer(client, request)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=20)
    assert isinstance(text, str) and closed.value.rcvd.code == 1011
    return text


def test_actions_are_those_of_the_folder(server: Running, policy_folder: Path) -> None:
    policy: Any = check_checkpoint(policy_folder).load_policy().eval()
    with open_client(server) as client:
        metadata = unpack(client.recv(timeout=20))
        assert metadata["action_horizon"] == 4 and metadata["action_dim"] == 2
        assert metadata["environment"]["task_suite_name"] == "toy_reach"
        assert list(metadata["observation"]) == list(observation()) == list(metadata["keys"].values())
        for number in range(3):
            request = observation(number)
            answer = infer(client, request)
            images, state = policy.prepare(request["observation/image"][None], request["observation/state"])
            expected = policy.act(images[None], state[None], [request["prompt"]], noise=None, temperature=1.0)
            np.testing.assert_array_equal(answer["actions"], expected.actions[0])
            assert answer["actions"].dtype == np.float32 and answer["server_timing"]["infer_ms"] > 0
        assert "prev_total_ms" in answer["server_timing"]


def test_several_clients_share_batches(server: Running) -> None:
    requests = [observation(number) for number in range(8)]
    with open_client(server) as client:
        client.recv(timeout=20)
        alone = [infer(client, request)["actions"] for request in requests]
    before = server.server._batcher.counts.batches
    together = threading.Barrier(8)

    def ask(request: dict[str, Any]) -> list[np.ndarray]:
        with open_client(server) as client:
            client.recv(timeout=20)
            together.wait(20)
            return [infer(client, request)["actions"] for _ in range(4)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, requests))
    for own, expected in zip(answers, alone):
        for actions in own:
            np.testing.assert_allclose(actions, expected, atol=1e-5)
    assert server.server._batcher.counts.batches - before < 32


def test_sampling_repeats_with_seeds(policy_folder: Path) -> None:
    with serving(policy_folder, temperature=1.0, num_actions=3) as run:
        spec = check_checkpoint(policy_folder).spec

        def episode(seed: int) -> list[np.ndarray]:
            with open_client(run) as client:
                client.recv(timeout=20)
                return [infer(client, observation() | {SEED_KEY: seed})["actions"] for _ in range(3)]

        first, again, other = episode(1), episode(1), episode(2)
        np.testing.assert_array_equal(first, again)
        assert first[0].shape == (3, 2) and not np.array_equal(first, other) and not np.array_equal(first[0], first[1])
        with open_client(run) as client:
            client.recv(timeout=20)
            noise = spec.draw(derive_rng(1, "sampling"))
            np.testing.assert_array_equal(infer(client, observation() | {NOISE_KEY: noise})["actions"], first[0])
        assert SEED_KEY in mistake(run, observation() | {SEED_KEY: -1})
        assert NOISE_KEY in mistake(run, observation() | {NOISE_KEY: np.zeros(1)})


def test_bf16(policy_folder: Path) -> None:
    with serving(policy_folder, bf16=True) as run, open_client(run) as client:
        client.recv(timeout=20)
        assert np.isfinite(infer(client, observation())["actions"]).all()


NEEDED = "needed: observation/image (uint8 [64, 64, 3]), observation/state (floats [2]), prompt (text)"


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ("text", "binary frames"),
        (b"\xc1", "not a msgpack message"),
        (pack(5), "a request is a map, not int"),
        ({"image": 1}, f"lacks observation/image, observation/state, prompt; {NEEDED}; received: image (int)"),
        (
            observation() | {"observation/image": np.zeros((32, 32, 3), np.uint8)},
            "observation/image (uint8 [32",
        ),
        (observation() | {"observation/image": np.full((64, 64, 3), np.nan)}, "float64 [64, 64, 3]"),
        (
            observation() | {"observation/state": np.zeros(7)},
            f"{NEEDED}; received: observation/image",
        ),
        (observation() | {"observation/state": [0.0, float("nan")]}, "observation/state holds NaN"),
        (observation() | {"prompt": b"reach"}, "prompt (bytes)"),
    ],
)
def test_mistakes_are_explained(server: Running, request_: Any, says: str) -> None:
    assert says in mistake(server, request_)
    with open_client(server) as client:
        client.recv(timeout=20)
        assert "actions" in infer(client, observation()), "the others are served"


def test_huge_messages_close_the_connection(server: Running) -> None:
    for message in (b"\0" * 2_000_000, [b"\0" * 400_000] * 5):  # whole, and in fragments
        with open_client(server) as client:
            client.recv(timeout=20)
            with pytest.raises(ConnectionClosed) as closed:
                exchange(client, message)
            assert closed.value.rcvd.code == 1009


def test_idle_clients_are_disconnected(policy_folder: Path) -> None:
    with serving(policy_folder, idle_seconds=0.2) as run, open_client(run) as client:
        client.recv(timeout=20)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=20)
        assert closed.value.rcvd.code == 1001 and "no request for 0.2 s" in closed.value.rcvd.reason


def test_health_metrics_and_unknown_paths(server: Running) -> None:
    def get(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=20) as answer:
            return answer.read().decode()

    assert get("/healthz") == "OK\n"
    with open_client(server) as client:
        client.recv(timeout=20)
        infer(client, observation())
        text = get("/metrics")
    values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    assert float(values["rlvla_requests_total"]) >= 1 and float(values["rlvla_connections"]) >= 1
    assert float(values["rlvla_policy_seconds_total"]) > 0 and "# TYPE rlvla_requests_total counter" in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get("/elsewhere")


def test_browsers_are_refused(server: Running) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        open_client(server, origin="http://example.org")


def test_a_key_is_asked_for(policy_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    with serving(policy_folder, api_key_file=str(file)) as run:
        for headers in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": KEY}):
            with pytest.raises(InvalidStatus, match="401"):
                open_client(run, additional_headers=headers)
        with open_client(run, additional_headers={"Authorization": f"Api-Key {KEY}"}) as client:
            assert "server" in unpack(client.recv(timeout=20))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{run.port}/metrics", timeout=20)


def test_too_many_connections(policy_folder: Path) -> None:
    with serving(policy_folder, max_connections=1) as run, open_client(run) as client:
        client.recv(timeout=20)
        with pytest.raises(InvalidStatus, match="503"):
            open_client(run)
        # the place is free again


class Long:
    """A policy with huge answers, or an error."""

    spec = PolicySpec(200_000, 2, 200_000, (1,), proprio_dim=0, reads_images=False)

    def __init__(self, *, fails: bool = False, value: float = 0.0):
        self._fails, self._value = fails, value

    def prepare(self, images: np.ndarray, proprio: Any) -> tuple[np.ndarray, Any]:
        return images, proprio

    def act(self, images: np.ndarray, proprio: Any, instructions: list[str], **options: Any) -> Decision:
        if self._fails:
            raise RuntimeError("out of memory")
        return Decision(np.full((len(images), 200_000, 2), self._value, np.float32), np.zeros((len(images), 1)), {})


def serving_long(policy: Long, **flags: Any) -> Any:
    config = ServeConfig(port=0, **flags)
    reader = ObservationReader(policy.spec, (), request_keys(()))
    return running(PolicyServer(policy, reader, config, {}), listen(config))


def test_a_client_that_never_reads_loses_its_connection() -> None:
    with serving_long(Long(), send_seconds=0.3) as run:
        with open_client(run, max_size=None, max_queue=1) as client:
            client.recv(timeout=20)
            with pytest.raises(ConnectionClosed):
                exchange(client, pack({"prompt": "x"}), 60)
        assert run.server.counts["timeouts"] == 1
        with open_client(run, max_size=None) as other:
            other.recv(timeout=20)
            assert infer(other, {"prompt": "x"})["actions"].shape == (200_000, 2)


def test_errors_and_nan_of_the_policy_reach_the_client() -> None:
    with serving_long(Long(fails=True)) as run:
        assert "RuntimeError: out of memory" in mistake(run, {"prompt": "x"})
        assert "rlvla_errors_total 1\n" in run.server.metrics()
    with serving_long(Long(value=np.nan)) as run:
        assert "NaN" in mistake(run, {"prompt": "x"})


# ------------------------------------------------------------------------------------------------------- flags
def problems(folder: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_serve(PolicyConfig(pretrain=str(folder)), ServeConfig(**flags))
    return str(error.value)


def test_mistakes_in_the_flags(policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--host 0.0.0.0: other machines" in problems(policy_folder, host="0.0.0.0")
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    assert check_serve(PolicyConfig(pretrain=str(policy_folder)), ServeConfig(host="0.0.0.0")).api_key == KEY
    monkeypatch.setenv(API_KEY_VARIABLE, "short")
    assert "at least 16" in problems(policy_folder)
    monkeypatch.delenv(API_KEY_VARIABLE)
    assert "cannot be read" in problems(policy_folder, api_key_file=str(tmp_path / "none"))
    text = problems(policy_folder, serve_map=("wrist=a", "state", "prompt=observation/state"), num_actions=2)
    assert "there is no camera wrist; the names are agentview, state, prompt" in text or "no camera wrist" in text
    assert "--serve_map state: write NAME=KEY" in text and "is given twice" in text
    assert "--num_actions 5: the policy predicts 4" in problems(policy_folder, num_actions=5)
    assert str(tmp_path / "none") in problems(tmp_path / "none")
    assert "--max_batch" in problems(policy_folder, max_batch=0)


def test_a_port_in_use() -> None:
    with listen(ServeConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="--port 0 takes any free port"):
            listen(ServeConfig(port=port))


def test_other_keys(policy_folder: Path) -> None:
    with serving(policy_folder, serve_map=("state=joints", "prompt=task")) as run, open_client(run) as client:
        client.recv(timeout=20)
        request = observation()
        request |= {"joints": request.pop("observation/state"), "task": request.pop("prompt")}
        assert infer(client, request)["actions"].shape == (4, 2)
