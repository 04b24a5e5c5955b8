"""Small undamaged datasets of each format, and the problems reported of damaged copies."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvla.data.reading import read_demonstrations
from rlvla.data.robomimic import DemonstrationWriter
from rlvla.utils.errors import ConfigError, MissingExtraError
from tests.support.libero_files import write_demos

STEPS, SIDE = 6, 16
ENV = {"task_suite_name": "toy", "cameras": ["left", "right"], "image_size": SIDE}
Change = Callable[[Any], object]
LIBERO_TASK = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"


def episode(index: int) -> dict[str, Any]:
    rng = np.random.default_rng(index)
    return {
        "images": rng.integers(0, 256, (STEPS, 2, SIDE, SIDE, 3), dtype=np.uint8),
        "proprio": rng.normal(size=(STEPS, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (STEPS, 4)).astype(np.float32),
        "rewards": np.zeros(STEPS, np.float32),
        "instruction": f"do {index}",
        "success_at_end": True,
        "init_state_id": index,
        "seed": index,
    }


def rollout(index: int) -> dict[str, Any]:
    """An episode with images of its two decisions, and of its end."""
    whole = episode(index)
    more = {"decision_steps": np.array([0, 3]), "rollout/last_obs/proprio": whole["proprio"][-1]}
    more |= {f"rollout/last_obs/{camera}_image": whole["images"][-1, i] for i, camera in enumerate(ENV["cameras"])}
    return whole | {"images": whole["images"][::3], "proprio": whole["proprio"][::3], "more": more}


def write(path: Path, kind: Callable[[int], dict[str, Any]]) -> Path:
    writer = DemonstrationWriter(path, ENV, ENV["cameras"], control_freq=10.0)
    for index in range(3):
        writer.add(kind(index), task_id=0)
    writer.close()
    return path


def write_pictures(folder: Path) -> Path:
    """A LeRobot dataset in format v2.1 with encoded pictures in its rows, of two episodes."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "meta").mkdir(parents=True)
    (folder / "data").mkdir()
    picture = {"dtype": "image", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]}
    info = {
        "codebase_version": "v2.1",
        "chunks_size": 1000,
        "fps": 10,
        "total_episodes": 2,
        "data_path": "data/{episode_index:06d}.parquet",
        "video_path": None,
        "features": {
            "observation.images.front": picture,
            "action": {"dtype": "float32", "shape": [2], "names": None},
        },
    }
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    lines = [{"episode_index": i, "tasks": ["tidy up"], "length": STEPS} for i in range(2)]
    (folder / "meta" / "episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for index in range(2):
        columns = {
            "action": np.random.default_rng(index).normal(size=(STEPS, 2)).tolist(),
            "frame_index": list(range(STEPS)),
            "episode_index": [index] * STEPS,
            "observation.images.front": [encoded("RGB", SIDE)] * STEPS,
        }
        pq.write_table(pa.table(columns), folder / "data" / f"{index:06d}.parquet")
    return folder


def encoded(mode: str, side: int) -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new(mode, (side, side)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def _demos(folder: Path) -> Path:
    return write(folder / "demos.hdf5", episode)


def _rollouts(folder: Path) -> Path:
    return write(folder / "demos.hdf5", rollout)


def _libero(folder: Path) -> Path:
    write_demos(folder / f"{LIBERO_TASK}_demo.hdf5", steps=STEPS, size=SIDE)
    return folder


def _videos(folder: Path) -> Path:
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    from rlvla.data.lerobot_writing import write_lerobot

    folder.parent.mkdir(exist_ok=True)
    write_lerobot(folder, read_demonstrations(write(folder.with_name("source") / "demos.hdf5", episode)), 10.0)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "demos": _demos,
    "rollouts": _rollouts,
    "libero": _libero,
    "videos": _videos,
    "pictures": write_pictures,
}


class Originals:
    """Undamaged data of each format, made when first needed.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path):
        self._root, self._made = root, {}

    def __call__(self, kind: str) -> Path:
        if kind == "libero":
            from rlvla.envs.libero.install import task_names

            try:
                task_names()
            except MissingExtraError as error:
                pytest.skip(str(error))
        if kind not in self._made:
            self._made[kind] = MAKERS[kind](self._root / kind)
        return self._made[kind]


def copied(original: Path, tmp_path: Path) -> Path:
    """A copy of a dataset; if it is a file, with what lies next to it."""
    folder = shutil.copytree(original if original.is_dir() else original.parent, tmp_path / "copy")
    return Path(folder) if original.is_dir() else Path(folder) / original.name


def problems(path: Path) -> str:
    """What the reader says."""
    with pytest.raises(ConfigError) as refused:
        read_demonstrations(path)
    text = str(refused.value)
    assert str(path.parent if path.name == "demos.hdf5" else path) in text, "the file is named"
    assert not any(word in text for word in ("Error", "object at 0x"))
    assert all(p.reason == "invalid_file" for p in refused.value.problems)
    return text
