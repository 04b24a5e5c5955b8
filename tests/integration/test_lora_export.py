"""Memory of loading a policy and of writing it merged: at most 1.2 times the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MEASURED = """
import sys
from pathlib import Path
import torch
from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.vla import checkpoint

def memory(field):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(field)))

def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")

folder = Path(sys.argv[1])
torch.set_num_threads(1)
warm = Actor.from_pretrained(sys.argv[2], ActorConfig(lora_rank=2))  # libraries, caches
warm.save_pretrained(folder / "warm")
del warm
reset_peak()
before = memory("VmRSS")
actor = Actor.from_pretrained(folder / "base", ActorConfig(lora_rank=2, lora_targets=("all-linear",)))
size = sum(t.nbytes for t in actor.state_dict().values())
print("load", (memory("VmHWM") - before) / size)
with torch.no_grad():
    for name, parameter in actor.named_parameters():
        if ".lora_" in name:
            parameter.fill_(0.01)
checkpoint.SINGLE_FILE_BYTES = 0  # as a model of more than 768 MB is written
reset_peak()
held = memory("VmRSS")  # the model and the libraries
actor.save_pretrained(folder / "merged")
print("save", 1 + (memory("VmHWM") - held) / size)
print("shards", len(list((folder / "merged").glob("model-*.safetensors"))))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_of_loading_and_of_merging(tmp_path: Path, policy_folder: Path) -> None:
    from rlvla.models.vla.tiny import build_tiny

    build_tiny(
        tmp_path / "base",
        sentences=["go"],
        dataset_statistics={"x": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}}},
        llm_dim=512,
        llm_mlp_dim=1536,
        llm_layers=16,
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), str(policy_folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    print(figures)
    assert figures["shards"] > 4
    assert figures["load"] <= 1.2, figures
    assert figures["save"] <= 1.2, figures
