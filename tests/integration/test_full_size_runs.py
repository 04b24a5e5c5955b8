"""Runs of the published sizes up to the first kernel, without a GPU: figures of docs/gpu.md, and arithmetic by hand."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlvla.commands.dry_run import ppo_memory
from rlvla.memory.plan import MemoryPlan
from rlvla.trainer.progress.report import trainable_and_all
from tests.support import full_size_runs
from tests.support.launching import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
MICRO = 16
# All parameters and those trained, by policy of `benchmarks/gpu.py`; adapters included.
SIZES = {
    "openvla": (7_541_237_184 + 107_862_016, 107_862_016),
    "smolvla_expert": (450_046_176, 99_880_992),
    "pi0_lora": (3_238_048_528 + 7_029_248, 7_029_248),
}


def pairs(rank: int, *layers: tuple[int, int]) -> int:
    """Parameters of adapters of this rank on layers of these widths."""
    return sum(rank * (into + out) for into, out in layers)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each policy with what is trained, on the meta device."""
    folder = tmp_path_factory.mktemp("policies")
    return {name: full_size_runs.on_meta(*full_size_runs.checked(name, folder / name, MICRO)) for name in SIZES}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SIZES)
def test_what_a_run_trains(name: str, policies: dict[str, Any]) -> None:
    policy = policies[name]
    trained, total = trainable_and_all(policy)
    assert (total, trained) == SIZES[name]
    measured = figures(name)
    assert (measured["parameters"], measured["trained_parameters"]) == SIZES[name]


@pytest.mark.nightly
def test_adapters_of_openvla(policies: dict[str, Any]) -> None:
    """On every linear layer but the output head and what no pass uses: last blocks of the towers, pooling head."""
    policy = policies["openvla"]
    adapted = [name for name, module in policy.named_modules() if hasattr(module, "lora_A")]
    assert not any(unused in name for name in adapted for unused in ("lm_head", "attn_pool"))
    towers = {"featurizer": 24, "fused_featurizer": 27}
    for tower, depth in towers.items():
        blocks = Counter(name.split(".blocks.")[1].split(".")[0] for name in adapted if f".{tower}.blocks." in name)
        assert blocks == {str(block): 4 for block in range(depth - 1)}
    layers = Counter(name.split(".layers.")[1].split(".")[0] for name in adapted if ".layers." in name)
    assert layers == {str(layer): 7 for layer in range(32)}
    assert len(adapted) == 23 * 4 + 26 * 4 + 32 * 7 + 3, "the rest: three layers of the projector"
    towers_trained = 23 * pairs(32, (1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024))
    towers_trained += 26 * pairs(32, (1152, 3456), (1152, 1152), (1152, 4304), (4304, 1152))
    projector = pairs(32, (2176, 8704), (8704, 4096), (4096, 4096))
    decoder = 32 * pairs(32, *[(4096, 4096)] * 4, *[(4096, 11008)] * 3)
    assert towers_trained + projector + decoder == SIZES["openvla"][1]
    trainable = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name for name in trainable) and len(trainable) == 2 * len(adapted)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["openvla"])
def test_the_engine_on_two_ranks(name: str, tmp_path: Path) -> None:
    """DeepSpeed's own, with ZeRO-2, whose tensors have no memory, and whose second rank does not exist."""
    begun = in_a_process(name, tmp_path / "policy", 2)
    trained, total = SIZES[name][1], SIZES[name][0]
    assert sum(begun["trained"].values()) == trained, "the parameters in the optimizer"
    assert not any("lm_head" in parameter for parameter in begun["trained"])
    assert begun["dtypes"] == ("torch.bfloat16", "torch.float32")
    assert (begun["stage"], begun["bucket"]) == (2, trained)
    assert trained / 2 <= begun["shard"] < trained / 2 + 16, "half of it, up to alignment"
    steps = 100 * 64 // 32
    assert begun["amounts"]["optimizer steps of the actor"] == len(begun["learning_rates"]) == steps
    peak, warmup = 5e-6, steps // 20
    for step, rate in enumerate(begun["learning_rates"]):
        done = (step - warmup) / (steps - warmup)
        expected = peak * (step / warmup if step < warmup else (1 + math.cos(math.pi * done)) / 2)
        assert rate == pytest.approx(expected, abs=1e-12)
    buffers = begun["live_bytes"] - 2 * total - 4 * begun["shard"]
    assert 0 <= buffers < 2**20, "weights and half of the master copy, and little beside them"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "micro"), [("openvla", 16), ("smolvla_expert", 16), ("pi0_expert", 16)])
def test_the_plan_is_the_memory_measured(name: str, micro: int, tmp_path: Path) -> None:
    """On one rank of an H200, to 5 %: an update at the same micro-batch."""
    plan = ppo_memory(*full_size_runs.checked(name, tmp_path / "policy", micro))
    assert isinstance(plan, MemoryPlan)
    (update,) = (row for row in figures(name)["update"] if row["micro"] == micro)
    assert plan.at_update / 2**30 == pytest.approx(update["allocated_gib"], rel=0.05)


def figures(name: str) -> dict[str, Any]:
    """Measured on a GPU, as docs/gpu.md shows them."""
    return json.loads((ROOT / f"benchmarks/results/gpu/{name}.json").read_text())["figures"]


def in_a_process(name: str, folder: Path, ranks: int) -> dict[str, Any]:
    """`full_size_runs.begin` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(full_size_runs.begin, name, folder, MICRO, ranks).result()
