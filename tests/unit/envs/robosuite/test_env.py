"""Specifics of the robosuite suite; the common contract is tested in test_contract.py."""

import os
import subprocess
import sys

import numpy as np
import pytest

from rlvla.envs.config import EnvConfig
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.registry import list_tasks, make_env
from rlvla.envs.robosuite.robot_state import WIDTHS
from rlvla.envs.testing import assert_same_observation, assert_same_result
from rlvla.envs.workers.messages import EnvSpec, Reset, StepChunk
from rlvla.envs.workers.pool import EnvPool
from rlvla.utils.errors import ConfigError, MissingExtraError
from tests.support.robosuite_reference import require_simulator

CAMERAS = ("agentview", "wrist", "closeup")


@pytest.fixture(scope="module")
def env():
    require_simulator()
    env = make_env("robosuite", 0, cameras=CAMERAS, use_proprio=True)
    yield env
    env.close()


def run_python(code, **environ):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, timeout=120
    )


def red_pixels(image):
    """Rows and columns of the cube's pixels."""
    red, green, blue = image.astype(int).transpose(2, 0, 1)
    return np.nonzero((red > 60) & (red > 2 * green) & (red > 2 * blue))


def test_listing_tasks_starts_no_simulator():
    code = (
        "import sys; from rlvla.envs.registry import list_tasks; list_tasks('robosuite');"
        "print(*{'mujoco', 'robosuite', 'numba', 'torch'} & set(sys.modules))"
    )
    result = run_python(code)
    assert result.returncode == 0 and result.stdout.strip() == "", result.stdout + result.stderr


def test_step_limit_scales_with_the_control_frequency():
    assert list_tasks("robosuite")[0].max_steps == 40
    assert list_tasks("robosuite", control_freq=10)[0].max_steps == 20
    assert list_tasks("robosuite", control_freq=10, max_steps=7)[0].max_steps == 7


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        list_tasks("robosuite", cameras=("agentview", "agentview"), image_size=0, max_steps=0, control_freq=0)
    assert len(error.value.problems) == 4


def test_no_camera_renders_nothing_and_refuses_to_record():
    require_simulator()
    env = make_env("robosuite", 0, cameras=())
    assert env.reset(0, seed=0).images.shape == (0, 64, 64, 3)
    with pytest.raises(ValueError, match="without cameras"):
        env.step_chunk(np.zeros((1, 7)), record_frames=True)
    assert env.step_chunk(np.zeros((1, 7))).steps_executed == 1
    env.close()


def test_proprio_is_pose_over_the_table_and_finger_distance(env):
    start = env.reset(0, seed=0).proprio
    state = env.privileged_state()
    np.testing.assert_allclose(start[:3], state["eef_pos"] - [0, 0, state["table_height"]], atol=1e-6)
    np.testing.assert_allclose(start[5], state["gripper_qpos"][0] - state["gripper_qpos"][1], atol=1e-6)
    assert start[5] == pytest.approx(0.0417, abs=1e-3)
    turn_and_open = np.tile(np.array([0, 0, 0, 0, 0, 0.4, -1], dtype=np.float32), (10, 1))
    end = env.step_chunk(turn_and_open).observation.proprio
    assert end[5] > 0.07
    yaw = [np.arctan2(*p[3:5]) for p in (start, end)]
    turned = np.angle(np.exp(1j * (yaw[1] - yaw[0])))
    assert 0.2 < turned < 2.0, "positive rotation about z turns the hand counter-clockwise seen from above"


def test_the_cube_is_visible_and_images_are_upright(env):
    blobs = {name: [] for name in CAMERAS}
    cubes = []
    for i in range(12):
        images = env.reset(i, seed=0).images
        cubes.append(env.privileged_state()["cube_pos"][:2])
        for name, image in zip(CAMERAS, images):
            rows, columns = red_pixels(image)
            blobs[name].append((len(rows), rows.mean(), columns.mean()))
    cubes = np.array(cubes)
    for name, fewest in (("agentview", 12), ("closeup", 40), ("wrist", 20)):
        count, row, column = np.array(blobs[name]).T
        assert count.min() >= fewest, name
        if name != "wrist":  # these look at the robot: what is nearer to them is lower, the robot's left is right
            assert np.corrcoef(row, cubes[:, 0])[0, 1] > 0.9, name
            assert np.corrcoef(column, cubes[:, 1])[0, 1] > 0.95, name


