"""Playing while training: how much time it saves, and what older weights cost.

    python benchmarks/async_rollout.py time --output runs/async
    python benchmarks/async_rollout.py learning --seeds 0 1 2 --output runs/async
    python benchmarks/async_rollout.py lift --seeds 0 1 2 --output runs/async

`time`: simulators that only sleep, as long for each iteration as the update takes. "ratio" is the wall time per
iteration to that of the synchronous run, "to the longer" that to the larger of its rollout and update.

`learning`: the recipe of toy_reach from the same supervised policies, with 128 episodes per iteration by default. "to
90 %" is the number of training episodes until nine of ten sampled episodes of an iteration succeed. A run that is there
already is not repeated.

`lift`: the same for the recipe `quickstart` (robosuite Lift, two ranks), as it is, early stopping included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlvla.utils.files import read_metrics
from rlvla.utils.terminal import table

REACHED = 0.9
HEADS = ("", "seed", "to 90 %", "success at end, %", "effective samples")
SUITE = ["--custom_module", str(ROOT / "benchmarks/suites/sleeping_reach.py"), "--task_suite_name", "sleeping_reach"]
UPDATE = [
    *("--advantage_estimator", "gae", "--share_backbone", "--rollout_batch_size", "64", "--train_batch_size", "16"),
    *("--max_epochs", "24", "--micro_train_batch_size", "96", "--gamma", "0.99", "--no-check_start"),
    *("--no-val_before_train", "--eval_episodes", "1", "--actor_learning_rate", "1e-5", "--no-use_tensorboard"),
]
WAYS = {
    "synchronous": [],
    "--max_staleness 1": ["--async_rollout"],
    "--partial_rollout": ["--async_rollout", "--partial_rollout"],
    "--max_staleness 4": ["--async_rollout", "--max_staleness", "4"],
    "--max_staleness 4, unweighted": ["--async_rollout", "--max_staleness", "4", "--rollout_is", "none"],
    "--proximal interpolate": ["--async_rollout", "--proximal", "interpolate"],
}


def command(name: str, *flags: str, milliseconds: float = 0.0) -> None:
    """Run a command of the repository, quietly."""
    environment = os.environ | {"SLEEPING_REACH_MS": str(milliseconds)}
    words = [sys.executable, str(ROOT / "cli" / name), *flags]
    subprocess.run(words, cwd=ROOT, check=True, env=environment, stdout=subprocess.DEVNULL)


def start(folder: Path, seed: int) -> Path:
    """The policy that runs of a seed start from: demonstrations and supervised learning of recipes/toy_reach.yaml."""
    policy = folder / "sft" / "policy"
    if not policy.exists():
        recipe = folder.with_suffix(".yaml")
        text = (ROOT / "recipes/toy_reach.yaml").read_text()
        folder.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(text[: text.index("\n  rl:")] + "\n")
        command("run_recipe.py", str(recipe), "--output", str(folder), "--set", f"all.seed={seed}")
    return policy


def times(folder: Path) -> dict[str, float]:
    """Median seconds per iteration, the first two left out."""
    lines = [line for line in read_metrics(folder) if "timing_s/iteration" in line][2:]
    names = ("iteration", "rollout", "update", "make_experience")
    return {name: statistics.median(line[f"timing_s/{name}"] for line in lines) for name in names}


def time_saved(output: Path, iterations: int, num_envs: int) -> None:
    """The table of `time`."""
    policy = start(output / "start_0", 0)

    def run(way: str, milliseconds: float, count: int) -> dict[str, float]:
        folder = output / f"time_{len(list(output.glob('time_*')))}"
        amounts = ["--num_episodes", str(64 * count), "--num_envs", str(num_envs)]
        flags = ["--pretrain", str(policy), "--save_path", str(folder), *SUITE, *UPDATE, *amounts, *WAYS[way]]
        command("train_ppo_vla.py", *flags, milliseconds=milliseconds)
        return times(folder)

    awake = run("synchronous", 0.0, 5)
    slept = run("synchronous", 10.0, 5)
    learning = awake["update"] + awake["make_experience"]
    milliseconds = max(0.0, (learning - awake["rollout"]) / (slept["rollout"] - awake["rollout"]) * 10.0)
    print(
        f"updates take {learning:.2f} s, rollouts {awake['rollout']:.2f} s; {milliseconds:.1f} ms of sleep per action"
    )
    ways = [way for way in WAYS if "unweighted" not in way and "interpolate" not in way]
    found = {way: run(way, milliseconds, iterations) for way in ways}
    base = found["synchronous"]
    longer = max(base["rollout"], base["update"] + base["make_experience"])
    rows = [
        (
            way,
            *(f"{seconds[name]:.2f}" for name in ("iteration", "rollout", "update")),
            f"{seconds['iteration'] / base['iteration']:.2f}",
            f"{seconds['iteration'] / longer:.2f}",
        )
        for way, seconds in found.items()
    ]
    print(table(("", "iteration, s", "rollout, s", "update, s", "ratio", "to the longer"), rows))


def effort(folder: Path) -> int | None:
    """Training episodes until an iteration reaches `REACHED`, sampled."""
    episodes = 0.0
    for line in read_metrics(folder):
        if "rollout/success_at_end" in line:
            episodes += line["rollout/episodes"]
            if line["rollout/success_at_end"] >= REACHED:
                return int(episodes)
    return None


def learning(output: Path, seeds: list[int], ways: list[str], changes: dict[str, object]) -> None:
    """The table of `learning`; `changes` are flags that differ from the recipe's."""
    rows, name = [], "_".join(map(str, changes.values()))
    for way in ways:
        for seed in seeds:
            begin = output / f"start_{seed}"
            policy = start(begin, seed)
            folder = output / f"learning_{name}_{list(WAYS).index(way)}_{seed}"
            if not (folder / "evaluations.json").exists():
                settings = _rl_flags(changes)
                flags = ["--pretrain", str(policy), "--save_path", str(folder), "--seed", str(seed), *settings]
                command("train_ppo_vla.py", *flags, *WAYS[way])
            rows.append(outcome(way, seed, folder))
    print(table(HEADS, rows))


