"""The contract between soft actor-critic and its policies, run over every family."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlvla.models.dsrl.family import new_dsrl
from rlvla.models.families import check_checkpoint
from rlvla.models.sac_policy import MatchingBatch, SACCritic, SACPolicy, SampledDecisions, with_goals
from rlvla.models.soft_actor.config import CriticView, SoftActorConfig
from rlvla.models.soft_actor.policy import SoftActorPolicy
from tests.support.flow_folders import write_flow

B, M, SIDE = 5, 3, 16
PLAIN = SoftActorConfig(action_dim=2, action_chunk_len=3, proprio_dim=4, hidden_sizes=(16,))
SOFT_ACTORS = {
    "plain": (PLAIN, None),
    "images": (
        SoftActorConfig(2, 1, num_images_in_input=2, image_size=SIDE, hidden_sizes=(16,), text_width=8),
        None,
    ),
    "goals, privileged critics": (
        SoftActorConfig(2, 3, 4, 1, SIDE, hidden_sizes=(16,), goals=3),
        CriticView(6, (0, 2, 3, 5)),
    ),
    "flow": (SoftActorConfig(2, 3, 4, 1, SIDE, hidden_sizes=(16,), goals=3, flow_steps=4), CriticView(6, (0, 2, 3, 5))),
    "primitives": (
        SoftActorConfig(6, 5, 4, hidden_sizes=(16,), primitives=("reach", "open", "push"), primitive_sizes=(2, 0, 3)),
        None,
    ),
}


@pytest.fixture(scope="module", params=[*SOFT_ACTORS, "dsrl"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SACPolicy:
    """A policy with perturbed weights."""
    torch.manual_seed(0)
    policy: Any
    if request.param == "dsrl":
        base = check_checkpoint(write_flow(tmp_path_factory.mktemp("dsrl") / "base"))
        sizes: dict[str, Any] = {"hidden_sizes": (16,), "noise_range": 0.7, "repeat_noise": False}
        policy = new_dsrl(Path("unused"), base, **sizes, base_settings={}).load_policy()
    else:
        policy = SoftActorPolicy(*SOFT_ACTORS[request.param])
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return policy


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def stored(policy: SACPolicy) -> tuple[Tensor | None, Tensor | None, Any]:
    """Proprio [B, P + G], images and sentences of a batch, as read back from the replay buffer."""
    sizes, proprio, images = policy.stored_sizes, None, None
    if sizes.proprio_dim:
        proprio = torch.from_numpy(rng().normal(size=(B, sizes.proprio_dim)).astype(np.float32))
        if sizes.goals:
            proprio = with_goals(proprio, torch.arange(B) % sizes.goals, sizes.goals)
    if sizes.num_images_in_input:
        shape = (B, sizes.num_images_in_input, sizes.image_size, sizes.image_size, 3)
        images = torch.from_numpy(rng().integers(0, 256, shape).astype(np.uint8))
    return proprio, images, policy.sentences(["reach the disc"] * B)


def sampled(policy: SACPolicy, seed: int = 0) -> SampledDecisions:
    proprio, images, sentences = stored(policy)
    shape = (B, len(policy.parameter_mask), policy.noise_width)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return policy(None if proprio is None else policy.policy_proprio(proprio), images, sentences, noise)


def observed(policy: SACPolicy) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Prepared observations of the environment."""
    spec, sizes = policy.spec, policy.stored_sizes
    images = rng().integers(0, 256, (B, spec.cameras or 1, SIDE, SIDE, 3)).astype(np.uint8)
    width = max(spec.proprio_dim, 0 if not sizes.goals else sizes.proprio_dim)
    proprio = rng().normal(size=(B, width)).astype(np.float32) if spec.proprio_dim else None
    return *policy.prepare(images, proprio), ["reach the disc"] * B


def act(policy: SACPolicy, seed: int | None) -> Any:
    draws = np.random.default_rng(seed)
    noise = None if seed is None else np.stack([policy.spec.draw(draws) for _ in range(B)])
    return policy.act(*observed(policy), noise=noise, temperature=1.0)


def test_it_satisfies_the_protocols(policy: SACPolicy) -> None:
    critic = policy.new_critic(M)
    assert isinstance(policy, SACPolicy) and isinstance(policy, nn.Module)
    assert isinstance(critic, SACCritic) and isinstance(critic, nn.Module)
    assert all(parameter.requires_grad for parameter in critic.parameters())
    assert policy.parameter_mask.dtype == torch.bool
    assert (len(policy.parameter_mask) > 1) == policy.has_primitives


def test_samples_are_reparameterized(policy: SACPolicy) -> None:
    parameters, densities, choice, _ = sampled(policy)
    n, width = policy.parameter_mask.shape
    assert parameters.shape == densities.shape == (B, n, width) and parameters.abs().max() <= 1
    unused = ~policy.parameter_mask.expand(B, -1, -1)
    assert not parameters[unused].any() and not densities[unused].any()
    gradient = torch.autograd.grad(parameters.sum(), [p for p in policy.parameters() if p.requires_grad][-1:])
    assert gradient[0].abs().max() > 0
    assert torch.equal(sampled(policy)[0], parameters) and not torch.equal(sampled(policy, seed=1)[0], parameters)
    assert (choice is not None) == policy.has_primitives
    if choice is not None:
        assert choice.shape == (B, n) and torch.allclose(choice.exp().sum(-1), torch.ones(B), atol=1e-5)
    entropy, of_choice = policy.entropies(densities.sum(-1), choice)
    assert entropy.shape == (B,) and (of_choice is None) == (choice is None)


