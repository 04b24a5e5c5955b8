"""Do priorities help? The off-policy learner on Stack with every kind of priority, from the same seeds.

    python benchmarks/replay_priorities.py --seeds 0 1 2 3 4 --jobs 2
    python benchmarks/replay_priorities.py --show --picture docs/images/replay_priorities.png

Task and settings are those of `benchmarks/off_policy.py --tasks stack`, with the changes in `BUDGET`. "reward model" is
trained on demonstrations of the scripted expert first. A finished run leaves a record in `--records`, which holds its
curve and its evaluation; a run with a record is not repeated, one that was interrupted goes on. All runs take about 20
core hours, so that records of several machines may be brought together.

"area" is the mean over the run, by environment steps, of the success of the sampled episodes; "difference" is its
paired difference to `uniform` over the seeds that both have, with a 95 % interval and the p-value of the paired t-test.
"at end" and "once" are the greedy success on 100 held-out initial states, "lost" how often it was there and went away,
in 100 episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.off_policy import COMMON, TASKS
from rlvla.utils.files import write_json
from rlvla.utils.terminal import table

BUDGET = ["--num_episodes", "2048", "--no-val_before_train"]
_MACHINE = ["--replay_score_source", "rm"]
PRIORITIES: dict[str, list[str]] = {
    "uniform": [],
    "td": ["--replay_priority", "td"],
    "machine": ["--replay_priority", "vlm", *_MACHINE],
    "reward model": ["--replay_priority", "vlm", "--replay_score_source", "rm_model"],
    "product": ["--replay_priority", "hybrid", "--replay_combine", "product", *_MACHINE],
    "additive": ["--replay_priority", "hybrid", *_MACHINE],
    "additive, mixed": ["--replay_priority", "hybrid", "--replay_share", "0", "0.5", *_MACHINE],
    "no validators": ["--no-rm_validation"],  # uniform as well
}
_MODEL = "reward model"
_CAMERA = ["--cameras", "closeup", "--image_size", "64"]
_DEMOS = [*("--task_suite_name", "robosuite", "--task_ids", "1", "--control_freq", "10"), *_CAMERA]


def reward_model(folder: Path) -> Path:
    """A reward model of the task, trained on 200 demonstrations of the expert, failures among them; made once."""
    result = folder / "model" / "reward_model"
    if not result.exists():
        collect = ["cli/collect_demos.py", *_DEMOS, "--num_demos", "200", "--keep", "all", "--offset_prob", "0.4"]
        collect += ["--offset_bias", "0.03", "0.0", "--use_proprio", "--output", str(folder / "demos")]
        train = ["cli/train_rm_vla.py", "--demos", str(folder / "demos" / "demos.hdf5"), "--pretrain", "compact"]
        for command in (collect, [*train, "--save_path", str(folder / "model")]):
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    return result


def flags(name: str, budget: list[str]) -> list[str]:
    """The flags of a row's training that decide what is learned, but for seed and reward model."""
    training = [*TASKS["stack"], *COMMON, *budget, *PRIORITIES[name]]
    if name == _MODEL:
        at = training.index("--reward") + 1
        training[at:at] = ["rm_model:0"]
        training += _CAMERA
    return training


def run(job: tuple[str, int], output: Path, records: Path, budget: list[str], model: Path | None) -> None:
    """Train, evaluate, and leave a record; a failure is said, and leaves none."""
    name, seed = job
    folder = (output / _label(name, seed)).resolve()
    command = [sys.executable, "cli/train_sac_vla.py", *flags(name, budget), "--seed", str(seed)]
    command += ["--rm_model_path", str(model)] if name == _MODEL else []
    command += ["--save_path", str(folder), *(["--load_checkpoint"] if folder.exists() else [])]
    with open(output / f"{folder.name}.log", "a") as log:  # one thread: the networks are small, and jobs run at once
        ended = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode:
        print(f"{name}, seed {seed}: failed (exit status {ended.returncode}), see {log.name}", flush=True)
        return
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    played = [line for line in lines if "rollout/success_at_end" in line]
    last = json.loads((folder / "evaluations.json").read_text())[-1]
    record = {
        "priority": name,
        "seed": seed,
        "flags": flags(name, budget),
        "env_steps": [int(line["rollout/env_steps"]) for line in played],  # of each iteration
        "success_at_end": [round(line["rollout/success_at_end"], 4) for line in played],
        "end": {key: last[key] for key in ("success_at_end", "success_once", "regressions")},
        "seconds": json.loads((folder / "totals.json").read_text())["seconds"],
    }
    write_json(records / f"{folder.name}.json", record)
    print(f"{name}, seed {seed}: {area(record):.3f}, at end {100 * last['success_at_end']['rate']:.0f} %", flush=True)


def _label(name: str, seed: int) -> str:
    return f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"


def area(record: dict[str, Any]) -> float:
    """Mean success of the sampled episodes, each iteration by its environment steps."""
    return float(np.average(record["success_at_end"], weights=record["env_steps"]))


