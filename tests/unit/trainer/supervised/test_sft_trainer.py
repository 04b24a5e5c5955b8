"""Supervised fine-tuning: rows, loss, result."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cli.replay_batch import main as replay
from cli.train_sft_vla import main
from rlvla.commands.custom_modules import CustomConfig
from rlvla.commands.train_sft import run_sft
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import read_demonstrations
from rlvla.data.rows import DemonstrationRows
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.config import ActorConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.models import WeightAverage
from rlvla.trainer.supervised import sft_trainer
from rlvla.trainer.supervised.config import NewModelConfig, SFTConfig, SFTRunConfig, ValidationConfig
from rlvla.trainer.supervised.validation import split_for_validation
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import read_metrics

A, D = 4, 2
TINY = ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--action_chunk_len", "4"]


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder)


@pytest.fixture(scope="module")
def demos(demos_file: Path) -> Demonstrations:
    return read_demonstrations(demos_file)


class Rank:
    """The part of a strategy that says which rows are this rank's."""

    def __init__(self, rank: int = 0, world_size: int = 1, seed: int = 0):
        self.rank, self.world_size, self.seed = rank, world_size, seed


def test_a_row_is_an_observation_and_the_actions_that_followed(
    actor: Actor, policy_folder: Path, demos: Demonstrations
) -> None:
    statistics = json.loads((policy_folder / "dataset_statistics.json").read_text())["toy_reach"]
    rows = DemonstrationRows(demos, actor)
    assert len(rows) == demos.num_steps
    everything = rows._rows
    start = len(demos.actions[0])
    for step in (0, 1, len(demos.actions[1]) - 2, len(demos.actions[1]) - 1):  # of the second episode
        row = start + step
        left = min(A, len(demos.actions[1]) - step)
        assert torch.equal(everything.images[row], torch.from_numpy(demos.images[1][step]))
        lowest, highest = (np.array(statistics["proprio"][q]) for q in ("q01", "q99"))
        normalized = 2 * (demos.proprio[1][step] - lowest) / (highest - lowest) - 1
        np.testing.assert_allclose(everything.proprio[row].numpy(), np.clip(normalized, -1, 1), atol=1e-6)
        assert everything.instructions[row] == demos.instructions[1]
        assert everything.action_mask[row].tolist() == [True] * (left * D) + [False] * ((A - left) * D)
        decoded = actor.inputs.decode_actions(everything.action_tokens[row].numpy()).reshape(A, D)
        low, high = (np.array(statistics["action"][q]) for q in ("q01", "q99"))
        wanted = np.clip(demos.actions[1][step : step + left], low, high)
        np.testing.assert_allclose(decoded[:left], wanted, atol=float((high - low).max()) / 255)


