"""The page of recorded episodes, and the recording for rerun.io."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlvla.evaluation.episode_viewer import ViewedEpisode, _plot, _runs, render_data_page, write_recording

EPISODE = ViewedEpisode(
    name="demo_0",
    instruction="lift <it>",
    success=True,
    frames={"top": np.arange(5, dtype=np.uint8)[:, None, None, None] * np.full((5, 16, 16, 3), 50, np.uint8)},
    frame_steps=np.array([0, 2, 4, 6, 8]),
    actions=np.stack([np.linspace(-1, 1, 8), np.zeros(8)], axis=1),
    rewards={"success": np.array([0.0] * 7 + [1.0]), "rm": np.full(8, 0.25)},
    events={"near": np.array([False, True, True, False, False, False, True, True])},
    state=(0, 12),
)


def sprites(page: str) -> list[Image.Image]:
    encoded = re.findall(r"url\(data:image/(?:png|jpeg);base64,([^)]*)\)", page)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in encoded]


def test_frames_stand_side_by_side_at_their_steps() -> None:
    page = render_data_page("data", "1 of 1", [EPISODE], 3, 20.0)
    (sheet,) = sprites(page)
    assert sheet.size == (3 * 16, 16)
    assert [sheet.getpixel((16 * i + 8, 8))[0] for i in range(3)] == [0, 100, 200], "evenly spaced"
    assert 'data-steps="8" data-frames="0 4 8"' in page and "}, 50);" in page, "plays at the control frequency"
    large = replace(EPISODE, frames={"top": np.zeros((5, 512, 256, 3), np.uint8)})
    assert sprites(render_data_page("data", "", [large], 9))[0].size == (5 * 120, 240)


def test_many_frames_stand_in_rows_that_browsers_can_draw() -> None:
    colors = np.arange(500, dtype=np.uint16)
    frames = np.zeros((500, 240, 240, 3), np.uint8)
    frames[..., 0], frames[..., 1] = (colors % 16 * 16)[:, None, None], (colors // 16 * 8)[:, None, None]
    long = replace(EPISODE, frames={"top": frames}, frame_steps=np.arange(500), actions=np.zeros((500, 2)))
    page = render_data_page("data", "", [long], 500)
    (sheet,) = sprites(page)
    assert sheet.size == (68 * 240, 8 * 240)
    assert "background-size:6800% 800%" in page and 'data-columns="68" data-rows="8"' in page
    for number in (67, 68, 499):
        row, column = divmod(number, 68)
        red, green, _ = sheet.getpixel((column * 240 + 120, row * 240 + 120))
        assert (red, green) == pytest.approx((number % 16 * 16, number // 16 * 8), abs=6)


def test_actions_rewards_and_events_are_on_one_time_line() -> None:
    page = render_data_page("data", "", [EPISODE], 3)
    assert page.count('<svg viewBox="0 0 8 100.0"') == 3
    assert "reward so far" in page and "0 to 2" in page, "rm pays 8 x 0.25"
    assert '<span style="left:12.500%;width:25.000%"></span><span style="left:75.000%;width:25.000%"></span>' in page
    assert "task 0, initial state 12" in page


def test_the_page_is_whole_and_names_are_text() -> None:
    page = render_data_page("</title><script>x", "", [EPISODE], 3)
    assert page.count("<script") == 1 and "lift &lt;it&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page) and "connect-src" not in page and "default-src 'none'" in page


def test_values_of_a_plot() -> None:
    plot = _plot("x", {"a": np.array([0.0, 2.0, np.nan]), "b": np.array([np.inf, 1.0, 1.0])}, 3)
    assert (plot["low"], plot["high"], plot["zero"]) == ("0", "2", "96.0")
    assert plot["lines"][0][2] == "M0 96.0L1 96.0L1 4.0L2 4.0" and plot["lines"][1][2].startswith("M1 50.0")
    assert _plot("x", {"a": np.zeros(2)}, 2)["high"] == "1"
    assert _plot("x", {"a": np.array([2.0, 3.0])}, 2)["low"] == "0", "zero is in sight"
    assert _runs(np.array([True, False, True]), 3) == [("0.000", "33.333"), ("66.667", "33.333")]


def test_a_recording_for_rerun(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="needs rerun.io, the extra rlvla[rerun]")
    path = tmp_path / "new" / "episodes.rrd"
    write_recording(path, [EPISODE], 10.0)
    content = path.read_bytes()
    assert content[:3] == b"RRF" and b"/demo_0/actions/1" in content and b"/demo_0/cameras/top" in content