def load(records: Path, budget: list[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """Records of these settings, by priority and seed.

    Raises:
        SystemExit: a record has other settings.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in PRIORITIES}
    for path in sorted(records.glob("*.json")):
        record = json.loads(path.read_text())
        if record["flags"] != flags(record["priority"], budget):
            raise SystemExit(f"{path} has other settings; move it, or give another folder as --records")
        found[record["priority"]][record["seed"]] = record
    return found


def rows(found: dict[str, dict[int, dict[str, Any]]]) -> list[tuple[str, ...]]:
    """A row of the table for each priority with records."""
    result = []
    for name, of_seed in found.items():
        if not of_seed:
            continue
        ends = [record["end"] for record in of_seed.values()]
        rates = [
            " ".join(f"{100 * end[key]['rate']:.0f}%" for end in ends) for key in ("success_at_end", "success_once")
        ]
        lost = " ".join(f"{100 * end['regressions']:.0f}" for end in ends)
        areas = {seed: area(record) for seed, record in of_seed.items()}
        row = (name, str(len(areas)), f"{np.mean(list(areas.values())):.3f}", *rates, lost)
        result.append(row + _difference(areas, {seed: area(record) for seed, record in found["uniform"].items()}))
    return result


def _difference(areas: dict[int, float], base: dict[int, float]) -> tuple[str, str]:
    """Paired difference with its interval, and the p-value; empty where there are not two pairs that differ."""
    pairs = np.array([(areas[seed], base[seed]) for seed in sorted(areas.keys() & base.keys())])
    if len(pairs) < 2 or (pairs[:, 0] == pairs[:, 1]).all():
        return "", ""
    test = stats.ttest_rel(*pairs.T)
    low, high = test.confidence_interval()
    return f"{np.mean(pairs[:, 0] - pairs[:, 1]):+.3f} [{low:+.3f}, {high:+.3f}]", f"{test.pvalue:.3f}"


def draw(found: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Success over environment steps: mean over seeds of five iterations, with a 95 % interval of the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in found if found[name] and name != "uniform"]
    columns = min(4, max(1, len(names)))
    shape = (-(-len(names) // columns), columns)
    figure, panels = plt.subplots(
        *shape, figsize=(3.2 * columns, 2.6 * shape[0]), squeeze=False, sharex=True, sharey=True
    )
    for panel in panels.flat[len(names) :]:
        panel.set_visible(False)
    for panel, name in zip(panels.flat, names):
        for label, color in (("uniform", "0.5"), (name, "tab:blue")):
            at, curves = _on_a_grid(list(found[label].values()))
            if not len(curves):
                continue
            mean = curves.mean(0)
            panel.plot(at / 1000, mean, color=color, label=f"{label} ({len(curves)})")
            if len(curves) > 1:
                half = stats.t.ppf(0.975, len(curves) - 1) * curves.std(0, ddof=1) / len(curves) ** 0.5
                panel.fill_between(at / 1000, (mean - half).clip(0), (mean + half).clip(max=1), color=color, alpha=0.2)
        panel.legend(frameon=False, fontsize=8)
        panel.grid(alpha=0.3)
    figure.supxlabel("thousand environment steps", fontsize=9)
    figure.supylabel("success at end, sampled", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _on_a_grid(records: list[dict[str, Any]], smooth: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Curves [seeds, 100], means of `smooth` iterations, at common environment steps [100]."""
    steps = [np.cumsum(record["env_steps"]) for record in records]
    at = np.linspace(0, min((part[-1] for part in steps), default=1), 100)
    curves = []
    for part, record in zip(steps, records):
        success = np.asarray(record["success_at_end"])
        padded = np.concatenate([np.zeros(smooth - 1), success])
        curves.append(np.interp(at, part, np.convolve(padded, np.full(smooth, 1 / smooth), "valid")))
    return at, np.array(curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--priorities", nargs="+", choices=PRIORITIES, default=list(PRIORITIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--budget", nargs=argparse.REMAINDER, default=[], help="other flags of all runs; comes last")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/replay_priorities")
    parser.add_argument("--output", type=Path, default=Path("runs/replay_priorities"))
    parser.add_argument("--show", action="store_true", help="train nothing")
    parser.add_argument("--picture", type=Path, help="file for the curves")
    args = parser.parse_args()
    budget = BUDGET + args.budget
    found = load(args.records, budget)
    if not args.show:
        jobs = [(name, seed) for seed in args.seeds for name in args.priorities if seed not in found[name]]
        for folder in (args.output, args.records):
            folder.mkdir(parents=True, exist_ok=True)
        model = reward_model(args.output.resolve() / "rm") if any(name == _MODEL for name, _ in jobs) else None
        with ThreadPoolExecutor(args.jobs) as pool:
            one = partial(run, output=args.output, records=args.records, budget=budget, model=model)
            list(pool.map(one, jobs))
        found = load(args.records, budget)
    names = ("priority", "seeds", "area", "at end", "once", "lost", "difference", "p")
    print(table(names, rows(found)))
    if args.picture:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
