"""Does a reward machine save episodes? Training with and without one, from a start that hardly ever succeeds.

    python benchmarks/reward_machine_learning.py --out runs/reward_machine
    python benchmarks/reward_machine_learning.py --suite lift --out runs/reward_machine_lift --seeds 0
    python benchmarks/reward_machine_learning.py --out runs/reward_machine --draw      (picture and table only)

One supervised start; reinforcement learning from there on success alone, or on success and the machine in hybrid mode,
all else equal, over several seeds. toy_reach: PPO with a critic, after an expert that aims more than a disc's width
beside the disc. lift_beside: GRPO on Lift, after an expert that aims 6 cm beside the cube, so that no success is seen;
the machine has a stage for reaching the cube. lift: the start of the quickstart, but 16 steps instead of 25 to lift and
hold the cube, by GRPO, or by PPO with a critic (lift_ppo). Complete runs are not repeated. Two runs at a time, each on
one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)
PER_ITERATION = 128
WINDOW = 3  # iterations of the moving average
LEVELS = (0.2, 0.3, 0.4, 0.5)
LIFT_ENV = (
    "--task_suite_name robosuite --task_ids 0 --control_freq 10 --max_steps 25 --cameras wrist --image_size 64 "
    "--use_proprio"
)
COMMON = (
    "--eps_clip_low_high 0.2 0.28 --no-val_before_train --no-use_tensorboard "
    "--no-check_start"  # of the first 128 episodes none may succeed
)
CRITIC = "--advantage_estimator gae --gamma 0.99 --lambd 0.95 --no-bootstrap_truncated --freezing_actor_steps 1"
LIFT = (
    f"{COMMON} --task_suite_name robosuite --task_ids 0 --train_batch_size 16 --max_epochs 2 "
    "--micro_train_batch_size 80 --micro_rollout_batch_size 256 --actor_learning_rate 4e-4 --num_envs 2"
)
GRPO = f"--advantage_estimator grpo --n_samples_per_prompt 8 --rollout_batch_size {PER_ITERATION // 8}"


@dataclass(frozen=True)
class Setting:
    """What is learned, from which start, by which algorithm.

    Attributes:
        demos: flags of the demonstrations.
        sft: flags of the supervised start.
        learning: flags of the training.
        machine: weight of the machine beside success.
        episodes: of a run.
        eval_episodes: of the evaluation at its end.
        formula: of the machine; by default the task's own.
    """

    demos: str
    sft: str
    learning: str
    machine: str
    episodes: int
    eval_episodes: int
    formula: str = ""

    @property
    def rewards(self) -> dict[str, list[str]]:
        """`--reward` of both arms."""
        formula = ["--rm_formula", self.formula] if self.formula else []
        return {"success": ["success:1.0"], "machine": ["success:1.0", f"rm:{self.machine}", *formula]}


TOY = Setting(
    demos="--task_suite_name toy_reach --image_size 32 --use_proprio --num_demos 1000 --keep all "
    "--offset_bias 0.35 -0.35 --offset_prob 1.0 --offset_max 0.1 --noise_std 0.05 --action_quantum 0.25 --num_envs 1",
    sft="--pretrain tiny --action_chunk_len 3 --tiny_vision_dim 16 --tiny_vision_depth 2 --tiny_llm_dim 32 "
    "--tiny_llm_layers 2 --max_epochs 5 --train_batch_size 64 --learning_rate 3e-3 --no-use_tensorboard",
    learning=f"{COMMON} {CRITIC} --task_suite_name toy_reach --rollout_batch_size {PER_ITERATION} "
    "--train_batch_size 32 --max_epochs 2 --micro_train_batch_size 512 --micro_rollout_batch_size 512 "
    "--actor_learning_rate 1e-3 "
    "--critic_learning_rate 2e-3 --num_envs 1",
    machine="0.5",
    episodes=6144,
    eval_episodes=200,
)
LIFT_GRPO = Setting(
    demos=f"{LIFT_ENV} --num_demos 600 --keep all --offset_bias 0.025 0.0 --offset_prob 0.5 --offset_max 0.02 "
    "--noise_std 0.1 --action_quantum 0.25 --num_envs 2",
    sft="--pretrain tiny --action_chunk_len 5 --tiny_vision_dim 32 --tiny_llm_dim 48 --tiny_llm_layers 3 "
    "--max_epochs 12 --train_batch_size 64 --learning_rate 2e-3 --no-use_tensorboard",
    learning=f"{LIFT} --max_steps 16 {GRPO}",
    machine="1.0",
    episodes=1024,
    eval_episodes=100,
)
LIFT_PPO = replace(
    LIFT_GRPO,
    learning=f"{LIFT} --max_steps 16 {CRITIC} --value_clip 0.2 --critic_learning_rate 1e-3 "
    f"--rollout_batch_size {PER_ITERATION}",
    episodes=1536,
)
LIFT_BESIDE = replace(
    LIFT_GRPO,
    demos=LIFT_GRPO.demos.replace("--offset_bias 0.025", "--offset_bias 0.06"),
    learning=f"{LIFT} --max_steps 25 {GRPO}",
    machine="0.5",
    formula="F(reached & F(grasped & F lifted))",
    episodes=2048,
)
SUITES = {"toy_reach": TOY, "lift_beside": LIFT_BESIDE, "lift": LIFT_GRPO, "lift_ppo": LIFT_PPO}
KINDS = tuple(TOY.rewards)


def command(script: str, *words: str | Path) -> None:
    """Run a command of the project on one core; raises with the end of its output if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli" / script), *map(str, words)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def make_start(out: Path, setting: Setting = TOY, *, evaluated: bool = True) -> Path:
    """The supervised start; its success, greedy and sampled, is in `start.json`."""
    policy = out / "start" / "policy"
    if not policy.exists():
        command("collect_demos.py", *setting.demos.split(), "--output", out / "demos")
        command(
            "train_sft_vla.py",
            *setting.sft.split(),
            "--demos",
            out / "demos" / "demos.hdf5",
            "--save_path",
            out / "start",
        )
    if evaluated and not (out / "start.json").exists():
        words = [
            "--eval_episodes",
            str(setting.eval_episodes),
            "--sampled",
            "--num_envs",
            "1",
            "--output",
            out / "start.json",
        ]
        command("eval_vla.py", "--pretrain", policy, *words)
    return policy


