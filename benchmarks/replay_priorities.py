"""Do priorities help? The off-policy learner on Stack with every kind of priority, from the same seeds.

    python benchmarks/replay_priorities.py --seeds 0 1 2 3 4 --output runs/replay_priorities

The task and all other settings are those of `benchmarks/off_policy.py --tasks stack`, at `--num_episodes`. The row
"reward model" needs `--rm_model FOLDER`, trained by train_rm_vla.py. "area" is the mean over the run, by environment
steps, of the success of the sampled episodes; "difference" is its paired difference to `uniform` over the seeds, with a
95 % interval and the p-value of the paired t-test. "at end" is the greedy success on 100 held-out initial states. A
run that is there already is continued.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.off_policy import COMMON, TASKS
from rlvla.utils.terminal import table

_MACHINE = ["--replay_score_source", "rm"]
PRIORITIES: dict[str, list[str]] = {
    "uniform": [],
    "td": ["--replay_priority", "td"],
    "machine": ["--replay_priority", "vlm", *_MACHINE],
    "reward model": ["--replay_priority", "vlm", "--replay_score_source", "rm_model"],
    "product": ["--replay_priority", "hybrid", "--replay_combine", "product", *_MACHINE],
    "additive": ["--replay_priority", "hybrid", *_MACHINE],
    "additive, mixed": ["--replay_priority", "hybrid", "--replay_share", "0", "0.5", *_MACHINE],
}


def area(folder: Path) -> float:
    """Mean success of the sampled episodes, each iteration by its environment steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    played = [line for line in lines if "rollout/success_at_end" in line]
    steps = [line["rollout/env_steps"] for line in played]
    return float(np.average([line["rollout/success_at_end"] for line in played], weights=steps))


def run(name: str, seed: int, folder: Path, episodes: int, model: Path | None) -> tuple[float, float]:
    """Train; area and success at end."""
    command = [sys.executable, "cli/train_sac_vla.py", *TASKS["stack"], *COMMON, "--seed", str(seed)]
    command += ["--num_episodes", str(episodes), "--no-val_before_train", *PRIORITIES[name]]
    if name == "reward model":
        at = command.index("--reward") + 1
        command[at:at] = ["rm_model:0"]
        command += ["--rm_model_path", str(model)]
    command += ["--save_path", str(folder.resolve()), *(["--load_checkpoint"] if folder.exists() else [])]
    subprocess.run(command, cwd=ROOT, check=True)
    return area(folder), json.loads((folder / "evaluations.json").read_text())[-1]["success_at_end"]["rate"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--priorities", nargs="+", choices=PRIORITIES, default=list(PRIORITIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--num_episodes", type=int, default=2048)
    parser.add_argument("--rm_model", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/replay_priorities"))
    args = parser.parse_args()
    names = [name for name in args.priorities if name != "reward model" or args.rm_model is not None]
    if len(args.seeds) < 2:
        parser.error("--seeds: differences need two seeds or more")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for seed in args.seeds:
        for name in names:
            folder = args.output / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
            found[name].append(run(name, seed, folder, args.num_episodes, args.rm_model))
    rows = []
    for name, results in found.items():
        areas, ends = np.array(results).T
        row = [name, f"{areas.mean():.3f}", " ".join(f"{100 * end:.0f}%" for end in ends), "", ""]
        if "uniform" in found and name != "uniform":
            test = stats.ttest_rel(areas, np.array(found["uniform"])[:, 0])
            low, high = test.confidence_interval()
            row[3:] = [f"{(areas - np.array(found['uniform'])[:, 0]).mean():+.3f} [{low:+.3f}, {high:+.3f}]"]
            row.append(f"{test.pvalue:.3f}")
        rows.append(tuple(row))
    print(table(("priority", "area", "at end", "difference", "p"), rows))


if __name__ == "__main__":
    main()
