"""The return model: a run on recorded episodes, its folder, and data or values that explain nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from cli import collect_demos, train_value_vla
from rlvla.algorithms.off_policy.augmentation import random_shifts, shifted
from rlvla.commands.train_return_model import verdict
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import joined, read_demonstrations
from rlvla.data.return_rows import ReturnRows, predicted_returns, return_scales
from rlvla.data.rows import observations_of
from rlvla.models.families import check_checkpoint
from rlvla.trainer.supervised.return_model_trainer import ReturnFacts, ReturnModelTrainer, explained_variance
from rlvla.utils.errors import ConfigError
from rlvla.utils.seeding import derive_rng, derive_seed

EPISODES = 40
SMALL = ["--pretrain", "compact", "--compact_channels", "8", "--compact_width", "32", "--no-use_tensorboard"]
SMALL += ["--image_shift", "0"]  # images have 16 pixels


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of an expert that often aims beside the disc; proprioception shows what a return model has to see."""
    folder = tmp_path_factory.mktemp("mixed") / "toy"
    words = ["--task_suite_name", "toy_reach", "--task_ids", "0", "--image_size", "16", "--num_demos", str(EPISODES)]
    words += ["--keep", "all", "--use_proprio", "--offset_prob", "0.6", "--offset_max", "0.6", "--num_envs", "1"]
    collect_demos.main([*words, "--output", str(folder)])
    with h5py.File(folder / "demos.hdf5", "r+") as file:
        for demo in file["data"].values():
            proprio = demo["obs/proprio"]
            proprio[:, 0], proprio[:, 1] = np.linspace(-1, 1, len(proprio)), demo.attrs["success"]
    (folder / "dataset_statistics.json").unlink()
    return folder / "demos.hdf5"


def test_a_run_predicts_held_out_returns(mixed_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--demos", str(mixed_file), *SMALL, "--use_proprio", "--save_path", str(tmp_path / "value")]
    train_value_vla.main([*words, "--max_epochs", "12", "--train_batch_size", "32", "--learning_rate", "1e-2"])
    folder = tmp_path / "value" / "return_model"
    metrics = json.loads((tmp_path / "value" / "metrics.json").read_text())
    assert metrics["return_model/explained_variance"] > 0.3, metrics
    assert metrics["return_model/spearman"] > 0.5
    assert (tmp_path / "value" / "calibration.png").stat().st_size > 1000
    assert "predictable" in capsys.readouterr().out
    demos = read_demonstrations(mixed_file)
    facts = ReturnFacts.read(folder)
    scales = facts.scales
    assert scales == return_scales(demos, 1.0) and facts.actions is None
    assert facts.explained_variance == metrics["return_model/explained_variance"]
    model = check_checkpoint(folder).load_return_model().eval()
    values = predicted_returns(model, observations_of(demos, range(EPISODES), model), torch.device("cpu"))
    rows = ReturnRows.of(demos, range(EPISODES), model, scales)
    assert explained_variance(values, rows.returns.numpy()) > 0.3, "the stored head is the trained one"
    assert values.min() >= -1 and values.max() <= 0
    with pytest.raises(ConfigError, match="returns.json"):
        ReturnFacts.read(tmp_path / "value" / "start")
    with pytest.raises(ConfigError, match="return_head"):
        check_checkpoint(tmp_path / "value" / "start").load_return_model()


@pytest.mark.parametrize("pixels", [0, 2])
def test_images_are_shifted_in_training_only(
    mixed_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pixels: int
) -> None:
    """By as much on any number of ranks: the shifts of all rows of a step are drawn on each."""
    trained, judged, logits = [], [], ReturnModelTrainer._logits
    monkeypatch.setattr(
        ReturnModelTrainer, "_logits", lambda self, inputs: (trained.append(inputs.images), logits(self, inputs))[1]
    )
    of = ReturnRows.of
    monkeypatch.setattr(ReturnRows, "of", lambda *words: (judged.append(of(*words)), judged[-1])[1])
    words = ["--demos", str(mixed_file), *SMALL, "--save_path", str(tmp_path / "value"), "--max_epochs", "1"]
    train_value_vla.main([*words, "--train_batch_size", "8", "--image_shift", str(pixels)])
    rows, heldout = judged[0].inputs.images, judged[-1].inputs.images
    first = derive_rng(0, "return model", 0).permutation(len(rows))[:8]
    shifts = random_shifts(8, 1, pixels, torch.Generator().manual_seed(derive_seed(0, "image shift", 1)))
    assert torch.equal(trained[0], shifted(rows[first], shifts)) and torch.equal(trained[0], rows[first]) == (
        not pixels
    )
    demos = read_demonstrations(mixed_file)
    assert any(torch.equal(heldout[0], torch.from_numpy(images[0])) for images in demos.images), "not shifted"


def test_the_verdict_on_what_explains_nothing() -> None:
    assert "predictable" in verdict(0.4, 0.6)
    assert "Nothing useful" in verdict(0.01, 0.9) and "more episodes" in verdict(0.01, 0.9)
    assert "for longer" in verdict(-0.2, 0.0)
    returns = np.array([-1.0, -0.5, 0.0])
    assert explained_variance(returns, returns) == 1 and explained_variance(np.full(3, -0.5), returns) == 0
    assert explained_variance(returns, np.full(3, -0.5)) == 0


def test_unrecorded_success_is_refused(mixed_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rlvla.commands import train_return_model as command
    from rlvla.trainer.supervised.config import NewModelConfig, ReturnModelConfig, ReturnRunConfig
    from rlvla.utils.deepspeed.config import StrategyConfig

    foreign = replace(read_demonstrations(mixed_file), success_recorded=False)
    monkeypatch.setattr(command, "read_several", lambda *args, **kwargs: foreign)
    run = ReturnRunConfig(demos=(str(mixed_file),), pretrain="compact", save_path=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="success of the episodes is not recorded"):
        command.run_return_model(run, NewModelConfig(), ReturnModelConfig(), StrategyConfig())
    assert not (tmp_path / "run").exists()


def test_who_played_survives_joining(mixed_file: Path) -> None:
    """Of the expert's demonstrations, a policy's own episodes and corrected ones."""
    expert = read_demonstrations(mixed_file)
    assert expert.autonomous is None and expert.expert_rows(0).all()

    def first_two(**changed: object) -> Demonstrations:
        lists = {name: v[:2] for name, v in vars(expert).items() if isinstance(v, list) and len(v) == EPISODES}
        return replace(expert, **{**lists, **changed})

    own = first_two(autonomous=[True, True])
    corrected = first_two(interventions=[np.arange(len(a)) >= 2 for a in expert.actions[:2]])
    both = joined([first_two(), own, corrected])
    assert both.autonomous == [False, False, True, True, False, False]
    assert [both.expert_rows(i).sum() for i in range(4)] == [len(a) for a in expert.actions[:2]] + [0, 0]
    assert both.expert_rows(4).tolist() == [t >= 2 for t in range(len(expert.actions[0]))]
