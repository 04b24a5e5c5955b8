"""The command `teleoperate.py`: mistakes before anything starts, and kept episodes after a signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("websockets")

from cli.teleoperate import main
from rlvla.commands import sockets
from rlvla.data.reading import read_demonstrations
from rlvla.teleoperation.server import HOST
from rlvla.utils import signals
from tests.support.teleoperation import open_socket, person, send, state_where


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

    def play(address: str) -> None:
        with open_socket(address) as page:
            state_where(page, phase="playing")
            send(page, "controls", held={"d": 1})
            state_where(page, step=1)
            if keeps:
                send(page, "keep")
                state_where(page, kept=1)
            os.kill(os.getpid(), signal.SIGTERM)

    with person(capsys, play):
        main(["toy_reach", "--port", "0", "--output", str(tmp_path / "demos")])
    out = capsys.readouterr().out
    if keeps:
        assert read_demonstrations(tmp_path / "demos" / "demos.hdf5").success == [False]
        assert "1 of 2 episodes" in out and "next: python cli/check_demos.py" in out
    else:
        assert "no episode was kept" in out and list((tmp_path / "demos").iterdir()) == []
