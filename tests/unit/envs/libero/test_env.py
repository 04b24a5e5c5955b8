"""LIBERO: its tasks and files without a simulator, and its environments against LIBERO's own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rlvla.envs.libero import install as install
from rlvla.envs.libero.env import MAX_STEPS, NOOP, TaskFacts, axis_angle, instruction_of
from rlvla.envs.registry import get_suite, list_tasks, make_env
from rlvla.envs.splits import eval_init_states, train_init_states
from rlvla.rewards.machines import task_graph
from rlvla.utils.errors import ConfigError, MissingExtraError
from tests.support.libero_requirements import require_libero, require_package

SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}


# ------------------------------------------------------------------------------------------- without a simulator
def test_130_tasks_with_the_published_limits() -> None:
    require_package()
    limits = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    for suite, count in SUITES.items():
        tasks = list_tasks(suite)
        assert [task.task_id for task in tasks] == list(range(count))
        assert {(task.max_steps, task.num_init_states, task.action_dim) for task in tasks} == {(limits[suite], 50, 7)}
        assert all(task.instruction and task.propositions for task in tasks)
    spatial = list_tasks("libero_spatial")[0]
    assert spatial.instruction == ("pick up the black bowl between the plate and the ramekin and place it on the plate")
    assert spatial.propositions[:4] == ("on_akita_black_bowl_1_plate_1", "near", "grasped", "lifted")
    assert get_suite("libero_spatial").image_size == 256


def test_listing_needs_neither_libero_nor_torch_imported() -> None:
    require_package()
    code = (
        "import sys; from rlvla.envs.registry import list_tasks; list_tasks('libero_10');"
        "from rlvla.envs.libero.install import init_states, task_names;"
        "init_states('libero_10', task_names()['libero_10'][0]);"
        "print(*{'mujoco', 'robosuite', 'libero', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "", done.stdout + done.stderr


def test_instructions_are_made_from_names() -> None:
    assert instruction_of("KITCHEN_SCENE10_put_the_butter_on_it") == "put the butter on it"
    assert instruction_of("LIVING_ROOM_SCENE5_do_it") == "do it"
    assert instruction_of("open_the_drawer") == "open the drawer"


def test_goals_are_read_from_definitions() -> None:
    bddl = "(define (problem x) (:init (On a b))\n (:goal\n  (And (In a_1 b_1_region) (Turnon stove_1))\n )\n)"
    assert install.goal_of(bddl) == [("in", "a_1", "b_1_region"), ("turnon", "stove_1")]


def test_initial_states_of_every_task_can_be_read() -> None:
    require_package()
    for suite in SUITES:
        for name in install.task_names()[suite]:
            states = install.init_states(suite, name)
            assert states.shape[0] == 50 and states.dtype == np.float64 and np.isfinite(states).all()


def test_a_file_of_initial_states_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    folder = tmp_path / "init_files" / "libero_10"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "task.pruned_init", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
    monkeypatch.setattr(install, "package_folder", lambda: tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="may not name"):
        install.init_states("libero_10", "task")


def test_axis_angle_as_in_the_training_data() -> None:
    half = np.sqrt(0.5)
    np.testing.assert_allclose(axis_angle(np.array([0, 0, half, half])), [0, 0, np.pi / 2])
    np.testing.assert_allclose(axis_angle(np.array([0, 0, -half, -half])), [0, 0, -3 * np.pi / 2])
    np.testing.assert_array_equal(axis_angle(np.array([0, 0, 0, 1.0])), np.zeros(3))
    np.testing.assert_array_equal(axis_angle(np.array([0, 0, 0, -1.0])), np.zeros(3))


def test_the_default_split_is_disjoint_and_shared_has_all_50() -> None:
    require_package()
    task = list_tasks("libero_goal")[3]
    assert train_init_states(task) == range(40) and eval_init_states(task, "heldout", 10) == list(range(40, 50))
    assert train_init_states(task, "shared") == range(50) and len(eval_init_states(task, "shared", 50)) == 50


def assets_at(folder: Path) -> Path:
    for name in install._ASSET_FOLDERS:
        (folder / name).mkdir(parents=True)
    return folder


def test_where_assets_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_package()
    folders = [tmp_path / name / "assets" for name in ("flag", "variable", "home/.cache/libero")]
    flag, variable, home = map(assets_at, folders)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(install.ASSETS_VARIABLE, str(variable.parent))
    assert install.find_assets(str(flag)) == flag  # the folder itself, or the one around it
    assert install.find_assets(None) == variable
    monkeypatch.delenv(install.ASSETS_VARIABLE)
    assert install.find_assets(None) == home
    with pytest.raises(ConfigError, match=r"--libero_assets .*nowhere does not hold"):
        install.find_assets(str(tmp_path / "nowhere"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"install_libero\.sh --assets"):
        install.find_assets(None)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"install_libero\.sh"):
        install.package_folder()


# ---------------------------------------------------------------------------------------------- with a simulator
@pytest.fixture(scope="module")
def env():
    require_libero()
    env = make_env("libero_spatial", 0, cameras=("agentview", "wrist"), use_proprio=True, image_size=64)
    yield env
    env.close()


@pytest.fixture(scope="module")
def stock(env):
    """LIBERO's own environment of the same task, with fixtures where ours has them."""
    from libero.libero.envs import OffScreenRenderEnv

    task = env.task
    stock = OffScreenRenderEnv(
        bddl_file_name=str(install.bddl_file(task.suite, task.name)), camera_heights=64, camera_widths=64
    )
    stock.seed(0)
    stock.reset()
    model = stock.sim.model._model
    model.body_pos[:], model.body_quat[:] = env._sim.model.body_pos, env._sim.model.body_quat
    yield stock
    stock.close()


