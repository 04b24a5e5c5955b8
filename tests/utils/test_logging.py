"""What a person sees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlvla.utils.errors import MissingExtraError, require
from rlvla.utils.logging import MetricsLogger, duration, progress_bar, read_metrics, table


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (95.2, "1m35s"), (3599.9, "1h00m"), (7384, "2h03m")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_table_aligns_numbers_to_the_right_and_words_to_the_left() -> None:
    lines = table(("task", "n"), [("reach", 5), ("x", 1000)]).splitlines()
    assert lines == ["task      n", "-----  ----", "reach     5", "x      1000"]
    assert table(("a", "b"), []).splitlines() == ["a  b", "-  -"]


def test_metrics_are_written_for_people_and_for_tensorboard(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, use_tensorboard=True)
    logger.log({"a/x": 1.0}, 1)
    logger.log({"a/x": 2.0}, 2)
    logger.log({"eval/y": 5.0}, 2)
    logger.close()
    again = MetricsLogger(tmp_path, use_tensorboard=False)  # a resumed run repeats step 2
    again.log({"a/x": 3.0}, 2)
    again.close()
    records = read_metrics(tmp_path)
    assert [(r["step"], r["a/x"]) for r in records] == [(1, 1.0), (2, 3.0)]
    assert records[1]["eval/y"] == 5.0
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("a/x")] == [(1, 1.0), (2, 2.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    logger = MetricsLogger(None, use_tensorboard=True)
    logger.log({"a": 1.0}, 1)
    logger.close()
    assert read_metrics(tmp_path) == []


def test_a_disabled_bar_is_silent(capsys: pytest.CaptureFixture) -> None:
    with progress_bar(3, "x", enabled=False) as bar:
        bar.update(1)
    assert capsys.readouterr().err == ""


def test_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"rlvla\[all\]"):
        MetricsLogger(tmp_path, use_tensorboard=True)


def test_require_names_module_and_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"no_such_module.*rlvla\[robosuite\]"):
        require("no_such_module", extra="robosuite")
    assert require("json", extra="x").dumps([]) == "[]"
