"""A task with RoboTwin's interface and no physics: the first joint of the left arm has to reach a marked angle."""

import os

import numpy as np

from .utils.create_actor import UnStableError

REACHED, SPEED = 0.1, 0.3  # radians; radians per action


def seed_fails(seed):
    return seed % 7 == 1


class reach_marker:
    def __init__(self):
        self.calls = []
        self.eval_success = False

    def setup_demo(self, now_ep_num=0, seed=0, is_test=False, **settings):
        assert os.path.isfile("task_config/demo_clean.yml"), "must be started in RoboTwin's own folder"
        assert settings["left_embodiment_config"]["arm_joints_name"] and settings["head_camera_w"] == 320
        self.calls.append(("setup_demo", seed, is_test))
        self.instruction, self.eval_success, self.take_action_cnt = None, False, 0
        self.seed = seed
        self.step_lim = 5 if settings["eval_mode"] else None
        rng = np.random.default_rng(seed)
        self.goal = rng.uniform(0.4, 1.5) * rng.choice([-1, 1])
        self.joints = rng.uniform(-0.05, 0.05, 14)
        if seed % 7 == 3:
            raise UnStableError(f"unstable objects in seed({seed})")
        self.plan_success = seed % 7 != 5

    def play_once(self):
        self.calls.append(("play_once",))
        if seed_fails(self.seed):
            raise ValueError("the planner found no grasp")
        self.joints[0] = self.goal
        return {"info": {"{A}": "left" if self.goal < 0 else "right"}}

    def check_success(self):
        return bool(abs(self.joints[0] - self.goal) < REACHED)

    def set_instruction(self, instruction=None):
        self.instruction = instruction

    def get_instruction(self):
        return self.instruction

    def get_obs(self):
        self.calls.append(("get_obs",))
        cameras = {}
        for index, name in enumerate(("head_camera", "left_camera", "right_camera")):
            picture = np.full((240, 320, 3), 40 + 60 * index, np.uint8)
            for angle, colour in ((self.goal, (0, 200, 0)), (self.joints[0], (200, 0, 0))):
                column = int((angle / np.pi + 1) / 2 * 310)
                picture[:, column : column + 10] = colour
            cameras[name] = {"rgb": picture}
        return {"observation": cameras, "joint_action": {"vector": self.joints.copy()}}

    def take_action(self, action, action_type="qpos"):
        if self.take_action_cnt == self.step_lim or self.eval_success:
            return
        self.take_action_cnt += 1
        self.joints += np.clip(action - self.joints, -SPEED, SPEED)
        if self.check_success():
            self.eval_success = True

    def close_env(self, clear_cache=False):
        self.calls.append(("close_env",))
