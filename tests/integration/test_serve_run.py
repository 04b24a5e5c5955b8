"""The command `serve_vla.py`: it starts, names the next command, and ends on a signal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

ROOT = Path(__file__).resolve().parents[2]


def test_it_serves_until_a_signal(policy_folder: Path) -> None:
    argv = [sys.executable, str(ROOT / "cli" / "serve_vla.py"), "--pretrain", str(policy_folder), "--port", "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = None
        while address is None:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            address = re.search(r"python cli/eval_vla.py --remote (ws://\S+)", line)
        with connect(address[1], proxy=None) as client:
            assert isinstance(client.recv(timeout=30), bytes)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(timeout=30)
        out, err = process.communicate(timeout=60)
    assert closed.value.rcvd.code == 1001 and process.returncode == 0, err
    assert "SIGTERM: the server has ended" in out and "served 0 requests on 1 connections" in out
    assert "Traceback" not in err
