"""Storage of the rows of a buffer: columns in memory, memory-mapped files, and saved states.

An episode of S decisions takes S + 1 rows: one for each decision, and one for its last observation, which is never
drawn. The next observation of a decision is therefore that of the next row, and each image is stored once.

    NAME.rows          memory-mapped column, read through the page cache
    rows_000007.npz    changed rows of the other columns, numpy arrays that are never pickled
    state_000007.json  the files of a saved state in order, with size and SHA-256, and counters; written last

Files are never changed once a state lists them, so a state is complete or does not exist. A state refers to rows of the
mapped files instead of copying them: a row that a saved state may need is not written again before that state is
deleted (`RowAllocator.release`). Their digests are a column, so that writing and saving cost what has changed.
"""

from __future__ import annotations

import mmap
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvla.replay.schema import CONTENT, SCORES, Array, BufferConfig
from rlvla.replay.sum_tree import Indices
from rlvla.utils.data_files import check_types, inside, read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import flushed_file, fsync_entry, manifest_entry, remove_leftovers, write_json

FORMAT = 2  # 2: digests of images
_STATE = re.compile(r"state_(\d+)\.json")
_ROWS = re.compile(r"rows_\d+\.npz")
_TYPES = {"format": int, "files": dict[str, dict], "mapped": dict[str, int], "buffer": dict[str, Any]}
_COUNTERS = {"cursor": int, "next_episode": int, "live": int, "max_priority": float}  # cannot be derived from columns
_MAX_FILES = 64  # of a saved state; beyond that all rows are written again
_MAX_WASTE = 2  # bytes of a saved state relative to its rows; beyond that all rows are written again
_DIGESTED_ROWS = 512  # images read at a time to verify them
_GROWTH = 1.25  # of a mapped file; the unwritten part takes no space on the disk


class RowFile:
    """Memory-mapped rows of one shape and dtype.

    Writing does not go through the map, where a full disk would kill the process.

    Args:
        path: the file; its rows are kept.
        shape: of a row.
        dtype: of the rows.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: str):
        self.path = path
        self._shape, self._dtype = shape, np.dtype(dtype)
        self.row_bytes = int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._rows: NDArray[Any] | None = None

    def write(self, rows: Indices, values: NDArray[Any]) -> None:
        """Write values [B, ...] to the rows [B], which are ascending.

        Raises:
            OSError: the disk is full.
        """
        runs = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
        for begin, end in zip(runs, [*runs[1:], len(rows)]):
            data = np.ascontiguousarray(values[begin:end]).reshape(-1).view(np.uint8).data
            offset = int(rows[begin]) * self.row_bytes
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written

    def read(self, rows: Indices) -> NDArray[Any]:
        """A copy of the rows [...], which have been written."""
        if not rows.size:
            return np.empty((*rows.shape, *self._shape), dtype=self._dtype)
        needed = int(rows.max()) + 1
        if self._rows is None or len(self._rows) < needed:
            count = max(needed, int(os.fstat(self._file).st_size / self.row_bytes * _GROWTH))
            os.ftruncate(self._file, count * self.row_bytes)
            mapped = mmap.mmap(self._file, count * self.row_bytes, prot=mmap.PROT_READ)
            mapped.madvise(mmap.MADV_RANDOM)  # no reading ahead: rows are drawn from everywhere
            self._rows = np.ndarray((count, *self._shape), dtype=self._dtype, buffer=mapped)
        return self._rows[rows]

    def complete_rows(self) -> int:
        """Number of rows that the file is long enough for."""
        return os.fstat(self._file).st_size // self.row_bytes

    def sync(self) -> None:
        """Flush the file to disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; it is mapped until the last array that refers to it is gone."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class RowAllocator:
    """Allocates rows of mapped files, lowest first; freed rows stay reserved while a saved state needs them."""

    def __init__(self) -> None:
        self.extent = 0  # rows ever allocated
        self._free: Indices = np.empty(0, dtype=np.int64)
        self._reserved: list[tuple[int, Indices]] = []  # newest saved state that may need them, rows

    def take(self, count: int) -> Indices:
        """Allocate `count` rows, ascending."""
        missing = max(0, count - len(self._free))
        rows = np.concatenate([self._free[:count], np.arange(self.extent, self.extent + missing)])
        self._free = self._free[count:]
        self.extent += missing
        return rows

    def put_back(self, rows: Indices, needed_by: int = 0) -> None:
        """Free unused rows; `needed_by` is the number of the newest saved state, 0 without one."""
        self._reserved.append((needed_by, rows))
        if not needed_by:
            self.release(1)

    def release(self, oldest: int) -> None:
        """Free the rows that only states before number `oldest`, now deleted, needed."""
        ready = [rows for state, rows in self._reserved if state < oldest]
        self._reserved = [entry for entry in self._reserved if entry[0] >= oldest]
        self._free = np.sort(np.concatenate([self._free, *ready]))

    def restore(self, used: Indices) -> None:
        """Reset to exactly these rows in use."""
        self.extent = int(used.max(initial=-1)) + 1
        self._free = np.setdiff1d(np.arange(self.extent), used)
        self._reserved = []


