"""Latency and decisions per second of the policy server for 1, 4 and 16 clients on this machine.

Each client is a thread that sends an observation as soon as it has the answer to the last one, without a simulator.

Example:
  python cli/serve_vla.py --pretrain runs/toy/sft/policy --port 8000
  python benchmarks/serving.py ws://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from rlvla.serving.client import Channel
from rlvla.serving.config import RemoteConfig
from rlvla.utils.terminal import markdown_table


def observation(expected: dict[str, str]) -> dict[str, Any]:
    """A request with the keys, types and shapes that the server's metadata names."""
    request: dict[str, Any] = {}
    for key, kind in expected.items():
        shape = [int(size) for size in re.findall(r"\d+(?=[,\]])", kind)]
        if kind.startswith("uint8"):
            size = shape if len(shape) == 3 else (224, 224, 3)
            request[key] = np.random.default_rng(0).integers(0, 255, size, np.uint8)
        else:
            request[key] = np.zeros(shape, np.float32) if shape else "do the task"
    return request


def play(config: RemoteConfig, together: threading.Barrier, seconds: float) -> list[float]:
    """Seconds from request to answer, of one client."""
    channel, latencies = Channel(config), []
    request = observation(channel.open()["observation"])
    channel.send(request)
    channel.receive()
    together.wait()
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        channel.send(request)
        channel.receive()
        latencies.append(time.perf_counter() - start)
    channel.close()
    return latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="ws://HOST:PORT")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds for each number of clients")
    flags = parser.parse_args()
    rows = []
    for clients in flags.clients:
        together = threading.Barrier(clients)
        with ThreadPoolExecutor(clients) as pool:
            runs = [pool.submit(play, RemoteConfig(flags.address), together, flags.seconds) for _ in range(clients)]
        latencies = np.concatenate([run.result() for run in runs])
        p50, p99 = 1000 * np.percentile(latencies, [50, 99])
        rows.append((clients, f"{p50:.1f}", f"{p99:.1f}", f"{len(latencies) / flags.seconds:.0f}"))
    print(markdown_table(("clients", "p50 (ms)", "p99 (ms)", "decisions/s"), rows))


if __name__ == "__main__":
    main()
