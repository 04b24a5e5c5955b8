"""The contract tests that apply to a robot: all but those that repeat an episode and compare every pixel."""

from pathlib import Path

from rlvla.envs.registry import load_custom_module
from rlvla.envs.testing import EnvContract

load_custom_module(str(Path(__file__).with_name("robot_suite.py")))


class TestRobot(EnvContract):
    suite = "robot"
    options = {"control_hz": 1000.0}

    test_equal_inputs_give_equal_trajectories_whatever_ran_before = None
    test_initial_state_does_not_depend_on_the_seed = None
    test_actions_are_clipped = None  # compares two episodes
