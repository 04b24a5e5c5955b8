"""Implicit Q-learning on recorded episodes, and advantage-weighted regression with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cli import collect_demos, train_sft_vla, train_value_vla
from rlvla.data.reading import read_several
from rlvla.data.return_rows import ActionScale, Transitions, return_scales, with_chunks
from rlvla.data.rows import DemonstrationRows, observations_of
from rlvla.evaluation.statistics import auroc
from rlvla.models.families import check_checkpoint
from rlvla.models.value_models import ACTION_CHUNK
from rlvla.trainer.supervised.advantages import advantages_ahead, advantages_of_actions
from rlvla.trainer.supervised.return_model_trainer import ReturnFacts
from rlvla.utils.files import read_metrics

CPU = torch.device("cpu")
CHUNK = 3
SMALL = ["--pretrain", "compact", "--compact_channels", "8", "--compact_width", "32", "--no-use_tensorboard"]
SMALL += ["--action_chunk_len", str(CHUNK), "--train_batch_size", "32"]
SFT = [*SMALL, "--max_steps", "4", "--logging_steps", "1"]
IQL = ["--value_objective", "iql", "--target_tau", "0.2", "--max_epochs", "4", "--learning_rate", "2e-2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Successes and failures that only the second action dimension tells apart; a model of IQL, a return model."""
    folder = tmp_path_factory.mktemp("iql")
    words = ["--task_suite_name", "toy_reach", "--task_ids", "0", "--image_size", "16", "--num_demos", "20"]
    words += ["--keep", "all", "--offset_prob", "0.6", "--offset_max", "0.6", "--num_envs", "1"]
    collect_demos.main([*words, "--output", str(folder / "own")])
    with h5py.File(folder / "own" / "demos.hdf5", "r+") as file:
        for demo in file["data"].values():
            demo["actions"][:, 1] = 0.5 if demo.attrs["success"] else -0.5
            for camera in demo["obs"].values():
                camera[:] = np.linspace(0, 255, len(camera), dtype=np.uint8).reshape(-1, *[1] * (camera.ndim - 1))
    (folder / "own" / "dataset_statistics.json").unlink()
    paths = {name: str(folder / name) for name in ("own", "iql", "returns")}
    words = ["--demos", paths["own"], *SMALL]
    train_value_vla.main([*words, *IQL, "--save_path", paths["iql"]])
    train_value_vla.main([*words, "--max_epochs", "1", "--save_path", paths["returns"]])
    for name in ("iql", "returns"):
        written = Path(paths[name]) / "return_model" / "returns.json"
        written.write_text(json.dumps(json.loads(written.read_text()) | {"explained_variance": 0.5}))
    return paths


def train(data: dict[str, str], folder: Path, *flags: str, by: str | None = "iql") -> Path:
    words = ["--demos", data["own"], *SFT, "--save_path", str(folder), *flags]
    train_sft_vla.main([*words, *([] if by is None else ["--advantage_weighting", data[by]])])
    return folder / "policy"


def test_actions_that_lead_to_success_have_advantages(data: dict[str, str]) -> None:
    demos, folder = read_several([data["own"]]), Path(data["iql"]) / "return_model"
    facts = ReturnFacts.read(folder)
    assert facts.scales == return_scales(demos, 1.0) and facts.actions == ActionScale.of(demos)
    model = facts.load_model(folder, CPU)
    advantages = advantages_of_actions(model, facts.actions, demos, CPU, CHUNK)
    success = np.repeat(demos.success, [len(images) for images in demos.images])
    assert 0 < success.mean() < 1 and auroc(advantages.tolist(), success.tolist()) > 0.8
    inputs = with_chunks(observations_of(demos, range(20), model), demos, range(20), facts.actions, CHUNK)
    output = model(**model.score(inputs))
    assert not torch.equal(output["action_values"], output["target_values"]), "the targets lag behind"
    assert torch.equal(model.expected_returns(inputs), output["values"].clamp(-1, 0)), "V is read as in training"
    features = model.observed(batch=inputs).detach().requires_grad_()
    output = model.head(features, inputs.trace[ACTION_CHUNK])
    sums = (output[name].square().sum() for name in ("values", "action_values", "returns"))
    gradients = [torch.autograd.grad(of_output, features, allow_unused=True)[0] for of_output in sums]
    assert gradients[:2] == [None, None] and gradients[2].any(), "features are learned from returns alone"
    slow = output["target_values"].min(1).values - output["values"]
    assert advantages == pytest.approx(slow.detach().numpy(), abs=1e-5)


def test_transitions_and_chunks_against_slow_ones(data: dict[str, str]) -> None:
    demos = read_several([data["own"]])
    scales, scale = return_scales(demos, 1.0), ActionScale.of(demos)
    every = np.concatenate(demos.actions)
    assert np.allclose(scale.mean, every.mean(0)) and np.allclose(scale.std, every.std(0))
    episodes = [3, 1]
    found = Transitions.of(demos, episodes, scales, CHUNK)
    row = first = 0
    for i in episodes:
        length, cost = len(demos.actions[i]), scales[demos.instructions[i]].step
        for t in range(length):
            inside = t + CHUNK < length
            wanted = -cost * min(CHUNK, length - t) + (0.0 if inside or demos.success[i] else -0.5)
            assert float(found.rewards[row]) == pytest.approx(wanted, abs=1e-6)
            assert found.bootstraps[row] == inside and found.following[row] == (first + t + CHUNK if inside else row)
            row += 1
        first += length
    actions = demos.actions[1]
    chunks = scale.chunks(actions, np.arange(len(actions)), CHUNK)
    for t in range(len(actions)):
        for k in range(CHUNK):
            wanted = (actions[min(t + k, len(actions) - 1)] - every.mean(0)) / every.std(0)
            assert chunks[t, k] == pytest.approx(wanted, abs=1e-4)