def test_closeup_tells_the_cubes_position_within_millimetres(env):
    features, cubes = [], []
    for i in range(60):
        rows, columns = red_pixels(env.reset(i, seed=0).images[2])
        features.append([1.0, rows.mean(), columns.mean()])
        cubes.append(env.privileged_state()["cube_pos"][:2])
    features, cubes = np.array(features), np.array(cubes)
    weights = np.linalg.lstsq(features[:40], cubes[:40], rcond=None)[0]
    error = np.abs(features[40:] @ weights - cubes[40:])
    assert error.mean() < 0.003, error.mean(axis=0)


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [
        (ExpertConfig(), 19, 20),
        (ExpertConfig(noise_std=0.1), 17, 20),
        (ExpertConfig(action_quantum=0.25), 17, 20),
        (ExpertConfig(offset_prob=0.7, offset_max=0.04), 6, 17),
        (ExpertConfig(gripper_shift=3), 0, 3),
        (ExpertConfig(gripper_shift=-3), 15, 20),
    ],
)
def test_lift_expert(config, least, most):
    require_simulator()
    env = make_env("robosuite", 0, cameras=())
    expert = make_expert("robosuite", 0, config)
    lengths = []
    for i in range(20):
        env.reset(i, seed=0)
        expert.reset(np.random.default_rng(i))
        for step in range(40):
            action = expert.act(env.privileged_state())
            assert action.dtype == np.float32 and not action[3:6].any() and abs(action[6]) == 1.0
            if env.step_chunk(action[None]).terminated:
                lengths.append(step + 1)
                break
    env.close()
    assert least <= len(lengths) <= most
    if config == ExpertConfig():
        assert np.mean(lengths) <= 30


def test_no_expert_for_door():
    with pytest.raises(ConfigError, match="Lift"):
        make_expert("robosuite", 2, ExpertConfig())


def test_missing_robosuite_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "robosuite", None)
    with pytest.raises(MissingExtraError, match=r"rlvla\[robosuite\]"):
        make_env("robosuite", 0)


def test_missing_gl_names_the_packages():
    require_simulator()
    code = (
        "from rlvla.envs.registry import make_env\nfrom rlvla.utils.errors import ConfigError\n"
        "try:\n    make_env('robosuite', 0)\nexcept ConfigError as error:\n    print(error)"
    )
    result = run_python(code, MUJOCO_GL="egl", MUJOCO_EGL_DEVICE_ID="99")
    assert "libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0" in result.stdout and "osmesa" in result.stdout
    assert result.stderr == "", result.stderr
    assert "glfw" in run_python(code, MUJOCO_GL="glfw").stdout


def test_import_and_exit_without_close_are_silent():
    require_simulator()
    code = (
        "from rlvla.envs.registry import make_env\n"
        "envs = [make_env('robosuite', 0, image_size=16) for _ in range(2)]\n"
        "for env in envs:\n    env.reset(0, 0)"
    )
    result = run_python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.nightly
def test_a_worker_with_two_environments_gives_the_bits_of_two_workers():
    require_simulator()
    spec = EnvSpec("robosuite", 0, {"image_size": 32, "use_proprio": True})
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 2, 3, 7)).astype(np.float32)
    played = []
    for envs_per_worker in (1, 2):
        with EnvPool(2, envs_per_worker=envs_per_worker) as pool:
            turns = [{slot: Reset(spec, slot, slot) for slot in range(2)}]
            turns += [{slot: StepChunk(chunk) for slot, chunk in enumerate(chunks)} for chunks in actions]
            for turn in turns:
                pool.submit_all(list(turn.items()))
                results = {}
                while len(results) < 2:
                    results |= dict(pool.wait(timeout=60))
                played.append(results)
    for alone, together in zip(played[:3], played[3:]):
        for slot in range(2):
            same = assert_same_observation if alone is played[0] else assert_same_result
            same(together[slot], alone[slot])
    assert not np.array_equal(played[1][0].observation.images, played[1][1].observation.images)


def test_observables_of_the_arm_are_those_of_robosuite():
    require_simulator()
    env = make_env("robosuite", 0, cameras=(), use_proprio=True, robot_state=tuple(WIDTHS))
    try:
        env.reset(3, 0)
        simulated = env._sim.env
        for name in WIDTHS:
            simulated.modify_observable(name, "active", True)
            simulated.modify_observable(name, "enabled", True)
        for actions in np.random.default_rng(0).uniform(-1, 1, (3, 4, 7)).astype(np.float32):
            proprio = env.step_chunk(actions).observation.proprio
            observed = simulated._get_observations(force_update=True)
            np.testing.assert_allclose(proprio, np.concatenate([observed[name] for name in WIDTHS]), atol=1e-6)
    finally:
        env.close()


def test_unknown_and_missing_observables_are_refused():
    with pytest.raises(ConfigError, match="--robot_state: there is no robot0_elbow; known: robot0_eef_pos, "):
        list_tasks("robosuite", robot_state=("robot0_elbow",))
    with pytest.raises(ConfigError, match="--robot_state: Wipe has no gripper"):
        EnvConfig(
            task_suite_name="robosuite", task_names=("Wipe",), options={"robot_state": ("robot0_gripper_qpos",)}
        ).tasks()
