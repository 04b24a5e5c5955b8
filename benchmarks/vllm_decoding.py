"""Decisions per second of an autoregressive policy: vLLM (`--rollout_backend vllm`) against the policy's own decoding.

    bash examples/scripts/install_vllm.sh
    python benchmarks/vllm_decoding.py

One camera of 64 x 64 pixels (64 patches), 7 tokens per decision, float32 on a CPU, OMP_NUM_THREADS as set. The two
alternate, and ratios are taken within a repetition, so that other work on the machine hardly matters; a range is that
of the repetitions. vLLM's time includes the prompts, which are embedded by this process.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import LlamaConfig

from rlvla.models.actor import Actor
from rlvla.models.inputs import VLAInputs
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny
from rlvla.rollout.config import BackendConfig, BackendSetup
from rlvla.rollout.vllm.backend import VLLMBackend
from rlvla.utils.terminal import table

INSTRUCTION = "put the red bowl on the plate"
BOUNDS = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 7}
# Name -> layers, width, width of the MLP, rows of the vocabulary (None: as many as the small tokenizer needs).
MODELS = {
    "tiny, 3 x 64": (3, 64, 192, None),
    "4 x 128, 32,064 words": (4, 128, 512, 32_064),
    "12 x 512, 32,064 words": (12, 512, 1536, 32_064),
}


def build(layers: int, width: int, mlp: int, words: int | None) -> Any:
    """A policy of this size with random weights."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"llm_dim": width, "llm_mlp_dim": mlp, "llm_layers": layers}
        shape = {"model_variant": "autoregressive", "dataset_statistics": {"data": {"action": BOUNDS}}}
        build_tiny(folder, sentences=[INSTRUCTION], **sizes, **shape)
        actor = Actor.from_pretrained(folder)
        if words is not None:
            config = copy.deepcopy(actor.inputs.config)
            text = config.text_config.to_dict() | {"vocab_size": words, "pad_token_id": words - 64}
            config.text_config, config.pad_to_multiple_of = LlamaConfig(**text), 64
            inputs = VLAInputs.from_pretrained(folder, config=config)
            actor = Actor(OpenVLAForActionPrediction(config), inputs)
    return actor.eval()


def milliseconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start)


def measure(name: str, batches: list[int], repetitions: int, python: str | None) -> list[list[Any]]:
    """Rows of the table for one model."""
    policy, rng, rows = build(*MODELS[name]), np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        setup = BackendSetup(BackendConfig("vllm", python), folder=Path(folder), episodes=max(batches))
        backend = VLLMBackend(policy, setup)
        backend.load(policy, 0)
        loading = min(milliseconds(lambda: backend.load(policy, 0)) for _ in range(3))
        for batch in batches:
            images = rng.integers(0, 256, (batch, 1, 64, 64, 3), dtype=np.uint8)
            noise, instructions = rng.random((batch, policy.spec.columns)), [INSTRUCTION] * batch
            options = {"noise": noise, "temperature": 1.0}
            calls = {
                "own": lambda: policy.act(images, None, instructions, **options),  # noqa: B023
                "vllm": lambda: backend.act(images, None, instructions, **options),  # noqa: B023
                "prompts": lambda: backend._decoder.embed(images, None, instructions),  # noqa: B023
            }
            own, served = policy.act(images, None, instructions, **options), calls["vllm"]()
            assert (own.trace["tokens"] == served.trace["tokens"]).all()
            gap = np.abs(own.log_probs - served.log_probs).max()
            times = [
                {each: min(milliseconds(call) for _ in range(3)) for each, call in calls.items()}
                for _ in range(repetitions)
            ]
            ratios = sorted(t["own"] / t["vllm"] for t in times)
            middle = {each: statistics.median(t[each] for t in times) for each in calls}
            rates = [f"{1000 * batch / middle[each]:.0f}" for each in ("own", "vllm")]
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            rows.append([name, batch, *rates, spread, f"{middle['prompts'] / middle['vllm']:.0%}", f"{gap:.0e}"])
            print(rows[-1], f"{middle}", f"new weights {loading:.0f} ms", flush=True)
        backend.close()
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--rollout_python", default=None)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = [row for name in args.models for row in measure(name, args.batches, args.repetitions, args.rollout_python)]
    print(table(("model", "batch", "own/s", "vllm/s", "vllm to own", "prompts", "log-prob gap"), rows))


if __name__ == "__main__":
    main()
