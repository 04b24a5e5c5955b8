"""The check of a suite: every task is tried, a failure is a line of the report, and the pictures show what was seen."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli.check_env import main
from rlvla.commands.check_env import NOT_REPEATED, TaskCheck, as_table, check_tasks
from rlvla.envs import list_tasks
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.watchdog import WatchdogLimits, WatchedPool
from rlvla.utils.video import contact_sheet
from tests.support import fake_suites


@pytest.fixture(scope="module")
def pool() -> Iterator[WatchedPool]:
    limits = WatchdogLimits(create=20.0, reset=20.0, step=0.5)
    with WatchedPool(EnvPool(1, custom_modules=[fake_suites.__file__]), limits) as pool:
        yield pool


def check(pool: WatchedPool, suite: str, **options) -> TaskCheck:
    (checked,) = check_tasks(pool, list_tasks(suite), options, init_state_id=0, steps=3)
    return checked


def test_a_suite_that_works(pool: WatchedPool) -> None:
    checked = check(pool, "toy_reach", image_size=32)
    assert checked.problem is None and set(checked.seconds) == {"make", "reset", "first_step", "step_chunk"}
    assert checked.instruction == "reach the green disc"  # that of initial state 0
    assert checked.start.shape == checked.end.shape == (1, 32, 32, 3) and (checked.start != checked.end).any()
    assert "ok" in as_table([checked])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"make": "raise"}, "phase make, fake task 0: ZeroDivisionError"),
        ({"make": "config"}, "first mistake; second mistake"),
        (
            {"reset": "kill"},
            "phase reset, fake task 0, initial state 0, seed 0: the process was killed by signal SIGKILL",
        ),
        ({}, "every pixel is 7"),
    ],
)
def test_what_goes_wrong_is_one_line_and_the_next_task_is_tried(pool: WatchedPool, options: dict, words: str) -> None:
    checked = check(pool, "fake", **options)
    assert words in checked.problem and "\n" not in checked.problem
    assert "failed" in as_table([checked])
    assert check(pool, "toy_reach").problem is None


def test_everything_that_breaks_the_contract_is_listed(pool: WatchedPool) -> None:
    checked = check(pool, "fake", careless=True)
    assert checked.problems == [
        "reset: images must be [N, H, W, 3] uint8, not [1, 8, 8] uint8",
        "reset: the instruction must be text, not int",
        "step_chunk: rewards must be [1] float32, not [1] float64",
        "step_chunk: rewards must be [3] float32, not [3] float64",
    ]
    assert checked.start is None and checked.steps == 3, "it went on to the end"
    assert "failed" in as_table([checked])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sheet = tmp_path / "pictures" / "sheet.png"
    main(["toy_reach", "--output", str(sheet), "--check_steps", "1", "--quiet"])
    printed = capsys.readouterr().out
    assert "reach: ok" not in printed and "reach the" in printed, "the table is the result"
    main(["toy_reach", "--output", str(sheet), "--image_size", "48"])
    printed = capsys.readouterr().out
    assert "reach: ok" in printed and str(sheet) in printed
    page = np.asarray(Image.open(sheet).convert("RGB"))
    table_colour = np.array([222, 216, 206])
    assert (np.abs(page - table_colour.astype(int)).max(-1) < 4).mean() > 0.3, "the picture is not on the page"


def test_command_fails_where_a_task_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker does not know the suite, as where a simulator is missing there.
    with pytest.raises(SystemExit) as stop:
        main(["fake", "--output", str(tmp_path / "sheet.png")])
    assert "1 of 1 tasks do not work here: fake" in str(stop.value.code)
    assert (tmp_path / "sheet.png").is_file()


LOOSE = """
from dataclasses import replace
from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.toy_reach.env import CAMERAS, ToyReachEnv, ToyReachOptions, list_tasks, make

class Loose(ToyReachEnv):
    played = 0
    def step_chunk(self, actions, **how):
        Loose.played += 1  # the simulator keeps something that a reset does not undo
        result = super().step_chunk(actions, **how)
        return replace(result, rewards=result.rewards + 0.25 * (Loose.played % 3))

def make_loose(task_id, **options):
    env = make(task_id, **options)
    env.__class__, env.task = Loose, replace(env.task, suite="loose_reach")
    return env

tasks = lambda **options: [replace(task, suite="loose_reach") for task in list_tasks(**options)]
register_suite("loose_reach", Suite(tasks, make_loose, CAMERAS, options=ToyReachOptions))
"""


def test_an_environment_that_does_not_repeat_itself_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "loose.py").write_text(LOOSE)
    main(["loose_reach", "--custom_module", str(tmp_path / "loose.py"), "--output", str(tmp_path / "sheet.png")])
    printed = capsys.readouterr().out
    assert f"reach: ok; {NOT_REPEATED}" in printed and "ok, not deterministic" in printed
    main(["toy_reach", "--output", str(tmp_path / "sheet.png")])
    assert "not deterministic" not in capsys.readouterr().out


def test_all_mistakes_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--output", str(tmp_path / "sheet.jpg"), "--cameras", "back", "--init_state_id", "20000"]
    with pytest.raises(SystemExit) as stop:
        main(["--task_suite_name", "toy_reach", "--check_steps", "0", *flags])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n  - ") == 3 and not list(tmp_path.iterdir())
    assert "--check_steps 0" in told and "back" in told and "sheet.jpg" in told
    with pytest.raises(SystemExit) as stop:
        main(["toy_reach", "--init_state_id", "20000"])
    assert stop.value.code == 2 and "0..9999" in capsys.readouterr().err


def test_contact_sheet_places_and_scales_pictures() -> None:
    red, wide = np.full((8, 8, 3), (255, 0, 0), np.uint8), np.full((300, 600, 3), (0, 0, 255), np.uint8)
    page = np.asarray(Image.open(io.BytesIO(contact_sheet([("red", red), ("wide", wide), ("missing", None)]))))
    assert (page == (255, 0, 0)).all(-1).sum() == 224 * 224
    assert (page == (0, 0, 255)).all(-1).sum() == 224 * 112
    columns = (page == (0, 0, 255)).all(-1).any(0).nonzero()[0]
    assert columns[0] > (page == (255, 0, 0)).all(-1).any(0).nonzero()[0][-1], "pictures of a row overlap"
