"""From flags to the mathematics: what estimators and losses are given, and what they make of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rlvla.algorithms import list_advantage_estimators
from rlvla.algorithms.advantages import get_advantage_estimator, register_advantage_estimator
from rlvla.algorithms.kl import kl_penalty
from rlvla.models.actor import Actor
from rlvla.models.reference import ReferenceModel
from rlvla.models.value_models import Critic
from rlvla.trainer.algorithm_config import AlgorithmConfig, CorrectionConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.scoring import Networks
from tests.support import experience as cases
from tests.support import slow_reference as slow

A, D, T = cases.A, cases.D, cases.A * cases.D
BUILT_IN = [name for name in list_advantage_estimators() if not name.startswith("test_")]
LEVELS = {"token": 1, "action": D, "chunk": T}


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder)


@pytest.fixture(scope="module")
def other(policy_folder: Path) -> ReferenceModel:
    """A reference that is not the actor."""
    torch.manual_seed(1)
    judge = Actor.from_pretrained(policy_folder)
    for parameter in judge.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return ReferenceModel(judge)


@pytest.fixture(scope="module")
def critic(policy_folder: Path) -> Critic:
    torch.manual_seed(0)
    found = Critic.from_pretrained(policy_folder)
    torch.nn.init.normal_(found.head.weight, std=0.3)
    return found


def make(actor, algorithm, *, critic=None, reference=None, samples=cases.SAMPLES, baselines=None, kl_coef=0.0, **more):
    engine = cases.PlainEngine(critic) if algorithm.needs_critic else None
    judges = Networks(cases.PlainEngine(actor), engine, reference)
    maker = ExperienceMaker(judges, cases.OneRank(), BatchConfig(micro_rollout_batch_size=3), algorithm, **more)
    rows, metrics = maker.make(samples, kl_coef, baselines)
    return rows, metrics.reduce(cases.OneRank()), maker


def starts() -> list[int]:
    return [sum(s.num_decisions for s in cases.SAMPLES[:i]) for i in range(len(cases.SAMPLES))]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_estimator_sees_the_episodes_column_by_column(actor, critic, name: str, level: str) -> None:
    """Against the function itself on columns packed by a plain loop."""
    algorithm = AlgorithmConfig.from_flags(advantage_estimator=name, advantage_level=level, gamma=0.9, lambd=0.8)
    baselines = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.5])
    rows, _, _ = make(actor, algorithm, critic=critic, baselines=baselines)
    width, longest = LEVELS[level], max(s.num_decisions for s in cases.SAMPLES)
    with torch.no_grad():
        every = actor(**actor.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"]
    squares = every.exp().square().sum(-1)
    shape = (len(cases.SAMPLES), longest * T // width)
    packed = {key: torch.zeros(shape) for key in ("rewards", "values", "log_probs", "squares")}
    mask, places = torch.zeros(shape, dtype=torch.bool), {}
    for episode, (item, start) in enumerate(zip(cases.SAMPLES, starts())):
        for decision in range(item.num_decisions):
            for column in range(T // width):
                tokens = [t for t in range(column * width, (column + 1) * width) if item.action_mask[decision, t]]
                if not tokens:
                    continue
                place, row = (episode, decision * (T // width) + column), start + decision
                mask[place], places[place] = True, (row, tokens[0])
                ends = [t // D for t in tokens if t % D == D - 1]
                packed["rewards"][place] = sum(float(item.rewards[decision, a]) for a in ends)
                packed["log_probs"][place] = sum(float(rows.old_log_probs[row, t]) for t in tokens)
                packed["squares"][place] = torch.prod(squares[row, tokens])
                if rows.values is not None:
                    packed["values"][place] = rows.values[row, tokens[0]]
        if name == "gae" and item.truncated:
            last = max(place[1] for place in places if place[0] == episode)
            seen = critic.score(rows.index(torch.tensor([start])))
            seen |= {"images": item.last_images[None], "proprio": item.last_proprio[None]}
            with torch.no_grad():
                packed["rewards"][episode, last] += 0.9 * float(critic(**seen)[0, 0])
    advantages, returns = get_advantage_estimator(name)(
        packed["rewards"],
        mask,
        group_ids=[item.uid for item in cases.SAMPLES],
        values=packed["values"],
        gamma=0.9,
        lam=0.8,
        reward_baselines=baselines,
        old_log_probs=packed["log_probs"],
        sum_pi_squared=packed["squares"],
        component_rewards={"success": packed["rewards"]},
    )
    if name != "grpo_passk":  # the best of these groups share their place
        assert float(advantages.abs().max()) > 0.01
    for place, (row, token) in places.items():
        assert float(rows.advantages[row, token]) == pytest.approx(float(advantages[place]), abs=2e-4)
        assert float(rows.returns[row, token]) == pytest.approx(float(returns[place]), abs=2e-4)


def test_components_enter_gdpo_without_their_weights_and_are_weighted_once(actor) -> None:
    speed = [torch.arange(s.rewards.numel(), dtype=torch.float32).reshape(s.rewards.shape) for s in cases.SAMPLES]
    weights = {"success": 2.0, "speed": -0.25, "off": 0.0}
    samples = []
    for item, extra in zip(cases.SAMPLES, speed):
        parts = {"success": 2.0 * item.rewards, "speed": -0.25 * extra, "off": 0.0 * extra}
        samples.append(dataclasses.replace(item, rewards=sum(parts.values()), reward_components=parts))
    algorithm = AlgorithmConfig(advantage_estimator="gdpo", advantage_level="chunk")
    rows, _, _ = make(actor, algorithm, samples=samples, reward_weights=lambda: weights)
    executed = [s.executed for s in cases.SAMPLES]
    scores = {
        "success": torch.tensor([float(s.rewards.sum()) for s in cases.SAMPLES]),
        "speed": torch.tensor([float(extra[done].sum()) for extra, done in zip(speed, executed)]),
    }
    total = torch.zeros(5)
    for name, values in scores.items():
        for uid in "ab":
            own = torch.tensor([s.uid == uid for s in cases.SAMPLES])
            total[own] += weights[name] * (values[own] - values[own].mean()) / (values[own].std() + 1e-6)
    spread = torch.cat([total[i].repeat(s.num_decisions) for i, s in enumerate(cases.SAMPLES)])
    wanted = (spread - spread.mean()) / (spread.var() + 1e-8).sqrt()
    assert torch.allclose(rows.advantages[:, 0], wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["k1", "k3", "full"])
def test_kl_in_the_reward_is_charged_where_tokens_were_executed(actor, other, kind: str) -> None:
    algorithm = AlgorithmConfig(advantage_estimator="reinforce", init_kl_coef=0.3, kl_estimator=kind)
    rows, metrics, _ = make(actor, algorithm, reference=other, kl_coef=0.3)
    with torch.no_grad():
        mine, theirs = (
            m(**m.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"] for m in (actor, other.actor)
        )
    chosen = [x.gather(-1, rows.action_tokens.unsqueeze(-1)).squeeze(-1) for x in (mine, theirs)]
    kl = kl_penalty(mine, theirs, "full") if kind == "full" else kl_penalty(*chosen, kind)
    assert metrics["actor/ref_kl"] == pytest.approx(float(kl[rows.policy_mask].mean()), rel=1e-4)
    for item, start in zip(cases.SAMPLES, starts()):
        own = slice(start, start + item.num_decisions)
        wanted = item.score - 0.3 * float(kl[own][rows.policy_mask[own]].sum())
        assert float(rows.returns[start, 0]) == pytest.approx(wanted, abs=1e-3)
    assert rows.reference is None


def test_exact_kl_as_a_loss_keeps_all_columns_and_leaves_the_reward_alone(actor, other) -> None:
    algorithm = AlgorithmConfig(
        advantage_estimator="reinforce", init_kl_coef=0.3, kl_estimator="full", use_kl_loss=True
    )
    rows, metrics, _ = make(actor, algorithm, reference=other, kl_coef=0.3)
    with torch.no_grad():
        scored = other.actor(**other.actor.score(rows, 1.0), wants=("parameters",))
    assert rows.reference.keys() == {"log_probs"}
    assert torch.allclose(rows.reference["log_probs"], scored["parameters/log_probs"], atol=1e-5)
    assert metrics["actor/ref_kl"] > 0
    assert float(rows.returns[0, 0]) == pytest.approx(cases.SAMPLES[0].score)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["tis", "icepop"])
def test_rollout_weights_are_formed_per_column(actor, level: str, mode: str) -> None:
    correction = CorrectionConfig(rollout_is=mode, rollout_is_high=1.3, rollout_is_low=0.5)
    algorithm = AlgorithmConfig(advantage_estimator="reinforce", log_prob_level=level)
    gap = 0.2 * torch.randn(16, T, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        base, _, _ = make(actor, algorithm)
    samples = [
        dataclasses.replace(s, log_probs=(base.old_log_probs - gap)[start : start + s.num_decisions])
        for s, start in zip(cases.SAMPLES, starts())
    ]
    rows, metrics, _ = make(actor, algorithm, samples=samples, correction=correction)
    width = LEVELS[level]
    for row in range(len(rows)):
        for first in range(0, T, width):
            tokens = [t for t in range(first, first + width) if rows.policy_mask[row, t]]
            if tokens:
                ratio = float(gap[row, tokens].sum().exp())
                clamped = min(max(ratio, 0.5), 1.3)
                wanted = clamped if mode == "tis" or clamped == ratio else 0.0
                assert float(rows.rollout_weights[row, first]) == pytest.approx(wanted, abs=1e-4)
    assert metrics["rollout_corr/rollout_is_max"] <= 1.3 + 1e-6
    assert 0 < metrics["rollout_corr/ess"] < 1
    assert metrics["rollout_corr/probs_diff_max"] >= metrics["rollout_corr/probs_diff_mean"] > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rejected_columns_have_no_energy_in_the_optimal_token_baseline(actor, level: str) -> None:
    """They have no gradient, so they do not raise the weight of their episode in the baselines of later columns."""
    algorithm = AlgorithmConfig(advantage_estimator="optimal_token_baseline", advantage_level="token")
    base, _, _ = make(actor, algorithm)
    gap = torch.zeros(16, T)
    gap[0, 2] = 4.0
    samples = [
        dataclasses.replace(s, log_probs=(base.old_log_probs - gap)[start : start + s.num_decisions])
        for s, start in zip(cases.SAMPLES, starts())
    ]
    correction = CorrectionConfig(rollout_rs="k3", rollout_rs_level=level, rollout_rs_high=0.1)
    rows, _, _ = make(actor, algorithm, samples=samples, correction=correction)
    rejected = base.policy_mask & ~rows.policy_mask
    assert rejected.sum() == (1 if level == "token" else base.policy_mask[0].sum())
    with torch.no_grad():
        every = actor(**actor.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"]
    squares = every.exp().square().sum(-1)
    energy = torch.where(rows.policy_mask, 1 - 2 * rows.old_log_probs.exp() + squares, 0.0)
    with_energy = slow_advantages(energy, rows.action_mask)
    assert torch.allclose(rows.advantages[rows.policy_mask], with_energy[rows.policy_mask], atol=1e-5)
    changed = (rows.advantages - base.advantages)[rows.policy_mask].abs()
    assert changed.max() > 1e-3, "the rejection reaches the baselines"


def slow_advantages(energy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return-to-go minus the baselines that these energies [16, T] give, on the columns of both."""
    episodes = [list(range(start, start + s.num_decisions)) for s, start in zip(cases.SAMPLES, starts())]
    longest = max(map(len, episodes)) * T
    weights, masks, rewards = [], [], []
    for sample, own in zip(cases.SAMPLES, episodes):
        padding = [0.0] * (longest - len(own) * T)
        weights.append(energy[own].flatten().tolist() + padding)
        masks.append([bool(m) for m in mask[own].flatten().tolist() + padding])
        spread = torch.zeros(len(own), A, D)
        spread[..., -1] = sample.rewards
        rewards.append(spread.flatten().tolist() + padding)
    # A sampled token of probability 0 leaves w = 1 + squares.
    impossible = [[-1e9] * longest] * len(masks)
    squares = [[w - 1 for w in row] for row in weights]
    advantages, _ = slow.token_baseline(rewards, masks, [s.uid for s in cases.SAMPLES], impossible, squares)
    result = torch.zeros(16, T)
    for row, own in zip(advantages, episodes):
        result[own] = torch.tensor(row[: len(own) * T]).view(len(own), T)
    return result


