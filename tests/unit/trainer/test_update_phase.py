"""What goes along with the steps of an actor: the early end by KL, the moving average, demonstrations."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cli.train_ppo_vla import main as train
from rlvla.data.reading import read_demonstrations
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.trainer.config import BatchConfig, OptimizationConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.models import WeightAverage
from rlvla.trainer.observers import OptimizerStep
from rlvla.trainer.replay import ReplayList
from rlvla.trainer.supervised.demonstration_loss import DemonstrationLoss
from rlvla.trainer.updater import UpdatePhase
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine, OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from tests.support.ranks import ManyRanks

OPTIM = OptimConfig(0.1, (0.9, 0.999), 0.0, "constant", 0.0, 10)


@pytest.fixture(scope="module")
def strategy() -> DeepspeedStrategy:
    return DeepspeedStrategy(StrategyConfig())


class FakeUpdater:
    """Moves the policy by a KL of 0.1 per step; one step, counted from 0, measures another one."""

    def __init__(self, odd_step: int = -1, odd_kl: float = 0.0) -> None:
        self._odd_step, self._odd_kl = odd_step, odd_kl
        self.policy_steps = self.value_steps = 0

    def spread(self, step: Experience, metrics: Metrics) -> Experience:
        return step

    def policy_step(self, engine, step, kl_coef, metrics: Metrics, *, first_of_iteration: bool) -> float:
        assert first_of_iteration == (self.policy_steps == 0)
        kl = self._odd_kl if self.policy_steps == self._odd_step else 0.1 * self.policy_steps
        metrics.mean({"actor/ppo_kl": kl}, float(len(step)))
        self.policy_steps += 1
        return 1.0

    def value_step(self, engine, step, metrics: Metrics) -> float:
        self.value_steps += 1
        return 1.0


def replay(episodes: int = 4) -> ReplayList:
    rows = ReplayList()
    rows.append(one_row_episodes(episodes))
    return rows


def one_row_episodes(count: int) -> Experience:
    return Experience(
        images=torch.zeros(count, 1, 4, 4, 3, dtype=torch.uint8),
        instructions=["reach"] * count,
        episode_index=torch.arange(count),
        trace={"tokens": torch.zeros(count, 2, dtype=torch.long)},
        action_mask=torch.ones(count, 2, dtype=torch.bool),
    )


@pytest.mark.parametrize(("target_kl", "steps"), [(None, 6), (0.25, 4), (9.0, 6)])
def test_the_policy_is_left_alone_beyond_the_target(strategy, target_kl: float | None, steps: int) -> None:
    updater, metrics = FakeUpdater(), Metrics()
    batch, optimization = BatchConfig(train_batch_size=2, max_epochs=3), OptimizationConfig(target_kl=target_kl)
    steps_seen: list[OptimizerStep] = []
    phase = UpdatePhase(strategy, batch, optimization, updater, object(), object(), steps_seen.append)
    phase.run(0, replay(), 0.0, metrics)
    assert [step.model for step in steps_seen].count("actor") == steps
    assert sum(step.counts for step in steps_seen) == 6, "rows count once, whatever is trained on them"
    assert updater.policy_steps == steps and updater.value_steps == 6, "KLs of the steps: 0, 0.1, 0.2, 0.3, ..."
    assert metrics.reduce(strategy)["actor/optimizer_steps"] == steps


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("target_kl", "steps"), [(None, 6), (9.0, 2)])
def test_a_kl_that_is_not_finite_is_not_within_the_target(
    strategy, kl: float, target_kl: float | None, steps: int
) -> None:
    updater, optimization = FakeUpdater(1, kl), OptimizationConfig(target_kl=target_kl)
    batch = BatchConfig(train_batch_size=2, max_epochs=3)
    phase = UpdatePhase(strategy, batch, optimization, updater, object(), object(), lambda step: None)
    phase.run(0, replay(), 0.0, Metrics())
    assert updater.policy_steps == steps and updater.value_steps == 6


@pytest.mark.parametrize(
    ("episodes", "batch_size", "expected"),
    [([7], 3, [3, 2, 2]), ([9], 3, [3, 3, 3]), ([4, 3], 6, [4, 3]), ([4, 2], 6, [6]), ([6, 6], 4, [4, 4, 4])],
)
def test_steps_are_of_about_equal_size_over_all_ranks(
    episodes: list[int], batch_size: int, expected: list[int]
) -> None:
    world = ManyRanks(len(episodes))

    def sizes(rank: int) -> list[int]:
        strategy = world.of(rank)
        strategy.seed = 0
        rows: list[int] = []
        batch = BatchConfig(train_batch_size=batch_size, max_epochs=1)
        phase = UpdatePhase(
            strategy, batch, OptimizationConfig(), FakeUpdater(), object(), None, lambda s: rows.append(trained(s.rows))
        )
        phase.run(0, replay(episodes[rank]), 0.0, Metrics())
        return rows

    with ThreadPoolExecutor(len(episodes)) as pool:
        jobs = [pool.submit(sizes, rank) for rank in range(len(episodes))]
        assert [sum(step) for step in zip(*[job.result(timeout=60) for job in jobs], strict=True)] == expected


def trained(step: Experience) -> int:
    return int(step.action_mask.any(-1).sum())


def engine_of(strategy: DeepspeedStrategy) -> Engine:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    return strategy.prepare(model, OPTIM)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_average_is_used_and_the_weights_come_back(stage: int) -> None:
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage))
    engine = engine_of(strategy)
    average = WeightAverage(engine, 0.75)
    seen = [engine.module.weight.detach().clone()]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 3)).square().mean(), last=True)
        for model, norm in (("actor", 1.0), ("actor", math.nan), *[("critic", 1.0)] * 2):  # only the first counts
            average.after_step(OptimizerStep(model, engine, norm, one_row_episodes(1), 0, Metrics()))
        seen.append(engine.module.weight.detach().clone())
    expected = 0.75 * (0.75 * seen[0] + 0.25 * seen[1]) + 0.25 * seen[2]
    with average.in_place_of_weights():
        assert torch.allclose(engine.module.weight, expected) and not torch.equal(engine.module.weight, seen[2])
    assert torch.equal(engine.module.weight, seen[2])
    assert set(average.state_dict()) == {"weight"}, "what is not trained has no average"
    other = WeightAverage(engine_of(strategy), 0.75)
    other.load_state_dict(average.state_dict())
    assert torch.equal(other.state_dict()["weight"], average.state_dict()["weight"])


def test_the_demonstration_loss_is_the_mean_over_its_tokens(strategy, policy_folder: Path, demos_file: Path) -> None:
    """Any micro-batch size gives the gradient of coef * cross-entropy, added to that of the step."""
    demos, gradients, losses = read_demonstrations(demos_file), [], []
    for micro in (3, 64):
        actor = Actor.from_pretrained(policy_folder)
        engine, metrics = strategy.prepare(actor, OPTIM), Metrics()
        loss = DemonstrationLoss(demos, actor, strategy, 0.5, 8, micro)
        loss.accumulate(engine, (0, 1, 2), metrics)
        gradients.append(torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None]))
        losses.append(metrics.reduce(strategy)["actor/ptx_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] > 0
    assert torch.allclose(*gradients, atol=1e-6) and float(gradients[0].abs().max()) > 1e-4


def test_the_demonstration_loss_keeps_the_limit_of_tokens(
    strategy, policy_folder: Path, demos_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Actor.from_pretrained(policy_folder)
    engine, score, sizes = strategy.prepare(actor, OPTIM), actor.score, []
    monkeypatch.setattr(actor, "score", lambda rows, temperature: sizes.append(len(rows)) or score(rows, temperature))
    monkeypatch.setattr(actor, "row_tokens", lambda instructions, images: [20, *[10] * (len(instructions) - 1)])
    demos = read_demonstrations(demos_file)
    DemonstrationLoss(demos, actor, strategy, 0.5, 8, 64, max_tokens=65).accumulate(engine, (0, 1, 2), Metrics())
    assert sizes == [3, 3, 2], "three of the longest row"


BAD = {
    "--use_ema": (["--use_ema"], "--use_ema: there is no moving average; give --ema_beta"),
    "--ema_beta": (["--ema_beta", "0.9", "--zero_stage", "3"], "--ema_beta 0.9 needs whole parameters"),
    "--ptx_coef": (["--ptx_coef", "0.1"], "--ptx_coef and --ptx_demos belong together"),
    "--ptx_demos": (["--ptx_coef", "0.1", "--ptx_demos", "nowhere.hdf5"], "--ptx_demos: nowhere.hdf5 does not exist"),
    "--ptx_batch_size": (["--ptx_batch_size", "8"], "--ptx_batch_size 8: no effect without --ptx_coef"),
    "--desired_kl": (
        ["--desired_kl", "0.1", "--train_batch_size", "64"],
        "--desired_kl 0.1: an iteration has only one",
    ),
    "--kl_horizon": (
        ["--init_kl_coef", "0.1", "--kl_target", "0.1", "--kl_horizon", "2"],
        "could make the weight of the KL negative; take at least",
    ),
    "--target_kl": (["--target_kl", "0.1", "--train_batch_size", "64"], "--target_kl 0.1: an iteration has only one"),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_that_cannot_work(name: str, policy_folder: Path, tmp_path: Path, capsys) -> None:
    flags, message = BAD[name]
    with pytest.raises(SystemExit) as ended:
        train(["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *flags])
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
