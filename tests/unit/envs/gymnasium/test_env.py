"""Suites `gym:ENV_ID`: contract, action scaling, success, rejected configurations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlvla.data.validation import camera_problems
from rlvla.envs import list_tasks, make_env
from rlvla.envs.config import EnvConfig
from rlvla.envs.registry import get_suite, is_known, load_custom_module, suite_names
from rlvla.envs.testing import EnvContract
from rlvla.utils.errors import ConfigError

MODULE = Path(__file__).resolve().parents[3] / "support" / "gym_point.py"
POINT = "gym:rlvla/Point-v0"
PIXELS = "gym:rlvla/PointOfPixels-v0"
VIEWS = "gym:rlvla/PointOfViews-v0"


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    pytest.importorskip("gymnasium")
    load_custom_module(str(MODULE))


class TestPoint(EnvContract):
    suite = POINT
    options = {"image_size": 16}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _registered(cls, registered: None) -> None:
        pass


class TestPointOfPixels(TestPoint):
    """The images of its observation are all that it shows."""

    suite = PIXELS
    options = {"image_size": 16, "cameras": ("observation",)}


class TestPointOfViews(TestPoint):
    suite = VIEWS
    options = {"image_size": 16, "cameras": ("views.front.left",), "use_proprio": True}


class TestFetchReach(EnvContract):
    suite = "gym:FetchReach-v4"
    options = {"image_size": 32}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _package(cls) -> None:
        pytest.importorskip("gymnasium_robotics")


class TestFetchPickAndPlace(TestFetchReach):
    suite = "gym:FetchPickAndPlace-v4"


def test_what_a_suite_knows_of_its_environment() -> None:
    (task,) = list_tasks(POINT)
    assert (task.name, task.instruction, task.max_steps) == ("Point-v0", "point", 25) or task.name == "rlvla/Point-v0"
    assert (task.action_dim, task.proprio_dim) == (2, 2), "images are no state"
    (other,) = list_tasks(POINT, gym_instruction="go to the middle", max_steps=9)
    assert other.instruction == "go to the middle" and other.max_steps == 9
    assert "gym:ENV_ID" in suite_names() and is_known(POINT) and not is_known("gim:Point")
    assert get_suite(POINT).options is get_suite("gym:ENV_ID").options


def test_two_environments_of_a_process_draw_each_their_own() -> None:
    pytest.importorskip("gymnasium_robotics")
    envs = [make_env("gym:FetchPickAndPlace-v4", 0, image_size=48) for _ in range(2)]
    alone = [envs[0].reset(state, 0).images for state in (1, 2)]
    for _ in range(2):
        assert np.array_equal(envs[0].reset(1, 0).images, alone[0])
        assert np.array_equal(envs[1].reset(2, 0).images, alone[1])
    assert all(image.mean() > 20 for image in alone), "not black"
    for env in envs:
        env.close()


def test_actions_are_scaled_and_states_are_seeds() -> None:
    env = make_env(POINT, 0, use_proprio=True, cameras=())
    start = env.reset(7, 0).proprio
    result = env.step_chunk(np.array([[1.0, -1.0], [0.0, 0.0], [-3.0, 1.0]]))
    moved = 0.1 * (np.array([1.0, -2.0]) + [0.5, 0.0] + [0.0, 2.0] - 3 * np.array([0.5, 0.0]))
    np.testing.assert_allclose(result.observation.proprio - start, moved, atol=1e-6)
    assert result.rewards[-1] == pytest.approx(-np.linalg.norm(start + moved), abs=1e-6)
    assert np.array_equal(env.reset(7, 5).proprio, start) and not np.array_equal(env.reset(8, 0).proprio, start)


def towards_the_middle(env: object, state: int) -> list[object]:
    place, results = env.reset(state, 0).proprio, []
    while not results or not (results[-1].terminated or results[-1].truncated):
        results.append(env.step_chunk(np.clip([-np.array(place) * [20.0, 5.0]], -1, 1)))
        place = results[-1].observation.proprio
    return results


def test_images_of_its_observation_are_cameras() -> None:
    import cv2

    env = make_env(POINT, 0, image_size=12, cameras=("pixels", "render"))
    plain = make_env(POINT, 0, image_size=12)
    raw = env._env.unwrapped
    images = env.reset(4, 0).images
    assert images.shape == (2, 12, 12, 3)
    for _ in range(2):
        observed = cv2.resize(raw._seen()["pixels"], (12, 12), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(images[0], observed)
        assert (images[0].max(axis=(0, 1)) > 60).all() and len(set(images[0].max(axis=(0, 1)).tolist())) == 3
        drawn = cv2.resize(raw.render(), (12, 12), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(images[1], drawn)
        result = env.step_chunk(np.full((3, 2), 0.4), record_frames=True)
        images = result.observation.images
    np.testing.assert_array_equal(result.frames[-1], images[0])
    np.testing.assert_array_equal(plain.reset(4, 0).images[0], env.reset(4, 0).images[1])


def test_an_observation_may_be_one_image() -> None:
    env = make_env(PIXELS, 0, image_size=16, cameras="observation")
    (image,) = env.reset(4, 0).images
    np.testing.assert_array_equal(image, np.repeat(env._env.unwrapped._seen()[0][..., None], 3, axis=2))
    assert image.std() > 0 and list_tasks(PIXELS, cameras="observation")[0].proprio_dim == 0


def test_parts_of_an_observation_are_named_by_their_place() -> None:
    """Camera names have no slashes, which demonstration files do not allow; `render` is reserved."""
    cameras = ("views.front.left", "observation.render")
    assert camera_problems(cameras, "here") == []
    env = make_env(VIEWS, 0, image_size=16, use_proprio=True, cameras=cameras)
    first = env.reset(4, 0)
    result = env.step_chunk(np.full((2, 2), 0.4), record_frames=True)
    for observation in (first, result.observation):
        assert len(observation.proprio) == 3 and observation.proprio[2] == 1.0, "stacks of images are no state"
        assert np.array_equal(*observation.images) and observation.images.max() == 255
    assert not np.array_equal(first.images, result.observation.images)
    assert np.array_equal(result.frames[-1], result.observation.images[0])


def test_an_environment_may_draw_without_a_mode_that_says_so() -> None:
    env = make_env(VIEWS, 0, image_size=16, use_proprio=True)
    assert len(np.unique(env.reset(0, 0).images)) > 1


def test_an_environment_that_does_not_draw_says_what_else_it_shows() -> None:
    env = make_env(PIXELS, 0)
    with pytest.raises(ConfigError, match=r"does not render .*; select .* --cameras: observation$"):
        env.reset(0, 0)


def test_one_failure_to_draw_is_that_of_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that cannot be used would end the run."""
    env = make_env(POINT, 0, image_size=16)
    env.reset(0, 0)

    def fail(self: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(type(env._env.unwrapped), "render", fail)
    with pytest.raises(RuntimeError, match="no memory") as error:
        env.reset(1, 0)
    assert not isinstance(error.value, ConfigError)


@pytest.mark.parametrize(("name", "says"), [("Varying", "number of arrays"), ("Twice", "map to camera a.b")])
def test_parts_of_observations_must_be_told_apart(name: str, says: str) -> None:
    import gymnasium

    image = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    spaces = {
        "Varying": gymnasium.spaces.Tuple([gymnasium.spaces.Dict({"views": gymnasium.spaces.Sequence(image)})]),
        "Twice": gymnasium.spaces.Dict({"a": gymnasium.spaces.Dict({"b": image}), "a.b": image}),
    }
    point = gymnasium.spec("rlvla/Point-v0").entry_point
    gymnasium.register(f"rlvla/{name}-v0", entry_point=type(name, (point,), {"observation_space": spaces[name]}))
    with pytest.raises(ConfigError, match=says):
        list_tasks(f"gym:rlvla/{name}-v0")


def test_an_observation_that_is_not_as_its_space_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env(POINT, 0, image_size=16, cameras="pixels")
    raw = type(env._env.unwrapped)
    draw = raw._drawn
    monkeypatch.setattr(raw, "_drawn", lambda self, *size: draw(self, *size).astype(np.int64))
    with pytest.raises(ConfigError, match="lack the uint8 images that its space has: pixels"):
        env.reset(0, 0)


@pytest.mark.parametrize(
    ("suite", "cameras", "says"),
    [
        (POINT, ("front",), r"unknown camera\(s\) front; known cameras: render, pixels$"),
        (VIEWS, ("front",), r"known cameras: render, observation.render, views.front.left$"),
    ],
)
def test_unknown_cameras_are_refused_before_anything_is_started(suite: str, cameras: tuple, says: str) -> None:
    for python in (None, sys.executable):
        with pytest.raises(ConfigError, match=says) as error:
            EnvConfig(task_suite_name=suite, cameras=cameras, env_python=python).tasks()
        assert [problem.flag for problem in error.value.problems] == ["cameras"]


def test_success_ends_an_episode() -> None:
    env = make_env(POINT, 0, use_proprio=True, cameras=())
    last = towards_the_middle(env, 3)[-1]
    assert last.terminated and last.success_at_end and last.events[-1] == {"success"}


def test_an_episode_that_the_environment_terminates_without_success_has_failed() -> None:
    import gymnasium

    gymnasium.register(
        "rlvla/Edge-v0", entry_point=gymnasium.spec("rlvla/Point-v0").entry_point, kwargs={"ends": "failure"}
    )
    env = make_env("gym:rlvla/Edge-v0", 0, cameras=())
    env.reset(3, 0)
    result = env.step_chunk(np.ones((30, 2)))
    assert result.terminated and not result.truncated and not result.success_at_end and result.steps_executed < 30
    with pytest.raises(RuntimeError):
        env.step_chunk(np.ones((1, 2)))


def test_success_at_which_the_environment_ends_needs_not_last() -> None:
    """Nothing can be held for five steps where the first one is the last."""
    env = make_env(POINT, 0, use_proprio=True, cameras=(), gym_success="terminated", success_hold_steps=5)
    last = towards_the_middle(env, 3)[-1]
    assert last.terminated and last.success_at_end and not last.truncated


def test_success_at_a_time_limit_of_the_environment_must_have_lasted() -> None:
    import gymnasium

    gymnasium.register(
        "rlvla/Short-v0", entry_point=gymnasium.spec("rlvla/Point-v0").entry_point, kwargs={"ends": "cut"}
    )
    env = make_env("gym:rlvla/Short-v0", 0, use_proprio=True, cameras=(), success_hold_steps=5)
    last = towards_the_middle(env, 3)[-1]
    assert last.truncated and last.successes[last.steps_executed - 1] and not last.success_at_end


def test_success_may_have_another_name_or_must_be_told() -> None:
    import gymnasium

    point = gymnasium.spec("rlvla/Point-v0").entry_point
    gymnasium.register("rlvla/Silent-v0", entry_point=point, kwargs={"tells": False})
    for key in ("reached", "terminated"):
        env = make_env("gym:rlvla/Silent-v0", 0, use_proprio=True, cameras=(), gym_success=key)
        assert towards_the_middle(env, 3)[-1].success_at_end
    env = make_env("gym:rlvla/Silent-v0", 0, cameras=())
    env.reset(3, 0)
    with pytest.raises(ConfigError, match="--gym_success"):
        env.step_chunk(np.zeros((1, 2)))


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("gym:ENV_ID", "replace ENV_ID"),
        ("gym:Nothing-v0", "cannot make it"),
        ("gym:no_such_module:Nothing-v0", "--custom_module no_such_module"),
        ("gym:CartPole-v1", "bounded vector"),
    ],
)
def test_what_cannot_be_a_suite(suite: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        list_tasks(suite)
    assert error.value.problems[0].flag == "task_suite_name"


def test_workers_import_the_module_that_registers_it(tmp_path: Path) -> None:
    """In a separate process, because this one has already imported the module."""
    root = MODULE.parents[2]
    command = [sys.executable, root / "cli/check_env.py", POINT, "--custom_module", MODULE, "--output", "point.png"]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "point.png").is_file()


def test_another_interpreter_imports_the_module_that_registers_it() -> None:
    env = EnvConfig(task_suite_name=POINT, env_python=sys.executable)
    assert env.tasks() == list_tasks(POINT)


def test_its_reward_is_not_taken_for_that_of_success() -> None:
    (task,) = list_tasks(POINT)
    assert task.dense_reward and task.reward_range is None


def test_it_draws_without_a_screen_and_without_settings() -> None:
    pytest.importorskip("gymnasium_robotics")
    code = (
        "from rlvla.envs import make_env; env = make_env('gym:FetchReach-v4', 0, image_size=32); "
        "print(env.reset(0, 0).images[0].std() > 0)"
    )
    unset = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "DISPLAY")}
    done = subprocess.run([sys.executable, "-c", code], env=unset, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"], done.stderr
