"""What `--dry_run` plans for full-size policies on one GPU, without their weights; and what a run then takes.

python benchmarks/one_gpu.py
python benchmarks/one_gpu.py --models openvla --gib 48
python benchmarks/one_gpu.py --run --cases 0 5      on a GPU: an iteration of robosuite Lift with random weights

The folders have the configuration of the published models, and weights that are all zero and take no room: a plan
reads sizes alone. GiB of one rank; kernel workspaces, fragmentation and the CUDA context come on top, for which one is
added where the last column says what fits. Takes minutes of CPU time.

With `--run` weights are random and written whole (15 GB for OpenVLA), and each case, in a process of its own, plays 8
episodes and takes one optimizer step on 8 decisions and more. "allocated" is the most that torch had given out,
"reserved" what it had taken from the driver for that. Seen to its end with small models only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cli.train_ppo_vla import main as train
from rlvla.models.lerobot.config import Feature, Features
from rlvla.models.pi0.checkpoint import file_shapes
from rlvla.models.pi0.config import PI0, SIZES_FILE, Pi0Config, Sizes
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils.files import read_metrics
from rlvla.utils.terminal import table
from tests.support.tiny_pi0 import build_tiny_pi0

SUITE = "libero_spatial"
ACTIONS = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "min": [-1.0] * 7, "max": [1.0] * 7, "mask": [True] * 7}
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
# An iteration on Lift: 8 episodes of two decisions or more.
RUN = (
    "--task_suite_name robosuite --bf16 --advantage_estimator grpo --n_samples_per_prompt 8 --rollout_batch_size 1 "
    "--train_batch_size 8 --num_episodes 8 --num_envs 8 --micro_rollout_batch_size 8 --eval_episodes 1 --max_steps 16 "
    "--reward env --no-val_before_train --no-use_tensorboard --no-check_start"
)
MEASURED = ("model", "trained", "planned", "allocated", "reserved", "played/s", "trained/s")


def openvla(folder: Path) -> Path:
    """openvla-7b as OpenVLA-OFT decodes it."""
    statistics = {suite: {"action": ACTIONS} for suite in (SUITE, "robosuite")}
    build_tiny(folder, sentences=["pick up the bowl"], dataset_statistics=statistics)
    full = OpenVLAConfig().to_dict()
    names = ("text_config", "timm_model_ids", "image_sizes", "timm_model_kwargs", "pad_to_multiple_of")
    raw = json.loads((folder / "config.json").read_text())
    untold = ("image_preprocessing", "action_normalization", "gripper_convention", "model_variant", "action_chunk_len")
    (folder / "config.json").write_text(json.dumps({name: raw[name] for name in raw if name not in untold}))
    with torch.device("meta"):
        model = OpenVLAForActionPrediction(OpenVLAConfig())
    hollow(folder / "model.safetensors", {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    return change(folder / "config.json", {name: full[name] for name in names})


def pi0(folder: Path, state: int = 8) -> Path:
    """lerobot/pi0_base with LIBERO's features, or another number of those of the robot's state."""
    unit = {key: {"mean": [0.0] * n, "std": [1.0] * n} for key, n in (("observation.state", state), ("action", 7))}
    cameras = ("image", "image2")
    build_tiny_pi0(folder, sentences=["pick up the bowl"], statistics=unit, cameras=cameras, state_dim=state)
    (folder / SIZES_FILE).unlink()
    features = json.loads((folder / "config.json").read_text())["input_features"]
    for name, feature in features.items():
        if ".images." in name:
            feature["shape"] = [3, 224, 224]
    sizes = {
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "image_resolution": [224, 224],
    }
    change(folder / "config.json", {**sizes, "input_features": features})
    features_of_base = Features({"observation.state": Feature("STATE", (32,))}, {"action": Feature("ACTION", (32,))})
    hollow(folder / "model.safetensors", file_shapes(Pi0Config(type=PI0, features=features_of_base), Sizes()))
    return folder


def hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of these shapes in bfloat16, whose numbers take no room on a disk that knows sparse files."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def fill(path: Path) -> None:
    """Random weights instead of none in a safetensors file of bfloat16: normal, deviation 0.02 (head: 0.1), norms of 1.

    A policy whose actions are as good as uniform would be refused, hence the head.
    """
    with path.open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
        for name, entry in header.items():
            norm = "norm" in name and name.endswith("weight") and len(entry["shape"]) == 1
            values = torch.ones_like(noise) if norm else 5 * noise if "lm_head" in name else noise
            values = values.view(torch.int16).numpy().tobytes()
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            for start in range(begin, end, len(values)):
                file.write(values[: min(len(values), end - start)])


def change(path: Path, settings: dict[str, Any]) -> Path:
    """Replace settings of a config.json; returns its folder."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return path.parent


