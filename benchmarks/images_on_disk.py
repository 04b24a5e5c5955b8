"""Speed of supervised training with images in a memory-mapped file, beside images in memory.

    python benchmarks/images_on_disk.py
    python benchmarks/images_on_disk.py --limit_gb 1.5      (root: it makes a control group)

A tiny policy is trained for an epoch on random images of 224 x 224 pixels from two cameras, alternately with images in
memory and in a file. The file is dropped from the page cache before the epoch, which reads each row once: all rows come
from the disk. That is worse than a dataset of twice the memory, half of which stays cached. The ratio is taken within
each repeat, and medians are shown. Weights must be equal.

With `--limit_gb`, `cli/train_sft_vla.py` trains on a file whose images take twice the limit, without a limit and in a
control group that has it, and the decisions per second of its updates are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.data import image_storage
from rlvla.data.demonstrations import Demonstrations, dataset_entry
from rlvla.data.image_storage import empty_images
from rlvla.data.robomimic import DemonstrationWriter
from rlvla.data.rows import DemonstrationRows
from rlvla.models.actor import Actor
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils.budgets import gib
from rlvla.utils.terminal import table

BATCH, STEPS_PER_EPISODE = 16, 50
CAMERAS = ("front", "wrist")


def dataset(rows: int) -> Demonstrations:
    """Episodes of random images and actions."""
    rng = np.random.default_rng(0)
    lengths = [STEPS_PER_EPISODE] * (rows // STEPS_PER_EPISODE)
    images = empty_images(lengths, (2, 224, 224, 3), "random images")
    for of_episode in images:
        of_episode[:] = rng.integers(0, 255, of_episode.shape, np.uint8)
    actions = [rng.uniform(-1, 1, (length, 7)).astype(np.float32) for length in lengths]
    statistics_ = {"random": dataset_entry(actions, None)}
    return Demonstrations(
        env_args={"task_suite_name": "random"},
        statistics=statistics_,
        images=images,
        proprio=None,
        actions=actions,
        instructions=["move"] * len(lengths),
        success=[True] * len(lengths),
        init_states=[],
    )


def drop(file: int, mapping: mmap.mmap) -> None:
    """Write a mapped file to the disk and remove it from the page cache."""
    mapping.flush()
    mapping.madvise(mmap.MADV_DONTNEED)  # mapped pages are not dropped
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_read() -> int:
    """Bytes that this process has read from disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def train(policy: Path, rows: int, folder: Path | None) -> tuple[float, float, float, torch.Tensor]:
    """Seconds of an epoch, of which for batches, MiB read, and the weights; images are in `folder` if given."""
    torch.manual_seed(0)
    image_storage.available_bytes = lambda: 2**60 if folder is None else 0  # type: ignore[assignment]
    if folder is not None:
        tempfile.tempdir = str(folder)
    duplicates: list[int] = []
    reserve = os.posix_fallocate

    def reserving(file: int, offset: int, size: int) -> None:
        duplicates.append(os.dup(file))
        reserve(file, offset, size)

    os.posix_fallocate = reserving
    demos, actor = dataset(rows), Actor.from_pretrained(policy)
    os.posix_fallocate = reserve
    examples = DemonstrationRows(demos, actor)
    mapping = image_storage.mapping_of(demos.images[0])
    assert (mapping is None) == (folder is None)
    optimizer = torch.optim.AdamW(actor.parameters(), 1e-4)
    if mapping is not None:
        drop(duplicates[0], mapping)
    waited, read = 0.0, bytes_read()
    start = time.perf_counter()
    batches = examples.batches(BATCH, 1, seed=0)
    while True:
        before = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - before
        if batch is None:
            break
        output = actor(**actor.score(batch, 1.0), wants=("loss",))
        loss = output["loss"][batch.action_mask].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    for file in duplicates:
        os.close(file)
    return seconds, waited, (bytes_read() - read) / 2**20, torch.cat([p.detach().flatten() for p in actor.parameters()])