class RowStore:
    """Rows of whole episodes.

    Args:
        config: columns and capacity.
        folder: for mapped files and saved states.

    Attributes:
        columns: name -> [capacity, ...], all columns but the mapped ones.
        next: [capacity] next row of the episode, -1 without one.
        first: [capacity] first row of the episode, -1 if the row is free.
        episodes: number -> first row, oldest first.
        live: number of rows in use.
        generation: number of the newest saved state; 0 without one.
    """

    def __init__(self, config: BufferConfig, folder: Path):
        self.folder, self._config = folder, config
        in_memory = [column for column in config.columns if not column.mapped]
        shapes: dict[str, tuple[int, ...]] = {column.name: column.shape for column in in_memory}
        shapes["rewards"] = (config.chunk_len,)
        dtypes = CONTENT | {column.name: column.dtype for column in in_memory}
        self._groups = {"content": list(dtypes), "scores": list(SCORES)}
        self.columns: dict[str, Array] = {
            name: np.zeros((config.capacity, *shapes.get(name, ())), dtype) for name, dtype in (dtypes | SCORES).items()
        }
        self.columns["episode"][:] = -1
        self.next, self.first = np.full(config.capacity, -1), np.full(config.capacity, -1)
        self.episodes: dict[int, int] = {}
        self.live = self.generation = 0
        self._next_episode = self._cursor = 0
        self._dirty = {group: np.zeros(config.capacity, dtype=bool) for group in self._groups}
        self._saved_files: dict[str, Any] = {}
        self._places = RowAllocator()
        self._files: dict[str, RowFile] = {}

    def _open_files(self) -> None:
        for column in self._config.columns:
            if column.mapped:
                path = self.folder / f"{column.name}.rows"
                self._files[column.name] = RowFile(path, column.shape, column.dtype)

    def close(self) -> None:
        """Close the mapped files."""
        for file in self._files.values():
            file.close()

    # ------------------------------------------------------------------------------------------------ rows
    def write_mapped(self, values: dict[str, Array], count: int) -> None:
        """Write the mapped columns of `count` rows; in `values` the entry `image_row` replaces them.

        Raises:
            OSError: the disk is full; nothing has changed.
        """
        places = values["image_row"] = self._places.take(count) if self._files else np.zeros(count, dtype=np.int64)
        values["image_digest"] = _digests([values[name] for name in self._files], count)
        try:
            for name, file in self._files.items():
                file.write(places, values.pop(name))
        except OSError as error:
            self._places.put_back(places)
            raise _explained(error, f"an episode could not be written to {self.folder}") from error

    @property
    def extent(self) -> int:
        """Rows up to the last one in use."""
        return len(self.first) - int(np.argmax(self.first[::-1] >= 0)) if self.live else 0

    def add(self, values: Mapping[str, Any], count: int) -> Indices:
        """Add an episode of `count` rows, for which there must be room; returns them in order."""
        # The first free rows from the cursor on.
        rows = np.arange(self._cursor, self._cursor + count)
        if rows[-1] >= self._config.capacity or (self.first[rows] >= 0).any():
            free = np.flatnonzero(self.first < 0)
            rows = free[(np.searchsorted(free, self._cursor) + np.arange(count)) % len(free)]
        self._cursor = (int(rows[-1]) + 1) % self._config.capacity
        number, self._next_episode = self._next_episode, self._next_episode + 1
        everything = {**values, "episode": number, "step": np.arange(count)}
        for name, column in self.columns.items():
            column[rows] = everything[name]
        for dirty in self._dirty.values():
            dirty[rows] = True
        self.episodes[number] = int(rows[0])
        self.live += count
        self._link(rows, np.zeros(count - 1, dtype=bool))
        return rows

    def _link(self, rows: Indices, breaks: NDArray[np.bool_]) -> None:
        """Link consecutive rows; after `breaks` [rows - 1] a new episode begins."""
        self.next[rows] = np.append(np.where(breaks, -1, rows[1:]), -1)
        begins = np.append(True, breaks)
        self.first[rows] = rows[begins][np.cumsum(begins) - 1]

    def rows_of(self, number: int) -> Indices:
        """The rows of an episode in order."""
        rows = [self.episodes[number]]
        while self.next[rows[-1]] >= 0:
            rows.append(int(self.next[rows[-1]]))
        return np.array(rows)

    def evict(self, number: int) -> Indices:
        """Remove an episode and return its rows."""
        rows = self.rows_of(number)
        del self.episodes[number]
        if self._files:
            self._places.put_back(self.columns["image_row"][rows], needed_by=self.generation)
        self.columns["episode"][rows] = self.next[rows] = self.first[rows] = -1
        self._dirty["content"][rows] = True
        self.live -= len(rows)
        return rows

    def scores_changed(self, rows: Indices) -> None:
        """Mark the `SCORES` columns of rows as changed."""
        self._dirty["scores"][rows] = True

    def gather(self, rows: Indices, names: Sequence[str]) -> dict[str, Array]:
        """Columns of rows [...] by name, mapped ones included.

        Raises:
            KeyError: unknown column.
        """
        images, files = self.columns["image_row"][rows], self._files
        return {name: files[name].read(images) if name in files else self.columns[name][rows] for name in names}

    # ------------------------------------------------------------------------------------------------ states
    def start_empty(self) -> None:
        """Start in a folder without saved states, created with its parents.

        Raises:
            ConfigError: the folder holds saved states.
        """
        if list_states(self.folder):
            text = f"{self.folder} already holds a replay buffer; load it, or name another folder"
            raise ConfigError.of(None, "folder_in_use", text)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._open_files()
        for file in self._files.values():
            os.truncate(file.path, 0)  # leftovers of a run that ended before it saved
        remove_states(self.folder, keep=[])

    def save(self, max_priority: float, keep: int | None) -> int:
        """See `ReplayBuffer.save`; `max_priority` is the largest so far."""
        number, files = self.generation + 1, dict(self._saved_files)
        live = self.first >= 0
        changed = {group: dirty & live for group, dirty in self._dirty.items()}
        size = sum(int(mask.sum()) * self._row_bytes(group) for group, mask in changed.items())
        size += sum(entry["bytes"] for entry in files.values())
        if len(files) >= _MAX_FILES or size > _MAX_WASTE * self.live * sum(map(self._row_bytes, self._groups)):
            files, changed = {}, dict.fromkeys(self._groups, live)
        try:
            path = self.folder / f"rows_{number:06d}.npz"
            files[path.name] = write_rows(path, self._changes(changed, live))
            for file in self._files.values():
                file.sync()
            sizes = {file.path.name: self._places.extent * file.row_bytes for file in self._files.values()}
            counters = {"cursor": self._cursor, "next_episode": self._next_episode, "live": self.live}
            settings = {**self._config.describe(), **counters, "max_priority": max_priority}
            fsync_entry(self.folder)
            content = {"format": FORMAT, "files": files, "mapped": sizes, "buffer": settings}
            write_json(state_path(self.folder, number), content)
            fsync_entry(self.folder)
        except OSError as error:
            raise _explained(error, f"the replay buffer could not be saved to {self.folder}") from error
        self.generation, self._saved_files = number, files
        for dirty in self._dirty.values():
            dirty[:] = False
        if keep is not None:
            self.keep_only(list_states(self.folder)[-max(1, keep) :])
        return number

    def keep_only(self, numbers: Collection[int]) -> None:
        """Delete all other saved states."""
        remove_states(self.folder, keep=numbers)
        self._places.release(min(numbers))

    def _row_bytes(self, group: str) -> int:
        return 8 + sum(self.columns[name][:1].nbytes for name in self._groups[group])  # 8: the number of the row

    def _changes(
        self, changed: Mapping[str, NDArray[np.bool_]], live: NDArray[np.bool_]
    ) -> Iterator[tuple[str, Array]]:
        yield "left", np.flatnonzero(self._dirty["content"] & ~live)
        for group, mask in changed.items():
            rows = np.flatnonzero(mask)
            yield f"{group}_rows", rows
            for name in self._groups[group]:
                yield f"{group}_{name}", self.columns[name][rows]

    def load(self, generation: int | None, *, only: bool) -> float:
        """See `ReplayBuffer.load`; returns the largest priority so far."""
        numbers = list_states(self.folder)
        if not numbers or generation not in (None, *numbers):
            which = "a replay buffer" if generation is None else f"state {generation} of a replay buffer"
            others = f"; there are {', '.join(map(str, numbers))}" if numbers else ""
            raise ConfigError.of(None, "missing_file", f"{self.folder} does not hold {which}{others}")
        number = numbers[-1] if generation is None else generation
        state = read_state(self.folder, number, self._config.describe())
        with_digests = state["format"] > 1
        self._open_files()
        try:
            for name in state["files"]:
                self._read(read_rows(self.folder / name), with_digests=with_digests)
            self._restore(state["buffer"])
            self._verify_images(with_digests=with_digests)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, MemoryError) as error:
            if isinstance(error, ConfigError):
                raise
            text = f"state {number} of the replay buffer in {self.folder} is damaged ({error})"
            raise ConfigError.of(None, "invalid_file", text) from error
        self.generation, self._saved_files = number, state["files"] if with_digests else {}
        if not with_digests:  # the next state is a complete one
            for dirty in self._dirty.values():
                dirty[self.first >= 0] = True
        if only:
            remove_states(self.folder, keep=[number])
        return state["buffer"]["max_priority"]

    def _read(self, arrays: dict[str, Array], *, with_digests: bool) -> None:
        """Fill in the rows of one file."""
        self.columns["episode"][_checked_rows(arrays["left"], self._config.capacity)] = -1
        for group, names in self._groups.items():
            rows = _checked_rows(arrays[f"{group}_rows"], self._config.capacity)
            for name in names:
                if name == "image_digest" and not with_digests:
                    continue
                column, values = self.columns[name], arrays[f"{group}_{name}"]
                if values.dtype != column.dtype or values.shape != (len(rows), *column.shape[1:]):
                    raise ValueError(f"{name} has dtype {values.dtype} and shape {values.shape}")
                column[rows] = values

    def _restore(self, counters: Mapping[str, Any]) -> None:
        """Restore counters, and everything derived from the columns; ValueError if these are not of a buffer."""
        self._cursor, self._next_episode = counters["cursor"], counters["next_episode"]
        episode = self.columns["episode"]
        rows = np.flatnonzero(episode >= 0)
        rows = rows[np.lexsort((self.columns["step"][rows], episode[rows]))]
        self.live = len(rows)
        if self.live != counters["live"]:
            raise ValueError(f"it has {self.live} rows instead of {counters['live']}")
        self._check_values(rows, counters)
        if self.live:
            breaks = np.diff(episode[rows]) != 0
            self._link(rows, breaks)
            firsts = rows[np.append(True, breaks)]
            self.episodes = dict(zip(episode[firsts].tolist(), firsts.tolist()))
            if not np.array_equal(
                self.columns["step"][rows] + np.searchsorted(episode[rows], episode[rows]), np.arange(self.live)
            ):
                raise ValueError("an episode has gaps")

    def _check_values(self, rows: Indices, counters: Mapping[str, Any]) -> None:
        """ValueError if the rows in use hold values that are never stored, as checksums do not tell."""
        newest = int(self.columns["episode"][rows].max(initial=-1))
        if not (0 <= self._cursor < self._config.capacity and newest < self._next_episode < 2**62):
            raise ValueError(f"its counters are {self._cursor} and {self._next_episode}")
        priority = np.append(self.columns["priority"][rows], counters["max_priority"])
        if not (np.isfinite(priority) & (priority >= 0)).all():
            raise ValueError("a priority is negative, NaN or infinite")
        decisions = rows[self.columns["steps"][rows] != 0]  # the row of a last observation has no steps
        steps = self.columns["steps"][decisions]
        if ((steps < 0) | (steps > self._config.chunk_len)).any():
            raise ValueError(f"a decision takes {steps.min()} to {steps.max()} env steps of {self._config.chunk_len}")
        for name, column in self.columns.items():
            if name not in SCORES and column.dtype.kind == "f" and not np.isfinite(column[rows]).all():
                raise ValueError(f"{name} is NaN or infinite")
        for name in ("td_error", "action_score", "progress"):  # NaN until known
            if np.isinf(self.columns[name][rows]).any():
                raise ValueError(f"{name} is infinite")

    def _verify_images(self, *, with_digests: bool) -> None:
        """Compare images with their digests, or compute these; ValueError if a row has changed or does not exist."""
        if not self._files:
            return
        rows = np.flatnonzero(self.first >= 0)
        rows = rows[np.argsort(self.columns["image_row"][rows])]
        places = self.columns["image_row"][rows]
        complete = min(file.complete_rows() for file in self._files.values())
        if len(places) and (places[0] < 0 or places[-1] >= complete or (np.diff(places) == 0).any()):
            raise ValueError(f"its images are rows {places[0]} to {places[-1]} of {complete}, each of them once")
        for start in range(0, len(rows), _DIGESTED_ROWS):
            part = slice(start, start + _DIGESTED_ROWS)
            images = [file.read(places[part]) for file in self._files.values()]
            digests = _digests(images, len(rows[part]))
            if with_digests and not np.array_equal(digests, self.columns["image_digest"][rows[part]]):
                raise ValueError("an image has changed since it was written")
            self.columns["image_digest"][rows[part]] = digests
        self._places.restore(places)


