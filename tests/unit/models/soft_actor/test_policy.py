"""Soft actors: decisions, stored transitions, and folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from rlvla.algorithms.off_policy import tanh_normal_log_prob
from rlvla.models.families import check_checkpoint
from rlvla.models.sac_policy import MatchingBatch, with_goals
from rlvla.models.soft_actor.config import SoftActorConfig
from rlvla.models.soft_actor.policy import SoftActorPolicy
from rlvla.utils.errors import ConfigError

PLAIN = SoftActorConfig(action_dim=2, action_chunk_len=3, proprio_dim=4, hidden_sizes=(16,))
FLOW = replace(PLAIN, flow_steps=3)
PRIMITIVES = SoftActorConfig(
    action_dim=6,
    action_chunk_len=5,
    proprio_dim=4,
    hidden_sizes=(16,),
    primitives=("reach", "open", "push"),
    primitive_sizes=(2, 0, 3),
)
SEEING = SoftActorConfig(
    action_dim=2, action_chunk_len=1, num_images_in_input=2, image_size=16, hidden_sizes=(16,), text_width=8
)


def policy_of(config: SoftActorConfig) -> SoftActorPolicy:
    torch.manual_seed(0)
    policy = SoftActorPolicy(config)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return policy


def act(policy: SoftActorPolicy, rows: int, noise: np.ndarray | None):
    config, rng = policy.config, np.random.default_rng(1)
    images = rng.integers(0, 256, (rows, config.num_images_in_input, 16, 16, 3)).astype(np.uint8)
    proprio = rng.normal(size=(rows, config.proprio_dim)).astype(np.float32)
    instructions = [("reach the red disc", "reach the blue disc")[row % 2] for row in range(rows)]
    decision = policy.act(images, proprio, instructions, noise=noise)
    observed = (torch.from_numpy(proprio), torch.from_numpy(images), policy.sentences(instructions))
    return decision, policy.encoder(*observed)


def draws(policy: SoftActorPolicy, rows: int) -> np.ndarray:
    rng = np.random.default_rng(2)
    return np.stack([policy.spec.draw(rng) for _ in range(rows)])


@pytest.mark.parametrize("config", [PLAIN, SEEING], ids=["state", "images"])
def test_a_chunk_is_sampled_with_its_density(config: SoftActorConfig) -> None:
    policy = policy_of(config)
    decision, features = act(policy, 64, draws(policy, 64))
    values = torch.from_numpy(decision.trace["action"])
    assert decision.actions.shape == (64, config.action_chunk_len, 2)
    assert np.array_equal(decision.actions.reshape(64, -1), values.numpy()) and np.abs(decision.actions).max() < 1
    distribution = policy.network.parameter_distribution(features)
    expected = tanh_normal_log_prob(values[:, None], *distribution, policy.parameter_mask).sum((1, 2))
    assert torch.allclose(torch.from_numpy(decision.log_probs[:, 0]), expected, atol=1e-4)
    assert not decision.log_probs[:, 1:].any()
    assert np.array_equal(policy.encode_actions(decision.actions)["action"], decision.trace["action"])


def test_it_acts_for_the_task_itself() -> None:
    plain, policy = policy_of(PLAIN), policy_of(replace(PLAIN, goals=3))
    assert policy.encoder.features == plain.encoder.features + 3
    policy.encoder.set_normalization(torch.full((4,), 0.5), torch.full((4,), 2.0))
    rng = np.random.default_rng(1)
    proprio, images = rng.normal(size=(5, 4)).astype(np.float32), np.zeros((5, 0, 16, 16, 3), np.uint8)
    decision = policy.act(images, proprio, [""] * 5, noise=None)
    for goal in range(3):
        observed = with_goals(torch.from_numpy(proprio), torch.full((5,), goal), 3)
        assert torch.equal(observed[:, 4:], torch.eye(3)[[goal] * 5])
        features = policy.encoder(observed, None, None)
        assert torch.equal(features[:, 4:], observed[:, 4:]) and torch.allclose(
            features[:, :4], (observed[:, :4] - 0.5) / 2
        )
        values, *_ = policy.network(features, torch.zeros(5, 1, 6))
        assert np.allclose(decision.trace["action"], values[:, 0].detach().numpy(), atol=1e-6) == (goal == 0)
    with pytest.raises(ConfigError, match="goals are read with proprio"):
        SoftActorConfig.from_json(replace(SEEING, goals=2).to_json(), Path("config.json"))


def test_a_primitive_is_its_choice_and_its_parameters() -> None:
    policy = policy_of(PRIMITIVES)
    decision, features = act(policy, 400, draws(policy, 400))
    stored = decision.trace["action"]
    kinds = stored[:, :3].argmax(1)
    assert set(kinds) == {0, 1, 2} and np.array_equal(stored[:, :3], np.eye(3)[kinds])
    unused = ~np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]], bool)[kinds]
    assert not stored[:, 3:][unused].any() and (stored[:, 3:][~unused] != 0).all()
    assert np.array_equal(decision.actions[:, 0], stored) and not decision.actions[:, 1:].any()
    choice = torch.log_softmax(policy.network.choice(features), -1)
    both = policy.network.parameter_distribution(features)
    row = torch.arange(400)
    density = tanh_normal_log_prob(
        torch.from_numpy(stored[:, None, 3:]).expand(-1, 3, -1), *both, policy.parameter_mask
    ).sum(-1)
    expected = choice[row, kinds] + density[row, kinds]
    assert torch.allclose(torch.from_numpy(decision.log_probs[:, 0]), expected, atol=1e-3)
    greedy, features = act(policy, 50, None)
    assert np.array_equal(greedy.trace["action"][:, :3].argmax(1), policy.network.choice(features).argmax(-1).numpy())


def test_the_choice_follows_its_probabilities() -> None:
    policy = policy_of(PRIMITIVES)
    with torch.no_grad():
        policy.network.choice[-1].weight.zero_()
        policy.network.choice[-1].bias.copy_(torch.tensor([0.5, 0.3, 0.2]).log())
    kinds = act(policy, 3000, draws(policy, 3000))[0].trace["action"][:, :3].argmax(1)
    counts = np.bincount(kinds, minlength=3)
    assert stats.chisquare(counts, 3000 * np.array([0.5, 0.3, 0.2])).pvalue > 1e-3
    policy.random_primitives = True
    kinds = act(policy, 3000, draws(policy, 3000))[0].trace["action"][:, :3].argmax(1)
    assert stats.chisquare(np.bincount(kinds, minlength=3)).pvalue > 1e-3


@pytest.mark.parametrize("config", [PLAIN, FLOW], ids=["state", "flow"])
def test_decisions_at_random_are_uniform_and_greedy_ones_are_not(config: SoftActorConfig) -> None:
    policy = policy_of(config)
    greedy = act(policy, 8, None)[0].actions
    assert not np.isclose(act(policy, 8, draws(policy, 8))[0].actions, greedy, atol=1e-3).any(), "samples differ"
    policy.random_actions = True
    values = act(policy, 2000, draws(policy, 2000))[0].trace["action"]
    assert all(stats.kstest(column, stats.uniform(-1, 2).cdf).pvalue > 1e-3 for column in values.T)
    assert np.array_equal(act(policy, 8, None)[0].actions, greedy), "evaluations do not explore"


def test_a_row_does_not_depend_on_the_batch() -> None:
    policy, noise = policy_of(PRIMITIVES), draws(policy_of(PRIMITIVES), 8)
    images, proprio = np.zeros((8, 0, 16, 16, 3), np.uint8), np.random.default_rng(0).normal(size=(8, 4))
    proprio = proprio.astype(np.float32)
    together = policy.act(images, proprio, ["x"] * 8, noise=noise).actions
    alone = [policy.act(images[[i]], proprio[[i]], ["x"], noise=noise[[i]]).actions[0] for i in range(8)]
    assert np.allclose(together, np.stack(alone), atol=1e-6)


@pytest.mark.parametrize("config", [PLAIN, PRIMITIVES, SEEING, FLOW], ids=["state", "primitives", "images", "flow"])
def test_a_folder_holds_the_policy(config: SoftActorConfig, tmp_path: Path) -> None:
    policy = policy_of(config)
    policy.encoder.set_normalization(torch.full((config.proprio_dim,), 0.5), torch.zeros(config.proprio_dim))
    policy.save_pretrained(tmp_path)
    read = check_checkpoint(tmp_path).load_policy()
    noise = draws(policy, 5)
    assert np.array_equal(act(read, 5, noise)[0].actions, act(policy, 5, noise)[0].actions)
    assert read.spec == policy.spec


DAMAGES = {
    "one primitive too many": (lambda c: c["primitives"].append("fly"), "4 primitives, but 3 primitive_sizes"),
    "wrong action_dim": (lambda c: c.update(action_dim=5), "do not fit actions"),
    "no observation": (lambda c: c.update(proprio_dim=0), "neither images nor proprio"),
    "a flow": (lambda c: c.update(flow_steps=2), "a flow is over plain actions, but there are primitives"),
    "no layers": (lambda c: c.update(hidden_sizes=[0]), "hidden_sizes"),
    "another width": (lambda c: c.update(hidden_sizes=[8]), "has shape"),
    "no chunk": (lambda c: c.pop("action_chunk_len"), "action_chunk_len missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(damage: str, tmp_path: Path) -> None:
    policy_of(PRIMITIVES).save_pretrained(tmp_path)
    change, text = DAMAGES[damage]
    content = json.loads((tmp_path / "config.json").read_text())
    change(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=text):
        check_checkpoint(tmp_path)


def test_a_flow_learns_two_ways_to_act_by_flow_matching() -> None:
    torch.manual_seed(0)
    policy = SoftActorPolicy(SoftActorConfig(1, 1, proprio_dim=1, hidden_sizes=(32,), flow_steps=4))
    optimizer, proprio = torch.optim.Adam(policy.parameters(), lr=1e-2), torch.zeros(256, 1)
    actions = torch.tensor([[-0.8], [0.8]]).repeat(128, 1)
    for _ in range(200):
        matching = MatchingBatch(actions, torch.ones(256, dtype=torch.long), torch.randn(256, policy.matching_noise))
        losses = policy(proprio, None, None, torch.zeros(256, 1, 2), matching).matching_losses
        assert losses is not None
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    starts = torch.cat([torch.randn(256, 1, 1), torch.zeros(256, 1, 1)], -1)  # without the noise of the last step
    sampled = policy(proprio, None, None, starts).parameters.flatten()
    assert (sampled > 0.5).float().mean() > 0.35 and (sampled < -0.5).float().mean() > 0.35
    assert sampled[sampled.abs() > 0.5].abs().mean().item() == pytest.approx(0.8, abs=0.1)
