"""Suites of LIBERO-plus, on small files of its layout and an environment of its interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlvla.envs.libero import install, plus
from rlvla.envs.libero.env import MAX_STEPS
from rlvla.envs.registry import list_tasks, make_env, suite_names
from rlvla.envs.testing import EnvContract
from rlvla.utils.errors import ConfigError
from tests.support import small_libero_plus as small

SUITE = "libero_plus_goal"
IDS = {category: number for number, category in enumerate(small.TASKS.values())}


@pytest.fixture(autouse=True, scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("plus")
    small.write_package(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "package_folder", lambda: folder)
        patch.setattr(install, "find_assets", lambda folder: folder)
        patch.setattr(install, "import_libero", lambda assets: small)
        plus._specs.cache_clear()
        yield folder
    plus._specs.cache_clear()


def make(category: str, **options: Any) -> plus.LiberoPlusEnv:
    return make_env(SUITE, IDS[category], image_size=8, use_proprio=True, settle_steps=1, **options)


class TestLiberoPlus(EnvContract):
    suite = SUITE
    task_id = IDS["Sensor Noise"]
    options: ClassVar = {"image_size": 8, "max_steps": 20}

    @classmethod
    def find_solution(cls, env):
        return 0, np.repeat(np.eye(7, dtype=np.float32)[[0, 5]], [3, 1], axis=0)


def test_every_task_is_counted_once_under_its_axis() -> None:
    tasks = list_tasks(SUITE)
    assert [task.name for task in tasks] == [small.BASE + end for end in small.TASKS]
    assert [task.category for task in tasks] == list(small.TASKS.values())
    assert {task.max_steps for task in tasks} == {MAX_STEPS["libero_goal"]}
    assert [task.num_init_states for task in tasks] == [50] * 6 + [1], "a layout of its own has one"
    told = {task.category: task.instruction for task in tasks}
    assert told.pop("Language Instructions") == "light the burner"
    assert set(told.values()) == {"turn on the stove"}, "no word of the perturbation"
    assert set(plus.SUITES) < set(suite_names())
    assert {task.max_steps for task in list_tasks(SUITE, max_steps=50)} == {50}


def test_the_package_is_asked_for_what_is_perturbed() -> None:
    for end, category in small.TASKS.items():
        file = make(category)._simulator.file
        assert file.endswith(f"bddl_files/libero_goal/{small.BASE}{end}.bddl"), "it reads the perturbation off the name"


def test_an_arm_that_starts_elsewhere_stays_there() -> None:
    posture = {name: make(name).reset(0, seed=0).proprio[:3] for name in IDS}
    np.testing.assert_allclose(posture["Robot Initial States"], 0.5)
    np.testing.assert_allclose(posture["Objects Layout"], 0.75, err_msg="a state of its own")
    np.testing.assert_allclose(posture["Light Conditions"], 0.25)
    env = make("Robot Initial States")
    np.testing.assert_allclose(env.reset(0, seed=0).proprio[6:], 0.25, err_msg="only the arm")


def test_noise_depends_on_the_initial_state_alone() -> None:
    env = make("Sensor Noise")
    first = env.reset(0, seed=0).images
    np.random.uniform(size=5)
    np.testing.assert_array_equal(env.reset(0, seed=1).images, first)


def test_noise_without_the_camera_that_has_it() -> None:
    assert make("Sensor Noise", cameras=("wrist",)).reset(0, seed=0).images.shape == (1, 8, 8, 3)


def test_another_libero(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "package_folder", lambda: tmp_path)
    plus._specs.cache_clear()
    with pytest.raises(ConfigError, match="the installed LIBERO is not LIBERO-plus"):
        list_tasks("libero_plus_10")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pick_up_the_bowl_from_table_center_table_4", ("pick_up_the_bowl_from_table_center", 0, 0, False)),
        ("pick_up_the_bowl_from_table_center_tb_4", ("pick_up_the_bowl_from_table_center", 0, 0, False)),
        ("open_it_view_0_0_100_0_0_initstate_12_noise_50", ("open_it", 12, 50, False)),
        ("open_it_language_3_view_0_0_100_0_0_initstate_0", ("open_it", 0, 0, False)),
        ("open_it_level1_sample2", ("open_it", 0, 0, True)),
        ("open_it_add_2", ("open_it", 0, 0, True)),
    ],
)
def test_names(name: str, expected: tuple) -> None:
    variant = plus.Variant.of(name)
    assert (variant.base, variant.robot, variant.noise, variant.own_layout) == expected
