"""Thread settings that must stand before torch is imported."""

from __future__ import annotations

import os


def limit_threads() -> None:
    """One thread per process, and threads that sleep while they wait, unless the user has said otherwise.

    Several processes (ranks, simulators) share the cores of a machine; two threads in each of them were measured to be
    many times slower than one. For a large model on a CPU of its own, set OMP_NUM_THREADS.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
