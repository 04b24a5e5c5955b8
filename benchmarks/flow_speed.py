"""Acting, scoring and training of flow policies against action tokens and a Gaussian on the same network.

    python benchmarks/flow_speed.py

One thread, the shapes of Lift (64 pixels, chunks of 5 actions of 7 numbers), batches of 64 decisions: compact
policies, and OpenVLA's network in small beside SmolVLA's of as many parameters. The policies alternate and ratios are
of CPU time within a repetition, to the tokens above, so that other work on the machine hardly matters. The last column
is how much longer acting takes if every denoising step computes the observation anew.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.policy_families import INSTRUCTION, ROWS, TASKS, ppo_step, rows_of, statistics_of
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact
from rlvla.models.families import check_checkpoint
from rlvla.models.smolvla.tiny import build_tiny_smolvla
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils.terminal import table

TASK = TASKS["Lift"]
POLICIES: dict[str, dict[str, Any]] = {
    "tokens": {"action_head": "tokens"},
    "gaussian": {"action_head": "gaussian"},
    "flow, K = 4, one noisy": {"action_head": "flow"},
    "flow, K = 4, all noisy": {"action_head": "flow", "flow_noisy_steps": "all"},
    "flow, K = 10, one noisy": {"action_head": "flow", "flow_steps": 10},
    "flow, K = 10, all noisy": {"action_head": "flow", "flow_steps": 10, "flow_noisy_steps": "all"},
    "OpenVLA, tokens": {},
    "SmolVLA, K = 4, one noisy": {"flow_steps": 4},
    "SmolVLA, K = 4, all noisy": {"flow_steps": 4, "flow_noisy_steps": "all"},
    "SmolVLA, K = 10, one noisy": {"flow_steps": 10},
}


def build(name: str, settings: dict[str, Any], folder: Path) -> Any:
    """A policy with a value head and random weights."""
    numbers, overrides = statistics_of(TASK), {}
    if name.startswith("OpenVLA"):
        shape = {"action_chunk_len": TASK.chunk, "action_dim": TASK.dim, "proprio_dim": TASK.proprio}
        sizes = {"image_size": TASK.size, "vision_dim": 40, "llm_dim": 72, "llm_mlp_dim": 216}
        sentences = {"sentences": [INSTRUCTION], "dataset_statistics": numbers}
        build_tiny(folder, **sentences, **sizes, **shape, use_proprio=True)
    elif name.startswith("SmolVLA"):
        shape = {"chunk_size": TASK.chunk, "action_dim": TASK.dim, "state_dim": TASK.proprio}
        flat = {"observation.state": numbers["data"]["proprio"], "action": numbers["data"]["action"]}
        build_tiny_smolvla(folder, sentences=[INSTRUCTION], statistics=flat, **shape)
        overrides = settings
    else:
        build_compact(folder, CompactConfig(TASK.size, 1, TASK.proprio, TASK.dim, TASK.chunk, **settings), numbers)
    return check_checkpoint(folder, overrides=overrides).load_policy(value_head=True).train()


def steps_of(policy: Any) -> dict[str, Callable[[], Any]]:
    """Acting, scoring without gradients, and a PPO step, each on the same random observations."""
    rows, rng = rows_of(policy, TASK), np.random.default_rng(0)
    images, proprio = rows.images.numpy(), rows.proprio.numpy()
    noise = np.stack([policy.spec.draw(rng) for _ in range(ROWS)])
    sentences = [INSTRUCTION] * ROWS

    def act() -> Any:
        return policy.act(images, proprio, sentences, noise=noise)

    decision = act()
    rows = rows.with_fields(trace={name: torch.from_numpy(value) for name, value in decision.trace.items()})

    def score() -> None:
        with torch.no_grad():
            policy(**policy.score(rows, 1.0), wants=("log_probs",))

    def observe() -> None:
        with torch.inference_mode():
            policy.hidden({}, **policy.observations(rows.images, rows.proprio, sentences))

    wants = ("log_probs", "values") if "entropy" in policy.spec.missing else ("log_probs", "entropy", "values")
    return {"act": act, "score": score, "ppo": ppo_step(policy, rows, wants), "observe": observe}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        policies = {name: build(name, POLICIES[name], Path(folder) / str(i)) for i, name in enumerate(POLICIES)}
    works = {name: steps_of(policy) for name, policy in policies.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats + 2):
        for name, steps in works.items():
            for kind, step in steps.items():
                start = time.process_time()
                step()
                if repeat > 1:  # the first two warm up
                    times.setdefault((name, kind), []).append(time.process_time() - start)
    lines, tokens = [], ""
    for name, policy in policies.items():
        seconds = {kind: statistics.median(times[name, kind]) for kind in ("act", "score", "ppo", "observe")}
        tokens = name if name.endswith("tokens") else tokens  # those above
        cells = [f"{sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M"]
        for kind in ("act", "score", "ppo"):
            ratio = statistics.median(a / b for a, b in zip(times[name, kind], times[tokens, kind]))
            cells.append(f"{ROWS / seconds[kind]:.0f} ({ratio:.2f})")
        k = POLICIES[name].get("flow_steps", 4) if "noisy" in name else 1
        again = (seconds["act"] + (k - 1) * seconds["observe"]) / seconds["act"]
        lines.append((name, *cells, f"{again:.1f}" if k > 1 else ""))
    print("decisions per CPU second (in brackets: time, tokens above = 1)")
    print(table(("head", "parameters", "acting", "scoring", "PPO step", "without reuse"), lines))


if __name__ == "__main__":
    main()
