"""LIBERO's demonstrations, from files of the same layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rlvla.data.libero import PROPRIO
from rlvla.data.reading import read_demonstrations
from rlvla.envs.config import EnvConfig, heldout_problems
from rlvla.envs.libero import install as libero_install
from rlvla.envs.libero.env import NOOP
from rlvla.envs.splits import LearnedStates
from rlvla.utils.errors import ConfigError, MissingExtraError
from tests.support.libero_files import write_demos

try:
    SPATIAL = libero_install.task_names()["libero_spatial"]
except MissingExtraError as error:
    pytest.skip(str(error), allow_module_level=True)


def test_a_folder_of_files_is_read_task_by_task(tmp_path: Path) -> None:
    for task_id in (7, 2):
        write_demos(tmp_path / f"{SPATIAL[task_id]}_demo.hdf5", steps=5 + task_id, seed=task_id)
    demos = read_demonstrations(tmp_path, ["wrist", "agentview"])
    assert demos.env_args == {
        "task_suite_name": "libero_spatial",
        "task_ids": [2, 7],
        "cameras": ["wrist", "agentview"],
        "image_size": 64,
    }
    assert [len(a) for a in demos.actions] == [6, 6, 11, 11] and demos.success == [True] * 4
    assert demos.instructions[0] == SPATIAL[2].replace("_", " ") != demos.instructions[2]
    with h5py.File(tmp_path / f"{SPATIAL[2]}_demo.hdf5") as file:
        first = file["data/demo_0"]
        np.testing.assert_array_equal(demos.images[0][:, 0], first["obs/eye_in_hand_rgb"][:-1])
        np.testing.assert_array_equal(demos.images[0][:, 1], first["obs/agentview_rgb"][:-1])
        state = np.concatenate([first[f"obs/{name}"] for name in PROPRIO], axis=1).astype(np.float32)
        np.testing.assert_array_equal(demos.proprio[0], state[:-1])
        np.testing.assert_array_equal(demos.actions[0], first["actions"][1:].astype(np.float32))
        np.testing.assert_array_equal(demos.last_images[0][0], first["obs/eye_in_hand_rgb"][-1])
        np.testing.assert_array_equal(demos.last_proprio[0], state[-1])
    entry = demos.statistics["libero_spatial"]
    assert entry["action"]["mask"] == [True] * 6 + [False] and len(entry["proprio"]["q99"]) == 8
    assert (entry["num_trajectories"], entry["num_transitions"]) == (4, 34)
    assert demos.init_states == []
    assert demos.states_learned_from == [LearnedStates("libero_spatial", task, 0, 0) for task in (2, 7)]
    suite = EnvConfig("libero_spatial")
    (learned,) = heldout_problems((SPATIAL[7], SPATIAL[1]), suite, (), demos.states_learned_from, "demos")
    assert learned.reason == "mismatch" and f"{SPATIAL[7]}" in str(learned)


def test_files_with_the_observations_before_the_actions_keep_every_row(tmp_path: Path) -> None:
    file = tmp_path / f"{SPATIAL[0]}_demo.hdf5"
    write_demos(file, seen_after=False)
    demos = read_demonstrations(file)
    with h5py.File(file) as opened:
        second = opened["data/demo_1"]
        np.testing.assert_array_equal(demos.images[1][:, 0], second["obs/agentview_rgb"])
        np.testing.assert_array_equal(demos.actions[1], second["actions"][:].astype(np.float32))
    assert demos.last_images is None and demos.last_proprio is None


def test_a_folder_may_hold_files_of_both_kinds(tmp_path: Path) -> None:
    write_demos(tmp_path / f"{SPATIAL[0]}_demo.hdf5", demos=1)
    write_demos(tmp_path / f"{SPATIAL[1]}_demo.hdf5", demos=1, seen_after=False)
    demos = read_demonstrations(tmp_path)
    assert [len(a) for a in demos.actions] == [len(i) for i in demos.images] == [7, 8]
    assert demos.last_images is None


@pytest.mark.parametrize("seen_after", [True, False])
def test_every_row_holds_the_observation_before_its_action(seen_after: bool, tmp_path: Path) -> None:
    """LIBERO's own environment played as the two scripts play it, against the contract of `LiberoEnv`."""
    try:
        assets = libero_install.find_assets(None)
    except ConfigError as error:
        pytest.skip(str(error))
    file = tmp_path / f"{SPATIAL[0]}_demo.hdf5"
    actions = np.repeat(np.random.default_rng(0).uniform(-1, 1, (4, 7)), 3, axis=0)
    before = record(libero_install.import_libero(assets), file, actions, seen_after=seen_after)
    demos = read_demonstrations(file)
    first = int(seen_after)
    np.testing.assert_array_equal(demos.actions[0], actions[first:].astype(np.float32))
    # An observation may be a substep old, a fortieth of what a step moves.
    moved = np.abs(np.diff(before, axis=0)).max(axis=0)
    assert (np.abs(demos.proprio[0][:, :3] - before[first:-1]) <= 0.1 * moved + 1e-6).all()


