"""Demonstrations of a suite of the user's own: its expert, its options and its gripper come from the module."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import pytest

from cli.collect_demos import main
from rlvla.commands import custom_modules
from rlvla.envs import registry
from rlvla.envs.suite_flags import suite_flags

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
