"""Demonstrations of a suite of the user's own: its expert, its options and its gripper come from the module."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from cli.collect_demos import main
from rlvla.commands import custom_modules
from rlvla.commands.demos import record
from rlvla.commands.demos.record import Tally
from rlvla.envs import list_tasks, make_env, registry
from rlvla.envs.config import EnvConfig
from rlvla.envs.suite_flags import suite_flags
from rlvla.utils.errors import ConfigError

MODULE = """
from dataclasses import dataclass, replace

from rlvla.envs.registry import get_suite, register_suite
from rlvla.envs.toy_reach.env import ToyReachEnv, ToyReachOptions, list_tasks
from rlvla.utils.cli.flags import arg


@dataclass(frozen=True)
class Options(ToyReachOptions):
    color: str = arg("red", "color that is spoken of", choices=("red", "blue"))


def tasks(color="red", **kw):
    (task,) = list_tasks(**kw)
    sentence = f"reach the {{color}} disc, not the {color} one"
    return [replace(task, suite="gripping_reach", instruction=sentence, gripper_dims=(1,))]


def make(task_id, image_size=64, use_proprio=False, **kw):
    return ToyReachEnv(tasks(**kw)[task_id], image_size=image_size, use_proprio=use_proprio)


register_suite("gripping_reach", replace(get_suite("toy_reach"), list_tasks=tasks, make=make, options=Options))
"""


def test_a_custom_suite_brings_expert_options_and_gripper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite_flags()  # imports the suites that ship with rlvla; what the test registers goes with it
    monkeypatch.setattr(registry, "_SUITES", dict(registry._SUITES))
    monkeypatch.setattr(custom_modules, "_with_suites", {})
    module = tmp_path / "gripping.py"
    module.write_text(MODULE)
    flags = ["--task_suite_name", "gripping_reach", "--custom_module", str(module), "--color", "blue"]
    main([*flags, "--num_demos", "2", "--num_envs", "1", "--output", str(tmp_path / "demos")])
    statistics = json.loads((tmp_path / "demos" / "dataset_statistics.json").read_text())
    assert statistics["gripping_reach"]["action"]["mask"] == [True, False], "the gripper is not normalised"
    with h5py.File(tmp_path / "demos" / "demos.hdf5") as file:
        assert json.loads(file["data"].attrs["env_args"])["color"] == "blue"
        assert file["data/demo_0"].attrs["instruction"].endswith("not the blue one")


def test_recorded_actions_of_toy_push_play_again(tmp_path: Path) -> None:
    flags = ["--task_suite_name", "toy_push", "--use_proprio", "--image_size", "32", "--noise_std", "0.3"]
    counts = ["--num_demos", "2", "--task_demos", "red_to_yellow:1", "3:3"]
    main([*flags, *counts, "--num_envs", "1", "--output", str(tmp_path)])
    with h5py.File(tmp_path / "demos.hdf5") as file:
        episodes = [(dict(episode.attrs), episode["obs"], episode["actions"][:]) for episode in file["data"].values()]
        assert sorted(attributes["task_id"] for attributes, _, _ in episodes) == [0, 0, 1, 2, 2, 3, 3, 3]
        for attributes, seen, actions in episodes:
            env = make_env("toy_push", int(attributes["task_id"]), image_size=32, use_proprio=True)
            observation = env.reset(int(attributes["init_state_id"]), 0)
            assert attributes["instruction"] == observation.instruction
            for image, proprio, action in zip(seen["top_image"], seen["proprio"], actions):
                np.testing.assert_array_equal(image, observation.images[0])
                np.testing.assert_array_equal(proprio, observation.proprio)
                result = env.step_chunk(action[None])
                observation = result.observation
            assert result.success_at_end == attributes["success"]


def test_an_expert_that_succeeds_too_rarely_is_given_up_early() -> None:
    known = next(n for n in range(1, 2000) if Tally(played=n).hopeless(wanted=100, attempts=2000))
    assert 100 < known < 400
    assert not Tally(played=1000, successes=50, kept=50).hopeless(100, 2000), "it may still be enough"
    assert Tally(played=1500, successes=20, kept=20).hopeless(100, 2000)
    assert not any(Tally(played=n, successes=n // 10, kept=n // 10).hopeless(100, 2000) for n in range(1, 1000))


def test_the_time_limit_is_shared_by_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second per episode: two minutes are enough for 60 of each task, and an episode is recorded in any case."""
    clock = itertools.count()
    monkeypatch.setattr(record.time, "perf_counter", lambda: float(next(clock)))
    flags = ["--task_suite_name", "toy_push", "--image_size", "32", "--num_envs", "1", "--num_demos", "80"]
    kept = {}
    for minutes in ("2", "0.001"):
        main([*flags, "--max_minutes", minutes, "--output", str(tmp_path / minutes)])
        with h5py.File(tmp_path / minutes / "demos.hdf5") as file:
            kept[minutes] = Counter(int(demo.attrs["task_id"]) for demo in file["data"].values())
    tasks = len(list_tasks("toy_push"))
    assert kept["0.001"] == dict.fromkeys(range(tasks), 1)
    assert all(50 / tasks * 1.5 < count < 80 for count in kept["2"].values()), kept


def test_an_environment_that_fails_is_not_blamed_on_the_expert() -> None:
    words = ("push", 100, "expert", "lower its errors")
    assert "expert" not in Tally(failed=2).why(*words) and "environment" in Tally(failed=2).why(*words)
    assert "0 of 300" in Tally(played=300, failed=3).why(*words)


def test_proprio_that_a_suite_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    suite_flags()
    monkeypatch.setattr(registry, "_SUITES", dict(registry._SUITES))
    reach = registry.get_suite("toy_reach")
    blind = [replace(task, suite="blind", proprio_dim=0) for task in list_tasks("toy_reach")]
    registry.register_suite("blind", replace(reach, list_tasks=lambda **kw: blind))
    with pytest.raises(ConfigError) as error:
        EnvConfig(task_suite_name="blind", use_proprio=True).tasks()
    assert [(problem.flag, problem.reason) for problem in error.value.problems] == [("use_proprio", "unavailable")]
    assert EnvConfig(task_suite_name="blind").tasks() == blind


def test_an_expert_gives_no_primitives(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--task_suite_name", "robosuite", "--action_space", "primitives", "--task_ids", "0", "1"])
    told = capsys.readouterr().err
    assert "Lift gives actions of the controller, not primitives" in told and "Stack gives" in told


def test_mistakes_in_the_numbers_of_demonstrations(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    counts = ["red_to_green", "red_to_yellow:0", "green_to_red:2", "blue_to_green:2", "blue_to_green:3"]
    with pytest.raises(SystemExit):
        main(["--task_suite_name", "toy_push", "--task_demos", *counts, "--output", str(tmp_path / "demos")])
    said = capsys.readouterr().err
    wrong = ("red_to_green: write TASK", "red_to_yellow:0: must be at least 1", "green_to_red:2: no such task")
    assert all(f"--task_demos {text}" in said for text in (*wrong, "blue_to_green:3: blue_to_green is given twice"))
    assert "blue_to_green:2:" not in said and not (tmp_path / "demos").exists()
