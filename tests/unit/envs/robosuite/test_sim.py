"""The fast physics loop against stock robosuite."""

import mujoco
import numpy as np
import pytest

from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.registry import make_env
from tests.support.robosuite_reference import StockTask, require_simulator

MAX_STEPS, HOLD_STEPS = 40, 5


@pytest.fixture(scope="module", autouse=True)
def _simulator():
    require_simulator()


@pytest.fixture(scope="module")
def stock():
    return StockTask()


@pytest.fixture(scope="module")
def env():
    """With a camera, so that the model is the one with reduced meshes."""
    env = make_env("robosuite", 0, image_size=16)
    yield env
    env.close()


def play_both(env, stock, init_state_id, actions):
    """Step both simulators from one initial state; yields after every step."""
    env.reset(init_state_id, seed=0)
    stock.start_from(env._sim)
    for action in actions:
        if callable(action):
            action = action()
        env._sim.step(action)
        stock.step(action)
        yield


def test_model_is_physically_the_stock_model(env, stock):
    ours, theirs = env._sim.model, stock.model
    solid = ours.geom_group == 0
    assert ours.nmeshface < theirs.nmeshface / 3, "the visual meshes were not reduced"
    for name in ("geom_size", "geom_pos", "geom_quat", "geom_rbound", "geom_friction", "geom_solref"):
        np.testing.assert_array_equal(getattr(ours, name)[solid], getattr(theirs, name)[solid], err_msg=name)
    for name in ("body_mass", "body_inertia", "body_ipos", "body_iquat", "body_invweight0", "dof_M0", "dof_damping"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert ours.stat.meaninertia == theirs.stat.meaninertia
    assert ours.opt.timestep == theirs.opt.timestep


@pytest.mark.parametrize("init_state_id", [0, 7])
def test_expert_trajectory_equals_stock(env, stock, init_state_id):
    expert = make_expert("robosuite", 0, ExpertConfig(noise_std=0.1))
    expert.reset(np.random.default_rng(init_state_id))
    lengths, streaks = [None, None], [0, 0]
    act = [lambda: expert.act(env.privileged_state())] * MAX_STEPS
    for step, _ in enumerate(play_both(env, stock, init_state_id, act)):
        np.testing.assert_allclose(env._sim.data.qpos, stock.data.qpos, rtol=0, atol=1e-10)
        assert ("grasped" in env._facts.events()) == stock.grasped()
        assert ("lifted" in env._facts.events()) == env._sim.success() == stock.success()
        for i, success in enumerate((env._sim.success(), stock.success())):
            streaks[i] = streaks[i] + 1 if success else 0
            if streaks[i] >= HOLD_STEPS and lengths[i] is None:
                lengths[i] = step + 1
    assert lengths[0] == lengths[1] is not None


def test_trajectory_with_rotations_is_close_to_stock(env, stock):
    # robosuite rounds the goal's rotation to single precision, which contacts amplify.
    actions = np.random.default_rng(1).uniform(-1, 1, (15, 7)).astype(np.float32)
    for _ in play_both(env, stock, 3, actions):
        np.testing.assert_allclose(env._sim.data.qpos, stock.data.qpos, rtol=0, atol=1e-5)
    assert np.abs(env._sim.data.qpos[:7] - env._sim._arm_init).max() > 0.1


def test_torques_equal_the_stock_controller(env, stock):
    rng = np.random.default_rng(0)
    osc, controller = env._sim.osc, stock.parts.controller
    ours, theirs = env._sim.data, stock.data
    for _ in range(20):
        env.reset(0, seed=0)
        ours.qpos[:7] += rng.normal(0, 0.5, 7)
        ours.qvel[:] = rng.normal(0, 0.5, len(ours.qvel))
        theirs.qpos[:], theirs.qvel[:] = ours.qpos, ours.qvel
        mujoco.mj_step1(env._sim.model, ours)
        controller.initial_joint = osc._rest.copy()
        controller.update(force=True)
        controller.set_goal(rng.uniform(-1, 1, 6))
        osc._goal_pos[:], osc._goal_mat[:] = controller.goal_pos, controller.goal_ori
        osc.apply()
        torques = np.clip(controller.run_controller(), *stock.env.robots[0].torque_limits)
        np.testing.assert_allclose(ours.ctrl[:7], torques, rtol=0, atol=1e-8)
        assert np.abs(torques).max() > 1.0


def test_torques_at_a_singularity_are_those_of_the_pseudo_inverse():
    from rlvla.envs.robosuite.osc import osc_torques

    rng = np.random.default_rng(0)
    jac = rng.normal(size=(6, 7))
    jac[2] = jac[0] + jac[1]  # linear velocities span a plane only
    mass = np.diag(rng.uniform(0.5, 2, 7))
    vector = rng.normal(size=(4, 7))
    kp, kd, identity = np.full(6, 150.0), np.full(6, 24.0), np.eye(3)
    torques = osc_torques(vector[0, :3], identity, identity, jac, mass, vector[1], vector[2], vector[3], kp, kd)
    minv = np.linalg.inv(mass)
    wrench = np.concatenate([150 * vector[0, :3], np.zeros(3)]) - 24 * jac @ vector[2]
    inertia_inv = jac @ minv @ jac.T
    force = np.linalg.pinv(inertia_inv[:3, :3]) @ wrench[:3]
    moment = np.linalg.pinv(inertia_inv[3:, 3:]) @ wrench[3:]
    null = np.eye(7) - minv @ jac.T @ np.linalg.pinv(inertia_inv) @ jac
    posture = mass @ (10 * vector[1] - 2 * np.sqrt(10) * vector[2])
    expected = jac.T @ np.concatenate([force, moment]) + vector[3] + null.T @ posture
    np.testing.assert_allclose(torques, expected, atol=1e-8)


def test_reset_leaves_numpys_global_generator_alone(env):
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    env.reset(0, seed=0)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.random.seed(6)
    first = env.privileged_state()["cube_pos"]
    env.reset(0, seed=0)
    np.testing.assert_array_equal(env.privileged_state()["cube_pos"], first)


def test_initial_states_spread_over_robosuites_placement_area(env):
    states = []
    for i in range(40):
        env.reset(i, seed=0)
        states.append(env.privileged_state())
    cubes, eefs = np.array([s["cube_pos"] for s in states]), np.array([s["eef_pos"] for s in states])
    assert np.abs(cubes[:, :2]).max() <= 0.03 and (np.ptp(cubes[:, :2], axis=0) > 0.05).all()
    assert eefs.std(axis=0).min() > 0.005 and eefs.std(axis=0).max() < 0.05
    yaws = np.array([2 * np.arctan2(s["cube_quat"][3], s["cube_quat"][0]) for s in states])
    assert abs(np.exp(1j * yaws).mean()) < 0.5


def test_full_quality_and_no_camera_have_the_same_physics(env):
    actions = np.random.default_rng(2).uniform(-1, 1, (20, 7)).astype(np.float32)

    def final_qpos(env):
        env.reset(4, seed=0)
        env.step_chunk(actions)
        return env._sim.data.qpos.copy()

    expected = final_qpos(env)
    for options in ({"image_size": 16, "render_quality": "full"}, {"cameras": ()}):
        other = make_env("robosuite", 0, **options)
        np.testing.assert_array_equal(final_qpos(other), expected)
        other.close()
