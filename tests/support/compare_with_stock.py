"""Run by another interpreter: how far our physics is from its own robosuite, as JSON on the last line."""

import json

import numpy as np

from rlvla.envs.registry import list_tasks, make_env
from rlvla.envs.robosuite.importing import import_robosuite
from tests.support.robosuite_reference import StockTask

STEPS = 15


def deviation(task):
    """Largest difference of joint positions on a random trajectory, and how far the arm went (radians)."""
    env, stock = make_env("robosuite", task.task_id, cameras=()), StockTask(task.name)
    env.reset(3, seed=0)
    stock.start_from(env._sim)
    if task.name == "Wipe":
        stock.env.wiped_markers = []
    start, worst = env._sim.data.qpos[:7].copy(), 0.0
    actions = np.random.default_rng(1).uniform(-1, 1, (STEPS, task.action_dim))
    actions[::3, 3:6] = 0.0  # without rotation the goal orientation is a matter of the version
    for action in actions:
        env._sim.step(action)
        stock.step(action)
        worst = max(worst, float(np.abs(env._sim.data.qpos - stock.data.qpos).max()))
        assert env._sim.success() == stock.success()
    moved = float(np.abs(env._sim.data.qpos[:7] - start).max())
    env.close()
    return worst, moved


if __name__ == "__main__":
    figures = {task.name: deviation(task) for task in list_tasks("robosuite")}
    print(json.dumps({"version": import_robosuite().__version__, "deviations": figures}))
