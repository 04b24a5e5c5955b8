"""Decisions per second of an autoregressive policy: vLLM (`--rollout_backend vllm`) against the policy's own decoding.

    bash examples/scripts/install_vllm.sh
    python benchmarks/vllm_decoding.py

One camera of 64 x 64 pixels (64 patches), 7 tokens per decision, float32 on a CPU, one thread. The two alternate, and
ratios are taken within a repetition, so that other work on the machine hardly matters; a range is that of the
repetitions. Rates are per second of CPU time, of both processes for vLLM; its time includes the prompts, which this
process embeds.
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
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import LlamaConfig

from rlvla.models.actor import Actor
from rlvla.models.vla.inputs import VLAInputs
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny
from rlvla.rollout.config import BackendConfig, BackendSetup
from rlvla.rollout.vllm.backend import VLLMBackend
from rlvla.utils.terminal import table

INSTRUCTION = "put the red bowl on the plate"
BOUNDS = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 7}
CALLS = 5  # of each in a repetition
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


class Clock:
    """Milliseconds of processes that compute, per call.

    Args:
        pid: a process besides this one.
    """

    def __init__(self, pid: int):
        self._pids = (os.getpid(), pid)

    def measure(self, call: Callable[[], object], calls: int) -> tuple[float, float]:
        """CPU time of both processes, and wall time."""
        cpu, wall = self._cpu(), time.perf_counter()
        for _ in range(calls):
            call()
        return 1000 * (self._cpu() - cpu) / calls, 1000 * (time.perf_counter() - wall) / calls

    def _cpu(self) -> float:
        files = [file for pid in self._pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure(name: str, batches: list[int], repetitions: int, python: str | None) -> list[list[Any]]:
    """Rows of the table for one model."""
    policy, rng, rows = build(*MODELS[name]), np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        setup = BackendSetup(BackendConfig("vllm", rollout_python=python), folder=Path(folder), episodes=max(batches))
        backend = VLLMBackend(policy, setup)
        backend.load(policy, 0)
        clock = Clock(backend.pids[0])
        loading = clock.measure(lambda: backend.load(policy, 0), 5)[0]
        for batch in batches:
            images = rng.integers(0, 256, (batch, 1, 64, 64, 3), dtype=np.uint8)
            noise, instructions = rng.random((batch, policy.spec.columns)), [INSTRUCTION] * batch
            act = partial(_act, images=images, instructions=instructions, noise=noise)
            own, served = act(policy), act(backend)
            assert (own.trace["tokens"] == served.trace["tokens"]).all()
            gap = np.abs(own.log_probs - served.log_probs).max()
            calls = {
                "own": partial(act, policy),
                "vllm": partial(act, backend),
                "prompts": partial(backend._decoder.embed, images, None, instructions),
            }
            times = [{each: clock.measure(call, CALLS) for each, call in calls.items()} for _ in range(repetitions)]
            rows.append([name, batch, *_figures(times, batch), f"{loading:.0f} ms", f"{gap:.0e}"])
            print(*rows[-1], flush=True)
        backend.close()
    return rows


def _act(policy: Any, images: np.ndarray, instructions: list[str], noise: np.ndarray) -> Any:
    return policy.act(images, None, instructions, noise=noise, temperature=1.0)


def _figures(times: list[dict[str, tuple[float, float]]], batch: int) -> list[str]:
    """Decisions per CPU second, the ratio of both by CPU and by wall time, and the share of the prompts."""

    def ratio(kind: int) -> str:
        found = sorted(t["own"][kind] / t["vllm"][kind] for t in times)
        return f"{statistics.median(found):.2f} ({found[0]:.2f}-{found[-1]:.2f})"

    cpu = {each: statistics.median(t[each][0] for t in times) for each in times[0]}
    rates = [f"{1000 * batch / cpu[each]:.0f}" for each in ("own", "vllm")]
    return [*rates, ratio(0), ratio(1), f"{cpu['prompts'] / cpu['vllm']:.0%}"]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--rollout_python", default=None)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = [row for name in args.models for row in measure(name, args.batches, args.repetitions, args.rollout_python)]
    heads = ("model", "batch", "own/s", "vllm/s", "vllm to own", "by wall time", "prompts", "weights", "log-prob gap")
    print(table(heads, rows))


if __name__ == "__main__":
    main()
