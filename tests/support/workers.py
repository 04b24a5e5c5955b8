"""Suites of the tests and whether processes still run."""

import time
from pathlib import Path

from rlvla.envs.workers.messages import EnvSpec

FAKE_SUITES = str(Path(__file__).parent / "fake_suites.py")

TOY = EnvSpec("toy_reach", 0, {"use_proprio": True})


def fake(**options):
    return EnvSpec("fake", 0, options)


def is_running(pid):
    """False for a process that has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or after
        return False


def wait_until_gone(pids, seconds=120.0):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))
