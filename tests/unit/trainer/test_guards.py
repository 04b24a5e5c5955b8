"""A run that cannot learn is ended early, with its cause; one that can is left alone."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from cli.replay_batch import main as replay
from cli.train_ppo_vla import main as train
from rlvla.commands import replay_batch
from rlvla.commands.replay_batch import run_replay
from rlvla.experience import Experience
from rlvla.models.families import check_checkpoint
from rlvla.rollout.stats import saturated_fraction
from rlvla.trainer.guards import BadSteps, IdleCheck, read_batch, start_rollout_problems, start_update_problems
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import TrainingHalted
from rlvla.utils.files import read_metrics
from tests.support.flow_folders import QUICK, write_flow

HEALTHY_ROLLOUT = {"lowest_score": 0.0, "highest_score": 1.0, "episodes": 64.0, "saturated_proprio": 0.02}
HEALTHY_UPDATE = {
    "actor/grad_norm": 0.4,
    "critic/advantages/mean": 0.0,
    "critic/advantages/std": 1.0,
}


@pytest.fixture(scope="module")
def strategy() -> DeepspeedStrategy:
    return DeepspeedStrategy(StrategyConfig())


def test_a_healthy_start_has_no_problem() -> None:
    assert start_rollout_problems(HEALTHY_ROLLOUT, (0.3, 100)) == start_rollout_problems(HEALTHY_ROLLOUT, None) == []
    assert start_update_problems(HEALTHY_UPDATE) == []


@pytest.mark.parametrize(
    ("changes", "evaluation", "says"),
    [
        (
            {"highest_score": 0.0},
            (0.0, 100),
            r"first 64 episodes got the same reward \(0\), and none of 100 evaluation",
        ),
        ({"highest_score": 0.0}, None, r"first 64 episodes got the same reward"),
        ({"lowest_score": 1.0}, (1.0, 100), "succeeded in all of 164 episodes: there is nothing to learn"),
        ({"saturated_proprio": 0.8}, (0.3, 100), "80 % of the proprioception lies at or outside"),
    ],
)
def test_a_reward_or_statistics_to_learn_nothing_from(changes: dict, evaluation: tuple | None, says: str) -> None:
    (problem,) = start_rollout_problems(HEALTHY_ROLLOUT | changes, evaluation)
    assert re.search(says, problem)


@pytest.mark.parametrize(
    ("changes", "evaluation"),
    [
        ({"highest_score": 0.0, "episodes": 8.0}, (0.0, 4)),  # too few to tell
        ({"highest_score": 0.0}, (0.1, 100)),  # greedy it succeeds: the sampled episodes had bad luck
        ({"lowest_score": -1.0}, (0.0, 100)),  # the reward varies without a success
    ],
)
def test_what_may_still_learn_is_left_alone(changes: dict, evaluation: tuple) -> None:
    assert start_rollout_problems(HEALTHY_ROLLOUT | changes, evaluation) == []


def test_a_dead_gradient() -> None:
    (problem,) = start_update_problems(HEALTHY_UPDATE | {"actor/grad_norm": 0.0})
    assert "no trainable weight reaches the loss" in problem
    vanishing = {"actor/grad_norm": 0.0, "critic/advantages/std": 0.0}
    assert start_update_problems(HEALTHY_UPDATE | vanishing) == [], "without advantages there is no gradient"
    frozen = {name: value for name, value in HEALTHY_UPDATE.items() if not name.startswith("actor")}
    assert start_update_problems(frozen) == []


def test_idle_iterations_are_counted_in_a_row() -> None:
    idle, busy = {"critic/advantages/mean": 0.0, "critic/advantages/std": 0.0}, HEALTHY_UPDATE
    check = IdleCheck(3)
    for metrics in (idle, idle, busy, idle, idle):
        check.check(metrics)
    with pytest.raises(TrainingHalted, match="in 3 iterations in a row all advantages were zero"):
        check.check(idle)
    for _ in range(9):
        IdleCheck(0).check(idle)


def rows(n: int = 3) -> Experience:
    return Experience(
        images=torch.zeros(n, 1, 4, 4, 3, dtype=torch.uint8),
        instructions=["reach"] * n,
        trace={"tokens": torch.arange(2 * n).view(n, 2)},
        action_mask=torch.ones(n, 2, dtype=torch.bool),
        advantages=torch.tensor([[1.0, math.nan]] * n),
    )


def test_batches_of_bad_steps_are_kept_and_end_the_run(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    bad = BadSteps(tmp_path / "bad", 2, strategy)
    assert bad.check("actor", 0.5, rows(), 1, {})
    assert not bad.check("actor", math.nan, rows(), 1, {"temperature": 1.5})
    assert bad.check("actor", 0.5, rows(), 1, {})  # in a row only
    assert not bad.check("critic", math.inf, rows(), 1, {})
    assert not bad.check("actor", math.inf, rows(), 2, {"temperature": 1.5})
    with pytest.raises(TrainingHalted, match=r"2 optimizer steps of the actor in a row .* cli/replay_batch.py --batch"):
        bad.check("actor", math.nan, rows(), 2, {"temperature": 1.5})
    assert bad.total == 4 and bad.in_a_row == {"actor": 2, "critic": 1}
    stored = read_batch(sorted((tmp_path / "bad").glob("*_actor_*"))[-1])
    again = stored.rows
    assert (stored.model, stored.settings, stored.prepared) == ("actor", {"temperature": 1.5}, True)
    assert torch.equal(again.action_tokens, rows().action_tokens) and again.instructions == ["reach"] * 3
    assert again.values is None and again.advantages.isnan().sum() == 3


def test_no_batch_of_a_bad_step_is_replaced(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    """Neither by a later step of the same iteration, nor when the iteration is done again."""
    for _ in ("a run", "the run continued"):
        bad = BadSteps(tmp_path, 5, strategy)
        for value in (math.nan, 0.5, math.nan):
            bad.check("actor", value, rows(), 3, {})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"iteration_000003_actor_{number}_rank0.pt" for number in (1, 2, 3, 4)]


def test_share_of_saturated_proprio() -> None:
    normalized = torch.tensor([[0.2, 1.0, 0.0], [-0.3, 1.5, 0.0]])
    assert saturated_fraction(normalized) == 0.5  # the last dimension never varies
    assert saturated_fraction(torch.zeros(4, 0)) == 0.0
    assert saturated_fraction(normalized, limit=1.5) == 0.25


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(stage: int, value: float, bf16: bool) -> None:
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage, bf16=bf16))
    row = torch.ones(4, 3, dtype=torch.bfloat16 if bf16 else torch.float32)
    torch.manual_seed(0)
    engine = strategy.prepare(torch.nn.Linear(3, 2), OptimConfig(0.1, (0.9, 0.999), 0.0, "linear", 0.0, 10))

    def weights() -> torch.Tensor:
        with engine.full_parameters() as module:
            return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()

    def step(factor: float) -> float | None:
        return engine.backward(engine(row).float().square().mean() * factor, last=True)

    assert math.isfinite(step(1.0))
    before, rate = weights(), engine.learning_rate
    assert not math.isfinite(step(value))
    assert torch.equal(weights(), before) and engine.learning_rate == rate
    assert math.isfinite(step(1.0)) and not torch.equal(weights(), before)
    assert weights().isfinite().all()


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)])
def test_a_loss_that_is_not_finite_costs_the_step_though_its_gradient_is(stage: int, offload: bool) -> None:
    """In one micro-batch of several; the next step knows nothing of it."""
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage, adam_offload=offload))
    torch.manual_seed(0)
    engine = strategy.prepare(torch.nn.Linear(3, 2), OptimConfig(0.01, (0.9, 0.999), 0.0, "linear", 0.0, 10))

    def weights() -> torch.Tensor:
        with engine.full_parameters() as module:
            return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()

    def step(*added: float) -> float | None:
        for index, constant in enumerate(added):
            loss = engine(torch.full((4, 3), 1.0)).square().mean() + constant
            norm = engine.backward(loss, last=index == len(added) - 1)
        return norm

    norm = step(0.0, 5.0)
    before, rate = weights(), engine.learning_rate
    for bad in ((math.nan, 0.0), (0.0, math.inf)):
        assert not math.isfinite(step(*bad))
        assert torch.equal(weights(), before) and engine.learning_rate == rate
    again = step(0.0, 0.0)
    assert math.isfinite(again) and 0 < again < 2 * norm and weights().isfinite().all()
    assert not torch.equal(weights(), before)


# ------------------------------------------------------------------------------------------------------ whole runs
TINY_RUN = [
    *("--num_episodes", "4", "--rollout_batch_size", "4", "--train_batch_size", "2", "--num_envs", "1"),
    *("--no-val_before_train", "--eval_episodes", "2", "--no-use_tensorboard", "--max_steps", "8"),
    *("--max_epochs", "3", "--entropy_loss_coef", "0.01"),
]


def test_a_run_whose_gradients_are_not_finite_ends_and_its_batch_can_be_replayed(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rlvla.trainer.updater.aggregate_loss", lambda loss, *_, **__: loss.sum() * math.nan)
        with pytest.raises(SystemExit) as ended:
            train(["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *TINY_RUN])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "3 optimizer steps of the actor in a row had NaN or infinity" in told and "Traceback" not in told
    batches = sorted((tmp_path / "run" / "bad_batches").iterdir())
    assert len(batches) == 3
    replay(["--batch", str(batches[0]), "--pretrain", str(policy_folder)])
    assert "everything is finite with this checkpoint" in capsys.readouterr().out

    content = torch.load(batches[0], weights_only=True)
    content["experience"]["advantages"][1] = math.inf
    torch.save(content, tmp_path / "broken.pt")
    found = run_replay(tmp_path / "broken.pt", policy_folder)
    assert found.fields == {"advantages": [1]} and list(found.rows) == [1] and not found.weights

    content = torch.load(batches[0], weights_only=True)
    latent = torch.zeros(len(content["experience"]["instructions"]), 3)
    latent[1, 2] = math.nan
    content["experience"]["trace"]["latent"] = latent
    torch.save(content, tmp_path / "broken.pt")
    found = run_replay(tmp_path / "broken.pt", policy_folder)
    assert found.fields == {"trace.latent": [1]} and not found.rows, "tokens are all that this policy reads"


def test_a_batch_is_replayed_with_the_settings_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = write_flow(tmp_path / "start")
    flags = ["--policy_loss", "dppo", "--flow_noisy_steps", "all", "--flow_steps", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "rlvla.algorithms.policy_losses.common.aggregate_loss", lambda loss, *_, **__: loss.sum() * math.nan
        )
        with pytest.raises(SystemExit) as ended:
            train(["--pretrain", str(start), "--save_path", str(tmp_path / "run"), *QUICK, *flags])
    assert ended.value.code == 1
    batch = next((tmp_path / "run" / "bad_batches").iterdir())
    found = run_replay(batch, start)
    assert not (found.fields or found.rows or found.weights)


def test_a_batch_of_version_0_1_is_prepared_before_it_is_replayed(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what the environment showed; networks of 0.1 prepared that in every forward pass."""
    policy, n = check_checkpoint(policy_folder).load_policy(), 2
    columns, raw = policy.spec.columns, torch.tensor([[0.3, -0.2], [-0.1, 0.05]])
    experience = {
        "images": torch.randint(0, 256, (n, 1, 64, 64, 3), dtype=torch.uint8),
        "proprio": raw,
        "instructions": ["reach the red disc"] * n,
        "action_tokens": torch.arange(n * columns).view(n, columns),
        "action_mask": torch.ones(n, columns, dtype=torch.bool),
        "advantages": torch.ones(n, columns),
        "ref_all_log_probs": torch.full((n, columns, 256), -math.log(256)),
    }
    path = tmp_path / "iteration_000001_actor_1_rank0.pt"
    torch.save({"experience": experience, "model": "actor", "settings": {"temperature": 1.0}}, path)
    stored = read_batch(path)
    assert not stored.prepared and torch.equal(stored.rows.proprio, raw)
    assert torch.equal(stored.rows.action_tokens, experience["action_tokens"])
    assert torch.equal(stored.rows.reference["log_probs"], experience["ref_all_log_probs"])

    seen, inspect = [], replay_batch.inspect
    monkeypatch.setattr(replay_batch, "inspect", lambda rows, *rest: (seen.append(rows), inspect(rows, *rest))[1])
    found = run_replay(path, policy_folder)
    assert not (found.fields or found.rows or found.weights)
    images, proprio = policy.prepare(experience["images"].numpy(), raw.numpy())
    assert (proprio != raw.numpy()).any(), "the statistics of the policy change these numbers"
    assert torch.equal(seen[0].proprio, torch.from_numpy(proprio))
    assert torch.equal(seen[0].images, torch.from_numpy(images))


