"""Suite `maniskill`: what is known without the package, and the contract where it is installed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from rlvla.envs import list_tasks, make_env
from rlvla.envs.maniskill.env import TASKS, _turned_from_down
from rlvla.envs.testing import EnvContract
from rlvla.utils.errors import ConfigError, MissingExtraError

INSTALLED = importlib.util.find_spec("mani_skill") is not None


class ManiSkillContract(EnvContract):
    suite = "maniskill"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _package(cls) -> None:
        pytest.importorskip("mani_skill", reason="ManiSkill is not installed; examples/scripts/install_maniskill.sh")


class TestPickCube(ManiSkillContract):
    options = {"image_size": 32, "use_proprio": True}
    task_id = 2

    def test_cameras_come_in_the_order_asked(self) -> None:
        pytest.skip("this robot carries no second camera")


class TestStackCube(ManiSkillContract):
    options = {"image_size": 32, "max_steps": 20}
    task_id = 3


def test_tasks_are_known_without_the_package() -> None:
    tasks = list_tasks("maniskill", max_steps=30)
    assert [task.name for task in tasks][:3] == ["push_cube", "pull_cube", "pick_cube"] and len(tasks) == len(TASKS)
    assert {task.action_dim for task in tasks} == {7} and {task.max_steps for task in tasks} == {30}
    assert len({task.instruction for task in tasks}) == len(tasks)
    stack = tasks[3]
    assert stack.propositions == ("grasped", "placed", "success") and stack.machine == "F(grasped & F(success))"
    states = list_tasks("maniskill", use_proprio=True, object_state=True)
    assert [task.proprio_dim - 8 for task in states] == [task.state_dim for task in TASKS]


def test_the_rotation_of_the_hand_is_counted_from_pointing_down() -> None:
    def quaternion(axis: tuple[float, float, float], angle: float) -> np.ndarray:
        return np.array([np.cos(angle / 2), *(np.sin(angle / 2) * np.array(axis))])

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        w = a[0] * b[0] - a[1:] @ b[1:]
        return np.array([w, *(a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:]))])

    down = quaternion((1, 0, 0), np.pi)
    assert np.allclose(_turned_from_down(down), 0) and np.allclose(_turned_from_down(-down), 0)
    for axis, angle in (((1, 0, 0), 0.1), ((0, 1, 0), -0.7), ((0, 0, 1), 2.0)):
        turned = product(quaternion(axis, angle), down)
        assert np.allclose(_turned_from_down(turned), angle * np.array(axis), atol=1e-6)
        assert np.allclose(_turned_from_down(-turned), angle * np.array(axis), atol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="carries no camera"):
        make_env("maniskill", 0, cameras=("hand",))
    with pytest.raises(ConfigError, match="give --use_proprio"):
        list_tasks("maniskill", object_state=True)


@pytest.mark.skipif(INSTALLED, reason="ManiSkill is installed")
def test_without_the_package_it_is_said_how_to_install_it() -> None:
    with pytest.raises(MissingExtraError, match="install_maniskill.sh"):
        make_env("maniskill", 0)
