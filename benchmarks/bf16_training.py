"""The path of a 7B run in small, on a CPU: two ranks, ZeRO-2, bfloat16, resumed once, beside float32 from one start.

    python benchmarks/bf16_training.py --output runs/bf16
    python benchmarks/bf16_training.py --output runs/bf16 --policies openvla --precisions bf16 --sizes tiny

OpenVLA-OFT with adapters on all layers and SmolVLA's expert learn toy_reach by GRPO from a supervised policy, with the
same seed in both precisions. The run in bfloat16 ends halfway and is continued by other processes. The table has the
sampled success of blocks of iterations, each with its 95 % interval. Steps that are complete are not
run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlvla.evaluation.statistics import clustered_interval
from rlvla.utils.files import read_metrics
from rlvla.utils.terminal import table
from tests.support.launching import PPO_SCRIPT, launch

PRECISIONS = ("float32", "bf16")
BLOCK = 5  # iterations whose episodes are counted together


@dataclass(frozen=True)
class Size:
    """Sizes of the policies and of their training.

    Attributes:
        policies: flags of a new policy.
        demos: number of demonstrations.
        epochs: of supervised learning, by policy.
        iterations: of reinforcement learning.
        states: initial states per iteration, in groups of `group` episodes.
        group: episodes per initial state.
        updates: optimizer steps per iteration.
        rates: learning rates of reinforcement learning.
    """

    policies: dict[str, str]
    demos: int
    epochs: dict[str, int]
    iterations: int
    states: int
    group: int
    updates: int
    rates: dict[str, float]


TRAINED = {
    "openvla": "--lora_rank 32 --lora_alpha 16 --lora_targets all-linear",
    "smolvla": "--train_expert_only --flow_steps 4",
}
LARGE = "--tiny_vision_dim 256 --tiny_vision_depth 4 --tiny_llm_dim 512"
TINY = "--tiny_vision_dim 32 --tiny_llm_dim 32 --tiny_llm_layers 2"
SIZES = {
    "30M": Size(
        {"openvla": f"{LARGE} --tiny_llm_layers 6", "smolvla": f"{LARGE} --tiny_llm_layers 8 --model_family smolvla"},
        demos=400,
        epochs={"openvla": 1, "smolvla": 3},
        iterations=20,
        states=4,
        group=8,
        updates=1,
        rates={"openvla": 1e-3, "smolvla": 3e-5},
    ),
    "tiny": Size(
        {"openvla": TINY, "smolvla": f"{TINY} --model_family smolvla"},
        demos=60,
        epochs={"openvla": 4, "smolvla": 4},
        iterations=20,
        states=2,
        group=8,
        updates=4,
        rates={"openvla": 3e-3, "smolvla": 1e-3},
    ),
}


def start(policy: str, size: Size, output: Path) -> Path:
    """The supervised policy that all runs of a policy start from."""
    from cli.collect_demos import main as collect
    from cli.train_sft_vla import main as train_sft

    demos, folder = output / "demos", output / f"{policy}_sft"
    if not demos.exists():
        words = "--task_suite_name toy_reach --image_size 32 --use_proprio --keep all --offset_bias 0.0 -0.2 "
        words += f"--noise_std 0.05 --action_quantum 0.25 --num_envs 1 --num_demos {size.demos} --output {demos}"
        collect(words.split())
    if not (folder / "policy").exists():
        words = f"--demos {demos} --save_path {folder} --pretrain tiny {size.policies[policy]} --action_chunk_len 3 "
        words += f"--max_epochs {size.epochs[policy]} "
        words += "--train_batch_size 32 --learning_rate 5e-4 --bf16 --no-use_tensorboard"
        train_sft(words.split())
    return folder / "policy"


def train(policy: str, precision: str, size: Size, output: Path, seed: int) -> Path:
    """The run folder of reinforcement learning; in bfloat16 two launches, of which the second continues the first."""
    folder, per_iteration = output / f"{policy}_{precision}_{seed}", size.states * size.group
    flags = f"--pretrain {start(policy, size, output)} --save_path {folder} --seed {seed} --zero_stage 2 "
    flags += f"{TRAINED[policy]} --actor_learning_rate {size.rates[policy]} --max_epochs {size.updates} "
    flags += f"--advantage_estimator grpo --n_samples_per_prompt {size.group} --rollout_batch_size {size.states} "
    flags += f"--train_batch_size {per_iteration} --micro_train_batch_size 16 --num_envs 2 --deterministic_rollout "
    flags += "--reward success rm:0.5 --rm_formula F(near&F(reached)) --success_hold_steps 1 --lr_scheduler constant "
    flags += "--lr_warmup_ratio 0 --eval_episodes 2 --no-val_before_train --no-check_start --max_idle_iterations 0 "
    flags += "--save_steps 5 --no-use_tensorboard" + (" --bf16" if precision == "bf16" else "")
    parts = (size.iterations // 2, size.iterations) if precision == "bf16" else (size.iterations,)
    for part in parts:
        if iterations_of(folder) < part:
            more = ["--load_checkpoint"] if iterations_of(folder) else []
            launch(PPO_SCRIPT, *flags.split(), "--num_episodes", part * per_iteration, *more)
    return folder


def iterations_of(folder: Path) -> int:
    """Number of iterations that a run has recorded."""
    return len(curve(folder)) if (folder / "metrics.jsonl").exists() else 0


def curve(folder: Path) -> list[float]:
    """Sampled success at end of each iteration."""
    records = {record["step"]: record for record in read_metrics(folder) if "rollout/success_at_end" in record}
    return [records[step]["rollout/success_at_end"] for step in sorted(records)]


def blocks(rates: Sequence[float], size: Size) -> list[tuple[float, float, float]]:
    """Success of each block of iterations with its 95 % interval; an iteration counts as a cluster."""
    episodes = size.states * size.group
    found = []
    for first in range(0, len(rates), BLOCK):
        block = rates[first : first + BLOCK]
        interval = clustered_interval([(round(rate * episodes), episodes) for rate in block], graded=True)
        found.append((sum(block) / len(block), *interval))
    return found


def agree(first: Sequence[float], second: Sequence[float], size: Size) -> bool:
    """Whether the intervals of all blocks overlap."""
    pairs = zip(blocks(first, size), blocks(second, size), strict=True)
    return all(low <= high_2 and low_2 <= high for (_, low, high), (_, low_2, high_2) in pairs)


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bf16"))
    parser.add_argument("--policies", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--sizes", choices=SIZES, default="30M")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    size, rows = SIZES[flags.sizes], []
    for policy in flags.policies:
        for precision in flags.precisions:
            rates = curve(train(policy, precision, size, flags.output.resolve(), flags.seed))
            cells = [
                f"{100 * rate:.0f}% [{100 * low:.0f}, {100 * high:.0f}]" for rate, low, high in blocks(rates, size)
            ]
            rows.append((policy, precision, *cells))
    headers = [f"iterations {first + 1} to {first + BLOCK}" for first in range(0, size.iterations, BLOCK)]
    print(table(("policy", "weights", *headers), rows))


if __name__ == "__main__":
    main()
