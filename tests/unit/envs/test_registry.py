import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from rlvla.envs import get_suite, list_tasks, make_env, registry, suite_names
from rlvla.envs.config import EnvConfig
from rlvla.envs.options import SuiteOptions
from rlvla.envs.registry import load_custom_module
from rlvla.utils.errors import ConfigError

CUSTOM = """
from rlvla.envs.base import TaskSpec
from rlvla.envs.registry import Suite, register_suite

TASK = TaskSpec("{name}", 0, "only", "do it", 5, 3, 2, 0, 1.0)
register_suite("{name}", Suite(lambda: [TASK], lambda task_id: TASK, ("eye",)))
"""


def test_unknown_suite_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"no_such.*robosuite.*toy_reach"):
        get_suite("no_such")


def test_unknown_option_lists_the_known_ones():
    for call in (lambda: make_env("toy_reach", 0, imagesize=3), lambda: list_tasks("toy_reach", imagesize=3)):
        with pytest.raises(ConfigError, match=r"imagesize.*image_size"):
            call()


def test_custom_file_registers_its_suite(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CUSTOM.format(name="custom_suite_of_a_test"))
    load_custom_module(str(file))
    load_custom_module(str(file))  # harmless
    assert "custom_suite_of_a_test" in suite_names()
    assert list_tasks("custom_suite_of_a_test")[0].name == "only"


@dataclass(frozen=True)
class TwoEyes(SuiteOptions):
    cameras: tuple[str, ...] = ("front", "top")
    image_size: int = 48


def test_cameras_and_image_size_are_those_that_the_options_of_a_suite_name(monkeypatch):
    suite = replace(get_suite("toy_reach"), cameras=("front", "top", "side"), options=TwoEyes)
    monkeypatch.setitem(registry._SUITES, "two_eyes", suite)
    assert EnvConfig(task_suite_name="two_eyes").camera_names == ("front", "top")
    assert EnvConfig(task_suite_name="two_eyes", cameras=("side",)).camera_names == ("side",)
    assert suite.default_image_size == 48
    without = replace(suite, options=None, image_size=32)
    assert (without.default_cameras, without.default_image_size) == (("front",), 32)
    for name in registry._BUILTIN:
        shipped = get_suite(name)
        assert (shipped.default_cameras, shipped.default_image_size) == (shipped.cameras[:1], shipped.image_size), name


def test_custom_modules_that_cannot_be_loaded(tmp_path):
    with pytest.raises(ConfigError, match="absent.py"):
        load_custom_module(str(tmp_path / "absent.py"))
    with pytest.raises(ConfigError, match="no_such_package"):
        load_custom_module("no_such_package.module")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    for _ in range(2):  # a failed import is not remembered as done
        with pytest.raises(ZeroDivisionError):
            load_custom_module(str(broken))


def test_the_room_imports_no_deep_learning_library():
    code = (
        "import sys, rlvla.envs.workers.worker, rlvla.envs.workers.pool, rlvla.envs.splits; "
        "from rlvla.envs import make_env; "
        "from rlvla.envs.experts import *; make_env('toy_reach', 0); make_expert('toy_reach', 0, ExpertConfig()); "
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'robosuite', 'pytest') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
