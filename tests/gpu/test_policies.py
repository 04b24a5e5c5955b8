"""A policy on a GPU against the same policy on the CPU: log-probs, greedy decisions, bfloat16, the flash kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.experience import Experience
from rlvla.models.actor import Actor, ActorConfig
from tests.support.devices import CUDA, needs_a_gpu
from tests.support.updates import batch

pytestmark = needs_a_gpu
N = 7  # decisions


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of a GPU round their inputs to TF32 otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder).eval()


@pytest.fixture(scope="module")
def rows(actor: Actor) -> Experience:
    return batch(actor, N)


@torch.no_grad()
def table(actor: Actor, rows: Experience) -> torch.Tensor:
    """Log-probabilities of every column, [N, T, 256], on the host."""
    return actor(**actor.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"].cpu()


def on_the_gpu(policy_folder: Path, dtype: torch.dtype = torch.float32, kernel: str = "sdpa") -> Actor:
    actor = Actor.from_pretrained(policy_folder, ActorConfig(attn_implementation=kernel))
    return actor.to(device=CUDA, dtype=dtype).eval()


def test_log_probs_are_those_of_the_cpu(actor: Actor, rows: Experience, policy_folder: Path) -> None:
    expected = table(actor, rows)
    assert torch.allclose(table(on_the_gpu(policy_folder), rows), expected, atol=1e-3)
    in_bf16 = table(on_the_gpu(policy_folder, torch.bfloat16), rows)
    assert float((in_bf16.exp() - expected.exp()).abs().sum(-1).max()) < 0.2, "total variation, twice"


def test_greedy_decisions_are_those_of_the_cpu(actor: Actor, rows: Experience, policy_folder: Path) -> None:
    shown = (rows.images.numpy(), rows.proprio.numpy(), rows.instructions)
    decisions = [a.act(*shown, noise=None, temperature=1.0) for a in (actor, on_the_gpu(policy_folder))]
    best = table(actor, rows).topk(2).values
    clear = (best[..., 0] - best[..., 1] > 1e-2).reshape(decisions[0].actions.shape).numpy()  # no tie
    assert clear.mean() > 0.5
    assert np.allclose(decisions[0].actions[clear], decisions[1].actions[clear], atol=1e-6)


def test_the_flash_kernel_computes_what_torch_does(rows: Experience, policy_folder: Path) -> None:
    """Prompts of unequal length, so that the packed kernel runs."""
    pytest.importorskip("flash_attn", reason="the flash-attn package is not installed")
    torch_s, flash = (table(on_the_gpu(policy_folder, torch.bfloat16, k), rows) for k in ("sdpa", "flash_attention_2"))
    assert float((torch_s.exp() - flash.exp()).abs().sum(-1).max()) < 0.1, "total variation, twice"
