"""A robot as an environment: docs/environments/own_robot.md. `Driver` stands in for the driver of your arm."""

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvla.envs import ChunkResult, Observation, Suite, TaskSpec, register_suite
from rlvla.envs.base import check_chunk, check_init_state_id, task_of
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.options import SuiteOptions
from rlvla.options import arg

LOW, HIGH = np.array([0.25, -0.20, 0.02]), np.array([0.60, 0.20, 0.35])  # workspace in meters
HOME, LARGEST_STEP = np.array([0.40, 0.0, 0.20]), 0.02


class Driver:
    """Stand-in for your driver: an arm with position targets, and a camera."""

    def __init__(self):
        self.position, self.scene = HOME.copy(), 0

    def go_to(self, position):
        self.position = np.array(position)

    def picture(self):
        image = np.full((96, 96, 3), 180, np.uint8)
        image[40:44, 2 * self.scene : 2 * self.scene + 6] = (40, 90, 200)
        y, x = ((self.position[:2] - LOW[:2]) / (HIGH - LOW)[:2] * 88).astype(int)
        size = int(4 + 20 * (self.position[2] - LOW[2]))
        image[y : y + size, x : x + size] = (200, 40, 40)
        return image

    def stop(self):
        pass


def ask_for_scene(driver, init_state_id):
    """Ask a person to set up the scene of this number; the stand-in sets its own."""
    driver.scene = init_state_id


@dataclass(frozen=True)
class RobotOptions(SuiteOptions):
    known_cameras: ClassVar = ("front",)
    needs_camera: ClassVar = True

    cameras: tuple[str, ...] = ("front",)
    image_size: int = 96
    max_steps: int = 100
    success_hold_steps: int = 1
    control_hz: float = arg(10.0, "environment steps per second", above=0)


class RobotEnv:
    def __init__(self, task, options):
        self.task, self._options = task, options
        self._driver = Driver()
        self._run = ChunkRunner(task.max_steps, options.success_hold_steps)

    def reset(self, init_state_id, seed):
        check_init_state_id(self.task, init_state_id)
        self._driver.go_to(HOME)
        ask_for_scene(self._driver, init_state_id)
        self._run.begin()
        return self._look()

    def step_chunk(self, actions, *, record_frames=False) -> ChunkResult:
        self._run.require_episode()
        self._due = time.monotonic()
        actions = check_chunk(actions, self.task)
        result = self._run.play(actions, self._move, self._look, self._see if record_frames else None)
        if result.terminated or result.truncated:
            self._driver.stop()
        return result

    def privileged_state(self):
        return {"position": self._driver.position.copy()}

    def close(self):
        self._run.end()
        self._driver.stop()

    def _move(self, action):
        step = LARGEST_STEP * action.astype(np.float64)
        self._driver.go_to(np.clip(self._driver.position + step, LOW, HIGH))
        self._due += 1.0 / self._options.control_hz
        time.sleep(max(0.0, self._due - time.monotonic()))
        return False, frozenset()  # success is detected by a model; return a button's or sensor's state here

    def _see(self):
        size = self._options.image_size  # crop and scale your camera's image to a square of this size
        rows = np.arange(size) * 96 // size
        return self._driver.picture()[rows][:, rows]

    def _look(self):
        proprio = self._driver.position.astype(np.float32) if self._options.use_proprio else None
        return Observation(self._see()[None], proprio, self.task.instruction)


def robot_tasks(**kw):
    options = RobotOptions(**kw)
    return [
        TaskSpec(
            suite="robot",
            instruction="put the red cube into the bowl",
            max_steps=options.max_steps,
            num_init_states=40,
            action_dim=3,
            proprio_dim=3,
            control_freq=options.control_hz,
        )
    ]


def make(task_id, **kw):
    return RobotEnv(task_of("robot", robot_tasks(**kw), task_id), RobotOptions(**kw))


register_suite("robot", Suite(list_tasks=robot_tasks, make=make, cameras=("front",), options=RobotOptions))
