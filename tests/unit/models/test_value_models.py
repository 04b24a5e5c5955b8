"""Critic and reward model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlvla.experience import Experience
from rlvla.models.value_models import REWARD_HEAD_FILE, VALUE_HEAD_FILE, Critic, RewardModel
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.errors import ConfigError

T = 8


def with_random_head(kind: type, folder: Path):
    model = kind(*_parts(folder))
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(model.head.bias, 0.2)
    return model.eval()


def _parts(folder: Path):
    critic = Critic.from_pretrained(folder)
    return critic.vla, critic.inputs


def test_values_of_a_new_critic_are_zero(policy_folder: Path, rows: Experience) -> None:
    critic = Critic.from_pretrained(policy_folder)
    values = critic(**critic.score(rows))
    assert values.shape == (3, T) and values.dtype == torch.float32
    assert not values.any()


def test_a_critic_can_be_made_to_crop_like_its_actor(policy_folder: Path) -> None:
    assert not Critic.from_pretrained(policy_folder).inputs.config.center_crop
    assert Critic.from_pretrained(policy_folder, center_crop=True).inputs.config.center_crop


def test_critic_starts_from_the_policy_and_is_a_separate_network(policy_folder: Path) -> None:
    critic = Critic.from_pretrained(policy_folder)
    policy = OpenVLAForActionPrediction.from_pretrained(policy_folder)
    assert all(torch.equal(p, critic.vla.state_dict()[name]) for name, p in policy.state_dict().items())
    other = Critic.from_pretrained(policy_folder)
    assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in other.parameters()}


@pytest.mark.parametrize(("kind", "head_file"), [(Critic, VALUE_HEAD_FILE), (RewardModel, REWARD_HEAD_FILE)])
def test_round_trip(kind: type, head_file: str, policy_folder: Path, rows: Experience, tmp_path: Path) -> None:
    model = with_random_head(kind, policy_folder)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / head_file).is_file()
    again = kind.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(model(**model.score(rows)), again(**again.score(rows)))
        assert model(**model.score(rows)).std() > 1e-3
    OpenVLAForActionPrediction.from_pretrained(tmp_path / "saved")  # the body stays a public checkpoint


def test_values_of_a_batch_equal_those_of_single_rows(policy_folder: Path, rows: Experience) -> None:
    critic = with_random_head(Critic, policy_folder)
    with torch.no_grad():
        together = critic(**critic.score(rows))
        alone = [critic(**critic.score(rows.index(torch.tensor([i])))) for i in range(3)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def test_gradients_reach_body_and_head(policy_folder: Path, rows: Experience) -> None:
    critic = with_random_head(Critic, policy_folder)
    critic(**critic.score(rows)).square().sum().backward()
    assert critic.head.weight.grad.abs().sum() > 0
    assert sum(float(p.grad.abs().sum()) for p in critic.vla.parameters() if p.grad is not None) > 0


def test_reward_model_gives_probabilities(policy_folder: Path, rows: Experience) -> None:
    model = with_random_head(RewardModel, policy_folder)
    p = model.success_probability(rows)
    assert p.shape == (3,) and bool(((p > 0) & (p < 1)).all())
    with torch.no_grad():
        assert torch.allclose(torch.logit(p), model(**model.score(rows))[:, 0], atol=1e-4)


def test_a_policy_is_not_a_reward_model(policy_folder: Path) -> None:
    with pytest.raises(ConfigError, match=REWARD_HEAD_FILE):
        RewardModel.from_pretrained(policy_folder)
