"""One policy for ten tasks, beside ten policies for one each: Meta-World MT10, from the same supervised start.

    python benchmarks/many_tasks.py --seeds 0 1 2 --output runs/many_tasks

For each seed `recipes/mt10.yaml` is run, and then, from its supervised policy, the stage `rl` of the same recipe for
each task alone, with a tenth of the episodes, in iterations of half the size, of which the critic has the first for
itself. All are evaluated on the same held-out initial states; differences are paired by state. A stage that is there
already is not repeated; `--skip_alone` leaves out the single tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.generalisation import run
from rlvla.evaluation.comparison import compare, compare_over_runs
from rlvla.evaluation.results import EvalResult, Rate
from rlvla.utils.terminal import table

RECIPE = ROOT / "recipes" / "mt10.yaml"
TASKS = 10


def result(path: Path) -> EvalResult:
    return EvalResult.from_dict(json.loads(path.read_text())["results"][0])


def alone(recipe: dict[str, Any], task: str, start: Path) -> dict[str, Any]:
    """The recipe of one task: a tenth of the episodes of the stage rl, in iterations of half the size."""
    rl = recipe["stages"]["rl"]
    size = rl["rollout_batch_size"] // 2
    own = {"num_episodes": round(rl["num_episodes"] / TASKS / size) * size, "rollout_batch_size": size}
    own |= {"pretrain": str(start), "task_names": [task]}
    own |= {
        "save_path": None,
        "eval_steps": 0,
        "task_sampling": None,
        "freezing_actor_steps": 1,
        "minutes": rl["minutes"] / TASKS,
    }
    stages = {"rl": rl | own, "eval_rl": recipe["stages"]["eval_rl"]}
    return {"about": f"{task}, alone", "output": "runs/alone", "stages": stages}


def play(seed: int, output: Path, skip_alone: bool) -> tuple[EvalResult, EvalResult, dict[str, EvalResult], float]:
    """Results of the start, of the policy for all tasks and of those for one each, and seconds of its training."""
    together = output / f"mt10_{seed}"  # where benchmarks/generalisation.py has it
    run("cli/run_recipe.py", RECIPE, "--output", together, "--set", f"all.seed={seed}")
    start = result(together / "eval_sft.json")
    of_one = {}
    for task in () if skip_alone else start.tasks:
        folder = output / f"{task.name}_{seed}"
        path = folder.with_suffix(".yaml")
        content = alone(yaml.safe_load(RECIPE.read_text()), task.name, together / "sft" / "policy")
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        run("cli/run_recipe.py", path, "--output", folder, "--set", f"all.seed={seed}")
        of_one[task.name] = result(folder / "eval_rl.json")
    seconds = json.loads((together / "report.json").read_text())["seconds"]
    return start, result(together / "eval_rl.json"), of_one, seconds["rl"]


def rows_of(start: EvalResult, end: EvalResult, of_one: dict[str, EvalResult]) -> list[tuple[str, ...]]:
    """A row for each task, and one for their mean."""
    rows, change = [], compare("all ten", end, "start", start)
    for before, after in zip(start.tasks, end.tasks, strict=True):
        gained, cells = change.of_task(before.name), ("-", "-")
        if of_one:
            one = of_one[before.name]
            cells = (str(one.success_at_end), compare("all ten", end, "alone", one).overall().in_points())
        assert gained is not None
        rows.append((before.name, str(before.success_at_end), str(after.success_at_end), gained.in_points(), *cells))
    cells = means([(end, one) for one in of_one.values()])
    mean = (str(start.success_at_end), str(end.success_at_end), change.overall().in_points())
    return [*rows, ("mean", *mean, *cells)]


def means(pairs: list[tuple[EvalResult, EvalResult]]) -> tuple[str, str]:
    """Success of the second policies of some pairs, and what the first are ahead; over seeds, clustered by state."""
    return (str(Rate.over_runs([b for _, b in pairs])), compare_over_runs(pairs).in_points()) if pairs else ("-", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/many_tasks"))
    parser.add_argument("--skip_alone", action="store_true", help="without the runs of one task each")
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    names = ("start", "all ten", "all ten - start", "alone", "all ten - alone")
    begun, single = [], []
    for seed in args.seeds:
        start, end, of_one, trained = play(seed, output, args.skip_alone)
        begun.append((end, start))
        single += [(end, one) for one in of_one.values()]
        print(f"seed {seed}: {trained / 60:.0f} minutes of training on all ten")
        print(table(("task", *names), rows_of(start, end, of_one)))
    first, change = means(begun)
    last = str(Rate.over_runs([end for end, _ in begun]))
    print(table(("seeds", *names), [(len(args.seeds), first, last, change, *means(single))]))


if __name__ == "__main__":
    main()
