"""The page in a real browser: demonstrations by keys and by gamepad, and corrections of a policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("websockets")

from cli.collect_demos import main as collect
from cli.teleoperate import main
from rlvla.data.reading import read_demonstrations
from rlvla.envs.toy_reach.env import STEP_SIZE, initial_scene
from tests.support.browser import BROWSER, Page, open_page
from tests.support.teleoperation import person

STATE = 4
LONG = ["--train_init_states", str(STATE), str(STATE + 1), "--max_steps", "60"]

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium or google-chrome")


def distance() -> tuple[int, int]:
    """Steps to the east and to the north, from the effector to its disc."""
    scene = initial_scene(STATE)
    east, north = np.rint((scene.centers[scene.target] - scene.effector) / STEP_SIZE).astype(int)
    return east, north


def browse(profile: Path, play: Callable[[Page], None]) -> Callable[[str], None]:
    """`play` on the page at an address, once it shows an episode."""

    def run(address: str) -> None:
        with open_page(profile, address) as page:
            page.wait_for("document.getElementById('instruction').textContent.startsWith('reach the')")
            play(page)

    return run


def keep(page: Page) -> None:
    page.tap("Enter")
    page.wait_for("document.getElementById('kept').textContent.startsWith('1')")


def test_an_episode_is_recorded_by_key_presses_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    east, north = distance()

    def play(page: Page) -> None:
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
        keep(page)

    argv = ["toy_reach", "--port", "0", "--output", str(tmp_path / "demos"), "--num_demos", "1"]
    with person(capsys, browse(tmp_path / "profile", play)):
        main([*argv, *LONG[:-1], "20"])
    demos = read_demonstrations(tmp_path / "demos" / "demos.hdf5")
    assert demos.success == [True] and demos.init_states == [(0, STATE)]
    assert np.abs(demos.actions[0]).sum() == pytest.approx(abs(east) + abs(north))


def test_a_gamepad_moves_with_its_stick_and_keeps_with_a_button(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The page reads the gamepad that its browser reports; here, one that the test reports in its place."""

    def play(page: Page) -> None:
        buttons = "Array.from({length: 16}, () => ({value: 0}))"
        page.evaluate(f"window.pad = {{id: 'Pad', axes: [0.1, 0, 0, 0], buttons: {buttons}}}; 0")
        page.evaluate("navigator.getGamepads = () => [null, window.pad]; 0")
        page.wait_for("document.getElementById('pad').textContent === 'Pad'")
        assert page.text("step") == "0", "a stick near its center is at rest"
        page.evaluate("window.pad.axes = [0.5, -1, 0, 0]; 0")
        page.wait_for("document.getElementById('step').textContent >= 3")
        page.evaluate("window.pad.axes = [0, 0, 0, 0]; window.pad.buttons[9].value = 1; 0")
        page.wait_for("document.getElementById('kept').textContent.startsWith('1')")

    argv = ["toy_reach", "--port", "0", "--output", str(tmp_path / "demos"), "--num_demos", "1"]
    with person(capsys, browse(tmp_path / "profile", play)):
        main([*argv, *LONG, "--speed", "0.4"])
    (actions,) = read_demonstrations(tmp_path / "demos" / "demos.hdf5").actions
    assert len(actions) >= 3
    np.testing.assert_allclose(actions[:3], [[0.2, 0.4]] * 3, rtol=1e-5)  # east, north


def test_a_policy_is_corrected_while_a_key_is_held(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    actor = "document.getElementById('actor').textContent"
    away = "s" if distance()[1] > 0 else "w"  # so that the episode goes on

    def play(page: Page) -> None:
        assert page.evaluate(actor) == "paused"
        page.key("down", away)
        page.tap("p")
        page.wait_for(f"{actor} === 'you act' && document.getElementById('interventions').textContent > '1'")
        page.key("up", away)
        page.wait_for(f"{actor} === 'the policy acts'")
        page.evaluate("window.dispatchEvent(new Event('blur')); 0")
        page.wait_for(f"{actor} === 'paused'")
        page.tap("p")
        page.wait_for("document.getElementById('message').textContent.endsWith('keep or discard it')")
        keep(page)

    argv = ["--policy", str(policy_folder), "--intervene", "page", "--port", "0", "--keep", "all", *LONG]
    with person(capsys, browse(tmp_path / "profile", play)):
        collect([*argv, "--num_demos", "1", "--output", str(tmp_path / "demos")])
    demos = read_demonstrations(tmp_path / "demos" / "demos.hdf5")
    (flags,), (actions,) = demos.interventions, demos.actions
    assert flags.any() and not flags.all()
    moved = actions[flags]
    assert (np.sign(moved[:, 1]) == (1 if away == "w" else -1)).all() and not moved[:, 0].any()
