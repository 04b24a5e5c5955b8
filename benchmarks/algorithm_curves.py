"""Learning curves on toy_reach: every advantage estimator and policy loss from the same supervised starts.

    python benchmarks/algorithm_curves.py --out runs/algorithm_curves
    python benchmarks/algorithm_curves.py --out runs/algorithm_curves --draw      (pictures and tables only)

One start per seed is shared by all runs of that seed: the main estimators x losses, every other estimator (with the ppo
loss) and every other loss (with grpo), over three seeds. Complete runs are not repeated, so the script can be
interrupted. Two runs at a time, each on one core; 84 runs take about half an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import shutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
IMAGES = ROOT / "docs" / "images" / "algorithms"

SEEDS = (0, 1, 2)
MAIN_ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_baseline")
MAIN_LOSSES = ("ppo", "gspo", "cispo")
OTHER_ESTIMATORS = (
    "grpo_passk",
    "gdpo",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "reinforce",
    "reinforce_plus_plus",
    "remax",
)
OTHER_LOSSES = ("geo_mean", "sapo", "gpg", "dro", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
NO_GROUPS = {"gae", "reinforce", "reinforce_plus_plus", "remax"}
EPISODES, PER_ITERATION, GROUP = 1024, 128, 8
EVAL_EPISODES = 100

# The starts are those of examples/scripts/toy_reach.sh.
DEMOS = (
    "--task_suite_name toy_reach --image_size 32 --use_proprio --num_demos 4000 --keep all --offset_bias 0.0 -0.2 "
    "--noise_std 0.05 --action_quantum 0.25 --num_envs 2"
)
SFT = (
    "--pretrain tiny --action_chunk_len 3 --tiny_vision_dim 32 --tiny_llm_dim 48 --max_epochs 3 --train_batch_size 64 "
    "--learning_rate 2e-3 --no-use_tensorboard"
)
PPO = (
    f"--task_suite_name toy_reach --num_episodes {EPISODES} --train_batch_size 32 --max_epochs 2 "
    "--micro_train_batch_size 512 --micro_rollout_batch_size 512 --actor_learning_rate 5e-4 --lr_scheduler linear "
    f"--lr_warmup_ratio 0.1 --num_envs 2 --eval_episodes {EVAL_EPISODES} --no-val_before_train --no-use_tensorboard"
)
ESTIMATOR_FLAGS = {
    "gae": "--gamma 0.99 --lambd 0.95 --critic_learning_rate 1e-3 --freezing_actor_steps 1 --no-bootstrap_truncated",
    "reinforce": "--gamma 0.99",
    "reinforce_plus_plus": "--gamma 0.99",
}
LOSS_FLAGS = {
    "ppo": "--eps_clip_low_high 0.2 0.28",
    "gspo": "--eps_clip_low_high 0.1 0.14",
    "cispo": "--eps_clip_low_high 10 0.28 --actor_learning_rate 1.5e-4",
    "geo_mean": "--eps_clip 0.4",
    "clip_cov": "--cov_ratio 0.01",
    "dppo_kl": "--eps_clip 0.05",
    # Nothing bounds how far these go in an iteration: smaller steps.
    "gpg": "--actor_learning_rate 1.5e-4",
    "dro": "--actor_learning_rate 1.5e-4",
    "kl_cov": "--cov_ratio 0.01 --actor_learning_rate 1.5e-4",
}


@dataclass(frozen=True)
class Run:
    """One combination from one start."""

    estimator: str
    loss: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.estimator}-{self.loss}-{self.seed}"

    def flags(self, out: Path) -> list[str]:
        """The command line of `cli/train_ppo_vla.py`."""
        size = 1 if self.estimator in NO_GROUPS else GROUP
        amounts = f"--n_samples_per_prompt {size} --rollout_batch_size {PER_ITERATION // size}"
        choice = f"--advantage_estimator {self.estimator} --policy_loss {self.loss}"
        more = f"{ESTIMATOR_FLAGS.get(self.estimator, '')} {LOSS_FLAGS.get(self.loss, '')}"
        folders = ["--pretrain", str(start_of(out, self.seed)), "--save_path", str(out / self.name)]
        return [*f"{PPO} {amounts} {choice} {more} --seed {self.seed}".split(), *folders]


def runs() -> list[Run]:
    """Seed by seed."""
    main = [(e, loss) for e in MAIN_ESTIMATORS for loss in MAIN_LOSSES]
    others = [(e, "ppo") for e in OTHER_ESTIMATORS] + [("grpo", loss) for loss in OTHER_LOSSES]
    return [Run(e, loss, seed) for seed in SEEDS for e, loss in main + others]


def start_of(out: Path, seed: int) -> Path:
    return out / f"start-{seed}" / "policy"


def make_start(out: Path, seed: int) -> None:
    """Demonstrations, supervised policy, and its success (greedy and sampled)."""
    from cli.collect_demos import main as collect
    from cli.eval_vla import main as evaluate
    from cli.train_sft_vla import main as sft

    folder = start_of(out, seed)
    if (folder / "eval.json").exists():
        return
    demos = out / f"demos-{seed}"
    for old in (demos, folder.parent):
        shutil.rmtree(old, ignore_errors=True)
    collect([*DEMOS.split(), "--seed", str(seed), "--output", str(demos)])
    sft([*SFT.split(), "--seed", str(seed), "--demos", str(demos / "demos.hdf5"), "--save_path", str(folder.parent)])
    evaluate(["--pretrain", str(folder), "--eval_episodes", str(EVAL_EPISODES), "--sampled", "--num_envs", "2"])


def work(job: tuple[Path, Run | int]) -> str:
    """A start or a run; a failure is reported and does not stop the others."""
    out, what = job
    name = f"start-{what}" if isinstance(what, int) else what.name
    begun = time.perf_counter()
    with (out / f"{name}.log").open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            if isinstance(what, int):
                make_start(out, what)
            else:
                from cli.train_ppo_vla import main as train

                shutil.rmtree(out / name, ignore_errors=True)
                train(what.flags(out))
        except (Exception, SystemExit):
            traceback.print_exc()
            return f"{name} FAILED, see {log.name}"
    return f"{name} {time.perf_counter() - begun:.0f} s"


def run_all(out: Path, only: str) -> None:
    """Everything that is not complete."""
    out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    wanted = [run for run in runs() if only in run.name and not (out / run.name / "evaluations.json").exists()]
    with context.Pool(2) as pool:
        for jobs in ([(out, seed) for seed in sorted({run.seed for run in wanted})], [(out, run) for run in wanted]):
            for message in pool.imap_unordered(work, jobs, chunksize=1):
                print(message, flush=True)


# ------------------------------------------------------------------------------------------------------ evaluation
def read(out: Path, run: Run) -> dict | None:
    """The curve and the closing evaluation of a run; None if it is not complete."""
    folder = out / run.name
    if not (folder / "evaluations.json").exists():
        return None
    from rlvla.utils.files import read_metrics

    records = [record for record in read_metrics(folder) if "rollout/success_at_end" in record]
    evaluation = json.loads((folder / "evaluations.json").read_text())[-1]["success_at_end"]
    return {
        "estimator": run.estimator,
        "loss": run.loss,
        "seed": run.seed,
        "episodes": [record["total/episodes"] for record in records],
        "success": [record["rollout/success_at_end"] for record in records],
        "entropy": [record.get("actor/entropy") for record in records],
        "evaluation": evaluation,
        "seconds": records[-1]["total/seconds"],
    }


def collect_results(out: Path) -> dict:
    """Everything measured, as it is written to the JSON file."""
    starts = {}
    for seed in SEEDS:
        path = start_of(out, seed) / "eval.json"
        if path.exists():
            results = json.loads(path.read_text())["results"]
            starts[str(seed)] = {"greedy" if r["greedy"] else "sampled": r["success_at_end"] for r in results}
    found = [result for run in runs() if (result := read(out, run)) is not None]
    return {"per_iteration": PER_ITERATION, "starts": starts, "runs": found}


def draw(results: dict) -> None:
    """One picture of the main combinations, one for each other estimator and loss beside a familiar one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    IMAGES.mkdir(parents=True, exist_ok=True)
    found = results["runs"]

    def save(figure: object, name: str) -> None:
        figure.savefig(IMAGES / f"{name}.png", dpi=72)
        plt.close(figure)

    def curve(axis: object, estimator: str, loss: str, color: str, label: str) -> None:
        chosen = [r for r in found if (r["estimator"], r["loss"]) == (estimator, loss)]
        for run in chosen:
            axis.plot(run["episodes"], run["success"], color=color, alpha=0.35, lw=1)
        mean = [sum(values) / len(values) for values in zip(*(run["success"] for run in chosen))]
        axis.plot(
            chosen[0]["episodes"] if chosen else [], mean, color=color, lw=2, label=f"{label} ({len(chosen)} seeds)"
        )

    def finish(axis: object, title: str) -> None:
        axis.set(ylim=(0, 1.02), xlabel="episodes", ylabel="success (sampled)", title=title)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)

    figure, axes = plt.subplots(1, len(MAIN_ESTIMATORS), figsize=(4 * len(MAIN_ESTIMATORS), 3.6), layout="constrained")
    colors = ("tab:blue", "tab:orange", "tab:green")
    for axis, estimator in zip(axes, MAIN_ESTIMATORS):
        for loss, color in zip(MAIN_LOSSES, colors):
            curve(axis, estimator, loss, color, loss)
        finish(axis, estimator)
    save(figure, "main")
    for kind, names in (("estimator", OTHER_ESTIMATORS + MAIN_ESTIMATORS), ("loss", OTHER_LOSSES + MAIN_LOSSES)):
        for name in names:
            estimator, loss = (name, "ppo") if kind == "estimator" else ("grpo", name)
            figure, axis = plt.subplots(figsize=(4.8, 3.2), layout="constrained")
            if name not in ("grpo", "ppo"):
                curve(axis, "grpo", "ppo", "tab:gray", "grpo, ppo")
            curve(axis, estimator, loss, "tab:blue", f"{estimator}, {loss}")
            finish(axis, name)
            save(figure, f"{kind}-{name}")