def record(libero: Any, file: Path, actions: np.ndarray, *, seen_after: bool) -> np.ndarray:
    """Record an episode of LIBERO's environment; returns the true positions [S + 1, 3] of the hand."""
    from rlvla.envs.robosuite.sim import numpy_seed, physics_only

    bddl = str(libero_install.bddl_file("libero_spatial", SPATIAL[0]))
    kind = libero.bddl_utils.get_problem_info(bddl)["problem_name"]
    with numpy_seed(0):
        env = libero.TASK_MAPPING[kind](bddl, robots=["Panda"], **physics_only(20.0))
        env.reset()
    env.sim.set_state_from_flattened(libero_install.init_states("libero_spatial", SPATIAL[0])[0])
    env.sim.forward()
    obs, rows, hand = None, [], []
    site = env.robots[0].eef_site_id
    if not seen_after:
        env._update_observables(force=True)
        obs = env.step(NOOP)[0]
    for action in actions:
        states, given = env.sim.get_state().flatten(), obs
        hand.append(env.sim.data.site_xpos[site].copy())
        obs = env.step(action)[0]
        rows.append((states, obs if seen_after else given))
    hand.append(env.sim.data.site_xpos[site].copy())
    env.close()
    names = {"ee_pos": "robot0_eef_pos", "joint_states": "robot0_joint_pos", "gripper_states": "robot0_gripper_qpos"}
    with h5py.File(file, "w") as opened:
        demo = opened.create_group("data/demo_0")
        demo["actions"], demo["states"] = actions, np.stack([states for states, _ in rows])
        for name, key in names.items():
            demo[f"obs/{name}"] = np.stack([observation[key] for _, observation in rows])
        demo["obs/ee_ori"] = np.zeros((len(actions), 3))
        demo["obs/agentview_rgb"] = np.zeros((len(actions), 8, 8, 3), np.uint8)
    return np.stack(hand)


def test_one_file(tmp_path: Path) -> None:
    write_demos(tmp_path / f"{SPATIAL[0]}_demo.hdf5")
    demos = read_demonstrations(tmp_path / f"{SPATIAL[0]}_demo.hdf5")
    assert demos.env_args["task_ids"] == [0] and demos.env_args["cameras"] == ["agentview"]


def test_invalid_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no file"):
        read_demonstrations(tmp_path)
    write_demos(tmp_path / f"{SPATIAL[0]}_demo.hdf5")
    with pytest.raises(ConfigError, match="no camera birdview; they have agentview, wrist"):
        read_demonstrations(tmp_path, ["birdview"])
    write_demos(tmp_path / f"{libero_install.task_names()['libero_goal'][0]}_demo.hdf5")
    write_demos(tmp_path / "juggle_demo.hdf5")
    with pytest.raises(ConfigError) as error:
        read_demonstrations(tmp_path)
    assert len(error.value.problems) == 2 and "juggle_demo.hdf5" in str(error.value)
    assert "libero_goal, libero_spatial" in str(error.value)
    short = tmp_path / "short" / f"{SPATIAL[0]}_demo.hdf5"
    write_demos(short, steps=1)
    with pytest.raises(ConfigError, match="demo_0: actions has one row"):
        read_demonstrations(short)
    write_demos(short, demos=0)
    with pytest.raises(ConfigError, match="holds no episode"):
        read_demonstrations(short)
    broken = tmp_path / "broken" / f"{SPATIAL[1]}_demo.hdf5"
    broken.parent.mkdir()
    broken.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a readable file of LIBERO demonstrations"):
        read_demonstrations(broken)
