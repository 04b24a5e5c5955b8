"""Suite `maniskill`: task list without the package, and the contract if it is installed."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlvla.envs import list_tasks, make_env
from rlvla.envs.config import EnvConfig
from rlvla.envs.maniskill import env as maniskill
from rlvla.envs.maniskill.env import TASKS, _turned_from_down
from rlvla.envs.registry import get_suite, make_batched_env
from rlvla.envs.testing import BatchedEnvContract, EnvContract
from rlvla.utils.errors import ConfigError

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


class TestBatch(ManiSkillContract, BatchedEnvContract):
    """One simulator per slot; that slots of one simulator on a GPU are independent is tested with a stand-in."""

    options = {"image_size": 32, "max_steps": 20}
    task_id = 2
    num_slots = 3

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
    assert [task.name for task in tasks if task.reward_range != (-1, 1)] == ["pull_cube_tool"]
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
    chosen = EnvConfig(task_suite_name="maniskill", task_ids=(0, 8), cameras=("hand",), options={"physics": "gpu"})
    with pytest.raises(ConfigError, match="push_cube carries no camera") as refused:
        chosen.tasks()
    assert "not for peg_insertion_side (initial states differ in the shape of the peg)" in str(refused.value)
    with pytest.raises(ConfigError, match="--physics brain: must be one of cpu, gpu"):
        list_tasks("maniskill", physics="brain")


def test_the_slots_of_a_worker_share_a_simulator_on_the_gpu_only() -> None:
    suite = get_suite("maniskill")
    assert [suite.offers_batch(options) for options in ({}, {"physics": "cpu"}, {"physics": "gpu"})] == [0, 0, 1]


class StandIn:
    """The package's interface with a state of one number per place: actions add to it, and 1 is success."""

    device = torch.device("cpu")

    def __init__(self, size: int):
        self.values = torch.zeros(size, 1)
        self.agent = self.scene = SimpleNamespace()

    def reset(self, options: dict[str, Any]) -> None:
        assert float(torch.rand(())) == float(
            torch.rand((), generator=torch.Generator().manual_seed(torch.initial_seed()))
        )
        self.values[options["env_idx"]] = torch.initial_seed() / 100

    def step(self, actions: np.ndarray) -> tuple:
        assert actions.shape == (len(self.values), 7) and actions.dtype == np.float32
        self.values += 0.5 + torch.from_numpy(actions[:, :1])  # time passes without an action, too
        success = (self.values == 1)[:, 0]
        info = {"success": success, "is_grasped": success, "is_obj_placed": success}
        return None, self.values[:, 0] / 10, None, None, info

    def get_state(self) -> torch.Tensor:
        return self.values

    def set_state(self, values: torch.Tensor, env_idx: torch.Tensor) -> None:
        self.values[env_idx] = values

    def close(self) -> None: ...


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(maniskill, "_simulator", lambda name, size, options: StandIn(size))
    return make_batched_env("maniskill", 2, 4, physics="gpu", cameras=(), max_steps=5)


def values(batch: Any) -> list[float]:
    return [round(float(batch.privileged_state(slot)["state"][0]), 4) for slot in range(4)]


def test_slots_of_one_simulator_wait_while_others_play(on_gpu: Any) -> None:
    on_gpu.reset([3, 0, 1, 2], [30, 0, 10, 20], [0] * 4)
    assert values(on_gpu) == [0.0, 0.1, 0.2, 0.3]
    results = on_gpu.step_chunk([2, 0], np.zeros((2, 3, 7), np.float32))
    assert values(on_gpu) == [1.0, 0.1, 1.7, 0.3]  # slot 0 ended with success after two steps, and waits since
    assert [result.steps_executed for result in results] == [3, 2] and results[1].terminated
    assert np.allclose(results[0].rewards, [0.07, 0.12, 0.17]) and np.allclose(results[1].rewards, [0.05, 0.1, 0])
    assert results[1].events == [frozenset(), frozenset({"grasped", "placed", "success"})]
    on_gpu.reset([0], [50], [0])
    assert values(on_gpu) == [0.5, 0.1, 1.7, 0.3]
