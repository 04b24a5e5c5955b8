"""`describe`, and the Auto classes of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from cli.inspect_vla import main as inspect
from rlvla.models import describe
from rlvla.models.vla.openvla import OpenVLAForActionPrediction


@pytest.fixture
def copy(policy_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(policy_folder, tmp_path / "copy")


def test_a_whole_checkpoint_can_be_trained(policy_folder: Path, capsys: pytest.CaptureFixture) -> None:
    described = describe(policy_folder)
    assert described.trainable and described.loadable
    model = OpenVLAForActionPrediction.from_pretrained(policy_folder)
    assert described.facts["parameters"] == f"{sum(p.numel() for p in model.state_dict().values()):,}"
    inspect(["--pretrain", str(policy_folder)])
    printed = capsys.readouterr().out
    for part in ("oft (config.json says so)", "4 x 2 per decision", "proprio", "toy_reach", "can be trained: yes"):
        assert part in printed, part


def test_the_folder_of_a_run_stands_for_its_policy(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(policy_folder, run / "policy")
    (run / "config.yaml").write_text("{}")
    inspect(["--pretrain", str(run)])
    assert str(run / "policy") in capsys.readouterr().out
    shutil.rmtree(run / "policy")
    with pytest.raises(SystemExit):
        inspect(["--pretrain", str(run)])
    assert "no policy" in capsys.readouterr().err


def test_a_regression_head_is_not_trainable_on_tokens(copy: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save({}, copy / "action_head--150000_checkpoint.pt")
    described = describe(copy)
    assert described.loadable and not described.trainable
    with pytest.raises(SystemExit) as caught:
        inspect(["--pretrain", str(copy)])
    assert caught.value.code == 1
    assert "regression head" in capsys.readouterr().out


def test_all_problems_are_listed(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "dataset_statistics.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 50
    (copy / "config.json").write_text(json.dumps(config))
    text = "\n".join(describe(copy).problems)
    for part in ("tokenizer.json is missing", "no action statistics", "mlp.down_proj.weight is [32, 96]"):
        assert part in text, part
    assert not describe(copy / "nowhere").loadable


def test_auto_classes_load_a_saved_folder(copy: Path, tmp_path: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_prismatic.OpenVLAConfig",
        "AutoModel": "modeling_prismatic.OpenVLAForActionPrediction",
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "modeling_prismatic.py").write_text("raise SystemExit('code of the folder was run')")
    assert AutoConfig.from_pretrained(copy).action_chunk_len == 4
    model = AutoModel.from_pretrained(copy, dtype=torch.bfloat16)
    assert isinstance(model, OpenVLAForActionPrediction) and model.dtype is torch.bfloat16
    OpenVLAForActionPrediction.from_pretrained(copy).save_pretrained(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved", trust_remote_code=True).action_chunk_len == 4
    # Without rlvla's classes, transformers would look for code that is not copied.
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())
