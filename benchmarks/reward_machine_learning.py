"""Does a reward machine save episodes? toy_reach from a start that hardly ever succeeds, with and without it.

    python benchmarks/reward_machine_learning.py --out runs/reward_machine
    python benchmarks/reward_machine_learning.py --out runs/reward_machine --draw      (picture and table only)

One supervised start, whose expert aims more than a disc's width beside the disc; PPO with a critic from there, paid for
success alone or for success and the machine (near, reached) in hybrid mode, all else equal, over several seeds. A run
that is complete is not repeated. Two runs go on at a time, each on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)
EPISODES, PER_ITERATION, EVAL_EPISODES = 6144, 128, 200
WINDOW = 3  # iterations of the moving average
LEVELS = (0.2, 0.3, 0.4, 0.5)
REWARDS = {"success": ["success:1.0"], "machine": ["success:1.0", "rm:0.5"]}
LABELS = {"success": "success:1.0", "machine": "success:1.0 rm:0.5"}

DEMOS = (
    "--task_suite_name toy_reach --image_size 32 --use_proprio --num_demos 1000 --keep all --offset_bias 0.35 -0.35 "
    "--offset_prob 1.0 --offset_max 0.1 --noise_std 0.05 --action_quantum 0.25 --num_envs 1"
)
SFT = (
    "--pretrain tiny --action_chunk_len 3 --tiny_vision_dim 16 --tiny_vision_depth 2 --tiny_llm_dim 32 "
    "--tiny_llm_layers 2 --max_epochs 5 --train_batch_size 64 --learning_rate 3e-3 --no-use_tensorboard"
)
PPO = (
    f"--task_suite_name toy_reach --rollout_batch_size {PER_ITERATION} --train_batch_size 32 --max_epochs 2 "
    "--micro_train_batch_size 512 --micro_rollout_batch_size 512 --advantage_estimator gae --gamma 0.99 --lambd 0.95 "
    "--eps_clip_low_high 0.2 0.28 --actor_learning_rate 1e-3 --critic_learning_rate 2e-3 --freezing_actor_steps 1 "
    f"--no-bootstrap_truncated --num_envs 1 --eval_episodes {EVAL_EPISODES} --no-val_before_train --no-use_tensorboard "
    "--no-check_start"  # of the first 128 episodes none may succeed
)


def command(script: str, *words: str | Path) -> None:
    """Run a command of the project on one core; raises with the end of its output if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli" / script), *map(str, words)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def make_start(out: Path, *, evaluated: bool = True) -> Path:
    """The supervised start; its success, greedy and sampled, is in `start.json`."""
    policy = out / "start" / "policy"
    if not policy.exists():
        command("collect_demos.py", *DEMOS.split(), "--output", out / "demos")
        command("train_sft_vla.py", *SFT.split(), "--demos", out / "demos" / "demos.hdf5", "--save_path", out / "start")
    if evaluated and not (out / "start.json").exists():
        words = ["--eval_episodes", str(EVAL_EPISODES), "--sampled", "--num_envs", "1", "--output", out / "start.json"]
        command("eval_vla.py", "--pretrain", policy, *words)
    return policy


def learn(out: Path, policy: Path, kind: str, seed: int, episodes: int = EPISODES) -> None:
    """One run; nothing if it is complete."""
    folder = out / f"{kind}-{seed}"
    if not (folder / "evaluations.json").exists():
        words = ["--pretrain", policy, "--save_path", folder, "--num_episodes", str(episodes), "--seed", str(seed)]
        command("train_ppo_vla.py", *PPO.split(), *words, "--reward", *REWARDS[kind])


def success_curve(folder: Path) -> list[float]:
    """Sampled success of each iteration."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["rollout/success_at_end"] for line in lines if "rollout/success_at_end" in line]


def smoothed(curve: Sequence[float]) -> list[float]:
    """Mean of each iteration and the `WINDOW` - 1 before it; the first full window first."""
    return [sum(curve[i - WINDOW + 1 : i + 1]) / WINDOW for i in range(WINDOW - 1, len(curve))]


def episodes_until(curve: Sequence[float], level: float) -> int | None:
    """Episodes played when the moving average first reached the level; None: never."""
    for index, value in enumerate(smoothed(curve)):
        if value >= level:
            return (index + WINDOW) * PER_ITERATION
    return None


def table(out: Path) -> list[str]:
    """Markdown rows: episodes until each level, final greedy success, seed by seed."""
    rows = ["| | " + " | ".join(f"{100 * level:.0f} %" for level in LEVELS) + " | greedy at the end |"]
    rows.append("|---" * (len(LEVELS) + 2) + "|")
    for kind in REWARDS:
        curves = [success_curve(out / f"{kind}-{seed}") for seed in SEEDS]
        cells = [" / ".join(str(episodes_until(curve, level) or "never") for curve in curves) for level in LEVELS]
        ends = []
        for seed in SEEDS:
            rate = json.loads((out / f"{kind}-{seed}" / "evaluations.json").read_text())[-1]["success_at_end"]
            ends.append(f"{100 * rate['rate']:.1f} [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]")
        rows.append(f"| `{LABELS[kind]}` | " + " | ".join(cells) + f" | {' / '.join(ends)} |")
    return rows


def draw(out: Path, picture: Path) -> None:
    """All seeds of both rewards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for kind, colour in zip(REWARDS, ("tab:gray", "tab:green")):
        for seed in SEEDS:
            curve = smoothed(success_curve(out / f"{kind}-{seed}"))
            episodes = [(i + WINDOW) * PER_ITERATION for i in range(len(curve))]
            axes.plot(episodes, curve, color=colour, label=None if seed else LABELS[kind])
    axes.set(xlabel="episodes", ylabel=f"sampled success, mean of {WINDOW} iterations", ylim=(0, 1))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reward_machine"), help="folder of all runs")
    parser.add_argument("--draw", action="store_true", help="picture and table of complete runs")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        policy = make_start(args.out)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda run: learn(args.out, policy, *run), [(k, s) for s in SEEDS for k in REWARDS]))
    draw(args.out, args.out / "success.png")
    print("\n".join(table(args.out)))


if __name__ == "__main__":
    main()
