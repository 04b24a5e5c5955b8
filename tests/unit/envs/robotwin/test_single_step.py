"""Simulators that step one action at a time (get_obs, step or take_action, eval_success) keep the contract."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.envs import TaskSpec, make_env
from rlvla.envs.pictures import IMAGE_FITS, ImageFit
from rlvla.envs.robotwin.single_step import SingleStepEnv, SingleStepSuite, View, register_single_step
from rlvla.envs.testing import EnvContract
from rlvla.utils.errors import ConfigError


class Button:
    """A finger has to come down onto a button; `step` and a method `eval_success`, as in some of these classes."""

    step_lim = 3

    def start(self, number):
        rng = np.random.default_rng(number)
        self.height, self.side, self.count = rng.uniform(0.5, 0.9), rng.uniform(-0.5, 0.5), 0

    def get_instruction(self):
        return f"press the button on the {'left' if self.side < 0 else 'right'}"

    def get_obs(self):
        top = np.full((20, 30, 3), 90, np.uint8)
        top[int(19 * self.height), int(29 * (self.side + 1) / 2)] = 255
        return {"top": top, "under": 255 - top, "state": [self.height, self.side]}

    def step(self, action):
        assert self.count < self.step_lim, "played beyond its limit"
        self.count += 1
        self.height = float(np.clip(self.height + 0.1 * action[0], 0, 1))
        self.side = float(np.clip(self.side + 0.01 * action[1], -1, 1))

    def eval_success(self):
        return self.height < 0.1


TASK = TaskSpec("older_button", 0, "press", "press the button", 25, 40, 2, 2, 10.0, ("success",))
register_single_step(
    "older_button",
    SingleStepSuite(
        tasks=(TASK,),
        build=lambda task_id: Button(),
        begin=lambda simulator, init_state_id, seed: simulator.start(init_state_id),
        cameras=("top", "under"),
        hold_steps=2,
    ),
)


class TestButton(EnvContract):
    suite = "older_button"
    hold_steps = 2

    @classmethod
    def find_solution(cls, env):
        env.reset(4, seed=0)
        actions = np.tile(np.array([-1, 0.5], dtype=np.float32), (20, 1))
        return 4, actions[: env.step_chunk(actions).steps_executed]


def test_instruction_is_the_episodes_own() -> None:
    env = make_env("older_button", 0)
    said = {env.reset(state, seed=0).instruction for state in range(8)}
    assert said == {"press the button on the left", "press the button on the right"}


def test_pictures_are_fitted_as_the_policy_records() -> None:
    def picture(**options) -> np.ndarray:
        return make_env("older_button", 0, **options).reset(3, seed=0).images

    whole = picture(image_size=16, image_fit="native")
    assert whole.shape == (1, 20, 30, 3)
    for how in IMAGE_FITS:
        assert (picture(image_size=16, image_fit=how) == ImageFit(16, how)(whole)).all(), how
    assert picture(image_size=16).shape == (1, 16, 16, 3)


def test_a_class_that_lacks_something_is_refused_by_name() -> None:
    class Half:
        def get_obs(self):
            return {}

    view = View(("top",), 8, None, False, lambda obs, camera: obs[camera], lambda obs: obs["state"])
    with pytest.raises(ConfigError, match=r"Half of older_button task 0 has no eval_success, take_action \(or step\)"):
        SingleStepEnv(TASK, Half(), lambda *_: None, view)


def test_a_picture_of_another_kind_is_refused() -> None:
    class Grey(Button):
        def get_obs(self):
            return {"top": np.zeros((8, 8), np.float32), "state": [0, 0]}

    view = View(("top",), 8, None, False, lambda obs, camera: obs[camera], lambda obs: obs["state"])
    env = SingleStepEnv(TASK, Grey(), lambda simulator, state, seed: simulator.start(state), view)
    with pytest.raises(ValueError, match=r"camera top must give \[H, W, 3\] uint8, not \[8, 8\] float32"):
        env.reset(0, seed=0)
