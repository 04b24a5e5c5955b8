"""The learning curve begins at the start, grows now and then, and does not slow the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvla.trainer.progress import curve
from rlvla.trainer.progress.curve import GrowingCurve, save_learning_curve, start_of, trained_before

SECONDS = curve._SECONDS


def test_it_is_drawn_now_and_then(tmp_path: Path) -> None:
    now, drawn = [0.0], []

    def draw(folder: Path) -> None:
        drawn.append(now[0])
        now[0] += 3.0

    picture = GrowingCurve(tmp_path, draw, lambda: now[0])
    assert not picture.update()
    while now[0] < 1000:
        now[0] += 1.0
        picture.update()
    assert drawn[0] == SECONDS
    assert 3.0 * len(drawn) < 0.03 * now[0], "a picture that takes three seconds is drawn every two and a half minutes"


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    def draw(folder: Path) -> None:
        raise OSError("no room")

    now = [0.0]
    picture = GrowingCurve(tmp_path, draw, lambda: now[0])
    now[0] = 2 * SECONDS
    assert picture.update() and not list(tmp_path.iterdir())


RECORDS = [
    {"step": 0, "eval/success_at_end": 0.25, "eval/n": 100, "total/episodes": 0.0},
    {"step": 1, "rollout/success_at_end": 0.2, "rollout/episodes": 50.0, "total/episodes": 50.0, "actor/entropy": 1.0},
    {"step": 3, "rollout/success_at_end": 0.4, "rollout/episodes": 50.0, "total/episodes": 150.0, "actor/entropy": 0.9},
]


def test_the_start_is_the_evaluation_or_else_the_first_rollout() -> None:
    rate, low, high, how = start_of(RECORDS) or pytest.fail("no start")
    assert (rate, how) == (0.25, "evaluation") and low < 0.25 < high
    rate, low, high, how = start_of(RECORDS[1:]) or pytest.fail("no start")
    assert (rate, how) == (0.2, "sampled") and low < 0.2 < high
    assert start_of(RECORDS[2:]) is None and start_of([]) is None


def test_a_rollout_belongs_to_the_policy_that_played_it() -> None:
    assert trained_before(RECORDS[1:]) == [0.0, 100.0], "the second record stands for two iterations"


def test_the_picture_replaces_the_former_one(tmp_path: Path) -> None:
    assert save_learning_curve(tmp_path) is None
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(RECORDS[0]) + "\n")
    first = save_learning_curve(tmp_path).read_bytes()
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    second = save_learning_curve(tmp_path).read_bytes()
    assert first.startswith(b"\x89PNG") and second.startswith(b"\x89PNG") and first != second
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "learning_curve.png"}
