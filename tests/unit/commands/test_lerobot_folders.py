"""LeRobot folders in the commands of supervised training: cameras and statistics of a published folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from cli.train_sft_vla import main as train_sft_main
from rlvla.commands import supervised, train_reward_model, train_sft
from rlvla.data.demonstrations import Demonstrations
from rlvla.models.families import check_checkpoint
from rlvla.models.smolvla.tiny import TinyVlm, build_tiny_smolvla
from rlvla.trainer.supervised.config import NewModelConfig, RewardModelConfig, RewardRunConfig
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.errors import ConfigError

SENTENCE = "put the bowl on the plate"
STATE, ACTION, SIDE = 8, 7, 24


def build(folder: Path, cameras: tuple[str, ...], state: int, action: int) -> Path:
    sizes = {"observation.state": state, "action": action}
    return build_tiny_smolvla(
        folder,
        sentences=[SENTENCE],
        statistics={key: {"mean": [0.5] * size, "std": [2.0] * size} for key, size in sizes.items()},
        cameras=cameras,
        vlm=TinyVlm(image_size=32, patch_size=8, vision_dim=32, vision_depth=1, dim=32, layers=2),
        chunk_size=12,
        n_action_steps=12,
        state_dim=state,
        max_state_dim=32,
        action_dim=action,
        max_action_dim=32,
        num_steps=2,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six joints and three cameras; the statistics are named after the data set, as in lerobot/smolvla_base."""
    folder = build(tmp_path / "base", ("camera1", "camera2", "camera3"), 6, 6)
    for path in folder.glob("policy_*.safetensors"):
        save_file({f"so100.buffer.{name}": value for name, value in load_file(str(path)).items()}, path)
    return folder


@pytest.fixture
def demos(monkeypatch: pytest.MonkeyPatch) -> Demonstrations:
    rng, episodes, steps, sizes = np.random.default_rng(0), 4, 6, {"proprio": STATE, "action": ACTION}
    names = ("mean", "std", "min", "max", "q01", "q99")
    statistics = {key: {name: [0.5] * size for name in names} for key, size in sizes.items()}
    recorded = Demonstrations(
        env_args={"task_suite_name": "libero_spatial", "cameras": ["agentview", "wrist"]},
        statistics={"libero_spatial": statistics, "libero_goal": statistics},
        images=[rng.integers(0, 256, (steps, 2, SIDE, SIDE, 3), dtype=np.uint8) for _ in range(episodes)],
        proprio=[rng.normal(size=(steps, STATE)).astype(np.float32) for _ in range(episodes)],
        actions=[rng.uniform(-1, 1, (steps, ACTION)).astype(np.float32) for _ in range(episodes)],
        instructions=[SENTENCE] * episodes,
        success=[True, True, False, False],
        init_states=[(0, state) for state in range(episodes)],
    )
    monkeypatch.setattr(train_sft, "read_several", lambda *_, **__: recorded)
    monkeypatch.setattr(train_reward_model, "read_outcomes", lambda *_, **__: recorded)
    monkeypatch.setattr(train_sft, "warn_of", lambda *_: None)
    return recorded


def plan(folder: Path, tmp_path: Path, *more: str) -> None:
    """The command of docs/smolvla.md, planned."""
    words = ["--pretrain", str(folder), "--fit_to_demos", "--demos", "data/libero_spatial"]
    words += ["--cameras", "agentview", "wrist", "--camera_map", "agentview=image", "wrist=image2"]
    words += ["--platform", "libero", "--bf16", "--train_batch_size", "4", "--micro_train_batch_size", "2"]
    words += ["--n_action_steps", "10", "--ema_decay", "0.999", "--save_path", str(tmp_path / "run")]
    train_sft_main([*words, "--dry_run", *more])


