"""Does reinforcement learning generalise better than more supervision? Success under perturbations, paired by state.

    python benchmarks/generalisation.py --seeds 0 1 2 --output runs/generalisation
    python benchmarks/generalisation.py --recipe mt10 --eval_episodes 20 --output runs/generalisation
    python benchmarks/generalisation.py --recipe libero --seeds 0 --eval_episodes 5 --output runs/generalisation \
        --env_python .venv-libero-pro/bin/python --suites libero_object libero_object_object libero_object_swap \
        libero_object_lan libero_object_task

For each seed a recipe is run, the quickstart by default (supervised start, then PPO), and a control that spends the
processor time of reinforcement learning on more demonstrations of the same expert instead, and on learning from them.
All three are evaluated on the same held-out initial states of each task, without and with each perturbation, and
without images; with --suites, in other suites instead of perturbations. A stage that is there already is not repeated.
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

from rlvla.evaluation.comparison import compare_over_runs
from rlvla.evaluation.results import EvalResult, Rate
from rlvla.utils.terminal import table

PERTURBATIONS = ("camera=0.25", "light=0.5", "texture=0.75", "distractor=4", "instruction=1", "initial_state=0.5")
NAMES = ("PPO", "supervised", "more supervision")


def run(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True)


def costs(folder: Path) -> dict[str, float]:
    """Stage of a recipe -> processor time in seconds.

    Raises:
        SystemExit: it was not measured.
    """
    stages = json.loads((folder / "state.json").read_text())["stages"].values()
    seconds = {record["stage"]: record.get("cpu_seconds") for record in stages}
    if None in seconds.values():
        raise SystemExit(f"{folder}: an earlier version, which did not measure processor time, ran it; delete it")
    return seconds


def control(folder: Path, first: Path, recipe: dict[str, Any], seed: int) -> Path:
    """The supervised policy that had the processor time of the whole run `first` of the recipe; returns its folder."""
    spent = costs(first)
    factor = 1.0 + spent["rl"] / (spent["demos"] + spent["sft"])
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


def evaluate(
    policies: Sequence[Path], output: Path, conditions: Sequence[object], *common: object
) -> dict[str, list[EvalResult]]:
    """Condition -> results of the policies, under `conditions` and without images: flags of `cli/eval_vla.py`."""
    blind = output.with_name(f"{output.stem}_blind.json")
    policy, *others = policies
    for file, flags in ((output, conditions), (blind, ("--images", "none"))):
        words = ("--pretrain", policy, "--compare", *others, *common, "--num_envs", 2)
        if not file.exists():
            run("cli/eval_vla.py", *words, *flags, "--output", file)
    content = json.loads(output.read_text())["suites"]
    measured = {name.partition(", ")[2] or name: suite for name, suite in content.items()}
    measured["no images"] = json.loads(blind.read_text())
    return {
        name: [EvalResult.from_dict(part["results"][0]) for part in (suite, *suite["baselines"])]
        for name, suite in measured.items()
    }


def row(of_seeds: Sequence[Sequence[EvalResult]]) -> list[str]:
    """Rates under one condition, with the rate of each seed, and paired differences of PPO to the others in points."""
    cells = []
    for of_policy in zip(*of_seeds):
        seeds = ", ".join(f"{100 * result.success_at_end.rate:.0f}" for result in of_policy)
        cells.append(f"{Rate.over_runs(of_policy)} ({seeds})")
    for other in range(1, len(NAMES)):
        cells.append(compare_over_runs([(results[0], results[other]) for results in of_seeds]).in_points())
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="quickstart", help="of recipes/, with the stages demos, sft and rl")
    parser.add_argument("--eval_episodes", type=int, default=100, help="of each task")
    parser.add_argument("--suites", nargs="+", help="to be evaluated in, instead of perturbations")
    parser.add_argument("--env_python", help="interpreter that has these suites")
    parser.add_argument("--output", type=Path, default=Path("runs/generalisation"))
    args = parser.parse_args()
    output, name = args.output.resolve(), args.recipe
    path = ROOT / "recipes" / f"{name}.yaml"
    recipe = yaml.safe_load(path.read_text())
    limit = recipe["stages"].get("eval_rl", {}).get("max_steps")
    common = ["--eval_episodes", args.eval_episodes, *(() if limit is None else ("--max_steps", limit))]
    conditions = ["--perturb", *PERTURBATIONS, "--each_perturbation"]
    if args.suites:
        conditions = ["--task_suite_name", *args.suites]
        conditions += ["--env_python", args.env_python] if args.env_python else []
    results_of: dict[str, list[list[EvalResult]]] = {}
    for seed in args.seeds:
        first, longer = output / f"{name}_{seed}", output / f"{name}_{seed}_control"
        run("cli/run_recipe.py", path, "--output", first, "--set", f"all.seed={seed}")
        policies = [first / "ppo/policy", first / "sft/policy", control(longer, first, recipe, seed)]
        kind = "suites" if args.suites else "states"
        file = output / f"{name}_{seed}_{args.eval_episodes}_{kind}.json"
        for condition, results in evaluate(policies, file, conditions, *common).items():
            results_of.setdefault(condition, []).append(results)
        spent = [sum(of.get(stage, 0.0) for stage in ("demos", "sft", "rl")) for of in (costs(first), costs(longer))]
        print(f"seed {seed}: {spent[0] / 60:.0f} minutes of processor time with PPO, the control {spent[1] / 60:.0f}")
    rows = [(condition, *row(of_seeds)) for condition, of_seeds in results_of.items()]
    print(table(("perturbation", *NAMES, *(f"PPO - {other}" for other in NAMES[1:])), rows))
    print(
        f"(mean over {len(args.seeds)} seeds of {args.eval_episodes} held-out states of each task, with the rate of "
        "each seed in brackets; differences in points, paired by state; 95 % intervals, clustered by state, cover the "
        "choice of states, not of training runs)"
    )


if __name__ == "__main__":
    main()
