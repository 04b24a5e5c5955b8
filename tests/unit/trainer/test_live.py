"""The live page of a run: content, access, and its end with the run."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rlvla.trainer import live
from rlvla.trainer.live import HOST, LiveRun, live_page
from rlvla.utils.cli import programs
from rlvla.utils.terminal import log

NODE = shutil.which("node")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "<b>lift</b>" / "ppo"
    (run / "videos" / "iteration_000004").mkdir(parents=True)
    (run / "videos" / "iteration_000012").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "actor/grad_norm": NaN}\n{"step": 2}\n{"step": 3, "unfin')
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "videos" / "iteration_000004" / "reach_state1_failure.mp4").write_bytes(b"old")
    (run / "videos" / "iteration_000012" / "a b_state2_success.mp4").write_bytes(b"new")
    return run


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with live_page(folder, 0) as url:
        yield url


def ask(address: str, path: str = "", method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, content and headers; the path is sent as it is."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        connection.request(method, parts.path + path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}
    finally:
        connection.close()


def test_the_page_needs_nothing_from_elsewhere(address: str) -> None:
    status, content, headers = ask(address)
    text = content.decode()
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "&lt;b&gt;lift" in text and "<b>lift" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    assert "default-src 'none'" in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"
    assert ask(address, method="HEAD")[:2] == (200, b"")


def test_only_updates_are_sent(address: str, folder: Path) -> None:
    log.info("first")
    first = json.loads(ask(address, "status.json")[1])
    assert first["metrics"].splitlines() == ['{"step": 1, "actor/grad_norm": NaN}', '{"step": 2}'], "whole lines"
    assert first["log"][-1] == "first" and first["from"] == 0
    assert first["videos"] == ["iteration_000012/a b_state2_success.mp4", "iteration_000004/reach_state1_failure.mp4"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('ished": 1}\n')
    log.warning("second")
    seen = f"status.json?metrics={first['to']}&log={first['log_to']}"
    more = json.loads(ask(address, seen)[1])
    assert more["metrics"] == '{"step": 3, "unfinished": 1}\n' and more["log"] == ["warning: second"]
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')  # a resumed run has forgotten some
    again = json.loads(ask(address, f"status.json?metrics={more['to']}&log={more['log_to']}")[1])
    assert (again["from"], again["metrics"], again["log"]) == (0, '{"step": 1}\n', [])
    assert ask(address, "status.json?metrics=x&log=-1")[0] == 200


def test_videos_are_served_by_their_names(address: str) -> None:
    status, content, headers = ask(address, "videos/iteration_000012/a%20b_state2_success.mp4")
    assert (status, content, headers["content-type"]) == (200, b"new", "video/mp4")


@pytest.mark.parametrize(
    ("asked", "status", "content", "where"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=0-", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=7-99", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
        ("bytes=-0", 416, b"", "bytes */10"),
        ("bytes=4-2", 200, b"0123456789", None),
        ("bytes=0-1,3-4", 200, b"0123456789", None),
        ("bytes=-", 200, b"0123456789", None),
        ("steps=0-1", 200, b"0123456789", None),
    ],
)
def test_parts_of_videos_are_served(
    address: str, folder: Path, asked: str, status: int, content: bytes, where: str | None
) -> None:
    (folder / "videos" / "iteration_000012" / "long.mp4").write_bytes(b"0123456789")
    found = ask(address, "videos/iteration_000012/long.mp4", Range=asked)
    assert found[:2] == (status, content) and found[2].get("content-range") == where
    assert found[2]["accept-ranges"] == "bytes" and found[2]["content-length"] == str(len(content))
    head = ask(address, "videos/iteration_000012/long.mp4", method="HEAD", Range=asked)
    assert head[:2] == (200, b"") and head[2]["content-length"] == "10"


def test_a_video_is_never_held_as_a_whole(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_CHUNK", 4)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("read as a whole"))
    (folder / "videos" / "iteration_000012" / "long.mp4").write_bytes(b"0123456789")
    assert ask(address, "videos/iteration_000012/long.mp4")[1] == b"0123456789"


def test_another_file_of_metrics_is_sent_from_its_start(folder: Path) -> None:
    run = LiveRun(folder, "run")
    seen = run.status(0, 0)["to"]
    (folder / "metrics.jsonl").write_text('{"step": 1, "what": "is longer than the file before"}\n{"step": 2}\n')
    again = run.status(seen, 0)
    assert (again["from"], len(again["metrics"].splitlines())) == (0, 2)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_a_damaged_line_does_not_end_the_page(folder: Path) -> None:
    script = re.search(r"<script>(.*)</script>", LiveRun(folder, "run").page.decode(), flags=re.S)[1]
    lines = "\n".join(['{"step": 1, "x": NaN}', 'aged": 1}', "null", '{"step": 2}', ""])
    news = {"from": 0, "to": 9, "metrics": lines, "log": [], "log_to": 0, "videos": []}
    around = f"""
        const parts = {{}}, part = () => ({{className: "", textContent: "", replaceChildren() {{}}, append() {{}}}});
        globalThis.document = {{getElementById: (id) => parts[id] ??= part(), createElement: part}};
        globalThis.fetch = async () => ({{ok: true, json: async () => ({json.dumps(news)})}});
        globalThis.setTimeout = () => console.log(JSON.stringify([parts.state.className, [...records.keys()]]));
    """
    done = subprocess.run([NODE, "-e", around + script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == ["", [1, 2]]


def test_the_log_is_plain_text_with_commands_as_they_are_called(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "is_installed", lambda: True)
    log.info("\x1b[1mtraining\x1b[0m\n  look: python cli/eval_vla.py --pretrain x\r\x1b[K")
    assert json.loads(ask(address, "status.json")[1])["log"][-1] == ("training\n  look: rlvla-eval-vla --pretrain x")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("_Server", OSError("no address")),
        ("render", ImportError("No module named 'jinja2'")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
)
def test_a_page_that_cannot_be_served_ends_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, what: str, error: Exception
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise error

    handlers = list(log.handlers)
    with monkeypatch.context() as patched:
        patched.setattr(f"rlvla.trainer.live.{what}", fails)
        with live_page(folder, 0) as url:
            assert url is None
    assert f"--live: the page cannot be served ({error})" in capsys.readouterr().err
    assert log.handlers == handlers
    with pytest.raises(OSError, match="of the run"), live_page(folder, 0):
        raise OSError("of the run")


@pytest.mark.parametrize(
    "path",
    [
        "config.yaml",
        "videos/../config.yaml",
        "videos/iteration_000012/../../config.yaml",
        "videos/%2e%2e/config.yaml",
        "videos/..%2f..%2fconfig.yaml",
        "videos//etc/passwd",
        "/etc/passwd",
        "videos/iteration_000012/link.mp4",
        "videos/iteration_000013/x.mp4",
        "videos/iteration_000012",
    ],
)
def test_nothing_else_is_served(address: str, folder: Path, path: str) -> None:
    (folder / "videos" / "iteration_000012" / "link.mp4").symlink_to(folder / "config.yaml")
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.mp4").write_bytes(b"secret")
    (folder / "videos" / "iteration_000013").symlink_to(elsewhere)
    status, content, _ = ask(address, path)
    assert status == 404 and b"seed" not in content and b"secret" not in content


def test_requests_without_the_token_are_refused(address: str) -> None:
    parts = urlsplit(address)
    for path in ("/", "/status.json", "/x" * 3, f"{parts.path[:-2]}/status.json", "//", f"{parts.path}/"[1:]):
        assert ask(f"http://{parts.netloc}", path)[0] in (400, 404), path
    assert ask(address, Host=f"evil.example:{parts.port}")[0] == 403, "a foreign name that leads to this machine"
    assert ask(address, Host=f"localhost:{parts.port}")[0] == 200, "through a tunnel"
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(address, method=method)[0] == 501


def test_it_listens_on_this_machine_and_ends_with_the_run(folder: Path) -> None:
    handlers = list(log.handlers)
    with live_page(folder, 0) as url:
        port = urlsplit(url).port
        assert urlsplit(url).hostname == HOST == "127.0.0.1"
        with live_page(folder, port) as other:  # taken: another one is used
            assert urlsplit(other).port != port and ask(other)[0] == 200
            assert urlsplit(other).path != urlsplit(url).path
        with pytest.raises(OSError):  # any other address of this machine
            socket.create_connection(("127.0.0.2", port), timeout=10)
    with pytest.raises(OSError):
        socket.create_connection((HOST, port), timeout=10)
    assert log.handlers == handlers


def test_a_run_without_anything_yet(tmp_path: Path) -> None:
    status = LiveRun(tmp_path / "none", "none").status(5, 7)
    assert (status["from"], status["to"], status["metrics"], status["log"], status["videos"]) == (0, 0, "", [], [])
