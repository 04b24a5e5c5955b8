"""Rates, arithmetic and memory, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlvla.experience import Experience
from rlvla.models.actor import Actor, training_flops
from rlvla.models.vla.inputs import row_tokens
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer import measurements as throughput
from rlvla.trainer.measurements import Throughput
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import OptimizerStep, Rollout
from tests.support.experience import SAMPLES
from tests.support.metrics import reduced

PEAK = 1e9


def strategy(bf16: bool = False) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(bf16=bf16))


def rows(masked: int) -> Experience:
    """Four rows, some of them stand-ins for none."""
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[:masked] = False
    images = torch.zeros(4, 1, 64, 64, 3, dtype=torch.uint8)
    return Experience(images=images, instructions=["reach the red disc"] * 4, action_mask=mask)


class Network(torch.nn.Module):
    """Parts with the names of the architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.vla = torch.nn.ModuleDict(
            {
                "vision_backbone": torch.nn.Linear(10, 10, bias=False),  # 100 weights
                "projector": torch.nn.Linear(10, 3, bias=False),  # 30
                "proprio_projector": torch.nn.Linear(4, 1, bias=False),  # 4
                "embed_tokens": torch.nn.Embedding(50, 10),  # looked up, not multiplied
                "language_model": torch.nn.Linear(20, 10, bias=False),  # 200
            }
        )


def test_arithmetic_of_a_decision() -> None:
    network = Network()
    assert training_flops(network, patches=7, tokens=11) == 6 * (130 * 7 + 204 * 11)
    network.vla["vision_backbone"].requires_grad_(False)
    assert training_flops(network, patches=7, tokens=11) == 2 * 100 * 7 + 6 * (30 * 7 + 204 * 11)
    network.vla["language_model"].requires_grad_(False)
    assert training_flops(network, patches=7, tokens=11) == 2 * 100 * 7 + 6 * (30 * 7 + 4 * 11) + 4 * 200 * 11


def test_rates_of_two_ranks_are_all_work_over_the_slowest(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "device_bf16_peak", lambda device: PEAK)
    actor = Actor.from_pretrained(policy_folder)
    engine = SimpleNamespace(module=actor)
    (length,) = row_tokens(actor.inputs, ["reach the red disc"], 1)
    parts = []
    for seconds, masked in ((2.0, 0), (4.0, 3)):
        metrics, measured = Metrics(), Throughput(strategy(bf16=True), actor)
        measured.after_step(OptimizerStep("actor", engine, 1.0, rows(masked), 0, metrics))
        measured.after_step(OptimizerStep("critic", engine, 1.0, rows(masked), 0, metrics, counts=False))
        measured.after_step(OptimizerStep("critic", engine, 1.0, rows(masked), 1, metrics))
        measured.after_steps(seconds, metrics)
        parts.append(metrics)
    found = reduced(*parts)
    assert found["perf/update_decisions_per_s"] == 2 * (4 + 1) / 4.0
    assert found["perf/update_tokens_per_s"] == pytest.approx(2 * (4 + 1) * length / 4.0)
    one = training_flops(actor, actor.inputs.config.tower_configs()[0].num_patches, length)
    assert found["perf/update_mfu"] == pytest.approx(3 * (4 + 1) * one / (4.0 * 2 * PEAK))


def test_no_share_of_the_peak_without_bf16_or_a_known_device(policy_folder: Path, monkeypatch) -> None:
    actor = Actor.from_pretrained(policy_folder)
    for bf16, peak in ((False, PEAK), (True, None)):
        monkeypatch.setattr(throughput, "device_bf16_peak", lambda device, peak=peak: peak)
        metrics, measured = Metrics(), Throughput(strategy(bf16), actor)
        step = OptimizerStep("actor", SimpleNamespace(module=actor), 1.0, rows(0), 0, metrics)
        measured.after_step(step)
        measured.after_steps(1.0, metrics)
        assert set(reduced(metrics)) == {"perf/update_decisions_per_s", "perf/update_tokens_per_s"}


def test_playing_counts_every_answer(policy_folder: Path) -> None:
    actor, parts = Actor.from_pretrained(policy_folder), []
    told = [text for sample in SAMPLES for text in sample.decision_instructions]
    length = row_tokens(actor.inputs, told, SAMPLES[0].images.shape[1])[0]
    for samples, stats in ((SAMPLES, RolloutStats(wall_s=3.0, decisions=40)), ([], RolloutStats(wall_s=5.0))):
        metrics = Metrics()
        Throughput(strategy(), actor).after_rollout(Rollout(0, samples, stats), metrics)
        parts.append(metrics)
    found = reduced(*parts)
    assert found == {"perf/rollout_decisions_per_s": 8.0, "perf/rollout_tokens_per_s": 8.0 * length}


def test_memory_is_that_of_the_largest_rank(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, parts = Actor.from_pretrained(policy_folder), []
    for rss, allocated in ((3.0, 70.0), (4.0, 60.0)):
        monkeypatch.setattr(throughput, "max_rss_gb", lambda rss=rss: rss)
        monkeypatch.setattr(throughput, "max_memory_allocated_gb", lambda device, allocated=allocated: allocated)
        parts.append(Metrics())
        Throughput(strategy(), actor).measure_memory(parts[-1])
    assert reduced(*parts) == {"perf/max_rss_gb": 4.0, "perf/max_memory_allocated_gb": 70.0}
