"""Time of drawing, updating, appending and saving in a replay buffer of a million rows, and its memory.

    python benchmarks/replay.py --rows 1000000 --image_size 16 --out /tmp/replay

Images lie in a mapped file in a temporary folder in `--out`. "file" is memory of the page cache, which the system takes
back when it is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from rlvla.replay.buffer import ReplayBuffer
from rlvla.replay.priorities import make_priority
from rlvla.replay.schema import BufferConfig, Column, Episode

DECISIONS = 49  # per episode


def episode(rng: np.random.Generator, size: int) -> Episode:
    columns = {
        "images": rng.integers(0, 255, (DECISIONS + 1, 1, size, size, 3), dtype=np.uint8),
        "proprio": rng.random((DECISIONS + 1, 9), dtype=np.float32),
        "actions": rng.random((DECISIONS, 8, 7), dtype=np.float32),
    }
    rewards, steps = rng.random((DECISIONS, 8), dtype=np.float32), np.full(DECISIONS, 8)
    return Episode(columns, rewards, steps, terminated=True, truncated=False)


def memory() -> str:
    kilobytes = dict(re.findall(r"Rss(Anon|File):\s+(\d+)", Path("/proc/self/status").read_text()))
    return f"own {int(kilobytes['Anon']) / 1024:,.0f} MB, file {int(kilobytes['File']) / 1024:,.0f} MB"


def median_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def measure(folder: Path, rows: int, size: int, batch: int, eviction: str) -> None:
    columns = (
        Column("images", (1, size, size, 3), "uint8", observation=True, mapped=True),
        Column("proprio", (9,), observation=True),
        Column("actions", (8, 7)),
    )
    config = BufferConfig(columns, rows, chunk_len=8, eviction=eviction)
    rng = np.random.default_rng(0)
    some = [episode(rng, size) for _ in range(20)]
    print(f"start: {memory()}")
    buffer = ReplayBuffer(config, folder, make_priority("td"))
    start = time.perf_counter()
    for _ in range(rows // (DECISIONS + 1) // len(some)):
        buffer.append(some)
    print(f"filled with {len(buffer):,} decisions in {time.perf_counter() - start:.0f} s: {memory()}")
    drawable = np.flatnonzero(buffer.drawable)
    for part in np.array_split(drawable, 20):
        buffer.set_priorities(part, rng.random(len(part)))

    drawn = buffer.sample(batch, rng)
    errors = rng.normal(size=batch)
    report = {
        f"draw {batch} rows with weights": median_ms(lambda: buffer.sample(batch, rng, beta=0.5), 500),
        f"draw {batch} rows, half of them uniform": median_ms(lambda: buffer.sample(batch, rng, share=0.5), 500),
        f"gather {batch} rows with images": median_ms(lambda: buffer.gather(buffer.sample(batch, rng).rows), 100),
        f"5-step returns of {batch} rows": median_ms(lambda: buffer.n_step(drawn.rows, 5, 0.99), 100),
        f"update {batch} TD errors": median_ms(
            lambda: buffer.update(drawn.rows, drawn.episodes, now=1, td_error=errors), 500
        ),
        f"find the {batch} oldest scores": median_ms(lambda: buffer.due(10, 5, batch), 5),
        f"append an episode of {DECISIONS + 1} rows to the full buffer": median_ms(
            lambda: buffer.append(some[:1]), 100
        ),
    }
    for what, milliseconds in report.items():
        print(f"{what}: {milliseconds:.3f} ms")

    for what in ("all rows", "nothing", "1 % new rows", "1 % new TD errors"):
        if what == "1 % new rows":
            for _ in range(rows // 100 // (DECISIONS + 1)):
                buffer.append(some[:1])
        if what == "1 % new TD errors":
            changed = rng.choice(np.flatnonzero(buffer.drawable), rows // 100, replace=False)
            episodes = buffer.gather(changed, ["episode"])["episode"]
            buffer.update(changed, episodes, now=2, td_error=rng.normal(size=len(changed)))
        start = time.perf_counter()
        number = buffer.save()
        seconds = time.perf_counter() - start
        written = (folder / f"rows_{number:06d}.npz").stat().st_size / 2**20
        print(f"save, changed: {what}: {seconds:.2f} s, {written:.1f} MB")
    print(f"end: {memory()}; images {os.stat(folder / 'images.rows').st_blocks * 512 / 2**20:,.0f} MB on disk")
    buffer.close()
    start = time.perf_counter()
    ReplayBuffer.load(config, folder, make_priority("td")).close()
    print(f"load: {time.perf_counter() - start:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--image_size", type=int, default=16, help="height and width of the one image of a row")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--eviction", choices=["fifo", "value"], default="fifo")
    parser.add_argument("--out", type=Path, help="folder for a temporary folder with the files")
    arguments = parser.parse_args()
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        measure(Path(folder), arguments.rows, arguments.image_size, arguments.batch, arguments.eviction)


if __name__ == "__main__":
    main()
