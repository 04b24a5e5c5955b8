"""Optimizer steps of a policy: the trainer against a plain PyTorch loop, real decisions against padded episodes.

    python benchmarks/train_step.py --size "11 M" --zero_stage 2
    python benchmarks/train_step.py --size smolvla
    python benchmarks/train_step.py --pretrain runs/sft/policy

Variants alternate, and ratios are of CPU time within a repetition, so other work on the machine hardly matters. For
CPUs only: on a GPU, CPU time means nothing.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.random_policies import POLICIES, new_policy, random_rows
from rlvla.algorithms.policy_losses import get_policy_loss
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.replay import consecutive
from rlvla.trainer.updater import Updater
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import table

OPTIM = OptimConfig(1e-5, (0.9, 0.999), 0.0, "constant", 0.0, 1000)


def half_masked(rows: Experience) -> Experience:
    """Episodes padded to the longest: every second decision is none."""
    mask = rows.action_mask & (torch.arange(len(rows)) % 2 == 0)[:, None]
    return rows.with_fields(action_mask=mask, policy_mask=mask)


def trainer_step(actor: Actor, strategy: DeepspeedStrategy, rows: Experience, batch: BatchConfig) -> Callable[[], None]:
    """An optimizer step as the trainer does it."""
    engine, metrics = strategy.prepare(copy.deepcopy(actor), OPTIM), Metrics()
    updater = Updater(strategy, batch, AlgorithmConfig(), actor)
    return lambda: void(updater.policy_step(engine, rows, 0.0, metrics, first_of_iteration=False))


def plain_step(actor: Actor, rows: Experience, micro: int) -> Callable[[], None]:
    """The same step written out with torch alone: forward, PPO loss, backward, clipping, AdamW."""
    model = copy.deepcopy(actor).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.learning_rate, weight_decay=0.0)
    loss_function, total = get_policy_loss("ppo"), float(rows.policy_mask.sum())

    def step() -> None:
        for part in consecutive(len(rows), micro, -(-len(rows) // micro)):
            batch = rows.index(part)
            new = model(**model.score(batch, 1.0), wants=("log_probs",))["log_probs"]
            loss, _ = loss_function(
                new, batch.old_log_probs, batch.advantages, batch.policy_mask, agg_mode="token-mean", num_tokens=total
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def void(_: object) -> None:
    """Drops a result."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    policy = parser.add_mutually_exclusive_group(required=True)
    policy.add_argument("--pretrain", help="checkpoint folder of a policy", metavar="DIR")
    policy.add_argument("--size", choices=POLICIES, help="random weights")
    parser.add_argument("--rows", type=int, default=64, help="decisions per optimizer step (default 64)")
    parser.add_argument("--micro", type=int, default=32, help="decisions per forward pass (default 32)")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions; medians are reported (default 7)")
    parser.add_argument("--zero_stage", type=int, default=0, choices=(0, 1, 2, 3), help="of the trainer (default 0)")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=flags.zero_stage))
    with tempfile.TemporaryDirectory() as folder:
        actor = Actor.from_pretrained(flags.pretrain or new_policy(Path(folder), flags.size))
    rows = random_rows(actor, flags.rows)
    padded = half_masked(rows)
    real = rows.index(torch.arange(0, flags.rows, 2))
    fixed = BatchConfig(micro_train_batch_size=flags.micro)
    cap = flags.micro * max(actor.row_tokens(rows.instructions, rows.images.shape[1]))
    dynamic = BatchConfig(use_dynamic_batch=True, train_max_tokens_per_gpu=cap)
    variants = {
        "plain PyTorch loop": plain_step(actor, rows, flags.micro),
        "trainer": trainer_step(actor, strategy, rows, fixed),
        "trainer, micro-batches by tokens": trainer_step(actor, strategy, rows, dynamic),
        "trainer, episodes padded": trainer_step(actor, strategy, padded, fixed),
        "trainer, real decisions only (half)": trainer_step(actor, strategy, real, fixed),
        "trainer, real decisions only, by tokens": trainer_step(actor, strategy, real, dynamic),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(flags.repeats + 1):
        for name, step in variants.items():
            start = time.process_time()
            step()
            if repeat:  # the first one warms up
                times[name].append(time.process_time() - start)
    medians = [(name, f"{statistics.median(found):.3f}") for name, found in times.items()]
    print(table(("one optimizer step", "CPU seconds"), medians))
    plain, trainer, by_tokens, full, half, half_by_tokens = times.values()
    for what, above, below in (
        ("trainer / plain loop", trainer, plain),
        ("trainer by tokens / plain loop", by_tokens, plain),
        ("real / padded", half, full),
        ("real by tokens / padded", half_by_tokens, full),
    ):
        ratios = [a / b for a, b in zip(above, below)]
        print(f"{what}: {statistics.median(ratios):.3f} (median of {len(ratios)} paired ratios)")


if __name__ == "__main__":
    main()
