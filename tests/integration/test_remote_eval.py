"""Evaluations of a policy behind a socket: the same as of its folder, and failures of the server are counted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from websockets.sync.server import serve

from cli.eval_vla import main
from rlvla.serving.client import Channel, NoAnswer
from rlvla.serving.config import RemoteConfig
from rlvla.serving.messages import pack, unpack
from tests.support.policy_server import serving

ARGS = ["--num_envs", "2", "--eval_episodes", "4"]


def test_it_equals_the_folder_episode_by_episode(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "eval.json"
    with serving(policy_folder, serve_map=("state=joints",)) as run:
        argv = ["--remote", run.url, "--compare", str(policy_folder), "--output", str(output), "--num_videos", "1"]
        main([*argv, "--report", str(tmp_path / "report"), *ARGS])
        assert run.server.counts["errors"] == 0
    content = json.loads(output.read_text())
    (base,) = content["baselines"]
    assert content["policy"] == run.url and content["results"] == base["results"]
    assert len(content["results"][0]["episodes"]) == 4 and content["comparisons"][0]["paired"]
    assert content["trained_on"] == f"a policy behind a socket, by its own account {base['trained_on']}"
    assert len(list((tmp_path / "eval_videos").rglob("*.mp4"))) == 2
    assert run.url in (tmp_path / "report" / "report.html").read_text()


@contextmanager
def foreign(
    answer: Callable[[dict[str, Any], int], Any], metadata: Any = None, delays: Sequence[float] = ()
) -> Iterator[str]:
    """A server of somebody else: `answer` of a request and its number; None hangs up, a text is an error.

    `delays`: seconds before the metadata of the first connections.
    """
    numbers, waits = iter(range(10_000)), iter(delays)

    def handle(connection: Any) -> None:
        time.sleep(next(waits, 0.0))
        connection.send(pack(metadata or {}))
        for message in connection:
            content = answer(unpack(message), next(numbers))
            if content is None:
                return
            connection.send(content if isinstance(content, str) else pack(content))

    with serve(handle, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(20)


def actions(value: float = 0.1, dim: int = 2) -> dict[str, Any]:
    return {"actions": np.full((5, dim), value)}


def evaluated(url: str, folder: Path, *more: str) -> dict[str, Any]:
    output = folder / "eval.json"
    flags = ["--task_suite_name", "toy_reach", "--max_steps", "8", "--eval_episodes", "2", "--num_envs", "1"]
    main(["--remote", url, "--output", str(output), *flags, *more])
    return json.loads(output.read_text())


def test_a_foreign_server(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any], number: int) -> Any:
        requests.append(request)
        return None if number in (2, 4) else actions()  # lost connections are retried

    with foreign(answer) as url:
        content = evaluated(url, tmp_path, "--remote_map", "top=image", "--action_chunk_len", "3")
    assert [e["length"] for e in content["results"][0]["episodes"]] == [8, 8]
    assert "unknown" in content["trained_on"] and content["trained_on"] in capsys.readouterr().out
    assert requests[0]["image"].shape == (64, 64, 3) and set(requests[0]) == {"image", "observation/state", "prompt"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (actions(np.nan), "NaN or infinity"),
        (actions(dim=7), "the server answered actions (float64 [5, 7])"),
        ("out of memory", "out of memory"),
        (None, "the connection was lost"),
    ],
    ids=["nan", "shape", "error", "lost"],
)
def test_failures_are_counted(wrong: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    # 0 is the probe; the first episode gets two answers, then something wrong
    with foreign(lambda request, number: wrong if number == 2 else actions(), {}) as url:
        content = evaluated(url, tmp_path, "--remote_retries", "0")
    first, second = content["results"][0]["episodes"]
    assert says in first["failure"] and not first["success_at_end"] and first["length"] == 5
    assert "failure" not in second and content["results"][0]["dropped"] == 0
    told = capsys.readouterr().out
    assert "1 EPISODES FAILED WITHOUT ACTIONS OF THE POLICY" in told
    assert "1 EPISODES FAILED" in (tmp_path / "eval.md").read_text()


def test_late_metadata_are_not_taken_for_an_answer() -> None:
    with foreign(lambda request, number: {"state": request["state"]}, delays=[1.0]) as url:
        channel = Channel(RemoteConfig(remote=url, remote_seconds=0.5))
        with pytest.raises(NoAnswer):
            channel.open()
        for state in (1, 2):
            channel.send({"state": state})
            assert channel.receive() == {"state": state}
        channel.close()


def refused(capsys: pytest.CaptureFixture, *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*argv])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_mistakes_before_anything_starts(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    toy = ("--task_suite_name", "toy_reach", "--remote_seconds", "2", "--output", str(tmp_path / "eval.json"))
    assert "no connection" in refused(capsys, "--remote", "ws://127.0.0.1:9", *toy)
    assert "write an address" in refused(capsys, "--remote", "127.0.0.1:9", *toy)
    both = refused(capsys, "--remote", "ws://127.0.0.1:9", "--pretrain", str(policy_folder), "--sampled", *toy)
    assert "name the folder with --compare" in both and "--sampled" in both
    assert "no effect without --remote" in refused(capsys, "--remote_retries", "1", "--pretrain", str(policy_folder))
    with foreign(lambda request, number: actions(dim=7)) as url:
        assert "needs actions [H, 2]; the server answered actions" in refused(capsys, "--remote", url, *toy)
        assert "no task suite" in refused(capsys, "--remote", url)
        unknown = refused(capsys, "--remote", url, *toy, "--remote_map", "wrist=x")
        assert "there is no camera wrist" in unknown
    with foreign(lambda request, number: "needs key q") as url:
        assert "needs key q; it was sent observation/image (uint8" in refused(capsys, "--remote", url, *toy)
    with foreign(lambda request, number: threading.Event().wait(5)) as url:
        assert "no answer within 0.5 s" in refused(capsys, "--remote", url, *toy, "--remote_seconds", "0.5")
    with serving(policy_folder, temperature=1.0) as run:
        assert "start it without --temperature" in refused(capsys, "--remote", run.url, *toy)
