"""Chunks of action primitives for robosuite, and what solves its tasks from privileged state."""

import math

import numpy as np
import torch

from rlvla.checkpoints.policy_folder import PolicyRecord, write_policy
from rlvla.envs.config import EnvConfig
from rlvla.envs.robosuite.rotation import HOME_YAW, MOST_TURN, grasp_yaw, quarter_turn, wrapped, yaw_of
from rlvla.envs.robosuite.tasks import TASKS
from rlvla.models.soft_actor.config import SoftActorConfig
from rlvla.models.soft_actor.policy import SoftActorPolicy


def chunk_of(task, name, *params, fill=0.0):
    """The chunk [macro_steps, D] of a primitive; `fill` is what stands where nothing is read."""
    names = [primitive for primitive, _ in task.primitives]
    chunk = np.full((task.macro_steps, task.action_dim), fill, dtype=np.float32)
    chunk[0, : len(names)] = -1.0
    chunk[0, names.index(name)] = 1.0
    chunk[0, len(names) : len(names) + len(params)] = params
    return chunk


def lift_chunks(env):
    """Grasp the cube and raise it."""
    state, space = env.privileged_state(), TASKS[0].workspace
    cube, yaw = state["cube_pos"], grasp_yaw(yaw_of(state["cube_quat"]), folds=4)[2]
    yield chunk_of(env.task, "grasp", *space.params(cube, space.object_height), yaw)
    yield chunk_of(env.task, "reach", *space.params([*cube[:2], space.high[2]], space.high[2]))


def stack_chunks(env):
    """Grasp cube A with no finger between the cubes, carry it over cube B, let go."""
    state, space = env.privileged_state(), TASKS[1].workspace
    a, b = state["cubeA_pos"], state["cubeB_pos"]
    yaw = HOME_YAW + quarter_turn(yaw_of(state["cubeA_quat"]) - HOME_YAW)
    way = (b - a)[:2]
    along = abs(math.cos(yaw) * way[0] + math.sin(yaw) * way[1])
    if np.hypot(*way) < 0.1 and along > math.sqrt(0.5) * np.hypot(*way):
        yaw += math.pi / 2
    turn = wrapped(yaw - HOME_YAW, math.pi) / MOST_TURN
    yield chunk_of(env.task, "grasp", *space.params(a, space.object_height), turn)
    yield chunk_of(env.task, "reach", *space.params(b + [0.0, 0.0, 0.052], space.high[2]))
    yield chunk_of(env.task, "open")


def play(env, chunks):
    """Execute chunks until the episode ends; the results."""
    results = []
    for chunk in chunks:
        results.append(env.step_chunk(chunk))
        if results[-1].terminated or results[-1].truncated:
            break
    return results


def soft_actor_of_primitives(folder, **options):
    """The folder of a soft actor with random weights for primitives of Lift; its environment's record."""
    env = EnvConfig(
        task_suite_name="robosuite",
        task_ids=(0,),
        use_proprio=True,
        options={
            "control_freq": 10.0,
            "action_space": "primitives",
            "primitives": ("reach", "grasp"),
            "object_state": True,
        }
        | options,
    )
    (task,) = env.tasks()
    config = SoftActorConfig(
        action_dim=task.action_dim,
        action_chunk_len=task.macro_steps,
        proprio_dim=task.proprio_dim,
        hidden_sizes=(8,),
        primitives=tuple(name for name, _ in task.primitives),
        primitive_sizes=tuple(size for _, size in task.primitives),
    )
    torch.manual_seed(0)
    assert write_policy(SoftActorPolicy(config), folder, PolicyRecord(env, ())) is None
    return env


class LiftPolicy(SoftActorPolicy):
    """Reads from Lift's `object_state` what to do: grasp the cube, raise it."""

    def act(self, images, proprio, instructions, **sampling):
        decision = super().act(images, proprio, instructions, **sampling)
        space = TASKS[0].workspace
        decision.actions[:] = 0.0
        for chunk, state in zip(decision.actions, proprio):
            cube, turn, grasped = state[6:9] + [0.0, 0.0, 0.8], state[11], state[15] > 0
            name, target, more = "grasp", space.params(cube, space.object_height), [turn]
            if grasped:
                name, target, more = "reach", space.params([*cube[:2], space.high[2]], space.high[2]), []
            names = self.config.primitives
            chunk[0, : len(names)] = [1.0 if name == other else -1.0 for other in names]
            chunk[0, len(names) :][: 3 + len(more)] = [*target, *more]
        return decision