def outcome(way: str, seed: int, folder: Path) -> tuple[object, ...]:
    """The row of a run."""
    last = json.loads((folder / "evaluations.json").read_text())[-1]["success_at_end"]
    found = effort(folder)
    rate = f"{100 * last['rate']:.1f} [{100 * last['low']:.1f}, {100 * last['high']:.1f}]"
    ess = [line["rollout_corr/ess"] for line in read_metrics(folder) if "rollout_corr/ess" in line]
    return way, seed, "-" if found is None else found, rate, f"{statistics.median(ess):.3f}"


def lift(output: Path, seeds: list[int], ways: list[str]) -> None:
    """The table of `lift`; all runs of a seed start from the supervised policy of the first."""
    recipe, rows = str(ROOT / "recipes/quickstart.yaml"), []
    for way in ways:
        for seed in seeds:
            first, folder = (output / f"lift_{list(WAYS).index(name)}_{seed}" for name in ("synchronous", way))
            settings = [f"all.seed={seed}", *_as_settings(WAYS[way])]
            if not (first / "ppo/evaluations.json").exists():
                command("run_recipe.py", recipe, "--output", str(first), "--set", f"all.seed={seed}")
            if not (folder / "ppo/evaluations.json").exists():
                shutil.copytree(first, folder, dirs_exist_ok=True)
                shutil.rmtree(folder / "ppo")
                command("run_recipe.py", recipe, "--output", str(folder), "--from", "rl", "--set", *settings)
            rows.append(outcome(way, seed, folder / "ppo"))
    print(table(HEADS, rows))


def _as_settings(flags: list[str]) -> list[str]:
    """Flags as settings of a recipe's stage `rl`; a flag without a value is a switch."""
    settings: list[str] = []
    for word in flags:
        if word.startswith("--"):
            settings.append(f"rl.{word[2:]}=true")
        else:
            settings[-1] = settings[-1].removesuffix("true") + word
    return settings


def _rl_flags(changes: dict[str, object]) -> list[str]:
    """The reinforcement learning of recipes/toy_reach.yaml with smaller iterations, to its end."""
    import yaml

    rl = yaml.safe_load((ROOT / "recipes/toy_reach.yaml").read_text())["stages"]["rl"]
    for name in ("minutes", "processes", "save_path", "early_stopping", "early_stop_by", "save_steps", "lr_scheduler"):
        rl.pop(name)
    rl |= {"val_before_train": False, **changes}
    flags: list[str] = []
    for name, value in rl.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "learning", "lift"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--num_episodes", type=int, default=4096)
    parser.add_argument("--rollout_batch_size", type=int, default=128)
    parser.add_argument("--actor_learning_rate", type=float, default=5e-4)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--num_envs", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("runs/async"))
    args = parser.parse_args()
    output = args.output.resolve()
    if args.what == "time":
        time_saved(output, args.iterations, args.num_envs)
    elif args.what == "lift":
        lift(output, args.seeds, args.ways)
    else:
        names = ("rollout_batch_size", "num_episodes", "actor_learning_rate")
        learning(output, args.seeds, args.ways, {name: getattr(args, name) for name in names})


if __name__ == "__main__":
    main()
