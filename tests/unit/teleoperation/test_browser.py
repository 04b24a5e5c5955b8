"""The page in a real browser: an episode is recorded by key presses alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("websockets")

from cli.teleoperate import main
from rlvla.data.reading import read_demonstrations
from rlvla.envs.toy_reach.env import STEP_SIZE, initial_scene
from tests.support.browser import BROWSER, Page, open_page
from tests.support.teleoperation import person

STATE = 4


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium or google-chrome")
def test_an_episode_is_recorded_by_key_presses_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    scene = initial_scene(STATE)
    east, north = np.rint((scene.centers[scene.target] - scene.effector) / STEP_SIZE).astype(int)

    def play(page: Page) -> None:
        page.wait_for("document.getElementById('instruction').textContent.startsWith('reach the')")
        assert page.evaluate("location.search") == "", "the token does not stay in the address"
        for number in range(10):  # up to full speed
            page.tap("=")
            page.wait_for(f"document.getElementById('speed').value >= {min(1, 0.55 + 0.05 * number) - 0.001}")
        keys = ["d" if east > 0 else "a"] * abs(east) + ["w" if north > 0 else "s"] * abs(north) + [".", ".", "."]
        for step, key in enumerate(keys, 1):
            page.tap(key)
            page.wait_for(f"document.getElementById('step').textContent >= {step}")
            if page.text("message").startswith("success"):
                break
        assert page.text("message") == "success: keep or discard it"
        drawn = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 64, 64).data]"
        assert page.evaluate(f"new Set({drawn}).size") > 20, "the picture shows something"
        page.tap("Enter")
        page.wait_for("document.getElementById('kept').textContent.startsWith('1')")

    argv = ["toy_reach", "--port", "0", "--output", str(tmp_path / "demos"), "--num_demos", "1"]

    def browse(address: str) -> None:
        with open_page(tmp_path / "profile", address) as page:
            play(page)

    with person(capsys, browse):
        main([*argv, "--train_init_states", str(STATE), str(STATE + 1), "--max_steps", "20"])
    demos = read_demonstrations(tmp_path / "demos" / "demos.hdf5")
    assert demos.success == [True] and demos.init_states == [(0, STATE)]
    assert np.abs(demos.actions[0]).sum() == pytest.approx(abs(east) + abs(north))