def test_critics_read_stored_decisions(policy: SACPolicy) -> None:
    critic, other = policy.new_critic(M), policy.new_critic(M)
    parameters, _, choice, _ = sampled(policy)
    n, proprio, images, sentences = parameters.shape[1], *stored(policy)
    kinds = None if choice is None else torch.arange(n).expand(B, -1)
    every = policy.critic_actions(parameters, kinds)
    assert every.shape == (B, n, policy.stored_sizes.action_width)
    values = critic(every, proprio, images, sentences)
    assert values.shape == (M, B, n)
    for k in range(n):
        one = critic(every[:, k], proprio, images, sentences)
        assert one.shape == (M, B) and torch.allclose(one, values[..., k], atol=1e-5)
    some = critic(every[:, 0], proprio, images, sentences, torch.tensor([2, 0]))
    assert torch.allclose(some, values[[2, 0], :, 0], atol=1e-5)
    assert not torch.equal(other(every, proprio, images, sentences), values), "weights are drawn for each"


def test_proprio_is_normalized_by_statistics_of_stored_proprio(policy: SACPolicy) -> None:
    size = policy.stored_sizes.proprio_dim
    if not size:
        pytest.skip("it reads no proprio")
    critic, before = policy.new_critic(M), sampled(policy)[0]
    mean, std = torch.linspace(-1, 1, size), torch.linspace(0.5, 2, size)
    for network in (policy, critic):
        network.set_proprio_normalization(mean, std)
    try:
        assert all(torch.equal(*pair) for pair in zip(critic.proprio_normalization(), (mean, std)))
        assert not torch.allclose(sampled(policy)[0], before, atol=1e-4)
    finally:
        policy.set_proprio_normalization(torch.zeros(size), torch.ones(size))


def test_a_decision_is_traced_as_it_is_stored(policy: SACPolicy) -> None:
    decision, spec = act(policy, seed=2), policy.spec
    assert decision.actions.shape == (B, spec.action_chunk_len, spec.action_dim)
    assert decision.trace["action"].shape == (B, policy.stored_sizes.action_width)
    encoded = policy.encode_actions(decision.actions)["action"]
    assert encoded.shape == decision.trace["action"].shape
    samples = []
    for row in range(B):
        images, proprio, instructions = observed(policy)
        state = None if proprio is None else torch.from_numpy(proprio[row])
        full = torch.zeros(2, policy.stored_sizes.proprio_dim)
        pixels = torch.from_numpy(images[row])
        trace = {name: torch.from_numpy(values[row : row + 1]) for name, values in decision.trace.items()}
        last = {"last_images": pixels, "last_proprio": state, "last_instruction": instructions[row]}
        first = {"images": pixels[None], "proprio": None if state is None else state[None], "observed_proprio": full}
        samples.append(SimpleNamespace(trace=trace, **last, **first))
    columns, sizes = policy.stored_observations(samples), policy.stored_sizes
    assert len(columns) == B
    for episode in columns:
        assert ("proprio" in episode) == bool(sizes.proprio_dim)
        assert ("images" in episode) == bool(sizes.num_images_in_input)
        if "proprio" in episode:
            assert episode["proprio"].shape == (2, sizes.proprio_dim)
        if "images" in episode:
            assert episode["images"].dtype == np.uint8 and episode["images"].shape[:2] == (2, sizes.num_images_in_input)


def test_flows_only_match_stored_decisions(policy: SACPolicy) -> None:
    if not policy.matching_noise:
        assert sampled(policy).matching_losses is None
        return
    proprio, images, sentences = stored(policy)
    sizes, alone = policy.stored_sizes, sampled(policy)
    actions = torch.linspace(-1, 1, B * sizes.action_width).view(B, -1)
    steps = torch.full((B,), sizes.action_chunk_len)
    matching = MatchingBatch(actions, steps, torch.ones(B, policy.matching_noise))
    noise = torch.randn(B, 1, policy.noise_width, generator=torch.Generator().manual_seed(0))
    both = policy(None if proprio is None else policy.policy_proprio(proprio), images, sentences, noise, matching)
    assert torch.equal(both.parameters, alone.parameters) and both.matching_losses is not None
    assert both.matching_losses.shape == (B,) and both.matching_losses.isfinite().all()


@pytest.mark.parametrize("exploration", ["random_actions", "random_primitives"])
def test_exploration_changes_sampled_decisions_only(policy: SACPolicy, exploration: str) -> None:
    if exploration == "random_primitives" and not policy.has_primitives:
        pytest.skip("it has no primitives")
    greedy, draws = act(policy, None).actions, [act(policy, seed).trace["action"] for seed in range(20)]
    setattr(policy, exploration, True)
    try:
        assert np.array_equal(act(policy, None).actions, greedy)
        assert any((act(policy, seed).trace["action"] != draw).any() for seed, draw in enumerate(draws))
    finally:
        setattr(policy, exploration, False)
