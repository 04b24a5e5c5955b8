"""Images in memory or in a memory-mapped file."""

import errno
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlvla.data import image_storage
from rlvla.data.image_storage import image_array, mapping_of, read_ahead
from rlvla.data.reading import read_demonstrations, read_several
from rlvla.data.reward_model_rows import read_outcomes
from rlvla.data.rows import DemonstrationRows, prepared
from rlvla.models.actor import Actor
from rlvla.utils import budgets
from rlvla.utils.errors import ConfigError


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Memory is used up; the temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(image_storage, "available_bytes", lambda: 0)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr(image_storage, "_MOUNTS", tmp_path / "mounts")
    return folder


def test_training_rows_are_the_same_from_disk(
    demos_file: Path, policy_folder: Path, no_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Actor.from_pretrained(policy_folder)
    rows = []
    for available in (2**40, 0):
        monkeypatch.setattr(image_storage, "available_bytes", lambda size=available: size)
        demos = read_demonstrations(demos_file)
        joined = demos.joined_images()
        assert (mapping_of(joined) is None) == bool(available), "memory, then a file"
        assert joined is demos.joined_images() and (demos.image_bytes == 0) == (available == 0)
        rows.append(DemonstrationRows(demos, actor))
    for batch, same in zip(*(of.batches(32, 1, seed=0) for of in rows), strict=True):
        assert torch.equal(batch.images, same.images) and torch.equal(batch.proprio, same.proprio)
        assert torch.equal(batch.action_tokens, same.action_tokens) and batch.instructions == same.instructions
    assert torch.equal(rows[0].take(np.array([7, 3])).images, rows[1].take(np.array([7, 3])).images)
    assert list(no_memory.iterdir()) == [], "the file has no name, so that a killed process leaves none"


def test_several_files_and_final_frames_stay_on_disk(demos_file: Path, no_memory: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.hdf5").write_bytes(demos_file.read_bytes())
    several = read_several([str(demos_file), str(tmp_path / "copy.hdf5")])
    assert mapping_of(several.joined_images()) is not None
    frames = read_outcomes([str(demos_file)])
    assert all(mapping_of(images) is not None for images in frames.images)


def test_prepared_images_stay_on_disk_and_are_copied_only_if_they_change(no_memory: Path) -> None:
    whole = image_array((5, 1, 4, 4, 3))
    whole[:] = np.arange(whole.size).reshape(whole.shape) % 251
    episodes, proprio = [whole[:2], whole[2:]], [np.ones((2, 3), np.float32), np.zeros((3, 3), np.float32)]
    same, states = prepared(SimpleNamespace(prepare=lambda images, state: (images, state)), episodes, proprio, whole)
    assert same is whole and states is not None and (states == np.concatenate(proprio)).all()
    smaller, states = prepared(
        SimpleNamespace(prepare=lambda images, state: (images[..., ::2, ::2, :].copy(), None)), episodes, None, whole
    )
    assert states is None and mapping_of(smaller) is not None and (smaller == whole[..., ::2, ::2, :]).all()
    joined, _ = prepared(SimpleNamespace(prepare=lambda images, state: (images, None)), episodes[::-1], None)
    assert (joined == whole[[2, 3, 4, 0, 1]]).all()


def test_mapped_arrays_survive_pickling_and_are_shared_with_forks(no_memory: Path) -> None:
    images = image_array((40, 1, 64, 64, 3))
    images[:] = 3
    read_ahead(images, [0, 39, 17])
    read_ahead(np.zeros((2, 3)), [0, 1])
    assert (pickle.loads(pickle.dumps(images)) == 3).all()
    child = os.fork()
    if child == 0:
        images[-1] = 4
        os._exit(0)
    os.waitpid(child, 0)
    assert (images[-1] == 4).all() and (images[:-1] == 3).all()


def test_no_room_is_said_before_anything_is_read(
    demos_file: Path, no_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        monkeypatch.setattr(image_storage.np, "split", lambda *_: pytest.fail("an array was made"))
        with pytest.raises(ConfigError) as error:
            read_demonstrations(demos_file)
        return str(error.value)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100))
        text = refused()
        assert text.startswith(str(demos_file)) and f"{no_memory} 0.0 GiB" in text and "set TMPDIR" in text
    with monkeypatch.context() as patch:  # less free than promised, as under a quota
        patch.setattr("os.posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        assert "set TMPDIR" in refused()
    (tmp_path / "mounts").write_text(f"/dev/a / ext4 rw 0 0\nnone {tmp_path.resolve()} tmpfs rw 0 0\n")
    monkeypatch.setattr(image_storage, "_free_bytes", lambda folder: 2**40 if folder == str(no_memory) else 0)
    assert f"{no_memory} 0.0 GiB" in refused(), "a tmpfs is memory"


@pytest.mark.parametrize("version", [1, 2])
def test_available_memory_follows_control_groups(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    own = root / "slurm" / "job_1"
    own.mkdir(parents=True)
    monkeypatch.setattr(budgets, "_CONTROL_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(budgets, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(budgets, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    groups = "9:name=systemd:/\n4:memory:/slurm/job_1\n0::/\n" if version == 1 else "0::/slurm/job_1\n"
    (tmp_path / "own").write_text(groups)
    machine = budgets.memory_bytes()
    assert budgets.available_bytes() == machine
    (tmp_path / "meminfo").write_text(f"MemTotal:  {2**31} kB\nMemAvailable:  {2**20} kB\n")
    assert budgets.available_bytes() == 2**30
    limit_file, use_file, prefix = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        if version == 1
        else ("memory.max", "memory.current", "")
    )
    for group, limit in ((own, "9223372036854771712" if version == 1 else "max"), (own.parent, str(1000))):
        (group / limit_file).write_text(limit)
        (group / use_file).write_text("900\n")
        (group / "memory.stat").write_text(f"anon 500\n{prefix}inactive_file 300\n{prefix}active_file 100\n")
    assert budgets.memory_bytes() == 1000
    assert budgets.available_bytes() == 500, "page cache can be dropped"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budgets.available_bytes() == 125
