"""Supervised training that is interrupted continues from its checkpoint, and ends in the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli import collect_demos, train_rm_vla, train_sft_vla, train_value_vla
from rlvla.trainer.supervised.frame_trainer import FrameTrainer
from rlvla.trainer.supervised.sft_trainer import BEST_POLICY, SFTTrainer
from rlvla.utils.files import read_lines
from tests.support.launching import launch

SMALL = ["--pretrain", "compact", "--compact_channels", "8", "--compact_width", "32"]
SHORT = ["--train_batch_size", "32", "--logging_steps", "2", "--no-use_tensorboard"]
SFT = [*SHORT, "--max_steps", "11", "--save_steps", "3"]  # checkpoints after steps 4, 6 and 10
FRAMES = [*SMALL, *SHORT, "--max_epochs", "3", "--heldout_share", "0.5", "--save_steps", "3"]
FRAMES += ["--train_batch_size", "8"]  # several steps per epoch
ANY_TIME = {"time", "perf/update_tokens_per_s", "perf/update_decisions_per_s", "perf/max_rss_gb"}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Successes and failures of a policy's own."""
    folder = tmp_path_factory.mktemp("own")
    words = ["--task_suite_name", "toy_reach", "--use_proprio", "--num_demos", "10", "--keep", "all"]
    words += ["--offset_prob", "0.6", "--offset_max", "0.8", "--num_envs", "1"]
    collect_demos.main([*words, "--output", str(folder)])
    return str(folder / "demos.hdf5")


class Killed(Exception):
    """Stands for a kill."""


def interrupted(
    main: Callable[[Sequence[str]], None],
    argv: Sequence[str],
    trainer: type[SFTTrainer | FrameTrainer],
    monkeypatch: pytest.MonkeyPatch,
    step: int = 11,
) -> None:
    """Run a command until it would take this optimizer step."""
    train_step = trainer._train_step

    def killed(self: Any, number: int, *rest: Any) -> Any:
        if number == step:
            raise Killed
        return train_step(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_train_step", killed)
        with pytest.raises(Killed):
            main(argv)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{path.name}/{k}": v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same(one: Path, other: Path, name: str) -> None:
    """The same exported weights and metrics."""
    ours, theirs = weights(one / name), weights(other / name)
    assert ours and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    lines = [
        [{k: v for k, v in line.items() if k not in ANY_TIME} for line in read_lines(f / "metrics.jsonl")]
        for f in (one, other)
    ]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("kind", ["best_of_averages", "lora", "flow"])
def test_fine_tuning(
    kind: str,
    demos: str,
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[[Callable[[], object]], list[str]],
) -> None:
    argv = {
        "best_of_averages": [*SMALL, "--heldout_share", "0.3", "--early_stopping", "5", "--ema_decay", "0.8"],
        "lora": ["--pretrain", str(policy_folder), "--lora_rank", "2"],
        "flow": [*SMALL, "--compact_head", "flow"],
    }[kind]
    argv = ["--demos", demos, *argv, *SFT]
    train_sft_vla.main([*argv, "--save_steps", "0", "--save_path", str(tmp_path / "whole")])
    folder = tmp_path / "interrupted"
    argv += ["--save_path", str(folder)]
    interrupted(train_sft_vla.main, argv, SFTTrainer, monkeypatch)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["iteration_000010"]
    assert (folder / BEST_POLICY).exists() == (kind == "best_of_averages")
    assert refused(lambda: train_sft_vla.main(argv)) == ["folder_in_use"], "nothing is overwritten unasked"
    assert refused(lambda: train_sft_vla.main([*argv, "--load_checkpoint", "--max_steps", "9"])) == ["mismatch"]
    train_sft_vla.main([*argv, "--load_checkpoint", "--max_minutes", "60"])
    assert_same(folder, tmp_path / "whole", "policy")
    assert refused(lambda: train_sft_vla.main([*argv, "--load_checkpoint"])) == ["changed"], "it has ended"


@pytest.mark.parametrize("kind", ["returns", "iql", "rewards"])
def test_models_of_frames(kind: str, demos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, name = (train_rm_vla.main, "reward_model") if kind == "rewards" else (train_value_vla.main, "return_model")
    argv = ["--demos", demos, *FRAMES, *(["--value_objective", "iql"] if kind == "iql" else [])]
    main([*argv, "--save_steps", "0", "--save_path", str(tmp_path / "whole")])
    folder = tmp_path / "interrupted"
    argv += ["--save_path", str(folder)]
    interrupted(main, argv, FrameTrainer, monkeypatch)
    main([*argv, "--load_checkpoint"])
    assert_same(folder, tmp_path / "whole", name)


def test_two_ranks(demos: str, tmp_path: Path) -> None:
    argv = ["--demos", demos, *SMALL, *SFT]
    launch("cli/train_sft_vla.py", *argv, "--save_steps", "0", "--save_path", tmp_path / "whole")
    folder = tmp_path / "interrupted"
    launch("cli/train_sft_vla.py", *argv, "--save_path", folder)
    shutil.rmtree(folder / "policy")
    (folder / "verdict.json").unlink()
    assert "resumed after step 10" in launch("cli/train_sft_vla.py", *argv, "--save_path", folder, "--load_checkpoint")
    assert_same(folder, tmp_path / "whole", "policy")
