"""A policy with a regression head: sampling, scoring, training, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.experience import Experience
from rlvla.models.action_heads import CORRECT_WITHIN
from rlvla.models.actor import Actor, ActorConfig, ActorCritic
from rlvla.models.distributions import GaussianDistribution
from rlvla.models.reference import ReferenceModel
from rlvla.models.vla.tiny import build_tiny

A, D, B = 4, 3, 5
STATISTICS = {
    "toy": {
        "action": {
            # The second dimension never moves; the last one passes unnormalized.
            "q01": [-0.5, 0.25, 0.0],
            "q99": [1.5, 0.25, 1.0],
            "mask": [True, True, False],
        }
    }
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(
        tmp_path_factory.mktemp("gaussian"),
        sentences=["reach the red disc", "reach the extraordinarily yellow disc"],
        dataset_statistics=STATISTICS,
        image_size=16,
        vision_dim=16,
        llm_dim=32,
        llm_layers=1,
        model_variant="oft_regression",
        action_chunk_len=A,
        action_dim=D,
        action_std_init=0.2,
    )


@pytest.fixture(scope="module")
def actor(folder: Path) -> Actor:
    return Actor.from_pretrained(folder).eval()


def observations(n: int = B) -> tuple[np.ndarray, None, list[str]]:
    rng = np.random.default_rng(0)
    texts = ["reach the red disc", "reach the extraordinarily yellow disc"]
    return rng.integers(0, 256, (n, 1, 16, 16, 3), dtype=np.uint8), None, [texts[i % 2] for i in range(n)]


def noise(actor: Actor, n: int = B) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.stack([actor.spec.draw(rng) for _ in range(n)])


def rows(actor: Actor, temperature: float = 1.0) -> Experience:
    images, proprio, instructions = observations()
    decision = actor.act(images, proprio, instructions, noise=noise(actor), temperature=temperature)
    return Experience(
        images=torch.from_numpy(images),
        instructions=instructions,
        trace={name: torch.from_numpy(value) for name, value in decision.trace.items()},
        old_log_probs=torch.from_numpy(decision.log_probs),
        action_mask=torch.ones(B, A * D, dtype=torch.bool),
    )


def score(actor: Actor, batch: Experience, *wants: str, temperature: float = 1.0, **more) -> dict[str, torch.Tensor]:
    return actor(**actor.score(batch, temperature), wants=wants, **more)


def test_noise_is_standard_normal_in_the_shape_of_a_chunk(actor: Actor) -> None:
    assert actor.spec.noise_shape == (A, D) and actor.spec.columns == A * D
    drawn = noise(actor, 4000)
    assert abs(drawn.mean()) < 0.02 and abs(drawn.std() - 1.0) < 0.02


def test_actions_are_unnormalized_means_and_draws_around_them(actor: Actor) -> None:
    greedy = actor.act(*observations(), noise=None)
    again = actor.act(*observations(), noise=None)
    assert np.array_equal(greedy.actions, again.actions)
    mean = greedy.trace["actions"]
    assert np.allclose(greedy.actions[..., 0], mean[..., 0] + 0.5, atol=1e-6)  # half the range of 2, around 0.5
    assert np.allclose(greedy.actions[..., 1], 0.25, atol=1e-6) and np.allclose(greedy.actions[..., 2], mean[..., 2])
    drawn = noise(actor)
    for temperature in (1.0, 1.5):
        sampled = actor.act(*observations(), noise=drawn, temperature=temperature).trace["actions"]
        assert np.allclose(sampled, mean + 0.2 * temperature * drawn, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_the_ratio_is_1_at_unchanged_weights_for_every_batch_size(actor: Actor, temperature: float) -> None:
    batch = rows(actor, temperature)
    for size in (1, 2, B):
        for start in range(0, B, size):
            part = batch.index(torch.arange(start, min(B, start + size)))
            log_probs = score(actor, part, "log_probs", temperature=temperature)["log_probs"]
            torch.testing.assert_close(log_probs, part.old_log_probs, rtol=0, atol=2e-5)
    same = score(actor, batch, "log_probs", temperature=temperature)["log_probs"]
    assert torch.equal(same, batch.old_log_probs)


def test_constant_dimensions_have_no_effective_log_probs(actor: Actor) -> None:
    assert actor.effective_columns.view(A, D).tolist() == [[True, False, True]] * A


def test_the_gripper_of_libero_is_opened_or_closed(folder: Path) -> None:
    actor = Actor.from_pretrained(folder, gripper_convention="libero").eval()
    sampled = actor.act(*observations(), noise=10 * noise(actor))
    assert set(np.unique(sampled.actions[..., -1])) <= {-1.0, 1.0}
    assert np.array_equal(sampled.actions[..., -1] < 0, sampled.trace["actions"][..., -1] > 0.5)  # open is 1 there
    assert actor.effective_columns.view(A, D)[:, -1].all()
    labels = actor.encode_actions(np.array([[[0.5, 0.25, -1.0], [1.5, 0.25, 1.0]]]))["actions"]
    assert np.allclose(labels, [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]], atol=1e-6) and labels.dtype == np.float32


def test_the_supervised_losses(actor: Actor) -> None:
    batch = rows(actor)
    mean = torch.from_numpy(actor.act(*observations(), noise=None).trace["actions"])
    l1 = score(actor, batch, "loss", sft_loss="l1")
    distance = (batch.trace["actions"] - mean).abs().flatten(1)
    torch.testing.assert_close(l1["loss"], distance, rtol=0, atol=1e-5)
    torch.testing.assert_close(l1["correct"], (distance < CORRECT_WITHIN).float())
    nll = score(actor, batch, "loss", sft_loss="nll")
    torch.testing.assert_close(nll["loss"], -batch.old_log_probs)
    actor.zero_grad()
    l1["loss"].sum().backward()
    assert actor.base.action_std.log_std.grad is None
    nll["loss"].sum().backward()
    assert actor.base.action_std.log_std.grad.abs().sum() > 0
    actor.zero_grad()


def test_entropy_and_kl_are_exact(actor: Actor) -> None:
    batch, other = rows(actor), {"mean": torch.zeros(B, A, D), "log_std": torch.zeros(B, A, D)}
    outputs = score(actor, batch, "entropy", "kl", "parameters", reference=other, temperature=2.0)
    ours = GaussianDistribution(outputs["parameters/mean"], outputs["parameters/log_std"])
    torch.testing.assert_close(ours.std, torch.full((B, A, D), 0.4))
    torch.testing.assert_close(outputs["entropy"], ours.entropy())
    torch.testing.assert_close(outputs["kl"], ours.kl(other))


def test_a_shared_backbone_gives_values_beside_log_probs(folder: Path) -> None:
    both = ActorCritic.from_pretrained(folder).eval()
    batch = rows(both)
    outputs = score(both, batch, "log_probs", "values")
    assert outputs["values"].shape == outputs["log_probs"].shape == (B, A * D)
    alone = both(**both.score_values(batch.with_fields(trace={})))["values"]
    torch.testing.assert_close(alone, outputs["values"])


def test_gradients_reach_adapters_head_and_standard_deviation_and_nothing_else(folder: Path) -> None:
    actor = Actor.from_pretrained(folder, ActorConfig(lora_rank=2, lora_alpha=4))
    score(actor, rows(actor), "log_probs")["log_probs"].sum().backward()
    reached = {name for name, p in actor.named_parameters() if p.grad is not None}
    trainable = {name for name, p in actor.named_parameters() if p.requires_grad}
    assert reached == trainable
    assert all(".lora_" in name or ".action_head." in name or ".action_std." in name for name in trainable)
    assert any(name.endswith("action_std.log_std") for name in trainable)


def test_the_reference_of_adapters_keeps_the_head_of_the_start(folder: Path) -> None:
    actor = Actor.from_pretrained(folder, ActorConfig(lora_rank=2, lora_alpha=4)).eval()
    reference = ReferenceModel(actor, without_adapters=True)
    batch = rows(actor)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    assert torch.equal(reference.log_probs(batch, 1.0), batch.old_log_probs)
    with torch.no_grad(), actor.adapters_disabled():
        assert torch.equal(score(actor, batch, "log_probs")["log_probs"], batch.old_log_probs)
    moved = score(actor, batch, "log_probs")["log_probs"]
    assert not torch.allclose(moved, batch.old_log_probs), "the trained head is back in its place"


def test_a_fixed_standard_deviation_is_not_trained(folder: Path) -> None:
    actor = Actor.from_pretrained(folder, action_std="fixed")
    assert not [name for name, _ in actor.named_parameters() if "action_std" in name]
    assert torch.allclose(actor.base.action_std.log_std.exp(), torch.tensor(0.2))
