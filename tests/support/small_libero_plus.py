"""A package of LIBERO-plus's layout in small: seven perturbed tasks of libero_goal, and an environment like its own."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

BASE = "turn_on_the_stove"
VIEW = "_view_0_0_100_0_0_initstate_"
# Name's end -> category, in the order of the ids.
TASKS = {
    "_table_3": "Background Textures",
    "_light_12": "Light Conditions",
    "_view_-15_5_110_0_-4_initstate_0": "Camera Viewpoints",
    f"{VIEW}7": "Robot Initial States",
    f"_language_2{VIEW}0": "Language Instructions",
    f"{VIEW}0_noise_31": "Sensor Noise",
    "_moved_level2_sample4": "Objects Layout",
}
DEFINITION = """(define (problem LIBERO_Tabletop_Manipulation)
  (:language {language})
  (:fixtures flat_stove_1 - flat_stove)
  (:objects akita_black_bowl_1 - akita_black_bowl)
  (:goal (And (Turnon flat_stove_1)))
)
"""
ARM = np.arange(7)
SIZE = 1 + 9 + 9  # time, positions and velocities of arm and fingers


def write_package(folder: Path) -> None:
    """Write the files; cameras, robots and noise have no definition of their own."""
    (folder / "benchmark").mkdir(parents=True)
    entries = [
        {"id": number, "name": BASE + end, "category": category, "difficulty_level": None}
        for number, (end, category) in enumerate(TASKS.items(), start=1)
    ]
    content = {"libero_goal": entries[::-1]}
    (folder / "benchmark/task_classification.json").write_text(json.dumps(content))
    definitions = folder / "bddl_files/libero_goal"
    definitions.mkdir(parents=True)
    for end in ("", "_table_3", "_light_12", "_language_2", "_moved_level2_sample4"):
        language = "Light the   Burner" if "language" in end else "Turn on the stove"
        (definitions / f"{BASE}{end}.bddl").write_text(DEFINITION.format(language=language))
    write_states(
        folder / f"init_files/libero_goal/{BASE}.pruned_init", 0.25 + 0.001 * np.arange(50)[:, None].repeat(SIZE, 1)
    )
    write_states(
        folder / f"init_files/libero_newobj/libero_goal/{BASE}_moved_level2_sample4.pruned_init", np.full(SIZE, 0.75)
    )


def write_states(path: Path, states: np.ndarray) -> None:
    """As torch.save writes arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(states))


class OffScreenRenderEnv:
    """The interface that evaluations use. The stove is on while the sixth number of an action is above .99."""

    def __init__(
        self, bddl_file_name: str, camera_names: list[str], camera_heights: int = 128, camera_widths: int = 128
    ):
        self.file, self._cameras, self._size = bddl_file_name, camera_names, (camera_heights, camera_widths, 3)
        self.sim = SimpleNamespace(data=SimpleNamespace(qpos=np.zeros(9)))
        self.robots = [SimpleNamespace(_ref_joint_pos_indexes=ARM.tolist())]
        self.env = SimpleNamespace(
            parsed_problem={"goal_state": [["turnon", "flat_stove_1"]]}, _eval_predicate=lambda state: self._on
        )
        self._on, self._noise = False, 0.0

    def reset(self) -> dict[str, Any]:
        """Another posture, and what a scene draws at random."""
        self.sim.data.qpos[:], self._on, self._noise = 0.5, False, np.random.uniform()
        return self._observe()

    def set_init_state(self, state: np.ndarray) -> dict[str, Any]:
        """The whole state is overwritten."""
        self.sim.data.qpos[:] = state[1:10]
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, dict]:
        """Moves each joint a little."""
        self.sim.data.qpos[:7] += 0.01 * np.asarray(action)
        self._on, self._noise = bool(action[5] > 0.99), np.random.uniform()
        return self._observe(), float(self._on), self._on, {}

    def check_success(self) -> bool:
        """The goal holds."""
        return self._on

    def close(self) -> None:
        """Nothing to release."""

    def _observe(self) -> dict[str, Any]:
        qpos = self.sim.data.qpos
        shade = np.uint8(200 * abs(np.sin(qpos.sum() + (self._noise if "_noise_" in self.file else 0.0))))
        pictures = {f"{name}_image": np.full(self._size, shade + len(name), np.uint8) for name in self._cameras}
        state = {"robot0_eef_pos": qpos[:3].copy(), "robot0_gripper_qpos": qpos[7:].copy()}
        pictures["agentview_image"] += 0  # noise is made in it
        return pictures | state | {"robot0_eef_quat": np.array([0.0, 0.0, 0.0, 1.0])}
