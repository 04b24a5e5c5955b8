"""What `--dry_run` plans for full-size policies on one GPU, without their weights.

python benchmarks/one_gpu.py
python benchmarks/one_gpu.py --models openvla --gib 48

The folders have the configuration of the published models, and weights that are all zero and take no room: a plan
reads sizes alone. GiB of one rank; kernel workspaces, fragmentation and the CUDA context come on top, for which one is
added where the last column says what fits. Takes minutes of CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import full_size
from cli.train_ppo_vla import main as train
from rlvla.utils.terminal import table

SUITE = "libero_spatial"
# As in docs/smolvla.md and examples/scripts/train_grpo_openvla_oft_libero_single_gpu.sh, with groups of eight.
COMMON = (
    "--bf16 --advantage_estimator grpo --n_samples_per_prompt 8 --rollout_batch_size 8 --train_batch_size 32 "
    "--num_episodes 6400 --num_envs 8 --micro_rollout_batch_size 8 --eval_episodes 10"
)
OPENVLA = "--platform libero --model_variant oft --gradient_checkpointing"
ADAPTERS = "--lora_rank 32 --lora_alpha 16 --lora_targets all-linear"
LEROBOT = (
    "--cameras agentview wrist --camera_map agentview=image wrist=image2 --platform libero --n_action_steps 10 "
    "--flow_steps 5"
)
# Model, what is trained, flags.
CASES = (
    ("openvla", "adapters on all layers, 8 decisions", f"{OPENVLA} {ADAPTERS} --micro_train_batch_size 8"),
    ("openvla", "adapters on all layers, 1 decision", f"{OPENVLA} {ADAPTERS} --micro_train_batch_size 1"),
    (
        "openvla",
        "adapters on the language model, 1 decision",
        f"{OPENVLA} --lora_rank 16 --lora_targets language --micro_train_batch_size 1",
    ),
    ("openvla", "all weights, 1 decision", f"{OPENVLA} --zero_stage 2 --micro_train_batch_size 1"),
    (
        "openvla",
        "all weights, 1 decision, optimizer on the host",
        f"{OPENVLA} --zero_stage 2 --adam_offload --micro_train_batch_size 1",
    ),
    ("pi0", "expert, 8 decisions", f"{LEROBOT} --train_expert_only --micro_train_batch_size 8"),
    ("pi0", "expert, 1 decision", f"{LEROBOT} --train_expert_only --micro_train_batch_size 1"),
    (
        "pi0",
        "adapters on the expert, 8 decisions",
        f"{LEROBOT} --lora_rank 16 --lora_targets expert --micro_train_batch_size 8",
    ),
)
TOTALS = ("while episodes are played", "while they are scored", "at update, at most")


def planned(folder: Path, flags: str) -> dict[str, float]:
    """GiB by row of the memory table."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(["--pretrain", str(folder), "--save_path", str(folder / "run"), "--dry_run", *flags.split()])
    rows = re.findall(r"^(.*?) {2,}([\d.]+)$", printed.getvalue(), re.MULTILINE)
    return {name.strip(): float(value) / 1024 for name, value in rows}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["openvla", "pi0"])
    parser.add_argument("--gib", type=float, default=24.0, help="memory of the GPU (default: 24)")
    chosen = parser.parse_args()
    rows = []
    cases = [case for case in CASES if case[0] in chosen.models]
    with tempfile.TemporaryDirectory() as place:
        folders = {model: getattr(full_size, model)(Path(place) / model) for model in {case[0] for case in cases}}
        for model, what, flags in cases:
            plan = planned(folders[model], f"--task_suite_name {SUITE} {COMMON} {flags}")
            totals = [plan[f"total on the device {phase}"] for phase in TOTALS]
            fits = "yes" if max(totals) + 1 < chosen.gib else "no"
            rows.append((model, what, *(f"{total:.1f}" for total in totals), fits))
    print(table(("model", "trained", "playing", "scoring", "update", f"fits in {chosen.gib:g} GiB"), rows))


if __name__ == "__main__":
    main()
