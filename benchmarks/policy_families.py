"""Training steps of the compact policy against the tiny VLA, and where the compact policy's time goes.

    python benchmarks/policy_families.py             decisions trained per CPU second, both networks
    python benchmarks/policy_families.py --kernels   the kernels of a step and the arithmetic they reach

One thread. The networks alternate and ratios are of CPU time within a repetition, so that other work on the machine
hardly matters. `sft` is a step of supervised training (forward, backward, AdamW on 64 decisions), `ppo` one with
ratios, entropies and values of a shared network, as the recipes train them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.algorithms.policy_losses import get_policy_loss
from rlvla.experience import Experience
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact
from rlvla.models.families import check_checkpoint
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils.terminal import table

ROWS = 64
INSTRUCTION = "push the red disc into the green zone"


@dataclass(frozen=True)
class Task:
    """Shapes of a recipe: one camera, images of `size` pixels, `proprio` numbers, chunks of `chunk` actions [`dim`]."""

    size: int
    proprio: int
    dim: int
    chunk: int


TASKS = {"toy_reach": Task(32, 2, 2, 3), "toy_push": Task(64, 2, 2, 5), "Lift": Task(64, 6, 7, 5)}


def statistics_of(task: Task) -> dict[str, Any]:
    """Statistics of data in [-1, 1]."""
    widths = {"action": task.dim, "proprio": task.proprio}
    bounds = {"min": -1.0, "q01": -1.0, "q99": 1.0, "max": 1.0, "mean": 0.0, "std": 1.0}
    return {"data": {part: {name: [v] * n for name, v in bounds.items()} for part, n in widths.items()}}


def networks(task: Task, folder: Path, head: str) -> dict[str, Any]:
    """The tiny VLA in the sizes of the recipes' variant `tiny`, and the compact policy."""
    numbers = statistics_of(task)
    tiny = build_tiny(
        folder / "tiny",
        sentences=[INSTRUCTION],
        dataset_statistics=numbers,
        image_size=task.size,
        vision_dim=32,
        llm_dim=48,
        llm_mlp_dim=144,
        action_chunk_len=task.chunk,
        action_dim=task.dim,
        use_proprio=True,
        proprio_dim=task.proprio,
    )
    config = CompactConfig(task.size, 1, task.proprio, task.dim, task.chunk, action_head=head)
    compact = build_compact(folder / "compact", config, numbers)
    policies = {name: check_checkpoint(path) for name, path in (("tiny", tiny), ("compact", compact))}
    return {name: policy.load_policy(value_head=True).train() for name, policy in policies.items()}


def rows_of(policy: Any, task: Task) -> Experience:
    """Random decisions."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 1, task.size, task.size, 3), dtype=np.uint8)
    proprio = rng.uniform(-1, 1, (ROWS, task.proprio)).astype(np.float32)
    trace = policy.encode_actions(rng.uniform(-1, 1, (ROWS, task.chunk, task.dim)))
    return Experience(
        images=torch.from_numpy(images),
        proprio=torch.from_numpy(proprio),
        instructions=[INSTRUCTION] * ROWS,
        trace={name: torch.from_numpy(value) for name, value in trace.items()},
        action_mask=torch.ones(ROWS, policy.spec.columns, dtype=torch.bool),
    )


def sft_step(policy: Any, rows: Experience) -> Callable[[], None]:
    """Forward, backward and AdamW on the supervised loss."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)

    def step() -> None:
        output = policy(**policy.score(rows, 1.0), wants=("loss",), sft_loss="nll")
        output["loss"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ppo_step(
    policy: Any, rows: Experience, wants: Sequence[str] = ("log_probs", "entropy", "values")
) -> Callable[[], None]:
    """Forward, backward and AdamW on the clipped PPO loss plus a value loss, and minus the entropy if it is wanted."""
    optimizer, loss_function = torch.optim.AdamW(policy.parameters(), lr=1e-5), get_policy_loss("ppo")
    with torch.no_grad():
        old = policy(**policy.score(rows, 1.0), wants=("log_probs",))["log_probs"]
    advantages, mask = torch.randn_like(old), torch.ones_like(old, dtype=torch.bool)

    def step() -> None:
        output = policy(**policy.score(rows, 1.0), wants=wants)
        loss, _ = loss_function(output["log_probs"], old, advantages, mask, agg_mode="token-mean")
        loss = loss + output["values"].square().mean()
        if "entropy" in output:
            loss = loss - 0.01 * output["entropy"].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


STEPS = {"sft": sft_step, "ppo": ppo_step}


def compare(tasks: Sequence[str], head: str, repeats: int) -> None:
    """Print decisions per CPU second and the ratio for each task and kind of step."""
    lines = []
    for name in tasks:
        for kind, build in STEPS.items():
            with tempfile.TemporaryDirectory() as folder:
                policies = networks(TASKS[name], Path(folder), head)
            steps = {which: build(policy, rows_of(policy, TASKS[name])) for which, policy in policies.items()}
            times: dict[str, list[float]] = {which: [] for which in steps}
            for repeat in range(repeats + 2):
                for which, step in steps.items():
                    start = time.process_time()
                    step()
                    if repeat > 1:  # the first two warm up
                        times[which].append(time.process_time() - start)
            rates = [f"{ROWS / statistics.median(seconds):.0f}" for seconds in times.values()]
            ratio = statistics.median(a / b for a, b in zip(times["tiny"], times["compact"]))
            lines.append((name, kind, *rates, f"{ratio:.2f}"))
    print(table(("task", "step", "tiny, decisions per CPU s", "compact", "ratio (paired median)"), lines))


def kernels(name: str, kind: str, head: str, count: int) -> None:
    """Print what the kernels of a compact policy's step take, and the arithmetic that they reach."""
    with tempfile.TemporaryDirectory() as folder:
        policy = networks(TASKS[name], Path(folder), head)["compact"]
    step = STEPS[kind](policy, rows_of(policy, TASKS[name]))
    for _ in range(min(3, count)):
        step()
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as record:
        for _ in range(count):
            step()
    events = sorted(record.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    lines = []
    for event in events[:14]:
        ms = event.self_cpu_time_total / count / 1e3
        reached = f"{event.flops / event.cpu_time_total / 1e3:.0f}" if event.flops else ""
        share = 100 * event.self_cpu_time_total / total
        lines.append((event.key, f"{event.count / count:.0f}", f"{ms:.2f}", f"{share:.0f}%", reached))
    print(f"{name}, {kind}, {ROWS} decisions: {total / count / 1e3:.1f} ms per step")
    print(table(("kernel", "calls", "ms", "share", "GFLOP/s"), lines))


def peak(size: int = 1024) -> float:
    """GFLOP/s of a float32 matrix product of this machine, one thread."""
    left, right = torch.randn(2, size, size).unbind()
    seconds = []
    for _ in range(8):
        start = time.process_time()
        left @ right
        seconds.append(time.process_time() - start)
    return 2 * size**3 / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--head", choices=("tokens", "gaussian"), default="gaussian", help="of the compact policy")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--kernels", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if not flags.kernels:
        compare(flags.tasks, flags.head, flags.repeats)
        return
    print(f"a matrix product of 1024 x 1024 reaches {peak():.0f} GFLOP/s")
    for name in flags.tasks:
        for kind in STEPS:
            kernels(name, kind, flags.head, flags.repeats)


if __name__ == "__main__":
    main()
