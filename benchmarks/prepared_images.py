"""How long an iteration takes where images are prepared elaborately (`image_preprocessing: libero`), in two checkouts.

    python benchmarks/prepared_images.py --before ../old

A tiny toy_reach policy whose config.json asks for LIBERO's treatment (turn, JPEG, Lanczos) is trained for a few
iterations by each checkout in turn; the ratio is taken within each repeat, and medians are shown. "update" and "make
experience" are what preparing once, at the observation, saves; "rollout" is where it happens now.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.terminal import table

THIS = Path(__file__).resolve().parents[1]
PHASES = ("update", "make_experience", "rollout", "iteration")
TRAIN = (
    "train_ppo_vla.py --pretrain {policy} --save_path {out} --advantage_estimator grpo --n_samples_per_prompt 4 "
    "--rollout_batch_size 8 --num_episodes 96 --train_batch_size 8 --max_epochs 2 --num_envs 2 "
    "--image_size {image_size} --eval_episodes 2 --no-val_before_train --no-use_tensorboard --no-check_start "
    "--deterministic_rollout"
)


def run(checkout: Path, command: str) -> None:
    """A command of a checkout, with its own code."""
    script, *words = command.split()
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(checkout / "cli" / script), *words],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {script} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def new_policy(folder: Path) -> Path:
    """A policy after a few supervised steps, with LIBERO's image treatment."""
    common = "--task_suite_name toy_reach --image_size 64 --use_proprio --num_demos 20"
    run(THIS, f"collect_demos.py {common} --output {folder}/demos")
    tiny = "--tiny_vision_dim 32 --tiny_llm_dim 48 --action_chunk_len 3 --max_epochs 1 --no-use_tensorboard"
    run(THIS, f"train_sft_vla.py --demos {folder}/demos/demos.hdf5 --save_path {folder}/sft {tiny}")
    config = folder / "sft" / "policy" / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) | {"image_preprocessing": "libero"}
    config.write_text(json.dumps(content), encoding="utf-8")
    return folder / "sft" / "policy"


def seconds(checkout: Path, policy: Path, out: Path, image_size: int) -> dict[str, float]:
    """Median seconds of each phase over the iterations of a run, the first left out."""
    run(checkout, TRAIN.format(policy=policy, out=out, image_size=image_size))
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "timing_s/update" in record][1:]
    return {phase: statistics.median(record[f"timing_s/{phase}"] for record in records) for phase in PHASES}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--after", type=Path, default=THIS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--image_size", type=int, default=256, help="side of the environment's images in pixels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = new_policy(folder)
        measured: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
        for repeat in range(args.repeats):
            for label, checkout in (("before", args.before.resolve()), ("after", args.after.resolve())):
                measured[label].append(seconds(checkout, policy, folder / f"{label}{repeat}", args.image_size))
    rows = []
    for phase in PHASES:
        before, after = ([m[phase] for m in measured[label]] for label in ("before", "after"))
        ratios = [b / a for b, a in zip(before, after)]
        rows.append((phase, *(f"{statistics.median(v):.2f}" for v in (before, after, ratios))))
    print(table(("phase", "before s", "after s", "before / after"), rows))


if __name__ == "__main__":
    main()
