"""Recorded episodes played again: each file in its own environment, to its last step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from cli.collect_demos import main as collect
from cli.convert_demos import main as convert
from rlvla.data.reading import read_demonstrations


def rollouts(folder: Path, max_steps: int, seed: int) -> Path:
    """Four failures of `max_steps` steps, with pictures of every third step, as dumped rollouts hold them."""
    argv = ["--task_suite_name", "toy_reach", "--image_size", "16", "--use_proprio", "--keep", "all", "--num_envs", "1"]
    argv += ["--num_demos", "4", "--offset_bias", "0.9", "0.9", "--max_steps", str(max_steps), "--seed", str(seed)]
    collect([*argv, "--output", str(folder)])
    with h5py.File(folder / "demos.hdf5", "r+") as file:
        for demo in file["data"].values():
            assert len(demo["actions"]) == max_steps
            starts = np.arange(0, max_steps, 3)
            for name in ("obs/top_image", "obs/proprio"):
                kept = demo[name][:][starts]
                del demo[name]
                demo[name] = kept
            demo["decision_steps"] = starts
    return folder / "demos.hdf5"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rollouts of episodes that end after 6 steps, and of such that end after 9."""
    folder = tmp_path_factory.mktemp("rollouts")
    return [rollouts(folder / str(max_steps), max_steps, max_steps) for max_steps in (6, 9)]


def test_each_file_is_played_in_its_own_environment(files: list[Path], tmp_path: Path) -> None:
    argv = ["--render_steps", "--format", "hdf5", "--output", str(tmp_path / "h"), "--demos"]
    convert([*argv, *map(str, files)])
    rendered = read_demonstrations(tmp_path / "h" / "demos.hdf5")
    assert rendered.decision_steps is None
    assert [len(images) for images in rendered.images] == [6] * 4 + [9] * 4
    recorded = [(images, 3) for path in files for images in read_demonstrations(path).images]
    for images, (decisions, every) in zip(rendered.images, recorded, strict=True):
        np.testing.assert_array_equal(images[::every], decisions)


def copied(file: Path, folder: Path, **entries: object) -> Path:
    """A copy of a file with other entries in its record of the environment."""
    copy = Path(shutil.copytree(file.parent, folder)) / file.name
    with h5py.File(copy, "r+") as content:
        record = json.loads(content["data"].attrs["env_args"])
        content["data"].attrs["env_args"] = json.dumps(record | entries)
    return copy


def test_conversion_keeps_who_played_and_the_last_observations(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    own = copied(files[0], tmp_path / "own", player="policy")
    with h5py.File(own, "r+") as file:
        for rank, demo in enumerate(file["data"].values()):
            demo["rollout/last_obs/top_image"], demo["rollout/last_obs/proprio"] = (
                demo[f"obs/{name}"][0] for name in ("top_image", "proprio")
            )
            demo.attrs["rank"] = rank
    convert(["--demos", str(own), "--output", str(tmp_path / "h"), "--format", "hdf5"])
    before, after = read_demonstrations(own), read_demonstrations(tmp_path / "h" / "demos.hdf5")
    for name in ("last_images", "last_proprio"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert after.ranks == [0, 1, 2, 3] and after.autonomous == [True] * 4
    convert(["--demos", str(own), "--output", str(tmp_path / "l")])
    assert read_demonstrations(tmp_path / "l").autonomous == [True] * 4
    assert "after the last action and ranks: not written" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert(["--demos", str(own), str(files[0]), "--output", str(tmp_path / "both"), "--format", "hdf5"])
    assert "cannot be told apart" in capsys.readouterr().err


def test_corrections_are_not_thinned(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    corrections = copied(files[0], tmp_path / "corrections")
    with h5py.File(corrections, "r+") as file:
        for demo in file["data"].values():  # from the takeover at step 4 to the end
            del demo["decision_steps"]
            demo["decision_steps"] = np.arange(4, 6)
    with pytest.raises(SystemExit):
        convert(["--demos", str(corrections), "--stride", "2", "--output", str(tmp_path / "thin"), "--format", "hdf5"])
    assert "--stride 2" in capsys.readouterr().err


def test_an_episode_that_ends_earlier_than_recorded_is_noticed(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shorter = copied(files[0], tmp_path / "shorter", max_steps=5)
    with pytest.raises(SystemExit):
        convert(
            ["--demos", str(files[1]), str(shorter), "--render_steps", "--format", "hdf5"]
            + ["--output", str(tmp_path / "h")]
        )
    err = capsys.readouterr().err
    assert f"{shorter}: demo_0 ends after 5 of its 6 recorded steps" in err, err
    assert not (tmp_path / "h").exists()