def learn(out: Path, policy: Path, kind: str, seed: int, episodes: int | None = None, setting: Setting = TOY) -> None:
    """One run; nothing if it is complete."""
    folder = out / f"{kind}-{seed}"
    if not (folder / "evaluations.json").exists():
        words = ["--pretrain", policy, "--save_path", folder, "--num_episodes", str(episodes or setting.episodes)]
        words += ["--seed", str(seed), "--eval_episodes", str(setting.eval_episodes)]
        command("train_ppo_vla.py", *setting.learning.split(), *words, "--reward", *setting.rewards[kind])


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


def table(out: Path, setting: Setting, seeds: Sequence[int]) -> list[str]:
    """Markdown rows: episodes until each level, final greedy success, seed by seed."""
    rows = ["| | " + " | ".join(f"{100 * level:.0f} %" for level in LEVELS) + " | greedy at the end |"]
    rows.append("|---" * (len(LEVELS) + 2) + "|")
    for kind in KINDS:
        curves = [success_curve(out / f"{kind}-{seed}") for seed in seeds]
        cells = [" / ".join(str(episodes_until(curve, level) or "never") for curve in curves) for level in LEVELS]
        ends = []
        for seed in seeds:
            rate = json.loads((out / f"{kind}-{seed}" / "evaluations.json").read_text())[-1]["success_at_end"]
            ends.append(f"{100 * rate['rate']:.1f} [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]")
        rows.append(f"| `{shlex.join(setting.rewards[kind])}` | " + " | ".join(cells) + f" | {' / '.join(ends)} |")
    return rows


def draw(out: Path, picture: Path, setting: Setting, seeds: Sequence[int]) -> None:
    """All seeds of both rewards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for kind, colour in zip(KINDS, ("tab:gray", "tab:green")):
        label = shlex.join(setting.rewards[kind])
        for seed in seeds:
            curve = smoothed(success_curve(out / f"{kind}-{seed}"))
            episodes = [(i + WINDOW) * PER_ITERATION for i in range(len(curve))]
            axes.plot(episodes, curve, color=colour, label=None if seed != seeds[0] else label)
    axes.set(xlabel="episodes", ylabel=f"sampled success, mean of {WINDOW} iterations", ylim=(0, 1))
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="toy_reach", help="task and algorithm (default: toy_reach)")
    parser.add_argument("--out", type=Path, default=Path("runs/reward_machine"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of learning (default: 0 1 2)")
    parser.add_argument("--draw", action="store_true", help="picture and table of complete runs")
    args = parser.parse_args(argv)
    setting = SUITES[args.suite]
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        policy = make_start(args.out, setting)
        runs = [(kind, seed) for seed in args.seeds for kind in KINDS]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda run: learn(args.out, policy, *run, setting=setting), runs))
    draw(args.out, args.out / "success.png", setting, args.seeds)
    print("\n".join(table(args.out, setting, args.seeds)))


if __name__ == "__main__":
    main()
