"""Does reinforcement learning generalise better than more supervision? Success under perturbations, paired by state.

    python benchmarks/generalisation.py --seeds 0 1 2 --output runs/generalisation
    python benchmarks/generalisation.py --recipe mt10 --eval_episodes 20 --output runs/generalisation_mt10

For each seed a recipe is run, the quickstart by default (supervised start, then PPO), and a control that spends the
time of reinforcement learning on more demonstrations of the same expert instead, and on learning from them. All three
are evaluated on the same held-out initial states, without and with each perturbation. A stage that is there already is
not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlvla.evaluation.results import EvalResult, Rate
from rlvla.utils.terminal import table

PERTURBATIONS = (*("camera=0.25", "light=0.5", "texture=0.75", "distractor=4", "instruction=1", "initial_state=0.5"),)
NAMES = ("PPO", "supervised", "more supervision")


def run(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True)


def control(folder: Path, first: Path, recipe: dict[str, Any], seed: int) -> Path:
    """The supervised policy that had the time of the whole run `first` of the recipe; returns its folder."""
    seconds = json.loads((first / "report.json").read_text())["seconds"]
    factor = 1.0 + seconds["rl"] / (seconds["demos"] + seconds["sft"])
    stages = {name: dict(recipe["stages"][name]) for name in ("demos", "sft")}
    longer = [("demos", "num_demos")] + [("sft", "max_steps")] * ("max_steps" in stages["sft"])
    for stage, flag in longer:
        stages[stage][flag] = round(factor * stages[stage][flag])
    counts = [spec.rpartition(":") for spec in stages["demos"].get("task_demos", ())]
    if counts:
        stages["demos"]["task_demos"] = [f"{task}:{round(factor * int(number))}" for task, _, number in counts]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".yaml")
    if not path.exists():  # times differ a little from run to run
        path.write_text(yaml.safe_dump({**recipe, "stages": stages, "variants": {}}, sort_keys=False))
    run("cli/run_recipe.py", path, "--output", folder, "--set", f"all.seed={seed}")
    return folder / "sft" / "policy"


def evaluate(policies: Sequence[Path], output: Path, states: int) -> dict[str, list[EvalResult]]:
    """Condition -> results of the policies."""
    if not output.exists():
        run(
            *("cli/eval_vla.py", "--pretrain", policies[0], "--compare", *policies[1:], "--eval_episodes", states),
            *("--num_envs", 2, "--perturb", *PERTURBATIONS, "--each_perturbation", "--output", output),
        )
    content = json.loads(output.read_text())["suites"]
    return {
        name.partition(", ")[2] or "none": [
            EvalResult.from_dict(part["results"][0]) for part in (found, *found["baselines"])
        ]
        for name, found in content.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="quickstart", help="of recipes/, with the stages demos, sft and rl")
    parser.add_argument("--eval_episodes", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs/generalisation"))
    args = parser.parse_args()
    output = args.output.resolve()
    path = ROOT / "recipes" / f"{args.recipe}.yaml"
    recipe = yaml.safe_load(path.read_text())
    found: dict[str, list[list[EvalResult]]] = {}
    for seed in args.seeds:
        first = output / f"{args.recipe}_{seed}"
        run("cli/run_recipe.py", path, "--output", first, "--set", f"all.seed={seed}")
        policies = [
            first / "ppo/policy",
            first / "sft/policy",
            control(output / f"control_{seed}", first, recipe, seed),
        ]
        for condition, results in evaluate(policies, output / f"eval_{seed}.json", args.eval_episodes).items():
            found.setdefault(condition, []).append(results)
    rows = []
    for condition, of_seeds in found.items():
        rates = [Rate.mean([results[i].success_at_end for results in of_seeds]) for i in range(len(NAMES))]
        rows.append((condition, *map(str, rates)))
    print(table(("perturbation", *NAMES), rows))
    print(f"(mean over {len(args.seeds)} seeds of {args.eval_episodes} held-out states each; 95 % intervals by MOVER)")


if __name__ == "__main__":
    main()
