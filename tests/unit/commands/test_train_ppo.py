"""What a run of PPO says at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlvla.commands.train_ppo import closing_words
from rlvla.evaluation.results import EvalResult, Rate


@pytest.mark.parametrize("use_tensorboard", [True, False])
def test_tensorboard_is_mentioned_where_it_is_written(tmp_path: Path, use_tensorboard: bool) -> None:
    rate = Rate.of([True, True, False, False])
    result = EvalResult("1234abcd", True, rate, rate, 3.0, ())
    trainer = SimpleNamespace(
        evaluations=[(2, result)],
        totals={"episodes": 8.0, "env_steps": 64.0, "seconds": 5.0},
        config=SimpleNamespace(schedule=SimpleNamespace(val_only=False, use_tensorboard=use_tensorboard)),
        exported=tmp_path / "policy",
    )
    words = closing_words(trainer, tmp_path)
    assert ("tensorboard --logdir" in words) is use_tensorboard
    assert f"{tmp_path / 'learning_curve.png'}" in words and f"--pretrain {tmp_path / 'policy'}" in words
