"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CLUSTER = """
    import sys, time, traceback
    from ray.cluster_utils import Cluster

    def add_node(**options):
        for attempt in range(3):  # on a busy machine Ray's own patience of 30 s may not be enough
            try:
                return cluster.add_node(num_cpus=1, object_store_memory=80_000_000, **options)
            except Exception:
                if attempt == 2:
                    raise
                traceback.print_exc()
                time.sleep(2)

    cluster = Cluster()
    try:
        add_node(include_dashboard=False)
        second = add_node()
        print(cluster.address, second.node_id, flush=True)
        if sys.stdin.readline():
            cluster.remove_node(second, allow_graceful=False)
            print("removed", flush=True)
            sys.stdin.readline()
    finally:
        cluster.shutdown()
"""


class TwoNodes:
    """A cluster on this machine, started by a small process: copying the big test process may fail."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CLUSTER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
        )
        self.address, self.second_node = self.process.stdout.readline().split()

    def lose_second_node(self) -> None:
        print(file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "removed\n"


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """The cluster, for a fixture; the test is skipped without Ray."""
    ray = pytest.importorskip("ray", reason='Ray is not installed; pip install "rlvla[ray]"')
    nodes = TwoNodes()
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.process.stdin.close()
        try:
            nodes.process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            nodes.process.kill()