def test_temperature_0_is_plain_training_to_the_bit(data: dict[str, str], tmp_path: Path) -> None:
    flags = ("--compact_head", "flow", "--max_steps", "2")
    plain = load_file(train(data, tmp_path / "plain", *flags, by=None) / "model.safetensors")
    equal = load_file(train(data, tmp_path / "equal", *flags, "--awr_temperature", "0") / "model.safetensors")
    assert plain.keys() == equal.keys() and all(torch.equal(plain[name], equal[name]) for name in plain)


@pytest.mark.parametrize("head", ["tokens", "gaussian", "flow"])
def test_weights_are_factors_on_the_rows(data: dict[str, str], tmp_path: Path, head: str) -> None:
    train(data, tmp_path, "--compact_head", head, "--max_steps", "1")
    shares, record = read_metrics(tmp_path)
    demos, folder = read_several([data["own"]]), Path(data["iql"]) / "return_model"
    facts, policy = ReturnFacts.read(folder), check_checkpoint(tmp_path / "start").load_policy()
    model = facts.load_model(folder, CPU)
    advantages = advantages_of_actions(model, facts.actions, demos, CPU, CHUNK)
    weights = np.minimum(np.exp(3.0 * (advantages - advantages.mean()) / advantages.std()), 100.0)
    weights /= weights.mean()
    assert shares["sft/awr_effective_share"] == pytest.approx(1 / np.square(weights).mean(), rel=1e-4)
    rows = DemonstrationRows(demos, policy)
    numbered = rows._rows.with_fields(episode_index=torch.arange(len(rows)))
    rows._rows = numbered
    batch = next(rows.batches(32, 1, 0))
    losses = policy(**policy.score(batch, 1.0), wants=("loss",))["loss"]
    total: Any = 0.0
    for row, of_row, mask in zip(batch.episode_index.tolist(), losses, batch.action_mask):
        total = total + weights[row] * of_row[mask].sum()
    (total / batch.action_mask.sum()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
    assert record["sft/grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_two_ranks_share_the_weighted_rows_of_one(data: dict[str, str]) -> None:
    demos = read_several([data["own"]])
    rows = DemonstrationRows(demos, check_checkpoint(Path(data["iql"]) / "start").load_policy())
    rows.weight_by(np.arange(len(rows)) / len(rows))
    whole, *halves = (next(rows.batches(16, 1, 0, rank, size)) for rank, size in ((0, 1), (0, 2), (1, 2)))
    assert [half.row_weights.tolist() for half in halves] == [whole.row_weights[k::2].tolist() for k in range(2)]


def test_a_return_model_gives_plain_advantage_weighted_regression(data: dict[str, str], tmp_path: Path) -> None:
    train(data, tmp_path / "run", "--max_steps", "1", "--advantage_horizon", "2", by="returns")
    demos, folder = read_several([data["own"]]), Path(data["returns"]) / "return_model"
    facts = ReturnFacts.read(folder)
    advantages = advantages_ahead(facts.load_model(folder, CPU), facts.scales, demos, CPU, 2 * CHUNK)
    weights = np.minimum(np.exp(3.0 * (advantages - advantages.mean()) / advantages.std()), 100.0)
    share = read_metrics(tmp_path / "run")[0]["sft/awr_effective_share"]
    assert share == pytest.approx(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()), rel=1e-4)


def test_state_values_serve_for_conditioning(data: dict[str, str], tmp_path: Path) -> None:
    words = ["--demos", data["own"], *SFT, "--max_steps", "1", "--save_path", str(tmp_path / "run")]
    train_sft_vla.main([*words, "--advantage_conditioning", data["iql"], "--label_demonstrations"])
    assert check_checkpoint(tmp_path / "run" / "policy").guidance == 1.0


def test_what_cannot_be_weighted_is_refused(
    data: dict[str, str], tmp_path: Path, refused: Callable[[Callable], list[str]]
) -> None:
    value = Path(shutil.copytree(data["iql"], tmp_path / "value"))
    written = value / "return_model" / "returns.json"
    record = json.loads(written.read_text())

    def reasons(*flags: str) -> list[str]:
        words = ["--demos", data["own"], *SFT, "--save_path", str(tmp_path / "run"), *flags]
        return refused(lambda: train_sft_vla.main([*words, "--advantage_weighting", str(value)]))

    written.write_text(json.dumps(record | {"explained_variance": 0.01}))
    assert reasons() == ["explains_nothing"]
    written.write_text(json.dumps(record | {"scales": {}}))
    assert reasons() == ["other_tasks"]
    written.write_text(json.dumps(record))
    assert reasons("--action_chunk_len", "4") == ["mismatch"]
    assert reasons("--advantage_conditioning", data["iql"], "--label_demonstrations") == ["contradiction"]
    written.unlink()
    assert reasons() == ["missing_file"]
    zero3 = ["--demos", data["own"], *SMALL, *IQL, "--zero_stage", "3", "--save_path", str(tmp_path / "run")]
    assert refused(lambda: train_value_vla.main(zero3)) == ["contradiction"]
    damaged = tmp_path / "damaged.hdf5"
    shutil.copy(Path(data["own"]) / "demos.hdf5", damaged)
    with h5py.File(damaged, "r+") as file:
        next(iter(file["data"].values()))["actions"][1] = np.nan
    nan = ["--demos", str(damaged), *SMALL, *IQL, "--save_path", str(tmp_path / "run")]
    assert len(refused(lambda: train_value_vla.main(nan))) == 1
    assert not (tmp_path / "run").exists()