def test_the_recipe_starts(
    folder: Path,
    demos: Demonstrations,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError):
        check_checkpoint(folder)  # of no use without the demonstrations
    monkeypatch.setattr(train_sft, "sft_report", lambda checkpoint, *_: checkpoint.settings.camera_map)
    plan(folder, tmp_path)
    said = capsys.readouterr().out
    assert "'agentview': 'observation.images.image'" in said and "'wrist': 'observation.images.image2'" in said


def test_the_key_is_one_of_the_demonstrations(
    folder: Path,
    demos: Demonstrations,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_sft, "sft_report", lambda checkpoint, *_: checkpoint.unnorm_key)
    (folder / "rlvla_policy.json").write_text(json.dumps({"unnorm_key": "so100"}))
    plan(folder, tmp_path, "--unnorm_key", "libero_goal")
    assert capsys.readouterr().out == "libero_goal\n"
    with pytest.raises(SystemExit):
        plan(folder, tmp_path, "--unnorm_key", "typo")
    assert "--unnorm_key typo" in capsys.readouterr().err


def test_statistics_that_the_network_needs(
    folder: Path, demos: Demonstrations, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["normalization_mapping"] = {**raw["normalization_mapping"], "ACTION": "QUANTILE10"}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(SystemExit):
        plan(folder, tmp_path)
    said = capsys.readouterr().err
    assert "--fit_to_demos" in said and "q10" in said
    assert not (tmp_path / "run").exists()


NEW = ["--pretrain", "tiny", "--model_family", "smolvla", "--tiny_vision_dim", "32", "--tiny_llm_dim", "32"]


def test_a_new_policy_with_the_conventions_of_lerobot(
    demos: Demonstrations, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Names of the image features, and images rotated by 180 degrees."""
    words = [*NEW, "--platform", "libero", "--action_chunk_len", "2", "--max_epochs", "1", "--no-use_tensorboard"]
    words += ["--unnorm_key", "libero_goal", "--save_path", str(tmp_path / "run"), "--train_batch_size", "4"]
    with pytest.raises(SystemExit):
        train_sft_main([*words, "--camera_map", "agentview=image"])
    assert "wrist is not mapped" in capsys.readouterr().err and not (tmp_path / "run").exists()
    train_sft_main([*words, "--camera_map", "agentview=image", "wrist=image2"])
    checkpoint: Any = check_checkpoint(tmp_path / "run" / "policy")
    assert checkpoint.files.config.features.cameras == ["observation.images.image", "observation.images.image2"]
    assert checkpoint.settings.turned_images
    assert dict(checkpoint.settings.camera_map) == {
        "agentview": "observation.images.image",
        "wrist": "observation.images.image2",
    }


def test_cameras_of_a_reward_model(demos: Demonstrations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are mapped before the start, and the mapping is that of the network."""
    folder, loaded = build(tmp_path / "policy", ("image2", "image"), STATE, ACTION), []
    given: dict[str, Any] = {"pretrain": str(folder), "save_path": str(tmp_path / "run"), "demos": ("none",)}
    sizes, config = NewModelConfig(), RewardModelConfig(train_batch_size=4, heldout_share=0.5)
    with pytest.raises(ConfigError) as error:
        train_reward_model.run_reward_model(RewardRunConfig(**given), sizes, config, StrategyConfig())
    assert ("camera_map", "mismatch") in [(problem.flag, problem.reason) for problem in error.value.problems]

    def stop(model: Any, *_: Any) -> None:
        loaded.append(model)
        raise InterruptedError

    monkeypatch.setattr(train_reward_model, "RewardModelTrainer", stop)
    run = RewardRunConfig(**given, camera_map=("agentview=image", "wrist=image2"), platform="libero")
    strategy: Any = SimpleNamespace(is_main=False)
    start = supervised._start_of_frame_model(run, sizes, demos, strategy)
    with pytest.raises(InterruptedError):
        train_reward_model._new_trainer(start, demos, strategy, config, run)
    settings = loaded[0].policy.settings
    assert settings.turned_images and settings.image_order(loaded[0].policy.files.config.features.cameras) == [1, 0]
