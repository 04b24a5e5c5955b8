"""Actor and critic as two networks or on one backbone: success, time and memory on toy_reach.

    python benchmarks/share_backbone.py --out runs/share_backbone --seeds 0 1 2

PPO with the flags of `examples/scripts/toy_reach.sh` from one supervised start, all else equal; then two iterations of
a larger model, for time and memory only. Complete runs are not repeated. One run at a time, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.files import write_json

ROOT = Path(__file__).resolve().parents[1]
DEMOS = (
    "--task_suite_name toy_reach --image_size 32 --use_proprio --keep all --offset_bias 0.0 -0.2 "
    "--noise_std 0.05 --action_quantum 0.25 --num_envs 1 --seed 0"
)
SFT = "--pretrain tiny --action_chunk_len 3 --train_batch_size 64 --learning_rate 2e-3 --no-use_tensorboard --seed 0"
SIZES = {
    "tiny": "--tiny_vision_dim 32 --tiny_llm_dim 48 --max_epochs 3",
    "larger": "--tiny_vision_dim 96 --tiny_llm_dim 256 --tiny_llm_layers 6 --max_epochs 1",
}
NUM_DEMOS = {"tiny": "4000", "larger": "200"}
PPO = (
    "--task_suite_name toy_reach --advantage_estimator gae --no-bootstrap_truncated "
    "--gamma 0.99 --lambd 0.95 --train_batch_size 32 --max_epochs 2 --micro_train_batch_size 96 --num_envs 1 "
    "--eps_clip_low_high 0.2 0.28 --actor_learning_rate 5e-4 --lr_scheduler linear --lr_warmup_ratio 0.1 "
    "--no-use_tensorboard --no-val_before_train --save_steps 1000"
)
KINDS = {"separate": "--critic_learning_rate 1e-3 --freezing_actor_steps 1", "shared": "--share_backbone"}
LENGTHS = {
    "tiny": "--num_episodes 4096 --rollout_batch_size 256 --eval_episodes 200",
    "larger": "--num_episodes 128 --rollout_batch_size 64 --eval_episodes 1 --no-check_start",
}


def command(script: str, *words: str | Path) -> dict[str, float]:
    """Run a command of the project on one core; its peak of resident memory (MB) and its CPU time (s)."""
    argv = [sys.executable, str(ROOT / "cli" / script), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pid = os.posix_spawn(sys.executable, argv, environment)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{' '.join(argv)} failed with status {status}")
    return {"peak_mb": usage.ru_maxrss / 1024, "cpu_s": usage.ru_utime + usage.ru_stime}


def make_start(out: Path, size: str) -> Path:
    """A supervised start of that size."""
    folder, demos = out / f"start_{size}", out / f"demos_{size}"
    if not (demos / "demos.hdf5").exists():
        command("collect_demos.py", *DEMOS.split(), "--num_demos", NUM_DEMOS[size], "--output", demos)
    if not (folder / "policy").exists():
        words = [*SFT.split(), *SIZES[size].split(), "--demos", demos / "demos.hdf5", "--save_path", folder]
        command("train_sft_vla.py", *words)
    return folder / "policy"


def measure(out: Path, size: str, kind: str, seed: int, more: Sequence[str]) -> dict[str, float]:
    """One run, and what it took: means over the iterations but the first (and the one of a frozen actor)."""
    folder, result = out / f"{size}-{kind}-{seed}", out / f"{size}-{kind}-{seed}.json"
    if not result.exists():
        words = ["--pretrain", make_start(out, size), "--save_path", folder, "--seed", str(seed)]
        if kind == "shared":
            words += more
        taken = command("train_ppo_vla.py", *PPO.split(), *LENGTHS[size].split(), *KINDS[kind].split(), *words)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        updated = [line for line in lines if "actor/entropy" in line][1 if kind == "shared" else 0 :]
        for name in ("update", "make_experience", "iteration"):
            taken[name] = sum(line[f"timing_s/{name}"] for line in updated) / len(updated)
        rate = json.loads((folder / "evaluations.json").read_text())[-1]["success_at_end"]
        taken |= {name: rate[name] for name in ("rate", "low", "high", "n")}
        taken["trained_parameters"] = trained_parameters(folder)
        write_json(result, taken)
    return json.loads(result.read_text())


def trained_parameters(folder: Path) -> int:
    """Of all engines, as the newest checkpoint lists them."""
    state = json.loads(sorted(folder.glob("checkpoints/iteration_*/trainer.json"))[-1].read_text())
    total = 0
    for shapes in state["models"].values():
        for shape in shapes.values():
            count = 1
            for length in shape:
                count *= length
            total += count
    return total


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/share_backbone"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of the shared runs")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    print(
        "| model | critic | parameters trained | peak memory, MB | experience s | update s | CPU s | success at end |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size, seeds in (("tiny", args.seeds), ("larger", args.seeds[:1])):
        for kind in KINDS:
            runs = [measure(args.out, size, kind, seed, args.flags) for seed in seeds]
            mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
            success = [f"{100 * r['rate']:.1f} [{100 * r['low']:.1f}, {100 * r['high']:.1f}]" for r in runs]
            print(
                f"| {size} | {kind} | {mean['trained_parameters'] / 1e6:.2f} M | {mean['peak_mb']:.0f} "
                f"| {mean['make_experience']:.2f} | {mean['update']:.2f} | {mean['cpu_s']:.0f} "
                f"| {' / '.join(success) if size == 'tiny' else ''} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