def test_every_row_once_per_epoch_and_ranks_share_each_step(actor: Actor, demos: Demonstrations) -> None:
    rows = DemonstrationRows(demos, actor)
    config = SFTConfig(max_epochs=2, train_batch_size=32)
    numbered = rows._rows.with_fields(episode_index=torch.arange(len(rows)))
    rows._rows = numbered

    def indices(rank: Rank) -> list[list[int]]:
        return [
            batch.episode_index.tolist()
            for batch in rows.batches(config.train_batch_size, config.max_epochs, rank.seed, rank.rank, rank.world_size)
        ]

    alone, first, second = indices(Rank()), indices(Rank(0, 2)), indices(Rank(1, 2))
    assert len(alone) == config.optimizer_steps(len(rows)) == 2 * (len(rows) // 32)
    assert [sorted(a + b) for a, b in zip(first, second)] == [sorted(step) for step in alone]
    epoch = [i for step in alone[: len(alone) // 2] for i in step]
    assert len(set(epoch)) == len(epoch), "no row twice in an epoch"
    assert alone[0] != alone[len(alone) // 2], "every epoch has its own order"
    assert alone == indices(Rank()) != indices(Rank(seed=1))


def train(folder: Path, demos_file: Path, *flags: str) -> Path:
    sizes = [] if "--pretrain" in flags else TINY
    main(["--demos", str(demos_file), "--save_path", str(folder), *sizes, "--no-use_tensorboard", *flags])
    return folder / "policy"


def test_the_loss_is_the_masked_cross_entropy(demos_file: Path, tmp_path: Path, demos: Demonstrations) -> None:
    """At a learning rate of almost 0 the metrics equal direct computations with the initial model on all data."""
    flags = ("--max_epochs", "1", "--train_batch_size", "1000", "--learning_rate", "1e-12")
    policy = train(tmp_path / "run", demos_file, *flags, "--micro_train_batch_size", "7")
    (record,) = read_metrics(tmp_path / "run")
    start = Actor.from_pretrained(policy)
    rows = DemonstrationRows(demos, start)._rows
    with torch.no_grad():
        table = start(**start.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"]
    nll = -table.gather(-1, rows.action_tokens.unsqueeze(-1)).squeeze(-1)
    right = (table.argmax(-1) == rows.action_tokens).float()
    assert record["sft/loss"] == pytest.approx(float(nll[rows.action_mask].mean()), abs=1e-4)
    assert record["sft/accuracy"] == pytest.approx(float(right[rows.action_mask].mean()), abs=1e-6)


def test_training_lowers_the_loss_and_the_micro_batch_changes_nothing(demos_file: Path, tmp_path: Path) -> None:
    flags = ("--max_epochs", "3", "--logging_steps", "1", "--train_batch_size", "50")
    one = train(tmp_path / "one", demos_file, *flags)
    losses = [record["sft/loss"] for record in read_metrics(tmp_path / "one")]
    assert losses[-1] < losses[0] - 0.05
    many = train(tmp_path / "many", demos_file, *flags, "--micro_train_batch_size", "9")
    a, b = (load_file(f / "model.safetensors") for f in (one, many))
    start = load_file(tmp_path / "one" / "start" / "model.safetensors")
    moved, other = (torch.cat([(w[name] - start[name]).flatten() for name in sorted(start)]) for w in (a, b))
    assert float(torch.cosine_similarity(moved, other, dim=0)) > 0.999


def test_steps_that_are_not_finite_are_left_out_counted_and_end_the_run(
    demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is NaN, its gradient is not: as in PPO."""
    calls, aggregate_loss = [], sft_trainer.aggregate_loss

    def sometimes_nan(*args: object, **kw: object) -> torch.Tensor:
        calls.append(1)
        return aggregate_loss(*args, **kw) + (math.nan if len(calls) in bad else 0.0)

    monkeypatch.setattr(sft_trainer, "aggregate_loss", sometimes_nan)
    flags = ("--max_epochs", "1", "--train_batch_size", "20", "--logging_steps", "999")  # steps of one micro-batch
    bad = {1, 2, 4}
    policy = train(tmp_path / "survives", demos_file, *flags)
    (record,) = read_metrics(tmp_path / "survives")
    assert record["step"] == len(calls) >= 5 and record["sft/skipped_steps"] == 3 and record["sft/grad_norm"] > 0
    assert all(tensor.isfinite().all() for tensor in load_file(policy / "model.safetensors").values())
    batches = sorted((tmp_path / "survives" / "bad_batches").iterdir())
    assert [path.name for path in batches] == [f"step_00000{n}_actor_1_rank0.pt" for n in (1, 2, 4)]
    replay(["--batch", str(batches[2]), "--pretrain", str(tmp_path / "survives" / "start")])
    assert "20 rows for the actor" in (told := capsys.readouterr().out) and "everything is finite" in told

    calls.clear()
    bad = {2, 4, 5}
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "ends", demos_file, *flags, "--max_bad_steps", "2")
    told = capsys.readouterr().err
    assert ended.value.code == 1 and len(calls) == 5 and "Traceback" not in told
    assert "2 optimizer steps of the actor in a row had NaN or infinity in their loss or gradient" in told
    assert not (tmp_path / "ends" / "policy").exists()
    bad = set(range(99))
    with pytest.raises(SystemExit):
        train(tmp_path / "never", demos_file, *flags)
    assert "3 optimizer steps of the actor in a row" in capsys.readouterr().err, "the default is that of PPO"


def test_equal_seeds_give_equal_policies(demos_file: Path, tmp_path: Path) -> None:
    runs = [train(tmp_path / n, demos_file, "--max_epochs", "1", "--seed", s) for n, s in zip("abc", "334")]
    a, b, c = (load_file(run / "model.safetensors") for run in runs)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_label_smoothing_raises_the_entropy(demos_file: Path, tmp_path: Path, demos: Demonstrations) -> None:
    entropies = []
    for smoothing in ("0", "0.9"):
        folder = train(
            tmp_path / smoothing,
            demos_file,
            "--max_epochs",
            "4",
            "--learning_rate",
            "3e-3",
            "--label_smoothing",
            smoothing,
        )
        actor = Actor.from_pretrained(folder)
        rows = DemonstrationRows(demos, actor)._rows.index(torch.arange(32))
        with torch.no_grad():
            entropies.append(float(actor(**actor.score(rows, 1.0))["entropy"].mean()))
    assert entropies[1] > entropies[0] + 0.02


def test_continuing_from_a_policy_with_lora(demos_file: Path, policy_folder: Path, tmp_path: Path) -> None:
    policy = train(
        tmp_path / "run", demos_file, "--pretrain", str(policy_folder), "--lora_rank", "4", "--max_epochs", "1"
    )
    before, after = (load_file(f / "model.safetensors") for f in (policy_folder, policy))
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("language_model" in name for name in changed)


def test_earlier_training_states_stay_recorded(
    demos_file: Path, policy_folder: Path, demos: Demonstrations, tmp_path: Path
) -> None:
    start = Path(shutil.copytree(policy_folder, tmp_path / "start"))
    record = json.loads((start / "rlvla_environment.json").read_text())
    (start / "rlvla_environment.json").write_text(json.dumps(record | {"learned_from": [[9000, 9100]]}))
    policy = train(tmp_path / "run", demos_file, "--pretrain", str(start), "--max_epochs", "1")
    states = [state for _, state in demos.init_states]
    after = json.loads((policy / "rlvla_environment.json").read_text())
    before = {"suite": "toy_reach", "task_id": None, "start": 9000, "stop": 9100}
    own = {"suite": "toy_reach", "task_id": 0, "start": min(states), "stop": max(states) + 1}
    assert after["learned_from"] == [before, own]


def test_a_policy_without_proprio_is_recorded_as_such(demos_file: Path, demos: Demonstrations, tmp_path: Path) -> None:
    policy = train(tmp_path / "run", demos_file, "--no-use_proprio", "--max_epochs", "1")
    assert json.loads((policy / "rlvla_environment.json").read_text())["use_proprio"] is False
    assert demos.proprio is not None
    assert DemonstrationRows(demos, Actor.from_pretrained(policy))._rows.proprio is None


def test_the_policy_folder_records_its_training_states(policy_folder: Path) -> None:
    demos = read_demonstrations(policy_folder.parents[1] / "demos")
    record = json.loads((policy_folder / "rlvla_environment.json").read_text())
    states = [state for _, state in demos.init_states]
    span = {"start": min(states), "stop": max(states) + 1}
    assert record["learned_from"] == [{"suite": "toy_reach", "task_id": 0, **span}]
    assert record["task_suite_name"] == "toy_reach" and record["use_proprio"] is True
    assert json.loads((policy_folder / "dataset_statistics.json").read_text()) == demos.statistics


def test_statistics_that_cannot_be_used_do_not_block_the_folder(
    demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copied = shutil.copytree(demos_file.parent, tmp_path / "demos")
    statistics = copied / "dataset_statistics.json"
    right = statistics.read_text()
    statistics.write_text(json.dumps(json.loads(right)["toy_reach"]))
    words = ["--demos", str(copied / "demos.hdf5"), "--save_path", str(tmp_path / "run"), "--action_chunk_len", "4"]
    words += ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--max_epochs", "1"]
    with pytest.raises(SystemExit):
        main([*words, "--no-use_tensorboard"])
    assert "statistics" in capsys.readouterr().err and not (tmp_path / "run").exists()
    statistics.write_text(right)
    main([*words, "--no-use_tensorboard"])
    assert (tmp_path / "run" / "policy").is_dir()


def test_measuring_does_not_change_training(demos_file: Path, tmp_path: Path) -> None:
    flags = ("--max_epochs", "2", "--train_batch_size", "100")
    plain = train(tmp_path / "plain", demos_file, *flags)
    played = ("--eval_epochs", "1", "--eval_episodes", "2", "--eval_samples", "0", "--num_envs", "1")
    measured = train(tmp_path / "measured", demos_file, *flags, *played)
    a, b = (load_file(folder / "model.safetensors") for folder in (plain, measured))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_moving_average_is_exported(demos_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decay rises: 1/10, 2/11, then the 0.25 that is asked for."""
    seen: list[dict[str, torch.Tensor]] = []

    def update(average: WeightAverage, steps: int | None = None) -> None:
        seen.append({name: p.detach().clone() for name, p in average._weights()})
        plain(average, steps)

    plain = WeightAverage.update
    monkeypatch.setattr(WeightAverage, "update", update)
    flags = ("--pretrain", "compact", "--compact_channels", "8", "--compact_width", "16", "--no-use_tensorboard")
    sizes = ("--max_steps", "3", "--train_batch_size", "20", "--action_chunk_len", "4")
    main(["--demos", str(demos_file), "--save_path", str(tmp_path), *flags, *sizes, "--ema_decay", "0.25"])
    start, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "policy"))
    for name, value in start.items():
        expected = value
        for weights, decay in zip(seen, (1 / 10, 2 / 11, 0.25), strict=True):
            expected = decay * expected + (1 - decay) * weights[name]
        torch.testing.assert_close(exported[name], expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(exported["network.join.weight"], seen[-1]["network.join.weight"])


def test_training_stops_when_nothing_improves_and_keeps_the_best(
    demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With a learning rate of almost 0 nothing does: the first of equal policies is the best."""
    flags = ("--max_epochs", "20", "--learning_rate", "1e-12", "--train_batch_size", "10", "--early_stopping", "2")
    played = ("--eval_epochs", "1", "--eval_episodes", "3", "--eval_samples", "2", "--num_envs", "1")
    policy = train(tmp_path, demos_file, *flags, *played, "--heldout_share", "0.25", "--heldout_rows", "20")
    records = read_metrics(tmp_path)
    per_epoch = min(r["step"] for r in records if "eval/success_at_end" in r)
    steps = [r["step"] for r in records if "sft_heldout/loss" in r]
    # Success was first measured after an epoch: two more without an improvement, then a tenth of the steps so far.
    assert steps == [0, per_epoch, 2 * per_epoch, 3 * per_epoch, 3 * per_epoch + round(0.3 * per_epoch)]
    assert all(r["eval/n"] == 3 for r in records if r["step"] in steps[1:] and "eval/n" in r)
    assert policy.is_dir() and not (tmp_path / "best_policy").exists()
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    shown = capsys.readouterr().out
    assert verdict["sentences"] and all(sentence in shown for sentence in verdict["sentences"])
    assert any(f"(step {per_epoch})" in s for s in verdict["sentences"]) and verdict["rl"] is not None
    assert shown.count("held-out loss") >= len(steps)


def test_a_time_budget_ends_training_with_a_falling_learning_rate(
    demos_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a second: 28 of them and a cool-down of a tenth are the first to exceed half a minute."""
    seconds = [0.0]
    plain = sft_trainer.SFTTrainer._train_step

    def train_step(*args: Any) -> float:
        seconds[0] += 1.0
        return plain(*args)

    monkeypatch.setattr(sft_trainer.SFTTrainer, "_train_step", train_step)
    monkeypatch.setattr(sft_trainer, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    flags = ("--train_batch_size", "10", "--logging_steps", "1", "--lr_scheduler", "constant")
    train(tmp_path / "ended", demos_file, *flags, "--max_steps", "100", "--max_minutes", "0.5")
    rates = [record["sft/lr"] for record in read_metrics(tmp_path / "ended")]
    assert len(rates) == 31 and rates[27] == max(rates) and sorted(rates[27:], reverse=True) == rates[27:]
    assert rates[-1] < 0.4 * rates[27]
    seconds[0] = 0.0
    train(tmp_path / "whole", demos_file, *flags, "--max_steps", "30", "--max_minutes", "0.5")
    assert len(read_metrics(tmp_path / "whole")) == 30, "its last steps take no longer than a cool-down"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"heldout_share": 0.001}, ("heldout_share", "too_few")),
        ({"heldout_share": 0.999}, ("heldout_share", "too_few")),
        ({"heldout_steps": 5}, ("heldout_steps", "no_effect")),
        ({"eval_samples": 2}, ("eval_samples", "no_effect")),
        ({"early_stopping": 2}, ("early_stopping", "no_effect")),
        ({"eval_epochs": 1.0, "eval_episodes": 9000}, ("eval_episodes", "too_few")),
        ({"heldout_share": -1.0}, ("heldout_share", "out_of_range")),
    ],
)
def test_measurements_that_cannot_be_made_are_refused(
    demos_file: Path, tmp_path: Path, flags: dict[str, float], expected: tuple[str, str]
) -> None:
    run = SFTRunConfig(demos=(str(demos_file),), save_path=str(tmp_path / "run"))
    parts = (NewModelConfig(), SFTConfig(), ActorConfig(), StrategyConfig(), CustomConfig(), ValidationConfig(**flags))
    with pytest.raises(ConfigError) as refused:
        run_sft(run, *parts)
    assert [(p.flag, p.reason) for p in refused.value.problems] == [expected]
    assert not (tmp_path / "run").exists()


def test_demonstrations_of_an_unknown_suite_cannot_be_played(demos_file: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(demos_file.parent, tmp_path / "demos"))
    with h5py.File(copied / "demos.hdf5", "r+") as file:
        env_args = json.loads(file["data"].attrs["env_args"])
        file["data"].attrs["env_args"] = json.dumps(env_args | {"task_suite_name": "elsewhere"})
    run = SFTRunConfig(demos=(str(copied / "demos.hdf5"),), save_path=str(tmp_path / "run"))
    parts = (NewModelConfig(), SFTConfig(), ActorConfig(), StrategyConfig(), CustomConfig())
    with pytest.raises(ConfigError) as refused:
        run_sft(run, *parts, ValidationConfig(eval_epochs=1.0))
    assert [(p.flag, p.reason) for p in refused.value.problems] == [("eval_epochs", "unavailable")]


def test_held_out_rows_are_not_trained_on(
    demos_file: Path, tmp_path: Path, demos: Demonstrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: set[bytes] = set()
    step = sft_trainer.SFTTrainer._train_step

    def recorded(self: sft_trainer.SFTTrainer, number: int, batch: Experience, means: Metrics) -> float:
        trained.update(image.numpy().tobytes() for image in batch.images)
        return step(self, number, batch, means)

    monkeypatch.setattr(sft_trainer.SFTTrainer, "_train_step", recorded)
    train(tmp_path, demos_file, "--max_epochs", "1", "--train_batch_size", "10", "--heldout_share", "0.25")
    train_side, heldout = split_for_validation(demos, ValidationConfig(heldout_share=0.25), 0)
    first = {side: {demos.images[i][0].tobytes() for i in part} for side, part in (("t", train_side), ("h", heldout))}
    assert not trained & first["h"] and len(trained & first["t"]) > 0.7 * len(first["t"])
