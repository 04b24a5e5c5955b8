"""Workers in another interpreter: one that has numpy and nothing else, and ones that will not do."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvla.envs import list_tasks, make_env
from rlvla.envs.config import EnvConfig
from rlvla.envs.registry import get_suite
from rlvla.envs.testing import assert_same_observation, assert_same_result
from rlvla.envs.workers.interpreter import answer, tasks_of_interpreter
from rlvla.envs.workers.messages import EnvSpec
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.worker_env import WorkerEnv
from rlvla.utils.errors import ConfigError


def interpreter(folder: Path, *packages: str) -> str:
    """This Python without its site-packages, except these packages."""
    site = folder / "site"
    site.mkdir()
    installed = Path(np.__file__).parents[1]
    for package in packages:
        (site / package).symlink_to(installed / package)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def numpy_only(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the pool adds what a worker needs
    libraries = [path.name for path in Path(np.__file__).parents[1].glob("numpy*.libs")]
    return interpreter(tmp_path, "numpy", *libraries)


def config(python, suite="toy_reach", **more):
    return EnvConfig(task_suite_name=suite, env_python=str(python), **more)


def test_numpy_is_all_that_a_worker_needs(numpy_only):
    asked = config(numpy_only, image_size=32)
    assert asked.tasks() == list_tasks("toy_reach", image_size=32)
    here = make_env("toy_reach", 0, image_size=32)
    with EnvPool(1, python=numpy_only) as pool:
        there = WorkerEnv(pool, 0, EnvSpec("toy_reach", 0, {"image_size": 32}))
        assert_same_observation(there.reset(3, 0), here.reset(3, 0))
        actions = np.full((4, 2), 0.3, dtype=np.float32)
        assert_same_result(there.step_chunk(actions), here.step_chunk(actions))


def test_mistakes_in_options_are_those_of_list_tasks(numpy_only):
    with pytest.raises(ConfigError) as error:
        config(numpy_only, cameras=("sideways",), task_ids=(7,)).tasks()
    assert len(error.value.problems) == 2
    assert "sideways" in error.value.problems[0] and "no task 7" in error.value.problems[1]


def test_missing_numpy_and_missing_simulator_are_named(tmp_path, numpy_only, monkeypatch):
    (tmp_path / "bare").mkdir()
    bare = interpreter(tmp_path / "bare")
    with pytest.raises(ConfigError, match=f"--env_python {bare}: it has no numpy.*-m pip install numpy"):
        config(bare).tasks()
    with pytest.raises(ConfigError, match="it has no robosuite, mujoco, numba, which robosuite needs"):
        config(numpy_only, "robosuite").tasks()
    with pytest.raises(ConfigError, match="it has no libero"):
        config(numpy_only, "libero_goal").tasks()


def test_what_is_no_interpreter_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no_such_python: not an executable file$"):
        config(tmp_path / "no_such_python").tasks()
    with pytest.raises(ConfigError, match="not an executable file; name the bin/python in it"):
        config(tmp_path).tasks()
    with pytest.raises(ConfigError, match="--env_python /bin/false: not a Python interpreter"):
        config("/bin/false").tasks()
    with pytest.raises(ConfigError, match="it cannot run rlvla's workers: it printed nothing"):
        config("/bin/true").tasks()
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 86\n")
    old.chmod(0o755)
    with pytest.raises(ConfigError, match=r"need Python 3\.10 or newer"):
        config(old).tasks()


def test_the_choice_is_not_recorded(numpy_only):
    assert "env_python" not in config(numpy_only).as_dict()
    assert config(numpy_only).completed({"env_python": "/elsewhere"}).env_python == numpy_only


def test_versions_are_those_of_the_interpreter_that_plays(numpy_only, tmp_path, monkeypatch):
    import mujoco

    here = EnvConfig(task_suite_name="robosuite").simulator_versions()
    assert here["mujoco"] == mujoco.__version__ and here["robosuite"].startswith("1.")
    suite = get_suite("toy_reach")
    monkeypatch.setattr("rlvla.envs.workers.interpreter.get_suite", lambda name: replace(suite, requires=("numpy",)))
    assert answer("toy_reach", {}, False)["versions"] == {"numpy": np.__version__}
    assert config(numpy_only).simulator_versions() == {}, "toy_reach needs no simulator, there either"


@pytest.mark.parametrize(
    "answer", ["7", "[]", "[" * 100_000, '{"tasks": [{"name": 1}]}', '{"tasks": 3}', '{"problems": [{"x": 1}]}', "{}"]
)
def test_an_answer_that_is_no_list_of_tasks_is_said(tmp_path, answer):
    python, text = tmp_path / "python", tmp_path / "answer"
    text.write_text(answer)
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exec cat "{text}"\nexit 0\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError) as error:
        tasks_of_interpreter(str(python), "toy_reach", {})
    assert [(p.flag, p.reason) for p in error.value.problems] == [("env_python", "unavailable")]