@pytest.mark.nightly
def test_trajectory_proprio_and_success_are_liberos(env, stock) -> None:
    first = env.reset(3, seed=0)
    stock.set_init_state(install.init_states(env.task.suite, env.task.name)[3])
    for _ in range(10):
        observed, _, _, _ = stock.step(NOOP)
    np.testing.assert_allclose(env._sim.data.qpos, stock.sim.data.qpos, atol=3e-5)
    actions = np.random.default_rng(0).uniform(-1, 1, (8, 7)).astype(np.float32)
    actions[:, 3:6] = 0.0  # robosuite rounds rotations to single precision
    result = env.step_chunk(actions)
    for action in actions:
        observed, _, done, _ = stock.step(action)
    np.testing.assert_allclose(env._sim.data.qpos, stock.sim.data.qpos, atol=1e-4)
    assert np.abs(env._sim.data.qpos[:7] - stock.robots[0].init_qpos).max() > 0.03, "the arm has moved"
    assert bool(done) == bool(result.successes[-1])
    quat = observed["robot0_eef_quat"]
    expected = np.concatenate([observed["robot0_eef_pos"], axis_angle(quat), observed["robot0_gripper_qpos"]])
    # robosuite samples its observables a substep or two apart from ours.
    np.testing.assert_allclose(result.observation.proprio, expected, atol=1e-2)
    assert first.proprio.shape == (8,)


@pytest.fixture(scope="module")
def full(env):
    full = make_env("libero_spatial", 0, cameras=("agentview", "wrist"), image_size=64, render_quality="full")
    yield full
    full.close()


def test_physics_are_the_same_with_lighter_meshes_and_textures(env, full) -> None:
    fast, heavy = env._sim.model, full._sim.model
    assert fast.nmeshface < 0.75 * heavy.nmeshface and fast.ntexdata < heavy.ntexdata
    solid = np.flatnonzero(heavy.geom_contype | heavy.geom_conaffinity)
    for field in ("geom_pos", "geom_quat", "geom_size", "geom_rbound", "geom_friction"):
        assert np.array_equal(getattr(fast, field)[solid], getattr(heavy, field)[solid]), field
    assert np.array_equal(fast.tex_colorspace, heavy.tex_colorspace)
    actions = np.random.default_rng(1).uniform(-1, 1, (40, 7)).astype(np.float32)
    for each in (env, full):
        each.reset(5, seed=0)
        each.step_chunk(actions)
    for field in ("qpos", "qvel", "qfrc_constraint"):
        assert np.array_equal(getattr(env._sim.data, field), getattr(full._sim.data, field)), field


def test_full_quality_images_are_liberos(env, full, stock) -> None:
    """The first row is the lowest, as in LIBERO's own observations."""
    images = full.reset(3, seed=0).images
    stock.set_init_state(install.init_states(env.task.suite, env.task.name)[3])
    for _ in range(10):
        observed, _, _, _ = stock.step(NOOP)
    for image, name in zip(images, ("agentview_image", "robot0_eye_in_hand_image")):
        apart, upright = (np.abs(i.astype(int) - observed[name].astype(int)).mean() for i in (image, image[::-1]))
        assert apart < 8.0 and apart < 0.25 * upright, (name, apart, upright)
    fast = env.reset(3, seed=0).images
    assert 0 < np.abs(fast.astype(int) - images.astype(int)).mean() < 10