def _digests(columns: Sequence[Array], count: int) -> Indices:
    """CRC-32 [count] of the rows of mapped columns [count, ...], one column after the other."""
    digests = [0] * count
    for column in columns:
        for index, row in enumerate(np.ascontiguousarray(column).reshape(count, -1).view(np.uint8)):
            digests[index] = zlib.crc32(row.data, digests[index])
    return np.array(digests, dtype=np.int64)


def _checked_rows(rows: Array, capacity: int) -> Array:
    """Numbers of rows; ValueError if a buffer has no such rows."""
    if rows.dtype != np.int64 or rows.ndim != 1 or ((rows < 0) | (rows >= capacity)).any():
        raise ValueError(f"it names rows beyond its capacity of {capacity}")
    return rows


def _explained(error: OSError, what: str) -> OSError:
    return OSError(error.errno, f"{what} ({error.strerror or error}); make room there, or name another folder")


# ---------------------------------------------------------------------------------------------------- saved states
def list_states(folder: Path) -> list[int]:
    """Numbers of the saved states in a folder, ascending."""
    matches = (_STATE.fullmatch(path.name) for path in folder.glob("state_*.json"))
    return sorted(int(match[1]) for match in matches if match)


def state_path(folder: Path, number: int) -> Path:
    """The manifest of a saved state."""
    return folder / f"state_{number:06d}.json"


