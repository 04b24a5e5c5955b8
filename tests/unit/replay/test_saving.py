"""Saved states of the replay buffer: exact, incremental, and complete whenever the process is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvla.replay import row_store
from rlvla.replay.buffer import ReplayBuffer
from rlvla.replay.priorities import make_priority
from rlvla.replay.row_store import RowAllocator, list_states
from rlvla.replay.schema import BufferConfig, Column, Episode
from rlvla.utils.errors import ConfigError
from tests.support.disks import needs_root, small_disk
from tests.support.replay import COLUMNS, config, episode, exercise, random_episodes, same

ROOT = Path(__file__).resolve().parents[3]
HYBRID = make_priority("hybrid")


def content(buffer: ReplayBuffer) -> list[Any]:
    """Everything a buffer holds, in an order that does not depend on where its images lie."""
    rows = np.flatnonzero(buffer.drawable)
    names = [c.name for c in COLUMNS] + ["episode", "step", "rewards", "steps", "terminated", "truncated", "init_state"]
    names += ["policy_version", "priority", "td_error", "action_score", "progress", "prioritised_at", "scored_at"]
    found = list(buffer.gather(rows, names).values()) + list(
        buffer.gather(buffer.n_step(rows, 1, 0.9).next_rows).values()
    )
    tree = buffer.tree
    return [rows, *found, tree.get(rows), np.array([tree.total, tree.min, tree.max, tree.positive, len(buffer)])]


@pytest.mark.parametrize("options", [{}, {"eviction": "value"}], ids=str)
def test_resumed_to_the_bit(tmp_path: Path, options: dict) -> None:
    settings = config(61, **options)
    through = ReplayBuffer(settings, tmp_path / "through", HYBRID)
    resumed = ReplayBuffer(settings, tmp_path / "resumed", HYBRID)
    for part in range(6):
        wanted = exercise(through, np.random.default_rng(part), 7)
        assert same(exercise(resumed, np.random.default_rng(part), 7), wanted)
        number = resumed.save()
        resumed.close()
        resumed = ReplayBuffer.load(settings, tmp_path / "resumed", HYBRID, generation=number if part % 2 else None)
        assert same(content(resumed), content(through))
    assert resumed.num_episodes > 5


def test_an_older_state_is_unchanged(tmp_path: Path) -> None:
    """Rows of images that a kept state needs are not written again before it has been given up."""
    buffer, rng, past = ReplayBuffer(config(40), tmp_path, HYBRID), np.random.default_rng(0), {}
    for _ in range(8):
        exercise(buffer, rng, 5)
        past[buffer.save(keep=3)] = content(buffer)
        exercise(buffer, rng, 5)  # the ring turns over
    assert list_states(tmp_path) == [6, 7, 8]
    buffer.close()
    again = ReplayBuffer.load(config(40), tmp_path, HYBRID, generation=6)
    assert same(content(again), past[6])
    assert list_states(tmp_path) == [6]
    exercise(again, rng, 20)
    assert again.save() == 7
    assert same(content(ReplayBuffer.load(config(40), tmp_path, HYBRID)), content(again))


def test_only_changes_are_written(tmp_path: Path) -> None:
    columns = (Column("proprio", (64,), observation=True),)
    buffer = ReplayBuffer(BufferConfig(columns, 30_000), tmp_path, make_priority("td"))

    def grow(count: int) -> None:
        proprio = np.zeros((100, 64), np.float32)
        buffer.append([Episode({"proprio": proprio}, np.zeros((99, 1)), np.ones(99, int), True, False)] * count)

    def written() -> int:
        return (tmp_path / f"rows_{buffer.save():06d}.npz").stat().st_size

    grow(200)
    everything = written()
    assert everything > 20_000 * 64 * 4
    assert written() < 10_000, "nothing has changed"
    grow(2)
    assert written() < everything / 60
    rows = np.flatnonzero(buffer.drawable)[::100]
    buffer.set_priorities(rows, np.ones(len(rows)))
    assert written() < everything / 400, "scores alone are small"
    sizes = []
    for _ in range(20):
        grow(60)
        buffer.save()
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("rows_*.npz")))
    # A state of at most twice the size and a whole one; a whole one is half as large again as at first. Without whole
    # ones there were 20 times 60 episodes beside the first 200.
    assert max(sizes) < 3 * 1.6 * everything


def test_states_do_not_gather_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "_MAX_FILES", 6)
    buffer = ReplayBuffer(config(4000), tmp_path)
    buffer.append([episode(seed, 10) for seed in range(300)])
    for seed in range(20):
        buffer.append([episode(seed, 2)])
        buffer.save()
        assert len(list(tmp_path.glob("rows_*.npz"))) <= 6 + 1
    assert same(content(ReplayBuffer.load(config(4000), tmp_path)), content(buffer))


def test_images_of_states_that_are_gone_make_room(tmp_path: Path) -> None:
    buffer, rng = ReplayBuffer(config(40), tmp_path), np.random.default_rng(0)
    for _ in range(50):
        buffer.append(random_episodes(rng, 3))
        buffer.save()
    # What is in the buffer, and what left it during the last saves (at most 21 rows are added between two of them).
    assert (tmp_path / "images.rows").stat().st_size <= (40 + 4 * 21) * 48 * 1.25


def test_rows_are_taken_back_when_no_state_needs_them() -> None:
    places = RowAllocator()
    assert places.take(6).tolist() == [0, 1, 2, 3, 4, 5]
    places.put_back(np.array([4, 1]))
    assert places.take(3).tolist() == [1, 4, 6]
    places.put_back(np.array([0, 2]), needed_by=3)
    places.put_back(np.array([5]), needed_by=4)
    places.release(3)
    assert places.take(1).tolist() == [7], "state 3 exists"
    places.release(4)
    assert places.take(3).tolist() == [0, 2, 8], "state 4 exists"
    places.restore(np.array([7, 3]))
    assert places.take(8).tolist() == [0, 1, 2, 4, 5, 6, 8, 9]


class Killed(BaseException):
    """Stands in for the end of the process."""


STEPS = [
    (row_store, "flushed_file"),
    (row_store, "manifest_entry"),
    (row_store.RowFile, "sync"),
    (row_store, "fsync_entry"),
    (row_store, "write_json"),
    (Path, "unlink"),
    (os, "pwrite"),
    (os, "replace"),
]


@pytest.mark.parametrize("nth", range(3))
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ended_at_any_step_of_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str], when: str, nth: int
) -> None:
    buffer, rng = ReplayBuffer(config(40), tmp_path, HYBRID), np.random.default_rng(nth)
    for _ in range(2):
        exercise(buffer, rng, 8)
        buffer.save()
    before, calls, original = content(buffer), [], getattr(*step)

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == nth + 1 and when == "before":
            raise Killed
        result = original(*args, **options)
        if len(calls) == nth + 1:
            raise Killed
        return result

    now: list[Any] = []
    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(*step, interrupted)
        exercise(buffer, rng, 8)
        now = content(buffer)
        buffer.save()
    buffer.close()
    newest = list_states(tmp_path)[-1]
    assert newest in (2, 3)
    assert same(content(ReplayBuffer.load(config(40), tmp_path, HYBRID)), now if newest == 3 else before)


KILLED = """
import sys
from pathlib import Path
import numpy as np
from rlvla.replay.buffer import ReplayBuffer
from rlvla.replay.row_store import list_states
from tests.support.replay import config, exercise
folder = Path(sys.argv[1])
start = list_states(folder)
buffer = ReplayBuffer.load(config(200), folder) if start else ReplayBuffer(config(200), folder)
print("ready", flush=True)
while True:
    number = (list_states(folder) or [0])[-1]
    exercise(buffer, np.random.default_rng(number), 4)
    buffer.save()