def test_a_run_whose_losses_are_not_finite_skips_counts_and_ends(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value loss is NaN, its gradient is not; the actor goes on until the critic ends the run."""
    from rlvla.trainer import updater as updates

    calls, value_loss = [], updates.value_loss

    def sometimes_nan(*args: object, **kw: object) -> tuple[torch.Tensor, dict]:
        calls.append(1)
        loss, metrics = value_loss(*args, **kw)
        return loss + (math.nan if len(calls) in bad else 0.0), metrics

    monkeypatch.setattr(updates, "value_loss", sometimes_nan)
    flags = ["--pretrain", str(policy_folder), *TINY_RUN]  # six optimizer steps of one micro-batch
    bad = {2, 3, 5}
    train([*flags, "--save_path", str(tmp_path / "survives")])
    (record,) = [r for r in read_metrics(tmp_path / "survives") if "critic/vf_loss" in r]
    assert record["critic/skipped_steps"] == 3 and record["actor/optimizer_steps"] == 6
    assert "actor/skipped_steps" not in record
    assert {p.name.split("_")[2] for p in (tmp_path / "survives/bad_batches").iterdir()} == {"critic"}

    calls.clear()
    bad = {3, 4, 5}
    with pytest.raises(SystemExit) as ended:
        train([*flags, "--save_path", str(tmp_path / "ends")])
    assert ended.value.code == 1 and len(calls) == 5
    told = capsys.readouterr().err
    assert "3 optimizer steps of the critic in a row had NaN or infinity in their loss or gradient" in told


def test_a_file_that_is_no_batch_is_refused_in_one_line(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "batch.pt").write_text("nothing")
    with pytest.raises(SystemExit) as ended:
        replay(["--batch", str(tmp_path / "batch.pt"), "--pretrain", str(policy_folder)])
    assert ended.value.code == 2 and "cannot be read as the batch" in capsys.readouterr().err
