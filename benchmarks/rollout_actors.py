"""Policy replicas on a Ray cluster of two nodes on this machine (`--rollout_backend actors`).

    python benchmarks/rollout_actors.py broadcast --millions 10 100
    python benchmarks/rollout_actors.py broadcast --millions 100 --trained 0.01
    python benchmarks/rollout_actors.py kill

`broadcast`: new weights reach a replica on the trainer's node and one on the other, which Ray treats as another machine
(over a local connection). Rates are megabytes of weights sent per second, beside those of copying as many bytes within
one process in the same run. "near" and "far": from the call until the replica of that node decides with them.

`kill`: one of two replicas is killed while a batch is being decided.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn

from rlvla.models.policy import Decision
from rlvla.rollout.backends.actors import RolloutActors
from rlvla.rollout.config import BackendConfig, BackendSetup
from rlvla.utils.terminal import table

_TENSOR = 1_000_000  # elements of each weight tensor
_REPEATS = 5


class Blocks(nn.Module):
    """Weights in float32; its action is the mean of one of them for each tensor, so that all of them must be there."""

    def __init__(self, millions: int, trained: float, milliseconds: float):
        super().__init__()
        number = max(1, round(trained * millions))
        self.blocks = nn.ParameterList(
            nn.Parameter(torch.zeros(_TENSOR), requires_grad=block < number) for block in range(millions)
        )
        self.seconds = milliseconds / 1000

    def act(self, images: np.ndarray, proprio: Any, instructions: Any, **_: Any) -> Decision:
        """The value of the weights, for each row."""
        time.sleep(self.seconds)
        value = np.mean([float(block[-1]) for block in self.blocks if block[-1] != 0] or [0.0])
        rows = len(images)
        return Decision(np.full((rows, 1, 1), value, np.float32), np.zeros((rows, 1), np.float32), {"row": images})

    def trained_blocks(self) -> list[nn.Parameter]:
        """What is sent each time."""
        return [block for block in self.blocks if block.requires_grad]


@contextmanager
def replicas(policy: Blocks) -> Iterator[RolloutActors]:
    """One on each of two nodes, whose object stores hold the weights three times."""
    from ray.cluster_utils import Cluster

    room = max(200_000_000, 3 * 4 * _TENSOR * len(policy.blocks))
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=room, include_dashboard=False)
        config = BackendConfig(rollout_backend="actors", rollout_actors=2)
        backend = RolloutActors(policy, BackendSetup(config, ray_address=cluster.address))
        try:
            yield backend
        finally:
            backend.close()
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()


def seconds(function: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def broadcast(millions: int, trained: float) -> tuple[str, ...]:
    """A row of the table: megabytes sent, and the rates."""
    import ray

    policy = Blocks(millions, trained, 0.0)
    blocks = [block.detach().numpy() for block in policy.trained_blocks()]
    megabytes = sum(block.nbytes for block in blocks) / 1e6
    source = np.ones(sum(block.size for block in blocks), np.float32)
    target = np.zeros_like(source)
    times: dict[str, list[float]] = {"copy": [], "put": [], "near": [], "far": []}
    with replicas(policy) as backend:
        backend.load(policy, 0)
        ray.get([member.loading for member in backend._members])
        near, far = sorted(backend._members, key=lambda member: member.place.node != backend._here)  # type: ignore[union-attr]
        for version in range(1, _REPEATS + 1):
            times["copy"].append(seconds(lambda: np.copyto(target, source)))
            with torch.no_grad():
                for block in policy.trained_blocks():
                    block.fill_(float(version))
            start = time.perf_counter()
            backend.load(policy, version)
            times["put"].append(time.perf_counter() - start)
            ray.get(near.loading)
            times["near"].append(time.perf_counter() - start)
            ray.get(far.loading)
            times["far"].append(time.perf_counter() - start)
            decision = backend.act(np.zeros((2, 1)), None, ["", ""], noise=None)
            assert decision.version == version and (decision.actions == version).all()
    rates = {name: megabytes / statistics.median(values) for name, values in times.items()}
    share = f"{100 * rates['near'] / rates['copy']:.0f} %", f"{100 * rates['far'] / rates['copy']:.0f} %"
    return f"{megabytes:.0f}", *(f"{rate:.0f}" for rate in rates.values()), *share


def kill() -> list[tuple[str, str]]:
    """Decide batches until both decide again, at least 200; a replica is killed while the 50th is being decided."""
    policy, rows, pauses, wrong = Blocks(2, 1.0, 20.0), 8, [], 0
    with replicas(policy) as backend:
        with torch.no_grad():
            policy.blocks[0].fill_(3.0)
        backend.load(policy, 1)
        victim, both = backend.pids[1], None
        killer = threading.Timer(0.005, lambda: os.kill(victim, signal.SIGKILL))
        begin = time.perf_counter()
        while len(pauses) < 200 or (both is None and len(pauses) < 5000):
            batch = len(pauses)
            if batch == 50:
                killer.start()
            images, start = np.arange(rows)[:, None] + rows * batch, time.perf_counter()
            decision = backend.act(images, None, [""] * rows, noise=None)
            pauses.append(time.perf_counter() - start)
            wrong += not (np.array_equal(decision.trace["row"], images) and (decision.actions == 3.0).all())
            if batch > 50 and both is None and all(member.place for member in backend._members):
                both = time.perf_counter() - begin - sum(pauses[:50])
        counts = backend.metrics()
    return [
        ("batches decided", str(len(pauses))),
        ("of them wrong or incomplete", str(wrong)),
        ("replicas replaced", f"{counts['rollout/replicas_replaced']:g}"),
        ("decisions made again", f"{counts['rollout/decisions_repeated']:g} of {len(pauses) * rows}"),
        ("median batch", f"{1000 * statistics.median(pauses):.0f} ms"),
        ("batch that lost its replica", f"{1000 * max(pauses[50:60]):.0f} ms"),
        ("until two replicas decide again", "longer than the test" if both is None else f"{both:.1f} s"),
    ]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("broadcast", "kill"))
    parser.add_argument("--millions", type=int, nargs="+", default=[10, 100], help="parameters in millions")
    parser.add_argument("--trained", type=float, default=1.0, help="share of them that is trained")
    flags = parser.parse_args()
    if flags.what == "kill":
        print(table(("one of two replicas is killed", ""), kill()))
        return
    heads = ("weights, MB", "copy, MB/s", "written, MB/s", "near, MB/s", "far, MB/s", "near to copy", "far to copy")
    print(table(heads, [broadcast(millions, flags.trained) for millions in flags.millions]))


if __name__ == "__main__":
    main()