def test_rejected_columns_take_no_part_in_the_policy_loss(actor) -> None:
    algorithm = AlgorithmConfig(advantage_estimator="reinforce", log_prob_level="action")
    base, _, _ = make(actor, algorithm)
    gap = torch.zeros(16, T)
    gap[3, 2] = 1.0  # k3 of that action: e - 2 = 0.718
    samples = [
        dataclasses.replace(s, log_probs=(base.old_log_probs - gap)[start : start + s.num_decisions])
        for s, start in zip(cases.SAMPLES, starts())
    ]
    for level, lost in (("token", {(3, 2), (3, 3)}), ("sequence", {(3, t) for t in range(T)})):
        correction = CorrectionConfig(rollout_rs="k3", rollout_rs_level=level, rollout_rs_high=0.1)
        rows, metrics, _ = make(actor, algorithm, samples=samples, correction=correction)
        missing = (base.policy_mask & ~rows.policy_mask).nonzero().tolist()
        assert {tuple(place) for place in missing} == {place for place in lost if base.policy_mask[place]}
        assert metrics["rollout_corr/rollout_rs_max"] == pytest.approx(
            0.718 if level == "token" else 0.718 / 4, abs=2e-3
        )
        assert torch.equal(rows.value_mask, base.value_mask)


def test_normalised_values_are_in_the_critics_units_and_the_estimator_sees_returns(actor, critic) -> None:
    plain, _, _ = make(actor, AlgorithmConfig(), critic=critic)
    rows, metrics, maker = make(actor, AlgorithmConfig(normalize_values=True), critic=critic)
    # Before anything has been seen the scale is 1 and the shift 0: the estimates are those without normalisation.
    assert torch.allclose(rows.advantages, plain.advantages, atol=1e-5)
    valid = rows.returns[rows.value_mask]
    assert float(valid.mean()) == pytest.approx(0.0, abs=1e-4) and float(valid.std(correction=0)) == pytest.approx(
        1, abs=1e-3
    )
    assert torch.allclose(rows.values, plain.values)
    again = ExperienceMaker(
        Networks(cases.PlainEngine(actor), cases.PlainEngine(critic), None), cases.OneRank(),
        BatchConfig(), AlgorithmConfig(normalize_values=True),
    )  # fmt: skip
    again.value_normalizer.load_state_dict(maker.value_normalizer.state_dict())
    scale, shift = again.value_normalizer.std, again.value_normalizer.mean
    later, measured = again.make(cases.SAMPLES, 0.0)
    seen = measured.reduce(cases.OneRank())["critic/values/mean"]
    assert seen == pytest.approx(float((plain.values * scale + shift)[plain.value_mask].mean()), abs=1e-4)
    assert metrics["critic/returns/mean"] != pytest.approx(0.0, abs=1e-3)


def test_an_estimator_of_the_users_own_gets_what_it_names(actor) -> None:
    seen = {}

    @register_advantage_estimator("test_own")
    def own(rewards, mask, *, reward_baselines, sum_pi_squared, **extra):
        seen.update(baselines=reward_baselines, squares=sum_pi_squared, extra=extra)
        return rewards, rewards

    algorithm = AlgorithmConfig(advantage_estimator="test_own")
    assert algorithm.needs_greedy_episodes and not algorithm.needs_critic
    make(actor, algorithm, baselines=torch.arange(5.0))
    assert seen["baselines"].tolist() == [0, 1, 2, 3, 4] and seen["squares"].shape == (5, 16) and seen["extra"] == {}
