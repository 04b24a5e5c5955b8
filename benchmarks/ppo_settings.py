"""Critic, exploration noise, step size and GRPO on six tasks, from supervised policies of 45 to 75 %.

    python benchmarks/ppo_settings.py --tasks toy_push lift ring_push key_door --output runs/ppo_settings

All arms of a task and seed start from one policy and play as many episodes. `shared`: a value head on the policy's
network, a fixed learning-rate schedule and independent noise; each other arm changes the setting in its name. Greedy
success on held-out states, paired with the start and with `shared`; explained variance of the returns, KL, and the
duration of an iteration without waiting, over the last two iterations; at the end, differences over all tasks. Finished
commands are not repeated. One run at a time, one thread.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import arms
from rlvla.utils.terminal import table

_MODULE = ("--custom_module", "benchmarks/suites/planar.py")
_PLANAR = " ".join(_MODULE)
_IMAGES = "--image_size 64 --use_proprio --num_envs 1"


def _task(suite: str, num_demos: int, steps: int, start: str = arms.START) -> arms.Task:
    """A task with chunks of five actions; `num_demos` per task, `steps` of supervised training."""
    start = f"{start} --action_chunk_len 5 --max_epochs 1000 --max_steps {steps}"
    return arms.Task(f"{suite} {_IMAGES} --num_demos {num_demos}", start, steps, suite)


def _with_head(head: str, num_demos: int, steps: int) -> arms.Task:
    """`toy_push` with another action head."""
    start = f"--pretrain compact --compact_head {head} --learning_rate 2e-3"
    return _task("--task_suite_name toy_push --task_ids 0", num_demos, steps, start)


TASKS = {
    "toy_push": _task("--task_suite_name toy_push --task_ids 0", 40, 600),
    "ring_push": _task(f"--task_suite_name ring_push {_PLANAR}", 200, 600),
    "key_door": _task(f"--task_suite_name key_door {_PLANAR}", 500, 1500),
    "lift": replace(arms.TASKS["lift"], ppo="--task_suite_name robosuite --task_ids 0"),
    "push": _task("--task_suite_name metaworld --task_names push", 100, 1200),
    "drawer-open": _task("--task_suite_name metaworld --task_names drawer-open", 25, 200),
}
# With --arms that do not need a Gaussian head.
OTHER_HEADS = {
    "toy_push_tokens": _with_head("tokens", 200, 1200),
    "toy_push_flow": _with_head("flow", 40, 800),
}
_GAE = "--advantage_estimator gae --gamma 0.99 --lambd 0.95 --rollout_batch_size 256 --n_samples_per_prompt 1"
_SHARED = f"{_GAE} --share_backbone"
ARMS = {
    "shared": _SHARED,
    "separate critic": f"{_GAE} --critic_learning_rate 1e-3",
    "separate critic, actor frozen for 2": f"{_GAE} --critic_learning_rate 1e-3 --freezing_actor_steps 2",
    "grpo": "--advantage_estimator grpo --rollout_batch_size 32 --n_samples_per_prompt 8",
    "temperature 0.5": f"{_SHARED} --temperature 0.5",
    "temperature 1.5": f"{_SHARED} --temperature 1.5",
    "temperature 2": f"{_SHARED} --temperature 2",
    "noise correlation 0.5": f"{_SHARED} --action_noise_correlation 0.5",
    "noise correlation 0.5, desired_kl 0.01": f"{_SHARED} --action_noise_correlation 0.5 --desired_kl 0.01",
    "noise correlation 0.8": f"{_SHARED} --action_noise_correlation 0.8",
    "rate 1e-4": f"{_SHARED} --actor_learning_rate 1e-4",
    "rate 1.6e-3": f"{_SHARED} --actor_learning_rate 1.6e-3",
    "desired_kl 0.003": f"{_SHARED} --desired_kl 0.003",
    "desired_kl 0.01": f"{_SHARED} --desired_kl 0.01",
    "desired_kl 0.03": f"{_SHARED} --desired_kl 0.03",
    "rate 1e-4, desired_kl 0.01": f"{_SHARED} --actor_learning_rate 1e-4 --desired_kl 0.01",
    "rate 1.6e-3, desired_kl 0.01": f"{_SHARED} --actor_learning_rate 1.6e-3 --desired_kl 0.01",
}
_RL = (
    "--train_batch_size 32 --micro_train_batch_size 96 --max_epochs 2 --eps_clip_low_high 0.2 0.28 --num_envs 2 "
    "--actor_learning_rate 4e-4 --lr_scheduler linear --lr_warmup_ratio 0.1 --no-val_before_train --no-use_tensorboard"
)


def learn(folder: Path, name: str, start: Path, flags: str, task: arms.Task, episodes: int, seed: int) -> Path:
    """Train an arm from the start; the folder of its policy."""
    run = folder / name.replace(" ", "_").replace(",", "")
    words = ["--pretrain", start, "--num_episodes", str(episodes), "--seed", str(seed), "--save_path", run]
    arms.command("train_ppo_vla", run / "policy", *shlex.split(f"{task.ppo} {_RL} {flags}"), *words)
    return run / "policy"


def last_metrics(policy: Path) -> list[str]:
    """Cells of the table: first and last sampled success, explained variance, largest and last KL, seconds."""
    lines = [json.loads(line) for line in (policy.parent / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "rollout/success_at_end" in line]

    def mean(name: str) -> float:
        values = [line[name] for line in lines[-2:] if name in line]
        return sum(values) / len(values) if values else float("nan")

    busy = mean("timing_s/iteration") - mean("timing_s/rollout_waiting")
    sampled = [100 * line["rollout/success_at_end"] for line in (lines[0], lines[-1])]
    kl = [line["actor/ppo_kl"] for line in lines if "actor/ppo_kl" in line]
    explained = "" if "critic/vf_explained_var" not in lines[-1] else f"{mean('critic/vf_explained_var'):.2f}"
    return [
        f"{sampled[0]:.0f} -> {sampled[1]:.0f}",
        explained,
        f"{max(kl):.4f}",
        f"{mean('actor/ppo_kl'):.4f}",
        f"{busy:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, *OTHER_HEADS], default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--episodes", type=int, default=2048)
    parser.add_argument("--eval_episodes", type=int, default=100, help="per task")
    parser.add_argument("--output", type=Path, default=Path("runs/ppo_settings"))
    args, pooled = parser.parse_args(), arms.Results()
    for name in args.tasks:
        task, results, rows = (TASKS | OTHER_HEADS)[name], arms.Results(), []
        for seed in args.seeds:
            folder = args.output / name / f"seed_{seed}"
            _, start = arms.start_of(task, folder, seed)
            results.setdefault(("start", 0), []).append(arms.evaluation(start, args.eval_episodes, *_MODULE))
            for arm in args.arms:
                policy = learn(folder, arm, start, ARMS[arm], task, args.episodes, seed)
                results.setdefault((arm, args.episodes), []).append(
                    arms.evaluation(policy, args.eval_episodes, *_MODULE)
                )
                rows.append((arm, seed, *last_metrics(policy)))
                print(name, *rows[-1], results[arm, args.episodes][-1].success_at_end, flush=True)
        for arm, of_seeds in results.items():
            pooled.setdefault(arm, []).extend(of_seeds)
        arms.report(results, name, "shared", args.output / f"{name}.json")
        header = ("arm", "seed", "sampled %", "explained", "largest KL", "last KL", "iteration s")
        print(table(header, rows), flush=True)
    if len(args.tasks) > 1:
        arms.report(pooled, "all tasks", "shared", args.output / "all_tasks.json")


if __name__ == "__main__":
    main()
