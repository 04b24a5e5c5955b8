"""Runs the off-policy learner on several seeds: from nothing, from demonstrations, or over the noise of a flow policy.

    python benchmarks/off_policy.py --tasks reach lift stack dsrl --seeds 0 1 2 --output runs/off_policy

Further flags are those of train_sac_vla.py, e.g. --policy flow for `reach`, `push` and `lift_state`, or
--offline_updates 2000 --cql_coef 1 for `push` and `lift_state`.

All success rates are greedy, on 100 held-out initial states, 200 for `dsrl`; "start" and "end" are at the end of
episodes, "lost" counts the times that success was there and went away. "to 90 %" has the training episodes, and the
seconds, until nine of ten sampled episodes of an iteration succeed. A run that is there already is continued.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.files import write_json
from rlvla.utils.terminal import duration, table

ROOT = Path(__file__).resolve().parents[1]
COMMON = [
    *("--critic_learning_rate", "1e-3", "--temperature_learning_rate", "1e-3", "--train_batch_size", "128"),
    *("--num_envs", "2", "--save_steps", "10"),
]
_ALONE = ["--eval_episodes", "100", "--rm_state_input", "proprio", "--utd_ratio", "2"]
_PRIMITIVES = [
    *_ALONE,
    *("--task_suite_name", "robosuite", "--control_freq", "10", "--object_state", "--action_space", "primitives"),
    *("--policy", "primitives", "--primitives", "reach", "grasp", "open", "--random_episodes", "96", "--gamma", "0.97"),
    *("--reward", "success:1.0", "rm:1.0", "affordance:0.5", "--init_temperature", "0.005", "--n_critics", "4"),
    *("--actor_reduction", "mean", "--no-entropy_in_target", "--target_entropy", "2", "--actor_learning_rate", "5e-4"),
    *("--hidden_sizes", "128", "128"),
]
_STACK = [
    *(*_PRIMITIVES, "--task_ids", "1", "--max_steps", "80"),
    *("--num_episodes", "4096", "--choice_exploration", "960"),
]
_IMAGES = [
    *("--task_suite_name", "robosuite", "--task_ids", "0", "--control_freq", "10", "--max_steps", "25"),
    *("--cameras", "wrist", "--image_size", "32", "--use_proprio", "--object_state"),
]
_PUSH = ["--task_suite_name", "toy_push", "--task_ids", "0", "--use_proprio", "--object_state", "--image_size", "32"]
_RLPD = [
    *("--eval_episodes", "100", "--utd_ratio", "4"),
    *("--actor_interval", "2", "--n_critics", "4", "--actor_reduction", "mean", "--no-entropy_in_target"),
    *("--init_temperature", "0.01", "--gamma", "0.97", "--actor_learning_rate", "5e-4", "--tau", "0.01"),
    *("--hidden_sizes", "128", "128"),
]
_SEEING = ["--read_images", "--critic_state", "--image_shift", "2"]
_DSRL = [
    *("--policy", "dsrl", "--noise_range", "2", "--utd_ratio", "5", "--n_critics", "4", "--hidden_sizes", "64", "64"),
    *("--init_temperature", "0.02", "--actor_learning_rate", "1e-3", "--random_episodes", "64"),
    *("--rollout_batch_size", "32"),
]
TASKS = {
    # The way to the disc is in proprio: a suite of the tests.
    "reach": [
        *_ALONE,
        *("--custom_module", "tests/support/state_reach.py", "--task_suite_name", "state_reach"),
        *("--action_chunk_len", "3", "--num_episodes", "640", "--random_episodes", "64", "--gamma", "0.95"),
        *("--reward", "success:1.0", "rm:1.0", "--init_temperature", "0.02", "--actor_learning_rate", "1e-3"),
    ],
    "lift": [
        *(*_PRIMITIVES, "--task_ids", "0", "--max_steps", "60"),
        *("--num_episodes", "1280", "--choice_exploration", "480"),
    ],
    "stack": _STACK,
    # From images, with 20 demonstrations of a scripted expert in half of each batch.
    "lift_images": [*_IMAGES, *_RLPD, *_SEEING, "--action_chunk_len", "5", "--num_episodes", "992"],
    # The same from the state, and pushing a disc from the state.
    "lift_state": [*_IMAGES, *_RLPD, "--action_chunk_len", "5", "--num_episodes", "496"],
    "push": [*_PUSH, *_RLPD, "--action_chunk_len", "3", "--num_episodes", "496"],
    "stack_unvalidated": [*_STACK, "--no-rm_validation"],
    # The noise of a flow policy that aims beside the disc, and of one that succeeds in half of its episodes.
    "dsrl": [*_DSRL, "--num_episodes", "256", "--gamma", "0.95", "--eval_episodes", "200"],
    "dsrl_lift": [*_DSRL, "--num_episodes", "640", "--gamma", "0.97", "--eval_episodes", "100"],
}
# Task -> the environment of its demonstrations.
DEMOS = {"lift_images": _IMAGES, "lift_state": _IMAGES, "push": _PUSH}
# Task -> the recipe whose demonstrations and supervised learning make its flow policy.
STARTS = {"dsrl": "recipes/toy_reach.yaml", "dsrl_lift": "recipes/quickstart.yaml"}
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


def start(task: str, seed: int, folder: Path) -> list[str]:
    """The flag that names what a task starts from, demonstrations or a flow policy; made unless it is there."""
    if task in DEMOS:
        command = [sys.executable, str(ROOT / "cli/collect_demos.py"), *DEMOS[task], "--num_demos", "20"]
        if not (folder / "demos.hdf5").exists():
            subprocess.run([*command, "--seed", str(seed), "--output", str(folder)], cwd=ROOT, check=True)
        return ["--demos", str(folder)]
    if task not in STARTS:
        return []
    recipe = yaml.safe_load((ROOT / STARTS[task]).read_text())
    stages = {name: recipe["stages"][name] for name in ("demos", "sft")}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "recipe.yaml", recipe | {"stages": stages, "variants": {"flow": recipe["variants"]["flow"]}})
    command = [sys.executable, str(ROOT / "cli/run_recipe.py"), str(folder / "recipe.yaml"), "--variant", "flow"]
    command += ["--output", str(folder / "start"), "--set", f"all.seed={seed}"]
    subprocess.run(command, cwd=ROOT, check=True)
    return ["--pretrain", str(folder / "start" / "sft" / "policy")]


def run(task: str, seed: int, folder: Path, more: list[str]) -> tuple:
    """Train; a row of the table."""
    command = [sys.executable, str(ROOT / "cli/train_sac_vla.py"), *TASKS[task], *COMMON, "--seed", str(seed)]
    if task in DEMOS and "--offline_updates" not in more:
        command += ["--random_episodes", "16"]
    command += start(task, seed, folder.resolve().with_name(f"{folder.name}_start"))
    resume = ["--load_checkpoint"] if folder.exists() else []
    subprocess.run([*command, "--save_path", str(folder.resolve()), *resume, *more], cwd=ROOT, check=True)
    evaluations = json.loads((folder / "evaluations.json").read_text())
    totals = json.loads((folder / "totals.json").read_text())
    last = evaluations[-1]
    rates = [evaluations[0]["success_at_end"], last["success_at_end"], last["success_once"]]
    cells = [f"{100 * r['rate']:.1f}% [{100 * r['low']:.1f}, {100 * r['high']:.1f}]" for r in rates]
    return (
        task,
        seed,
        *cells,
        f"{last['regressions'] * last['success_at_end']['n']:.0f}",
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
    print(table(("task", "seed", "start", "end", "once", "lost", "episodes", "env steps", "to 90 %", "training"), rows))


if __name__ == "__main__":
    main()