def planned(folder: Path, flags: str) -> dict[str, float]:
    """GiB by row of the memory table."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(["--pretrain", str(folder), "--save_path", str(folder / "run"), "--dry_run", *flags.split()])
    rows = re.findall(r"^(.*?) {2,}([\d.]+)$", printed.getvalue(), re.MULTILINE)
    return {name.strip(): float(value) / 1024 for name, value in rows}


def measured(folder: Path, flags: str) -> tuple[float, ...]:
    """GiB allocated and reserved at most, decisions played and trained per second; the run's output goes to stderr."""
    code = (
        "import sys, torch; from pathlib import Path; from cli.train_ppo_vla import main; main(sys.argv[2:]); "
        "most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(); "
        "Path(sys.argv[1]).write_text(' '.join(map(str, most)))"
    )
    out, note = folder / "run", folder / "memory"
    words = ["--pretrain", str(folder), "--save_path", str(out), *flags.split()]
    subprocess.run([sys.executable, "-c", code, str(note), *words], stdout=sys.stderr, check=True, cwd=ROOT)
    allocated, reserved = (int(number) / 2**30 for number in note.read_text().split())
    record = next(row for row in read_metrics(out) if "actor/grad_norm" in row)
    shutil.rmtree(out)
    return allocated, reserved, record["perf/rollout_decisions_per_s"], record["perf/update_decisions_per_s"]


def compare(folders: dict[str, Path], cases: list[tuple[str, str, str]]) -> None:
    """Print what a run takes beside the plan of the same flags."""
    for folder in folders.values():
        fill(folder / "model.safetensors")
    for model, what, flags in cases:
        of_run = f"{RUN} {flags}"
        plan = max(planned(folders[model], of_run)[f"total on the device {phase}"] for phase in TOTALS)
        figures = (plan, *measured(folders[model], of_run))
        print(table(MEASURED, [(model, what, *(f"{value:.1f}" for value in figures))]), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["openvla", "pi0"])
    parser.add_argument("--gib", type=float, default=24.0, help="memory of the GPU (default: 24)")
    parser.add_argument("--run", action="store_true", help="run each case for an iteration, on this machine's GPU")
    parser.add_argument(
        "--cases",
        nargs="+",
        type=int,
        choices=range(len(CASES)),
        default=range(len(CASES)),
        help="by number (default: all)",
    )
    chosen = parser.parse_args()
    if chosen.run and not torch.cuda.is_available():
        parser.error("--run measures a GPU, and there is none here")
    rows = []
    cases = [CASES[index] for index in chosen.cases if CASES[index][0] in chosen.models]
    with tempfile.TemporaryDirectory() as place:
        chosen_models = {model for model, _, _ in cases}
        # Lift has six numbers of proprioception.
        build = {"openvla": openvla, "pi0": partial(pi0, state=6) if chosen.run else pi0}
        folders = {model: build[model](Path(place) / model) for model in chosen_models}
        if chosen.run:
            compare(folders, cases)
            return
        for model, what, flags in cases:
            plan = planned(folders[model], f"--task_suite_name {SUITE} {COMMON} {flags}")
            totals = [plan[f"total on the device {phase}"] for phase in TOTALS]
            fits = "yes" if max(totals) + 1 < chosen.gib else "no"
            rows.append((model, what, *(f"{total:.1f}" for total in totals), fits))
    print(table(("model", "trained", "playing", "scoring", "update", f"fits in {chosen.gib:g} GiB"), rows))


if __name__ == "__main__":
    main()
