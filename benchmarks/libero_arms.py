"""LIBERO: reward machine, critic and GRPO from the same supervised policies, with equal numbers of episodes.

    python benchmarks/libero_arms.py --variant spatial --seeds 0 1 2 --output runs/libero_arms

`recipe` has the settings of `recipes/libero.yaml`: success and a reward machine as reward, a separate critic. Each
other arm changes what its name says. Greedy success on held-out initial states, with differences to the start and to
`recipe`, paired by state. Finished stages are not repeated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import arms

_NO_CRITIC = [f"rl.{name}=null" for name in ("critic_learning_rate", "gamma", "lambd", "bootstrap_truncated")]
ARMS = {
    "recipe": [],
    "success alone": ["rl.reward=success", "rl.rm_goal_stages=null"],
    "shared critic": ["rl.share_backbone=true", "rl.critic_learning_rate=null"],
    "GRPO": ["rl.advantage_estimator=grpo", "rl.n_samples_per_prompt=8", "rl.rollout_batch_size=24", *_NO_CRITIC],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", nargs="+", default=[], help="of recipes/libero.yaml")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=1920)
    parser.add_argument("--output", type=Path, default=Path("runs/libero_arms"))
    args = parser.parse_args()
    results: arms.Results = {("start", 0): []}
    command = [sys.executable, "cli/run_recipe.py", "recipes/libero.yaml"]
    command += ["--variant", *args.variant] if args.variant else []
    for seed in args.seeds:
        folder = args.output.resolve() / f"seed_{seed}"
        for arm in args.arms:
            name = arm.replace(" ", "_")
            words = [f"all.seed={seed}", f"rl.num_episodes={args.episodes}", f"rl.save_path=$output/{name}", *ARMS[arm]]
            words += [f"eval_rl.output=$output/{name}.json", "eval_rl.num_videos=null"]
            subprocess.run([*command, "--output", folder, "--set", *words], cwd=arms.ROOT, check=True)
            results.setdefault((arm, args.episodes), []).append(arms.result_of(folder / f"{name}.json"))
        results["start", 0].append(arms.result_of(folder / "eval_sft.json"))
    arms.report(results, "-".join(["libero", *args.variant]), "recipe", args.output / "arms.json")


if __name__ == "__main__":
    main()
