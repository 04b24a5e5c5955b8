"""SIGKILL at random moments while saving: the newest checkpoint is always intact and never an old one.

    python benchmarks/kill_while_saving.py --kills 50 --seed 0

Each round starts a process that resumes from the newest checkpoint and saves one iteration after the other with the
function that training uses; it is killed at a random moment. Then all checksums are verified. It reports the kills, how
many of them hit while a checkpoint was being written, and the iterations saved; a violation ends it with status 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import deepspeed  # noqa: F401  (imported once, before the processes are forked: an import costs more than a round)
import torch
from transformers import get_scheduler  # noqa: F401

from rlvla.checkpoints.training import list_checkpoints, load_checkpoint, save_checkpoint
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.files import damage, recover

KEEP = 2


@dataclass
class Outcome:
    """Of a loop: kills, those that hit a save, iterations completed, and what went wrong."""

    kills: int = 0
    while_saving: int = 0
    iterations: int = 0
    violations: tuple[str, ...] = ()


def save_forever(folder: Path, completed: int, side: int) -> None:
    """Continue from the newest checkpoint and save; one byte per beginning ("b") and completion ("c") of a save."""
    strategy = DeepspeedStrategy(StrategyConfig())
    engine = strategy.prepare(torch.nn.Linear(side, side), OptimConfig(0.1, (0.9, 0.999), 0.0, "constant", 0.0, 10))
    state = load_checkpoint(folder, {"net": engine}, strategy)
    iteration = state["iteration"] if state else 0
    while True:
        iteration += 1
        with torch.no_grad():
            engine.module.weight.fill_(iteration)
        os.write(completed, b"b")
        save_checkpoint(folder, iteration, {"net": engine}, {}, strategy, KEEP)
        os.write(completed, b"c")


def kill_loop(folder: Path, kills: int, seed: int, side: int = 64, longest: float = 1.0) -> Outcome:
    """Start, wait for a random time after the first save has begun, kill, look; `side` is that of the saved matrix."""
    rng, outcome, done = random.Random(seed), Outcome(), 0
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                save_forever(folder, writer, side)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writer)
        events = os.read(reader, 1)  # waits until it has loaded and begins to save
        time.sleep(rng.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        while part := os.read(reader, 4096):
            events += part
        os.close(reader)
        outcome.kills += 1
        outcome.while_saving += events.endswith(b"b")
        done += events.count(b"c")
        problem = None if os.WIFSIGNALED(status) and events else "the process ended by itself"
        problem = problem or violation(folder, done)
        if problem:
            outcome.violations += (f"after kill {outcome.kills}: {problem}",)
            break
        newest = list_checkpoints(folder)
        done = int(newest[-1].name.split("_")[1]) if newest else 0  # one more than reported, if it was just in place
    outcome.iterations = done
    return outcome


def violation(folder: Path, done: int) -> str | None:
    """What is wrong with the folder, where `done` iterations were reported as saved."""
    recover(folder)
    found = {int(path.name.split("_")[1]): damage(path) for path in folder.glob("iteration_*")}
    broken = {iteration: problem for iteration, problem in found.items() if problem}
    if broken:
        return f"damaged: {broken}"
    newest = max(found, default=0)
    if newest not in (done, done + 1):
        return f"{done} iterations were saved, but the newest checkpoint is {newest}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", type=int, default=64, help="rows and columns of the saved matrix")
    arguments = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_loop(Path(folder), arguments.kills, arguments.seed, arguments.side)
    print(
        f"{outcome.kills} kills, {outcome.while_saving} of them while a checkpoint was being written, "
        f"{outcome.iterations} iterations saved, {len(outcome.violations)} violations "
        f"({time.perf_counter() - start:.0f} s)"
    )
    for text in outcome.violations:
        print(text)
    raise SystemExit(bool(outcome.violations))


if __name__ == "__main__":
    main()
