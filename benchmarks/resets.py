"""Memory and file descriptors of a simulator over many resets, in one process.

    python benchmarks/resets.py [--suite robosuite] [--resets 500] [--cameras wrist]

Prints resident memory and open descriptors after every tenth of the resets; ends with 1 if either keeps growing: the
last value is above that after the second tenth by more than 5 % or 3 descriptors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.envs import make_env

GROWTH, DESCRIPTORS = 1.05, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", default="robosuite")
    parser.add_argument("--resets", type=int, default=500)
    parser.add_argument("--cameras", nargs="+", default=["wrist"])
    flags = parser.parse_args()
    env = make_env(flags.suite, 0, cameras=tuple(flags.cameras), image_size=64)
    process, measured, start = psutil.Process(), [], time.perf_counter()
    for number in range(flags.resets):
        env.reset(number, seed=number)
        if (number + 1) % max(1, flags.resets // 10) == 0:
            measured.append((process.memory_info().rss / 1e6, len(os.listdir("/proc/self/fd"))))
            memory, descriptors = measured[-1]
            seconds = (time.perf_counter() - start) / (number + 1)
            print(f"{number + 1} resets: {memory:.0f} MB, {descriptors} descriptors, {seconds:.2f} s each", flush=True)
    env.close()
    (memory, descriptors), (last_memory, last_descriptors) = measured[1], measured[-1]
    sys.exit(int(last_memory > GROWTH * memory or last_descriptors > descriptors + DESCRIPTORS))


if __name__ == "__main__":
    main()