def test_propositions_name_what_is_to_be_moved_and_operated() -> None:
    text = """
      (:fixtures main_table - table wooden_cabinet_1 - wooden_cabinet)
      (:objects
        bowl_1 bowl_2 - bowl
        Plate_1 - plate)
      (:goal (And (Close wooden_cabinet_1_top_region) (In bowl_2 wooden_cabinet_1_top_region)))
    )"""
    facts = TaskFacts.of(text.replace("table wooden", "table\n wooden"))
    assert (facts.moved, facts.operated) == (("bowl_2",), ("wooden_cabinet_1",))
    close, inside = "close_wooden_cabinet_1_top_region", "in_bowl_2_wooden_cabinet_1_top_region"
    assert facts.stages == (
        ("near_bowl_2", "grasped_bowl_2", "lifted_bowl_2", inside),  # before the drawer is shut
        ("touched_wooden_cabinet_1", close),
    )
    kinds = {"near", "grasped", "lifted", "touched"}
    assert set(facts.propositions) == {close, inside, *kinds, *facts.stages[0], *facts.stages[1]}


def test_every_task_has_a_machine_of_several_stages() -> None:
    require_package()
    tasks = [task for suite in MAX_STEPS for task in list_tasks(suite)]
    graphs = [task_graph(task, ordered=ordered, stages="manipulation") for task in tasks for ordered in (True, False)]
    assert len(graphs) == 260 and all(graph.distances["u0"] >= 2 for graph in graphs)
    assert sum(len(task_graph(task).states) == 2 for task in tasks) > 100, "predicates alone: one edge"


def test_near_grasped_lifted_follow_the_bowl(env) -> None:
    env.reset(0, seed=0)
    sim = env._sim
    mujoco = pytest.importorskip("mujoco")
    bowl = sim.env.objects_dict["akita_black_bowl_1"]
    address = sim.model.joint(bowl.joints[0]).qposadr[0]
    body = sim.env.obj_body_id["akita_black_bowl_1"]
    resting = sim.data.xpos[body].copy()

    def events_at(position: np.ndarray) -> set[str]:
        sim.data.qpos[address : address + 3] = position
        mujoco.mj_forward(sim.model, sim.data)
        return {name for name in env._stages() if not name.endswith("bowl_1")}

    hand = sim.data.site_xpos[sim.eef_site].copy()
    assert events_at(resting) == set()
    assert events_at(resting + [0, 0, 0.05]) == {"lifted"}
    assert events_at(hand) >= {"near", "lifted"}
    held = sim.grasped
    sim.grasped = lambda geoms: geoms == sim.geom_ids(bowl.contact_geoms)
    try:
        assert events_at(hand) == {"near", "lifted", "grasped"}
        assert events_at(resting + [0.5, 0, 0]) == set(), "out of the fingers' reach"
    finally:
        sim.grasped = held


def test_success_is_the_goal_of_the_definition(env) -> None:
    env.reset(0, seed=0)
    sim = env._sim
    plate = sim.data.xpos[sim.env.obj_body_id["plate_1"]].copy()
    address = sim.model.joint(sim.env.objects_dict["akita_black_bowl_1"].joints[0]).qposadr[0]
    sim.data.qpos[address : address + 3] = plate + [0.0, 0.0, 0.03]
    result = env.step_chunk(np.tile(NOOP, (20, 1)))
    assert result.terminated and result.success_at_end and result.steps_executed < 20
    assert "on_akita_black_bowl_1_plate_1" in result.events[-1] and result.rewards[result.steps_executed - 1] == 1.0


def test_the_import_asks_nothing(tmp_path: Path) -> None:
    require_libero()
    code = (
        "from rlvla.envs.registry import make_env\n"
        "env = make_env('libero_object', 0, cameras=(), settle_steps=0)\nenv.reset(0, 0)\n"
        "import sys\nassert not {'torch', 'robomimic', 'wandb'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HOME": str(tmp_path), "LIBERO_CONFIG_PATH": str(tmp_path / "none")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "Do you want" not in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "task_id"), [("libero_object", 4), ("libero_goal", 6), ("libero_10", 9), ("libero_90", 45)]
)
def test_a_task_of_every_other_suite_builds_resets_and_steps(suite: str, task_id: int) -> None:
    require_libero()
    env = make_env(suite, task_id, image_size=32)
    for init_state_id in (0, 49):
        images = env.reset(init_state_id, seed=0).images
        assert images.std() > 5
        result = env.step_chunk(np.tile(NOOP, (5, 1)))
        assert not result.successes.any() and not result.terminated
    env.close()