"""


def test_sigkill_at_random_moments(tmp_path: Path) -> None:
    """Each state is that of a process that was never killed."""
    rng, folder = random.Random(0), tmp_path / "killed"
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(4):
        before = list_states(folder)[-1:]
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, env=environment)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while list_states(folder)[-1:] == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
    whole = ReplayBuffer(config(200), tmp_path / "whole")
    newest = list_states(folder)[-1]
    for number in range(newest):
        exercise(whole, np.random.default_rng(number), 4)
    assert newest >= 4
    assert same(content(ReplayBuffer.load(config(200), folder)), content(whole))


@needs_root
def test_a_full_disk_leaves_the_state_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        folder = disk.folder / "replay"
        buffer = ReplayBuffer(config(2000), folder)
        buffer.append([episode(seed, 9) for seed in range(100)])
        buffer.save()
        before = content(buffer)
        buffer.append([episode(seed, 9) for seed in range(100, 150)])
        disk.fill(left=4096)
        with pytest.raises(OSError, match="could not be saved to .*No space left.*make room there"):
            buffer.save()
        assert len(list(folder.glob("rows_*"))) == 1, "nothing is left of the attempt"
        disk.make_room()
        assert list_states(folder) == [1]
        now = content(buffer)
        assert buffer.save() == 2
        buffer.close()
        assert same(content(ReplayBuffer.load(config(2000), folder)), now)
        assert not same(now, before)


def saved(folder: Path) -> None:
    buffer = ReplayBuffer(config(40), folder)
    exercise(buffer, np.random.default_rng(0), 7)
    buffer.save()
    buffer.append([episode(1, 3)])
    buffer.save()
    buffer.close()


def refused(folder: Path, **options: Any) -> str:
    before = sorted((path.name, path.read_bytes()) for path in folder.iterdir() if path.suffix != ".rows")
    with pytest.raises(ConfigError) as caught:
        ReplayBuffer.load(options.pop("config", config(40)), folder, **options)
    assert before == sorted((path.name, path.read_bytes()) for path in folder.iterdir() if path.suffix != ".rows")
    return str(caught.value)


def test_damage_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    for name in ("rows_000001.npz", "rows_000002.npz", "images.rows"):
        path = tmp_path / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        assert f"{name} is damaged" in refused(tmp_path)
        path.unlink()
        assert f"{name} is missing" in refused(tmp_path)
        path.write_bytes(data)
    path = tmp_path / "rows_000002.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "rows_000002.npz is damaged" in refused(tmp_path)
    assert ReplayBuffer.load(config(40), tmp_path, generation=1).num_episodes > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.pop("files"), "does not have files"),
        (lambda state: state.update(format=99), "format 99; formats up to 2 are known"),
        (lambda state: state.update(mapped=[]), "mapped is"),
        (lambda state: state["files"].update({"../x.npz": {}}), "is not the name of a file"),
        (lambda state: state["buffer"].pop("max_priority"), "does not have max_priority"),
        (lambda state: state["buffer"].update(cursor="x"), "cursor is 'x'"),
        (lambda state: state["files"].pop("rows_000001.npz"), "is damaged (it has 4 rows instead of"),
    ],
)
def test_manifests_are_checked(tmp_path: Path, change: Any, named: str) -> None:
    saved(tmp_path)
    path = tmp_path / "state_000002.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    assert named in refused(tmp_path)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_saved_priorities_are_checked(tmp_path: Path, wrong: float) -> None:
    buffer = ReplayBuffer(config(40), tmp_path)
    buffer.append([episode(0, 5)])
    buffer._columns["priority"][0] = wrong
    buffer.save()
    assert "a priority is" in refused(tmp_path)


def rewrite(folder: Path, change: Any, *, form: int = row_store.FORMAT, compress: bool = False) -> None:
    """Change the arrays of the only saved state, and its checksums accordingly."""
    path, manifest = folder / "rows_000001.npz", folder / "state_000001.json"
    arrays, state = dict(np.load(path)), json.loads(manifest.read_text())
    change(arrays, state["buffer"])
    (np.savez_compressed if compress else np.savez)(path, **arrays)
    state["files"][path.name] = row_store.manifest_entry(path)
    manifest.write_text(json.dumps(state | {"format": form}))


def first(name: str, value: Any, row: Any = 0) -> Any:
    def change(arrays: dict[str, Any], _: dict[str, Any]) -> None:
        arrays[name][row] = value

    return change


HOSTILE = {
    "NaN priority": (first("scores_priority", np.nan), "a priority is negative, NaN or infinite"),
    "largest priority": (lambda _, buffer: buffer.update(max_priority=-1.0), "a priority is"),
    "NaN observation": (first("content_proprio", np.nan), "proprio is NaN or infinite"),
    "infinite reward": (first("content_rewards", np.inf), "rewards is NaN or infinite"),
    "infinite error": (first("scores_td_error", -np.inf), "td_error is infinite"),
    "steps": (first("content_steps", 9), "a decision takes"),
    "image far away": (first("content_image_row", 2**50), "its images are rows"),
    "image before": (first("content_image_row", -1), "its images are rows"),
    "image twice": (first("content_image_row", 1), "its images are rows"),
    "another image": (first("content_image_row", [1, 0], slice(2)), "an image has changed"),
    "gap": (first("content_step", 77), "an episode has gaps"),
    "row before": (first("content_rows", -1), "rows beyond its capacity"),
    "row after": (first("scores_rows", 40), "rows beyond its capacity"),
    "cursor": (lambda _, buffer: buffer.update(cursor=40), "its counters are 40"),
    "episode": (lambda _, buffer: buffer.update(next_episode=0), "its counters are"),
    "huge counter": (lambda _, buffer: buffer.update(next_episode=10**30), "its counters are"),
    "no digests": (lambda arrays, _: arrays.pop("content_image_digest"), "is damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_values_are_checked_behind_rewritten_checksums(tmp_path: Path, name: str) -> None:
    change, reason = HOSTILE[name]
    buffer = ReplayBuffer(config(40), tmp_path)
    buffer.append([episode(0, 5), episode(1, 3)])
    buffer.save()
    buffer.close()
    rewrite(tmp_path, lambda *_: None)
    ReplayBuffer.load(config(40), tmp_path).close()
    rewrite(tmp_path, change)
    assert reason in refused(tmp_path)


def test_rows_that_inflate_are_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(40), tmp_path)
    buffer.append([episode(0, 5)])
    buffer.save()
    rewrite(tmp_path, lambda arrays, _: arrays.update(left=np.zeros(2**20, np.int64)), compress=True)
    assert "its arrays are compressed" in refused(tmp_path)


def test_each_image_is_verified(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "images.rows"
    intact = path.read_bytes()
    rows = ReplayBuffer.load(config(40), tmp_path, only=False)._store
    size = rows._files["images"].row_bytes
    for row in range(len(intact) // size):
        damaged = bytearray(intact)
        damaged[row * size + row % size] ^= 1
        path.write_bytes(damaged)
        if row in rows.columns["image_row"][rows.first >= 0]:
            assert "an image has changed since it was written" in refused(tmp_path)
        else:
            ReplayBuffer.load(config(40), tmp_path, only=False).close()
    path.write_bytes(intact)
    assert ReplayBuffer.load(config(40), tmp_path).num_episodes > 0


def test_states_without_digests_are_continued(tmp_path: Path) -> None:
    """Of version 0.2.0."""
    buffer = ReplayBuffer(config(40), tmp_path, HYBRID)
    exercise(buffer, np.random.default_rng(0), 7)
    buffer.save()
    before = content(buffer)
    buffer.close()
    rewrite(tmp_path, lambda arrays, _: arrays.pop("content_image_digest"), form=1)
    buffer = ReplayBuffer.load(config(40), tmp_path, HYBRID)
    assert same(content(buffer), before)
    buffer.append([episode(1, 3)])
    now = content(buffer)
    buffer.save()
    buffer.close()
    assert same(content(ReplayBuffer.load(config(40), tmp_path, HYBRID, only=False)), now)
    data = bytearray((tmp_path / "images.rows").read_bytes())
    data[: 40 * 48] = bytes(40 * 48)
    (tmp_path / "images.rows").write_bytes(data)
    assert "an image has changed" in refused(tmp_path)


def test_nothing_in_a_folder_is_executed(tmp_path: Path) -> None:
    saved(tmp_path)

    class Malice:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    path = tmp_path / "rows_000002.npz"
    np.savez(path, left=np.array([Malice()], dtype=object))
    manifest = tmp_path / "state_000002.json"
    state = json.loads(manifest.read_text())
    state["files"][path.name] = row_store.manifest_entry(path)
    manifest.write_text(json.dumps(state))
    assert "rows_000002.npz cannot be read" in refused(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_another_buffer_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    assert "has capacity 40, not 41" in refused(tmp_path, config=config(41))
    assert "has chunk_len 2, not 3" in refused(tmp_path, config=BufferConfig(COLUMNS, 40, chunk_len=3))
    other = (*COLUMNS[:2], Column("actions", (2, 3), "float64"))
    assert "has columns" in refused(tmp_path, config=BufferConfig(other, 40, chunk_len=2))
    assert "does not hold state 7 of a replay buffer; there are 1, 2" in refused(tmp_path, generation=7)
    with pytest.raises(ConfigError, match="already holds a replay buffer"):
        ReplayBuffer(config(40), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="does not hold a replay buffer"):
        ReplayBuffer.load(config(40), tmp_path / "empty")
    ReplayBuffer.load(config(40, eviction="value"), tmp_path)


def test_leftovers_of_a_run_without_saved_states_are_removed(tmp_path: Path) -> None:
    ReplayBuffer(config(40), tmp_path).append([episode(0, 5)])
    (tmp_path / "rows_000001.npz").write_bytes(b"half")
    buffer = ReplayBuffer(config(40), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["images.rows"]
    buffer.append([episode(1, 2)])
    assert same(list(buffer.gather(np.array([0, 1, 2]), ["images"]).values()), [episode(1, 2).columns["images"]])