def write_rows(path: Path, arrays: Iterable[tuple[str, Array]]) -> dict[str, Any]:
    """Write arrays to a file and return its manifest entry.

    Raises:
        OSError: it could not be written; it is removed.
    """
    try:
        with flushed_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return manifest_entry(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_state(folder: Path, number: int, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Read the manifest of a state and verify presence, sizes and checksums of its files.

    Of mapped files the size is verified, since other rows in them go on changing; `RowStore.load` verifies their rows.

    Args:
        folder: the folder of the buffer.
        number: number of the state.
        expected: required settings of the buffer, name -> JSON.

    Raises:
        ConfigError: it is missing, damaged, of another format version, or of a buffer with other settings.
    """
    path = state_path(folder, number)
    content = read_json(path)
    _check_entries(content, _TYPES, path)
    if not 1 <= content["format"] <= FORMAT:
        text = f"{path} has format {content['format']}; formats up to {FORMAT} are known"
        raise ConfigError.of(None, "mismatch", text)
    for name, value in expected.items():
        if content["buffer"].get(name) != value:
            text = f"the replay buffer in {folder} has {name} {content['buffer'].get(name)}, not {value}"
            raise ConfigError.of(None, "mismatch", f"{text}; load it as it was saved, or name another folder")
    _check_entries(content["buffer"], _COUNTERS, path)
    for name, expectation in {**content["files"], **content["mapped"]}.items():
        try:
            file = inside(folder, name)
            if not file.exists():
                problem = "is missing"
            elif isinstance(expectation, dict):
                problem = "" if file.is_file() and manifest_entry(file) == expectation else "is damaged"
            else:
                problem = "" if file.is_file() and file.stat().st_size >= expectation else "is damaged"
        except (OSError, ValueError) as error:
            problem = f"cannot be used ({error})"
        if problem:
            text = f"{folder / name} {problem}; use an earlier state, or start with an empty buffer"
            raise ConfigError.of(None, "invalid_file", text)
    return content


def _check_entries(content: Mapping[str, Any], types: Mapping[str, Any], path: Path) -> None:
    missing = sorted(set(types) - set(content))
    if missing:
        raise ConfigError.of(None, "invalid_file", f"{path} does not have {', '.join(missing)}; it is damaged")
    check_types(content, types, path)


def read_rows(path: Path) -> dict[str, Array]:
    """Read the arrays of a file written by `write_rows`.

    Raises:
        ConfigError: it holds anything else.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            members = archive.zip.infolist()
            stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
            if not stored or sum(member.file_size for member in members) > path.stat().st_size:
                raise ValueError("its arrays are compressed, which those of a buffer are not")
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, AttributeError, MemoryError, zipfile.BadZipFile, EOFError) as error:
        raise ConfigError.of(None, "invalid_file", f"{path} cannot be read ({error})") from error


def remove_states(folder: Path, *, keep: Iterable[int]) -> None:
    """Delete all other states, then the files that none of the remaining ones lists."""
    kept = set(keep)
    for number in list_states(folder):
        if number not in kept:
            state_path(folder, number).unlink()
    fsync_entry(folder)
    listed = {name for number in kept for name in read_json(state_path(folder, number))["files"]}
    for path in folder.glob("rows_*.npz"):
        if _ROWS.fullmatch(path.name) and path.name not in listed:
            path.unlink()
    remove_leftovers(folder)