def table(results: dict) -> str:
    """Held-out success of every combination as Markdown: per seed, and pooled over the seeds with a Wilson interval."""
    from rlvla.evaluation.statistics import wilson_interval

    lines = ["| estimator | loss | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | pooled [95 %] |"]
    lines.append("|" + "---|" * (len(SEEDS) + 3))
    pairs = list(dict.fromkeys((r["estimator"], r["loss"]) for r in results["runs"]))
    for pair in pairs:
        own = {r["seed"]: r["evaluation"] for r in results["runs"] if (r["estimator"], r["loss"]) == pair}
        n = sum(e["n"] for e in own.values())
        hits = sum(round(e["rate"] * e["n"]) for e in own.values())
        low, high = wilson_interval(hits, n)
        cells = [f"{100 * own[seed]['rate']:.1f} %" if seed in own else "" for seed in SEEDS]
        lines.append(
            f"| `{pair[0]}` | `{pair[1]}` | {' | '.join(cells)} | {100 * hits / n:.1f} % [{100 * low:.1f}, "
            f"{100 * high:.1f}] of {n} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/algorithm_curves"))
    parser.add_argument("--only", default="", help="runs whose name (estimator-loss-seed) contains this")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    if not args.draw:
        run_all(args.out, args.only)
    results = collect_results(args.out)
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "curves.json").write_text(json.dumps(results), encoding="utf-8")
    draw(results)
    print(table(results))


if __name__ == "__main__":
    main()
