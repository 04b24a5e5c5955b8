"""What a run of PPO says and writes at its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlvla.commands.runs import ending
from rlvla.commands.runs.ending import closing_words, conclude, newest_checkpoint
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
    assert f"{tmp_path / 'learning_curve.png'}" in words


def test_another_evaluation_of_a_checkpoint_leaves_the_other_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iteration 10 of a finished run of 20 is evaluated; its checkpoint knows nothing of what came later."""
    monkeypatch.setattr(ending, "closing_words", lambda *_: "")
    (tmp_path / "totals.json").write_text("of 20")
    file = tmp_path / "evaluations.json"
    file.write_text(json.dumps([{"iteration": iteration, "from": "file"} for iteration in (0, 10, 20)]))
    evaluations = [(step, SimpleNamespace(as_dict=lambda: {"from": "checkpoint"})) for step in (0, 5, 10)]
    trainer = SimpleNamespace(evaluations=evaluations, totals={"episodes": 10.0})
    schedule, run = SimpleNamespace(val_only=True), SimpleNamespace(load_checkpoint="iteration_000010")
    conclude(trainer, SimpleNamespace(schedule=schedule, run=run), tmp_path)
    entries = [(entry["iteration"], entry["from"]) for entry in json.loads(file.read_text())]
    assert entries == [(0, "file"), (5, "checkpoint"), (10, "checkpoint"), (20, "file")]
    assert (tmp_path / "totals.json").read_text() == "of 20"
    file.write_text("[{")
    conclude(trainer, SimpleNamespace(schedule=schedule, run=run), tmp_path)
    assert [entry["iteration"] for entry in json.loads(file.read_text())] == [0, 5, 10]


def test_an_evaluation_that_ends_early_is_repeated_with_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["cli/train_ppo_vla.py", "--val_only", "--load_checkpoint", "iteration_000010"]
    monkeypatch.setattr(sys, "argv", words)
    flags = SimpleNamespace(schedule=SimpleNamespace(val_only=True), ckpt_path=tmp_path)
    monkeypatch.setattr(ending, "list_checkpoints", lambda _: [tmp_path / "iteration_000020"])
    assert newest_checkpoint(flags).endswith(" ".join(words))
