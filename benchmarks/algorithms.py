"""Time per call of every advantage estimator and policy loss, and the ratio to a plain loop over groups.

    python benchmarks/algorithms.py --rows 100000 --tokens 56 --group_size 8 --repeats 5

CPU time of one core, which other load on the machine hardly affects. The loop is the straightforward one: gather the
rows of each group, compute, scatter back; it is timed on a subset of the groups and scaled up. Group ids are strings in
shuffled order.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rlvla.algorithms import get_advantage_estimator, get_policy_loss, list_advantage_estimators, list_policy_losses

TARGET_SECONDS = 0.2
LOOP_GROUPS = 400


def make_batch(rows: int, tokens: int, group_size: int) -> dict:
    torch.manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows,))
    ids = [f"state-{i // group_size}" for i in range(rows)]
    random.Random(0).shuffle(ids)
    old = -torch.rand(rows, tokens) - 0.1
    return {
        "mask": torch.arange(tokens) < lengths.unsqueeze(-1),
        "rewards": torch.randn(rows, tokens),
        "values": torch.randn(rows, tokens),
        "old": old,
        "new": old + 0.1 * torch.randn(rows, tokens),
        "advantages": torch.randn(rows, tokens),
        "squares": torch.rand(rows, tokens),
        "baselines": torch.randn(rows),
        "ids": ids,
    }


def estimator_call(name: str, batch: dict) -> Callable[[], object]:
    estimate = get_advantage_estimator(name)
    components = {"success": batch["rewards"], "shaping": batch["values"]}
    return lambda: estimate(
        batch["rewards"],
        batch["mask"],
        group_ids=batch["ids"],
        values=batch["values"],
        reward_baselines=batch["baselines"],
        old_log_probs=batch["old"],
        sum_pi_squared=batch["squares"],
        component_rewards=components,
        gamma=0.99,
        lam=0.95,
    )


def loss_call(name: str, batch: dict) -> Callable[[], object]:
    loss, new = get_policy_loss(name), batch["new"].clone().requires_grad_()
    return lambda: loss(new, batch["old"], batch["advantages"], batch["mask"])


def seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def grpo_of(scores: Tensor) -> Tensor:
    return (scores - scores.mean()) / (scores.std() + 1e-6)


def best_only(scores: Tensor) -> Tensor:
    top = scores.topk(2)
    advantages = torch.zeros_like(scores)
    advantages[top.indices[0]] = (top.values[0] - top.values[1]) / (scores.std() + 1e-6)
    return advantages


def length_weighted(scores: Tensor, lengths: Tensor) -> Tensor:
    return scores - (lengths * scores).sum() / lengths.sum()


# What one group's rows get, before any whitening, from their scores, lengths and scores of a second component.
GROUP_FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grpo": lambda scores, lengths, second: grpo_of(scores),
    "grpo_passk": lambda scores, lengths, second: best_only(scores),
    "gdpo": lambda scores, lengths, second: grpo_of(scores) + grpo_of(second),
    "rloo": lambda scores, lengths, second: (scores - scores.mean()) * len(scores) / (len(scores) - 1),
    "opo": lambda scores, lengths, second: length_weighted(scores, lengths),
    "gpg": lambda scores, lengths, second: scores - scores.mean(),
    "reinforce_baseline": lambda scores, lengths, second: scores - scores.mean(),
}
WHITENED = ("gdpo", "reinforce_baseline")


def loop_over_groups(name: str, batch: dict) -> Tensor:
    """[B, T] advantages of one of `GROUP_FORMULAS` or of `optimal_token_baseline`."""
    rewards, mask = batch["rewards"], batch["mask"]
    members = defaultdict(list)
    for row, key in enumerate(batch["ids"]):
        members[key].append(row)
    advantages = torch.zeros_like(rewards)
    for group in members.values():
        if name == "optimal_token_baseline":
            values = token_baseline(batch, group)
        else:
            scores = torch.stack([rewards[i][mask[i]].sum() for i in group])
            second = torch.stack([batch["values"][i][mask[i]].sum() for i in group]) if name == "gdpo" else scores
            values = GROUP_FORMULAS[name](scores, mask[group].sum(-1), second)
        for i, value in zip(group, values):
            advantages[i] = torch.where(mask[i], value, 0.0)
    if name in WHITENED:
        kept = advantages[mask]
        advantages = torch.where(mask, (advantages - kept.mean()) * torch.rsqrt(kept.var() + 1e-8), 0.0)
    return advantages


def token_baseline(batch: dict, group: list[int]) -> Tensor:
    """[rows of the group, T] return-to-go minus the energy-weighted mean of the rows that are still going."""
    mask = batch["mask"][group]
    returns = torch.where(mask, batch["rewards"][group], 0.0).flip(-1).cumsum(-1).flip(-1)
    energy = torch.where(mask, 1 - 2 * batch["old"][group].exp() + batch["squares"][group], 0.0).cumsum(-1) * mask
    baseline = (returns * energy * mask).sum(0) / (energy.sum(0) + 1e-8)
    result = returns - baseline
    first, second = mask.sum(-1).topk(2)[0]
    if first > second:
        longest = int(mask.sum(-1).argmax())
        result[longest, second:] = returns[longest, second:]
    return result


def loop_seconds(name: str, batch: dict) -> float:
    """Of the whole batch, scaled up from a part; the part's result is held against the estimator's.

    Raises:
        SystemExit: they differ: the loop would be a comparison with something else.
    """
    names = list(dict.fromkeys(batch["ids"]))[:LOOP_GROUPS]
    chosen = set(names)
    rows = [row for row, key in enumerate(batch["ids"]) if key in chosen]
    part = {key: value[rows] for key, value in batch.items() if key != "ids"}
    part["ids"] = [batch["ids"][row] for row in rows]
    start = time.process_time()
    looped = loop_over_groups(name, part)
    taken = time.process_time() - start
    if not torch.allclose(looped, estimator_call(name, part)()[0].to(looped.dtype), rtol=1e-3, atol=1e-3):
        raise SystemExit(f"the loop and the estimator {name} differ")
    return taken * len(batch["ids"]) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=56)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="the fastest is reported")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(args.rows, args.tokens, args.group_size)
    figures = {}
    for kind, names, make in (
        ("estimator", list_advantage_estimators(), estimator_call),
        ("loss", list_policy_losses(), loss_call),
    ):
        for name in names:
            figures[f"{kind} {name}"] = {"seconds": seconds(make(name, batch), args.repeats)}
    for name in (*GROUP_FORMULAS, "optimal_token_baseline"):
        entry = figures[f"estimator {name}"]
        entry["times_faster_than_loop"] = loop_seconds(name, batch) / entry["seconds"]
    print(f"{args.rows} rows x {args.tokens} tokens in groups of {args.group_size}, processor seconds on one core")
    for name, entry in figures.items():
        slow = " above the target" if entry["seconds"] > TARGET_SECONDS else ""
        ratio = f"  {entry['times_faster_than_loop']:.0f}x a loop" if "times_faster_than_loop" in entry else ""
        print(f"{name:38s} {entry['seconds']:.3f} s{ratio}{slow}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
