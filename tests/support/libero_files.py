"""Small files of the layout of LIBERO's demonstrations."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np


def write_demos(
    path: Path, demos: int = 2, steps: int = 8, size: int = 64, seed: int = 0, seen_after: bool = True
) -> None:
    """A file `<task>_demo.hdf5` with random content.

    Args:
        path: the file.
        demos, steps, size, seed: of its content.
        seen_after: observations are those after the action beside them, as LIBERO's own files have them; False: before
            it, as OpenVLA's script writes them.
    """
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["bddl_file_name"] = f"bddl_files/{path.name}.bddl"
        data.attrs["num_demos"], data.attrs["total"] = demos, demos * steps
        for index in range(demos):
            demo = data.create_group(f"demo_{index}")
            demo.attrs["num_samples"] = steps
            actions = rng.uniform(-1, 1, (steps, 7))
            actions[:, 6] = np.sign(actions[:, 6])
            demo["actions"] = actions
            demo["dones"] = (np.arange(steps) == steps - 1).astype(np.uint8)
            demo["rewards"] = demo["dones"][:]
            states = rng.normal(size=(steps + 1, 92))  # before each action, and after the last
            demo["robot_states"], demo["states"] = rng.normal(size=(steps, 9)), states[:-1]
            for name in ("agentview_rgb", "eye_in_hand_rgb"):
                demo[f"obs/{name}"] = rng.integers(0, 256, (steps, size, size, 3), dtype=np.uint8)
            widths = {"ee_pos": 3, "ee_ori": 3, "ee_states": 6, "gripper_states": 2}
            for name, width in widths.items():
                demo[f"obs/{name}"] = rng.normal(size=(steps, width))
            demo["obs/joint_states"] = (states[1:] if seen_after else states[:-1])[:, 1:8]
