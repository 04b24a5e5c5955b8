"""A policy on a GPU against the same policy on the CPU: log-probs, greedy decisions, bfloat16, the flash kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import full_size
from rlvla.experience import Experience
from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.vla.decoder import FusedRMSNorm
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


def test_the_fused_norm_is_llamas() -> None:
    torch.manual_seed(0)
    norm, rows = FusedRMSNorm(64), torch.randn(5, 64, requires_grad=True)
    norm.weight.data.normal_()
    norm(rows).square().sum().backward()
    expected = norm(rows), rows.grad, norm.weight.grad
    on_gpu, moved = FusedRMSNorm(64).to(CUDA), rows.detach().to(CUDA).requires_grad_()
    on_gpu.load_state_dict(norm.state_dict())
    on_gpu(moved).square().sum().backward()
    for found, reference in zip((on_gpu(moved), moved.grad, on_gpu.weight.grad), expected):
        torch.testing.assert_close(found.cpu(), reference, atol=1e-4, rtol=1e-4)


def test_adapters_compute_what_peft_does(rows: Experience, policy_folder: Path) -> None:
    """Gradients of all adapters, against those of the CPU, where peft computes them."""
    gradients = []
    for device in ("cpu", CUDA):
        torch.manual_seed(0)
        adapted = Actor.from_pretrained(policy_folder, ActorConfig(lora_rank=4, lora_targets=("all-linear",)))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0.0, 0.1)
        adapted.to(device).train()
        adapted(**adapted.score(rows, 1.0))["log_probs"].sum().backward()
        gradients.append({name: p.grad.cpu() for name, p in adapted.named_parameters() if p.grad is not None})
    assert len(gradients[0]) > 10
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("family", ["openvla", "smolvla", "pi0"])
def test_graphs_decide_as_the_policy_does(family: str, tmp_path: Path) -> None:
    """Also with a batch that is padded, and after the weights have changed in place."""
    folder = getattr(full_size, family)(tmp_path / "policy", tiny=True)
    settings = {} if family == "openvla" else {"cameras": ("a", "b"), "camera_map": ("a=image", "b=image2")}
    policy = Actor.from_pretrained(folder, **settings).to(CUDA).eval()
    spec, generator = policy.spec, np.random.default_rng(0)
    images = generator.integers(0, 256, (3, spec.cameras, 64, 64, 3), dtype=np.uint8)
    proprio = generator.uniform(size=(3, spec.proprio_dim)).astype(np.float32) if spec.proprio_dim else None
    noise = np.stack([spec.draw(generator) for _ in range(3)])
    shown = (images, proprio, ["pick up the bowl"] * 3)

    def decide(graphs: bool) -> np.ndarray:
        policy.use_cuda_graphs(graphs)
        first = policy.act(*shown, noise=noise, temperature=1.0).log_probs
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.01)
        second = policy.act(*shown, noise=noise, temperature=1.0).log_probs
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.div_(1.01)
        assert not np.array_equal(first, second)
        return np.stack([first, second])

    assert np.allclose(decide(True), decide(False), atol=1e-2)
    policy.use_cuda_graphs()
    policy.act(*shown, noise=noise, temperature=1.0)
    assert policy._graphs is not None and len(policy._graphs._graphs) == 1, "captured once"
    expected = policy.act(*shown, noise=noise, temperature=1.0).log_probs
    for parameter in policy.parameters():
        parameter.data = parameter.data.clone()
    again = policy.act(*shown, noise=noise, temperature=1.0).log_probs
    assert policy._graphs._usable and len(policy._graphs._graphs) == 1, "captured anew where the weights are now"
    assert np.allclose(again, expected, atol=1e-2)
