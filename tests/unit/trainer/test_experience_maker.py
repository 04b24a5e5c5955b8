"""Advantages of whole episodes against plain loops, at every level."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.algorithms.columns import Columns, EpisodeGrid
from rlvla.envs.base import ChunkResult, Observation
from rlvla.envs.chunks import ChunkRunner
from rlvla.models.actor import Actor
from rlvla.models.soft_actor.config import SoftActorConfig
from rlvla.models.soft_actor.policy import SoftActorPolicy
from rlvla.models.value_models import Critic
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.off_policy.config import ReplayConfig
from rlvla.trainer.off_policy.memory import Memory
from rlvla.trainer.scoring import Networks
from tests.support.experience import SAMPLES, A, D, OneRank, PlainEngine, sample


@pytest.fixture(scope="module")
def models(policy_folder: Path) -> tuple[Actor, Critic]:
    torch.manual_seed(0)
    critic = Critic.from_pretrained(policy_folder)
    torch.nn.init.normal_(critic.head.weight, std=0.3)
    return Actor.from_pretrained(policy_folder), critic


def make(models, algorithm: AlgorithmConfig, micro: int = 3, samples=SAMPLES, strategy=None, **judges):
    actor, critic = models
    critic = PlainEngine(critic) if algorithm.needs_critic else None
    everyone = Networks(PlainEngine(actor), critic, judges.get("reference"))
    batch = BatchConfig(micro_rollout_batch_size=micro)
    strategy = strategy or OneRank()
    maker = ExperienceMaker(everyone, strategy, batch, algorithm)
    rows, metrics = maker.make(samples, kl_coef=0.0)
    return rows, metrics.reduce(strategy)


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_gae_equals_a_plain_loop(models, level: str, goes_on: bool) -> None:
    gamma, lam = 0.9, 0.8
    settings = AlgorithmConfig.from_flags(gamma=gamma, lambd=lam, advantage_level=level, bootstrap_truncated=goes_on)
    rows, _ = make(models, settings)
    critic, width = models[1], Columns(level, A * D, D).width
    raw, start = [], 0
    with torch.no_grad():
        for item in SAMPLES:
            stop = start + item.num_decisions
            values = rows.values[start:stop]
            last = critic.score(rows.index(torch.tensor([start])))
            last |= {"images": item.last_images[None], "proprio": item.last_proprio[None]}
            bootstrap = float(critic(**last)[0, 0]) if item.truncated and goes_on else 0.0
            columns = []  # (value, reward, rows and tokens of the column)
            for s in range(item.num_decisions):
                for c in range(0, A * D, width):
                    if not item.action_mask[s, c]:
                        continue
                    actions = range(c // D, (c + width) // D) if width >= D else [c // D] * (c % D == D - 1)
                    reward = sum(float(item.rewards[s, a]) for a in actions)
                    columns.append((float(values[s, c]), reward, (start + s, c)))
            advantage, following = 0.0, bootstrap
            for value, reward, place in reversed(columns):
                delta = reward + gamma * following - value
                advantage, following = delta + gamma * lam * advantage, value
                raw.append((place, advantage, advantage + value))
            start = stop
    flat = torch.tensor([advantage for _, advantage, _ in raw])
    whitened = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()
    for (row, column), wanted, target in zip([r[0] for r in raw], whitened, [r[2] for r in raw]):
        assert float(rows.advantages[row, column]) == pytest.approx(float(wanted), abs=2e-4)
        assert float(rows.returns[row, column]) == pytest.approx(target, abs=1e-4)
        assert bool(rows.value_mask[row, column])
    assert int(rows.value_mask.sum()) == len(raw)


class Fragile:
    """Pays 0.1 at each of four steps; `careless` breaks it at the second one."""

    def __init__(self, careless: bool):
        self._runner, self._steps = ChunkRunner(max_steps=4, hold_steps=1), 0
        self._careless = careless

    def play(self) -> ChunkResult:
        def advance(action: np.ndarray) -> tuple[bool, frozenset[str]]:
            self._steps += 1
            return False, frozenset()

        self._runner.begin()
        last = Observation(np.zeros((1, 64, 64, 3), np.uint8), None, "")
        broken = lambda: (self._careless and self._steps == 2, False)  # noqa: E731
        return self._runner.play(np.zeros((A, D)), advance, lambda: last, reward=lambda: 0.1, ended=broken)


def test_failing_early_does_not_pay(models) -> None:
    """A critic that expects 1 everywhere: only the episode that goes on is worth more than its rewards."""
    constant = copy.deepcopy(models[1])
    torch.nn.init.zeros_(constant.head.weight)
    torch.nn.init.ones_(constant.head.bias)
    careful, careless = (Fragile(careless).play() for careless in (False, True))
    samples = [
        dataclasses.replace(
            sample(1, result.steps_executed, success=False, uid=uid, seed=7),
            rewards=torch.from_numpy(result.rewards)[None],
            terminated=result.terminated,
            truncated=result.truncated,
        )
        for uid, result in (("careful", careful), ("careless", careless))
    ]
    gamma, settings = 0.9, AlgorithmConfig.from_flags(gamma=0.9, lambd=1.0, advantage_level="action")
    rows, _ = make((models[0], constant), settings, samples=samples)
    paid = [sum(0.1 * gamma**step for step in range(steps)) for steps in (4, 2)]
    assert rows.returns[:, 0].tolist() == pytest.approx([paid[0] + gamma**4, paid[1]])

    actor = SoftActorPolicy(SoftActorConfig(action_dim=D, action_chunk_len=A, proprio_dim=2, hidden_sizes=(8,)))
    samples = [dataclasses.replace(s, trace={"action": torch.zeros(1, A * D)}) for s in samples]
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory(actor, ReplayConfig(replay_capacity=10), Path(folder) / "buffer")
        memory.append(samples, scale=1.0, version=0, now=0)
        drawn = memory.buffer.n_step(np.flatnonzero(memory.buffer.drawable), 1, gamma)
    np.testing.assert_allclose(drawn.returns, paid, rtol=1e-6)
    np.testing.assert_allclose(drawn.discounts, [gamma**4, 0.0], rtol=1e-6)


def test_metrics_are_those_of_the_valid_entries(models) -> None:
    rows, metrics = make(models, AlgorithmConfig())
    advantages = rows.advantages[rows.action_mask]
    values, returns = rows.values[rows.value_mask], rows.returns[rows.value_mask]
    difference = (rows.old_log_probs.exp() - rows.rollout_log_probs.exp())[rows.action_mask].abs()
    weights = (rows.old_log_probs - rows.rollout_log_probs).clamp(-20, 20).exp()[rows.action_mask]
    scores = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    wanted = {
        "rollout_corr/probs_diff_mean": difference.mean(),
        "rollout_corr/probs_diff_std": difference.std(correction=0),
        "rollout_corr/probs_diff_max": difference.max(),
        "rollout_corr/kl": (rows.rollout_log_probs - rows.old_log_probs)[rows.action_mask].mean(),
        "rollout_corr/k3_kl": (weights - weights.log() - 1).mean(),
        "rollout_corr/ess": weights.mean() ** 2 / weights.square().mean(),
        "critic/vf_explained_var": 1 - (returns - values).var() / returns.var(),
        "reward/total": 2 / 5,
    }
    for name, entries in (("score", scores), ("advantages", advantages), ("returns", returns), ("values", values)):
        wanted |= {f"critic/{name}/mean": entries.mean(), f"critic/{name}/std": entries.std(correction=0)}
        wanted |= {f"critic/{name}/max": entries.max(), f"critic/{name}/min": entries.min()}
    assert metrics == pytest.approx({name: float(value) for name, value in wanted.items()}, abs=1e-5)


def test_metrics_are_over_the_episodes_of_all_ranks(models) -> None:
    """Ranks with 2 and with 3 episodes, of unequal lengths, report what one rank with all of them does."""
    passed: list[dict[str, float]] = []
    kinds = {"sum": lambda a, b: a + b, "max": max, "min": min}

    class First(OneRank):
        def all_reduce(self, values, op="mean"):
            passed.append(dict(values))
            return dict(values)

    class Second(OneRank):
        def all_reduce(self, values, op="mean"):
            others = passed.pop(0)
            return {name: kinds[op](value, others[name]) for name, value in values.items()}

    make(models, AlgorithmConfig(), samples=SAMPLES[:2], strategy=First())
    _, together = make(models, AlgorithmConfig(), samples=SAMPLES[2:], strategy=Second())
    _, alone = make(models, AlgorithmConfig())
    assert not passed
    # Advantages are left out: without a process group each rank whitens its own.
    names = [name for name in alone if "advantages" not in name]
    assert {n: together[n] for n in names} == pytest.approx({n: alone[n] for n in names}, abs=1e-5)


def test_tokens_of_an_action_share_its_advantage(models) -> None:
    rows, _ = make(models, AlgorithmConfig(advantage_level="action"))
    assert torch.equal(rows.advantages[:, 0::2], rows.advantages[:, 1::2])


def test_grpo_compares_within_groups_only(models) -> None:
    rows, metrics = make(models, AlgorithmConfig(advantage_estimator="grpo"))
    a = torch.tensor([1.0, 1.0, 0.0])  # scores of group a: samples 0, 2, 4
    wanted = (a - a.mean()) / (a.std() + 1e-6)
    got = [float(rows.advantages[rows.episode_index == i][0, 0]) for i in range(5)]
    assert got == pytest.approx([float(w) for w in (wanted[0], 0, wanted[1], 0, wanted[2])], abs=1e-5)
    assert rows.values is None
    assert metrics["reward/total"] == pytest.approx(2 / 5)


def test_log_probs_do_not_depend_on_the_micro_batch(models) -> None:
    small, _ = make(models, AlgorithmConfig(), micro=2)
    large, _ = make(models, AlgorithmConfig(), micro=100)
    assert torch.allclose(small.old_log_probs, large.old_log_probs, atol=1e-5)


def test_episode_grid_round_trip() -> None:
    grid = EpisodeGrid([2, 1, 3])
    values = torch.arange(12.0).reshape(6, 2)
    packed = grid.pack(values)
    assert packed.tolist()[1] == [4.0, 5.0, 0.0, 0.0, 0.0, 0.0]
    assert torch.equal(grid.unpack(packed, 2), values)


def test_rewards_are_scaled_before_advantages_and_metrics_are_not(models) -> None:
    algorithm = AlgorithmConfig(advantage_estimator="reinforce", normalize_reward=True)
    actor, critic = models
    maker = ExperienceMaker(Networks(PlainEngine(actor), None, None), OneRank(), BatchConfig(), algorithm)
    maker.update_reward_scale(SAMPLES)
    deviation = float(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]).std(correction=0))
    rows, metrics = maker.make(SAMPLES, 0.0)
    measured = metrics.reduce(OneRank())
    assert float(rows.returns[0, 0]) == pytest.approx(1.0 / deviation)
    assert measured["reward/total"] == pytest.approx(0.4)
    assert measured["reward/normalizer_std"] == pytest.approx(deviation)


@pytest.mark.parametrize("estimator", ["gae", "reinforce"])
def test_advantages_of_each_task_are_whitened_by_themselves(models, estimator: str) -> None:
    samples = [dataclasses.replace(s, task_id=int(number > 1)) for number, s in enumerate(SAMPLES)]
    rows, _ = make(models, AlgorithmConfig(advantage_estimator=estimator), samples=samples)
    white, _ = make(models, AlgorithmConfig(advantage_estimator=estimator, whiten_per_task=True), samples=samples)
    tasks = torch.tensor([s.task_id for s in samples for _ in range(s.num_decisions)])
    for task in (0, 1):
        first = Columns("action", A * D, D).starts(rows.action_mask) & (tasks == task)[:, None]
        values = rows.advantages[first]
        expected = (values - values.mean()) / (values.var() + 1e-8).sqrt()
        assert expected.std() > 0.9
        torch.testing.assert_close(white.advantages[first], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(white.returns, rows.returns)
