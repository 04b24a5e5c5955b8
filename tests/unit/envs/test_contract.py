"""The contract tests, over all suites that ship with rlvla."""

from typing import ClassVar

import pytest

from rlvla.envs.testing import BatchedEnvContract, EnvContract
from rlvla.utils.errors import ConfigError, MissingExtraError
from tests.support.libero_requirements import require_libero


class TestToyReach(EnvContract):
    suite = "toy_reach"
    hold_steps = 3


class TestBatchedToyReach(BatchedEnvContract):
    suite = "toy_reach"
    hold_steps = 3


class TestToyPush(EnvContract):
    suite = "toy_push"
    hold_steps = 3


class TestBatchedToyPush(BatchedEnvContract):
    suite = "toy_push"
    task_id = 3
    hold_steps = 3


class TestRobosuiteLift(EnvContract):
    suite = "robosuite"
    options = {"image_size": 32}
    hold_steps = 5

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _simulator(cls):
        from rlvla.envs.mujoco.gl import make_gl_context
        from rlvla.envs.robosuite.importing import import_robosuite

        try:
            import_robosuite()
            make_gl_context(1, 1).free()
        except (MissingExtraError, ConfigError) as error:
            pytest.skip(str(error))


class TestRobosuiteStack(TestRobosuiteLift):
    task_id = 1


class TestRobosuiteDoor(TestRobosuiteLift):
    task_id = 2


class TestRobosuitePickPlaceCan(TestRobosuiteLift):
    task_id = 3


class TestRobosuiteNutAssemblyRound(TestRobosuiteLift):
    task_id = 4


class TestRobosuiteWipe(TestRobosuiteLift):
    task_id = 5


class TestLibero(EnvContract):
    suite = "libero_spatial"
    options: ClassVar = {"image_size": 32}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _simulator(cls):
        require_libero()
