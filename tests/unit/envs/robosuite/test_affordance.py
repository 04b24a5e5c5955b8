"""Affordance scores of action primitives."""

import math

import numpy as np
import pytest

from rlvla.envs.registry import list_tasks, make_env
from rlvla.envs.robosuite.primitives import SECONDS, affordance
from rlvla.envs.robosuite.tasks import TASKS
from tests.support.robosuite_primitives import chunk_of, stack_chunks
from tests.support.robosuite_reference import require_simulator


def slow(name, target, keypoints):
    """The formula, written out for each keypoint and axis."""
    best = 0.0
    for keypoint in keypoints:
        dx, dy, dz = (abs(float(t) - float(k)) for t, k in zip(target, keypoint))
        if name == "push":
            dx, dy, dz = max(dx - 0.12, 0), max(dy - 0.12, 0), max(dz - 0.04, 0)
            beyond = math.sqrt(dx * dx + dy * dy + dz * dz)
        else:
            beyond = math.sqrt(dx * dx + dy * dy + dz * dz) - {"reach": 0.06, "grasp": 0.03}[name]
        best = max(best, 1.0 if beyond <= 0 else 1.0 - math.tanh(10 * beyond))
    return best


@pytest.mark.parametrize("name", ["reach", "grasp", "push"])
def test_against_a_slow_reference(name):
    rng = np.random.default_rng(0)
    values = []
    for _ in range(200):
        target = rng.uniform(-0.1, 0.1, 3)
        keypoints = list(rng.uniform(-0.1, 0.1, (rng.integers(1, 4), 3)))
        values.append(affordance(name, target, keypoints))
        assert values[-1] == pytest.approx(slow(name, target, keypoints), abs=1e-12)
    assert min(values) < 0.6 and max(values) == 1.0


def test_what_needs_no_object_suits_everywhere():
    assert affordance("open", None, []) == affordance("atomic", None, [np.zeros(3)]) == 1.0
    assert affordance("reach", np.ones(3), []) == 1.0


@pytest.fixture
def make():
    require_simulator()
    made = []

    def build(name):
        task_id = [task.name for task in TASKS].index(name)
        made.append(make_env("robosuite", task_id, cameras=(), control_freq=10.0, action_space="primitives"))
        return made[-1]

    yield build
    for env in made:
        env.close()


def lost(env, chunk):
    """The component of a chunk in a new episode, which is paid at its first step."""
    env.reset(0, seed=0)
    component = env.step_chunk(chunk).components["affordance"]
    assert component.dtype == np.float32 and component.shape == (env.task.macro_steps,) and not component[1:].any()
    return float(component[0])


def test_the_component_of_a_chunk(make):
    env = make("Stack")
    env.reset(0, seed=0)
    state, (grasp, reach, _) = env.privileged_state(), stack_chunks(env)
    assert lost(env, grasp) == lost(env, reach) == lost(env, chunk_of(env.task, "open")) == 0.0
    space, keypoints = TASKS[1].workspace, {"grasp": ["cubeA_pos"], "push": ["cubeA_pos", "cubeB_pos"]}
    for params in ((0.9, 0.9, 0.9), (-0.5, 0.2, -1.0)):
        for name, objects in keypoints.items():
            target = space.position(np.array(params), space.object_height)
            expected = slow(name, target, [state[key] for key in objects]) - 1.0
            assert lost(env, chunk_of(env.task, name, *params)) == pytest.approx(expected, abs=1e-6)
        place = state["cubeB_pos"] + [0, 0, 0.045]
        expected = slow("reach", space.position(np.array(params), space.high[2]), [place]) - 1.0
        assert lost(env, chunk_of(env.task, "reach", *params)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", [task.name for task in TASKS])
def test_every_keypoint_is_in_the_box_of_its_primitive(make, name):
    env, space = make(name), TASKS[[task.name for task in TASKS].index(name)].workspace
    primitives = {primitive for primitive, _ in env.task.primitives}
    for state in range(3):
        env.reset(state, seed=0)
        env.step_chunk(chunk_of(env.task, "atomic"))
        keypoints = env._facts.keypoints()
        assert keypoints and set(keypoints) <= primitives & set(SECONDS)
        for primitive, points in keypoints.items():
            highest = space.high[2] if primitive == "reach" else space.object_height
            for point in points:
                params = space.params(point, highest)
                assert np.abs(params).max() <= 1.0, (primitive, point)


def test_only_primitives_have_affordances():
    assert all(task.reward_components == () for task in list_tasks("robosuite"))
    tasks = list_tasks("robosuite", action_space="primitives")
    assert all(task.reward_components == ("affordance",) for task in tasks)