def limited_group(limit: int) -> Path:
    """A new control group, of either version, whose processes share `limit` bytes of memory, page cache included."""
    root = Path("/sys/fs/cgroup")
    root, name = (root / "memory", "limit_in_bytes") if (root / "memory").is_dir() else (root, "max")
    group = root / f"images_on_disk_{os.getpid()}"
    group.mkdir()
    (group / f"memory.{name}").write_text(str(limit))
    return group


def train_under_limit(limit: int, steps: int) -> None:
    """Print the updates' decisions per second without a limit and under it, and the peak of memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        episodes = math.ceil(2 * limit / (STEPS_PER_EPISODE * 2 * 224 * 224 * 3))
        rng = np.random.default_rng(0)
        writer = DemonstrationWriter(folder / "demos.hdf5", {"task_suite_name": "random", "cameras": CAMERAS}, CAMERAS)
        for index in range(episodes):
            episode = {
                "images": rng.integers(0, 255, (STEPS_PER_EPISODE, 2, 224, 224, 3), np.uint8),
                "actions": rng.uniform(-1, 1, (STEPS_PER_EPISODE, 7)).astype(np.float32),
                "rewards": None,
                "proprio": None,
                "instruction": "move",
                "init_state_id": index,
                "seed": index,
                "success_at_end": True,
            }
            writer.add(episode, 0)
        writer.close()
        group = limited_group(limit)
        enter = f"echo $$ > {group}/cgroup.procs && "
        speeds = {}
        for label, before in (("no limit", ""), ("limit", enter)):
            run = folder / label.replace(" ", "_")
            command = [sys.executable, "cli/train_sft_vla.py", "--demos", folder / "demos.hdf5", "--save_path", run]
            command += [
                "--pretrain",
                "compact",
                "--train_batch_size",
                BATCH,
                "--max_steps",
                steps,
                "--no-use_tensorboard",
            ]
            subprocess.run(["sh", "-c", f"{before}exec {shlex.join(map(str, command))}"], check=True)
            entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            first, last = entries[0], entries[-1]
            speeds[label] = BATCH * (last["step"] - first["step"]) / (last["time"] - first["time"])
            print(label, f"{speeds[label]:.1f} decisions/s", flush=True)
        group.rmdir()
    images = episodes * STEPS_PER_EPISODE * 2 * 224 * 224 * 3
    print(f"images {gib(images)}, limit {gib(limit)}: {speeds['limit'] / speeds['no limit']:.2f} of the speed")


def main() -> None:
    """Print seconds per epoch of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit_gb", type=float, help="limit of the memory; images take twice as much")
    parser.add_argument("--steps", type=int, default=400, help="updates with --limit_gb")
    args = parser.parse_args()
    if args.limit_gb is not None:
        train_under_limit(int(args.limit_gb * 2**30), args.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        demos = dataset(STEPS_PER_EPISODE)
        policy = Path(folder) / "policy"
        build_tiny(
            policy,
            sentences=["move"],
            dataset_statistics=demos.statistics,
            image_size=224,
            patch_size=32,
            num_images_in_input=2,
        )
        table_rows = []
        for repeat in range(args.repeats):
            memory, batches, _, weights = train(policy, args.rows, None)
            disk, disk_batches, read, same = train(policy, args.rows, Path(folder))
            assert torch.equal(weights, same), "other weights"
            table_rows.append((memory, batches, disk, disk_batches, read, memory / disk))
            print(repeat, *(f"{x:.3f}" for x in table_rows[-1]), flush=True)
    names = (
        "in memory, s",
        "of which batches, s",
        "from disk, s",
        "of which batches, s",
        "read, MiB",
        "relative speed",
    )
    print(table(("median", ""), [(n, f"{statistics.median(c):.3f}") for n, c in zip(names, zip(*table_rows))]))


if __name__ == "__main__":
    main()
