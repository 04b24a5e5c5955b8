"""The command `teleoperate.py`: mistakes before anything starts, and kept episodes after a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets")

from websockets.sync.client import connect

from cli.teleoperate import main
from rlvla.commands import sockets
from rlvla.data.reading import read_demonstrations
from rlvla.teleoperation.server import HOST
from rlvla.utils import signals


def mistake(capsys: pytest.CaptureFixture, *argv: str) -> str:
    """The error of a command line, in one line."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_mistakes_are_reported_together_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlvla.commands.teleoperate.start_workers", lambda *_: pytest.fail("a worker is started"))
    (tmp_path / "demos.hdf5").write_text("of an earlier run")
    flags = ["--output", str(tmp_path), "--keys", "0:a", "5:b/c", "--num_demos", "0"]
    text = mistake(capsys, "toy_reach", *flags)
    assert str(tmp_path) in text and "already holds another run" in text, text
    assert "--keys 5:b/c: the actions of reach have dimensions 0..1" in text and "--num_demos" in text
    assert "toy_reech" in mistake(capsys, "toy_reech")
    assert "no task suite is given" in mistake(capsys)
    primitives = mistake(capsys, "robosuite", "--action_space", "primitives", "--output", str(tmp_path / "new"))
    assert "keys command actions of the controller" in primitives


def test_a_port_in_use_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with sockets.listen(HOST, 0, "") as used:
        port = used.getsockname()[1]
        text = mistake(capsys, "toy_reach", "--output", str(tmp_path / "demos"), "--port", str(port))
    assert f"--port {port}: Address already in use" in text and "--port 0 takes any free port" in text
    assert not (tmp_path / "demos").exists()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_signal_loses_no_kept_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr(signals, "_command", signals._Command())
    errors: list[BaseException] = []

    def play() -> None:
        try:
            out = ""
            while (address := re.search(r"open: (http://\S+)", out)) is None:
                out += capsys.readouterr().out
                time.sleep(0.01)
            origin = address[1].partition("/?")[0]
            page = urllib.request.urlopen(address[1], timeout=20).read().decode()
            url = f"ws{origin[4:]}/socket?key={page.partition('/socket?key=')[2].partition('`')[0]}"
            with connect(url, origin=origin, proxy=None) as socket:

                def read_until(**expected: Any) -> None:
                    end = time.monotonic() + 20
                    while time.monotonic() < end:
                        message = socket.recv(timeout=20)
                        if isinstance(message, str) and expected.items() <= json.loads(message).items():
                            return
                    raise AssertionError(expected)

                read_until(phase="playing")
                socket.send('{"type": "controls", "held": {"d": 1}}')
                read_until(step=1)
                if keeps:
                    socket.send('{"type": "keep"}')
                    read_until(kept=1)
                os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    person = threading.Thread(target=play, daemon=True)
    person.start()
    main(["toy_reach", "--port", "0", "--output", str(tmp_path / "demos")])
    person.join(20)
    assert not errors, errors
    out = capsys.readouterr().out
    if keeps:
        assert read_demonstrations(tmp_path / "demos" / "demos.hdf5").success == [False]
        assert "1 of 2 episodes" in out and "next: python cli/check_demos.py" in out
    else:
        assert "no episode was kept" in out and list((tmp_path / "demos").iterdir()) == []
