"""Runs the off-policy learner from nothing on several seeds.

    python benchmarks/off_policy.py --tasks reach lift --seeds 0 1 2 --output runs/off_policy

All success rates are at end, greedy, on 100 held-out initial states. "to 90 %" has the training episodes, and the
seconds, until nine of ten sampled episodes of an iteration succeed. A run that is there already is continued.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.terminal import duration, table

ROOT = Path(__file__).resolve().parents[1]
COMMON = [
    *("--eval_episodes", "100", "--rm_state_input", "proprio", "--critic_learning_rate", "1e-3", "--save_steps", "10"),
    *("--temperature_learning_rate", "1e-3", "--train_batch_size", "128", "--utd_ratio", "2", "--num_envs", "2"),
]
_PRIMITIVES = [
    *("--task_suite_name", "robosuite", "--control_freq", "10", "--object_state", "--action_space", "primitives"),
    *("--policy", "primitives", "--primitives", "reach", "grasp", "open", "--random_episodes", "96", "--gamma", "0.97"),
    *("--reward", "success:1.0", "rm:1.0", "affordance:0.5", "--init_temperature", "0.005", "--n_critics", "4"),
    *("--actor_reduction", "mean", "--no-entropy_in_target", "--target_entropy", "2", "--actor_learning_rate", "5e-4"),
    *("--hidden_sizes", "128", "128"),
]
TASKS = {
    # The way to the disc is in proprio: a suite of the tests.
    "reach": [
        *("--custom_module", "tests/support/state_reach.py", "--task_suite_name", "state_reach"),
        *("--action_chunk_len", "3", "--num_episodes", "640", "--random_episodes", "64", "--gamma", "0.95"),
        *("--reward", "success:1.0", "rm:1.0", "--init_temperature", "0.02", "--actor_learning_rate", "1e-3"),
    ],
    "lift": [
        *(*_PRIMITIVES, "--task_ids", "0", "--max_steps", "60"),
        *("--num_episodes", "1280", "--choice_exploration", "480"),
    ],
    "stack": [
        *(*_PRIMITIVES, "--task_ids", "1", "--max_steps", "80"),
        *("--num_episodes", "4096", "--choice_exploration", "960"),
    ],
}
REACHED = 0.9


def effort(folder: Path) -> str:
    """Training episodes and seconds until an iteration reaches `REACHED`, sampled."""
    episodes = seconds = 0.0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if "rollout/success_at_end" in metrics:
            episodes += metrics["rollout/episodes"]
            seconds += metrics["timing_s/iteration"]
            if metrics["rollout/success_at_end"] >= REACHED:
                return f"{episodes:.0f}, {seconds:.0f} s"
    return "-"


def run(task: str, seed: int, folder: Path, more: list[str]) -> tuple:
    """Train; a row of the table."""
    command = [sys.executable, str(ROOT / "cli/train_sac_vla.py"), *TASKS[task], *COMMON, "--seed", str(seed)]
    resume = ["--load_checkpoint"] if folder.exists() else []
    subprocess.run([*command, "--save_path", str(folder.resolve()), *resume, *more], cwd=ROOT, check=True)
    evaluations = json.loads((folder / "evaluations.json").read_text())
    totals = json.loads((folder / "totals.json").read_text())
    rates = [evaluations[place]["success_at_end"] for place in (0, -1)]
    cells = [f"{100 * r['rate']:.1f}% [{100 * r['low']:.1f}, {100 * r['high']:.1f}]" for r in rates]
    return (
        task,
        seed,
        *cells,
        f"{totals['episodes']:.0f}",
        f"{totals['env_steps']:.0f}",
        effort(folder),
        duration(totals["seconds"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/off_policy"))
    args, more = parser.parse_known_args()
    rows = [run(task, seed, args.output / f"{task}_{seed}", more) for task in args.tasks for seed in args.seeds]
    print(table(("task", "seed", "start", "end", "episodes", "env steps", "to 90 %", "training"), rows))


if __name__ == "__main__":
    main()
