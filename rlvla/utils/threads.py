"""Thread settings that must be in place before torch is imported."""

from __future__ import annotations

import os


def limit_threads() -> None:
    """Use one OpenMP thread per process and let waiting threads sleep, unless the environment says otherwise.

    Several processes (ranks, simulators) share the cores of a machine; with two threads each they were measured to be
    many times slower than with one. For a large model with a CPU to itself, set OMP_NUM_THREADS.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
