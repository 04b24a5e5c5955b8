"""Progress bars."""

from __future__ import annotations

import io
import itertools
import re
import sys

import pytest

from rlvla.utils.bars import part_of_run, progress_bar
from rlvla.utils.terminal import log, set_output


def test_a_disabled_bar_is_silent(capsys: pytest.CaptureFixture) -> None:
    with progress_bar(3, "x", enabled=False) as bar:
        bar.update(1)
    assert capsys.readouterr().err == ""


def test_without_a_terminal_a_short_bar_says_nothing(capsys: pytest.CaptureFixture) -> None:
    with progress_bar(3, "x") as bar:
        bar.update(1)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_long_bar_says_lines(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0  # of tqdm's clock
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with progress_bar(4, "evaluate", initial=1) as bar:
        for done in range(3):
            now += 40.0  # more than the pause between two lines
            bar.set_postfix_str(f"success {done}", refresh=False)
            bar.update(1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "evaluate: 2/4, 40.0 s each, success 0, 1m20s left",
        "evaluate: 3/4, 40.0 s each, success 1, 40s left",
        "evaluate: 4/4, 40.0 s each, success 2",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int = 80) -> Terminal:
    """A terminal as standard error, whose clock goes on by 10 s whenever a bar looks at it."""
    stream, clock = Terminal(), itertools.count(1000, 10)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(clock)))
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (width, 40))
    return stream


def states(stream: Terminal) -> list[str]:
    """What has been shown, state by state."""
    return [state for state in re.split(r"\r|\n", stream.getvalue()) if state.strip()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_figures_come_before_the_bar_and_stay(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch, width)
    with part_of_run(lambda: 4000.0), progress_bar(64, "iteration 12/400 rollout") as bar:
        bar.set_postfix_str("success 0.25", refresh=False)
        bar.update(16)
        bar.refresh()
    shown = states(terminal)[-1]
    assert len(shown) <= width
    figures = r"iteration 12/400 rollout: 16/64, [\d.]+(/s| s each), success 0\.25"
    assert re.match(figures + (r", \S+ left, run 1h06m left" if width >= 80 else ""), shown)
    assert width < 120 or "##" in shown


def test_the_time_of_the_run_is_that_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    for block, words in ((part_of_run(lambda: None), False), (part_of_run(lambda: 90.0), True)):
        with block, progress_bar(3, "x") as bar:
            bar.update(1)
        assert ("run 1m30s left" in states(terminal)[-1]) == words
    with progress_bar(3, "x") as bar:
        bar.update(1)
    assert "run" not in states(terminal)[-1]


def test_a_message_does_not_stand_in_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(sys, "stdout", terminal)  # one screen
    with progress_bar(3, "x") as bar:
        bar.update(1)
        before = len(terminal.getvalue())
        log.info("news")
        text = terminal.getvalue()[before:]
    cleared, _, after = text.partition("news\n")
    assert cleared.startswith("\r") and not cleared.strip() and "x: 1/3" in after


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_moves_on_after_a_burst(
    terminal: bool, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = on_terminal(monkeypatch) if terminal else None
    now, pause = 1000.0, 0.3 if terminal else 40.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with progress_bar(64, "x") as bar:
        for episodes in (32, 1, 1, 1):  # the first ones were played ahead
            now += pause
            bar.update(episodes)
        shown = "".join(states(stream)) if stream else capsys.readouterr().err
    assert all(f"{done}/64" in shown for done in (32, 33, 34, 35))


def test_quiet_hides_bars(capsys: pytest.CaptureFixture) -> None:
    set_output(quiet=True)
    with progress_bar(3, "x") as bar:
        bar.update(1)
    assert capsys.readouterr().err == ""
