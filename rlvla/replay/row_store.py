"""The rows of a buffer: columns in memory, mapped files, the order of episodes, and saved states of all that.

An episode of S decisions takes S + 1 rows: one for each decision, and one for its last observation, which is never
drawn. The next observation of a decision is therefore that of the next row, and each image is stored once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvla.replay import saved_states
from rlvla.replay.mapped import RowAllocator, RowFile
from rlvla.replay.schema import CONTENT, SCORES, Array, BufferConfig
from rlvla.replay.sum_tree import Indices
from rlvla.utils.errors import ConfigError

_NUMBERS = {"cursor": int, "next_episode": int, "live": int, "max_priority": float}  # what columns do not tell
_MOST_FILES = 64  # of a saved state; with more of them all rows are written anew
_MOST_WASTE = 2  # bytes of a saved state, in those of its rows; beyond that all rows are written anew


class RowStore:
    """Rows of whole episodes.

    Args:
        config: columns and capacity.
        folder: for mapped files and saved states.

    Attributes:
        columns: name -> [capacity, ...], all columns but the mapped ones.
        next, previous: [capacity] neighbours in the episode, -1 if there is none.
        first: [capacity] first row of the episode, -1 if the row is free.
        episodes: number -> first row, oldest first.
        live: number of rows in use.
        generation: number of the newest saved state; 0 if there is none.
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
        self.next, self.previous, self.first = (np.full(config.capacity, -1) for _ in range(3))
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
        """Write the mapped columns of `count` rows; in `values` the entry `image_row` takes their place.

        Raises:
            OSError: there is no room; nothing has changed.
        """
        places = values["image_row"] = self._places.take(count) if self._files else np.zeros(count, dtype=np.int64)
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
        rows = self._free_rows(count)
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

    def _free_rows(self, count: int) -> Indices:
        """The first free rows from the cursor on, which moves behind them."""
        rows = np.arange(self._cursor, self._cursor + count)
        if rows[-1] >= self._config.capacity or (self.first[rows] >= 0).any():
            free = np.flatnonzero(self.first < 0)
            rows = free[(np.searchsorted(free, self._cursor) + np.arange(count)) % len(free)]
        self._cursor = (int(rows[-1]) + 1) % self._config.capacity
        return rows

    def _link(self, rows: Indices, breaks: NDArray[np.bool_]) -> None:
        """Make rows neighbours; at `breaks` [rows - 1] the next row begins another episode."""
        self.next[rows] = np.append(np.where(breaks, -1, rows[1:]), -1)
        self.previous[rows] = np.append(-1, np.where(breaks, -1, rows[:-1]))
        begins = np.append(True, breaks)
        self.first[rows] = rows[begins][np.cumsum(begins) - 1]

    def rows_of(self, number: int) -> Indices:
        """The rows of an episode in order."""
        found = [self.episodes[number]]
        while self.next[found[-1]] >= 0:
            found.append(int(self.next[found[-1]]))
        return np.array(found)

    def evict(self, number: int) -> Indices:
        """Remove an episode; returns the rows that were its."""
        rows = self.rows_of(number)
        del self.episodes[number]
        if self._files:
            self._places.put_back(self.columns["image_row"][rows], needed_by=self.generation)
        self.columns["episode"][rows] = self.next[rows] = self.previous[rows] = self.first[rows] = -1
        self._dirty["content"][rows] = True
        self.live -= len(rows)
        return rows

    def scores_changed(self, rows: Indices) -> None:
        """Note that a column of `SCORES` was written."""
        self._dirty["scores"][rows] = True

    def gather(self, rows: Indices, names: Sequence[str]) -> dict[str, Array]:
        """Columns of rows [...] by name, mapped ones included.

        Raises:
            KeyError: there is no such column.
        """
        found = {}
        for name in names:
            file = self._files.get(name)
            found[name] = self.columns[name][rows] if file is None else file.read(self.columns["image_row"][rows])
        return found

    # ------------------------------------------------------------------------------------------------ states
    def start_empty(self) -> None:
        """Begin in a folder without saved states, created with its parents.

        Raises:
            ConfigError: there are some.
        """
        if saved_states.states(self.folder):
            text = f"{self.folder} already holds a replay buffer; load it, or name another folder"
            raise ConfigError.of(None, "folder_in_use", text)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._open_files()
        for file in self._files.values():
            os.truncate(file.path, 0)  # of a run that ended before it saved
        saved_states.keep_only(self.folder, [])

    def save(self, max_priority: float, keep: int | None) -> int:
        """For `ReplayBuffer.save`, with the largest priority so far."""
        number, files = self.generation + 1, dict(self._saved_files)
        live = self.first >= 0
        changed = {group: dirty & live for group, dirty in self._dirty.items()}
        size = sum(int(mask.sum()) * self._row_bytes(group) for group, mask in changed.items())
        size += sum(entry["bytes"] for entry in files.values())
        if len(files) >= _MOST_FILES or size > _MOST_WASTE * self.live * sum(map(self._row_bytes, self._groups)):
            files, changed = {}, dict.fromkeys(self._groups, live)
        try:
            name, files_entry = saved_states.write_rows(self.folder, number, self._changes(changed, live))
            files[name] = files_entry
            for file in self._files.values():
                file.sync()
            sizes = {file.path.name: self._places.extent * file.row_bytes for file in self._files.values()}
            own = {
                "cursor": self._cursor,
                "next_episode": self._next_episode,
                "live": self.live,
                "max_priority": max_priority,
            }
            saved_states.write_state(self.folder, number, files, sizes, {**self._config.describe(), **own})
        except OSError as error:
            raise _explained(error, f"the replay buffer could not be saved to {self.folder}") from error
        self.generation, self._saved_files = number, files
        for dirty in self._dirty.values():
            dirty[:] = False
        if keep is not None:
            self.keep_only(saved_states.states(self.folder)[-max(1, keep) :])
        return number

    def keep_only(self, numbers: Collection[int]) -> None:
        """Give up all other saved states."""
        saved_states.keep_only(self.folder, numbers)
        self._places.give_up(min(numbers))

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

    def load(self, generation: int | None) -> float:
        """For `ReplayBuffer.load`; returns the largest priority so far."""
        known = saved_states.states(self.folder)
        if not known or generation not in (None, *known):
            which = "a replay buffer" if generation is None else f"state {generation} of a replay buffer"
            there = f"; there are {', '.join(map(str, known))}" if known else ""
            raise ConfigError.of(None, "missing_file", f"{self.folder} does not hold {which}{there}")
        number = known[-1] if generation is None else generation
        state = saved_states.read_state(self.folder, number, self._config.describe(), _NUMBERS)
        self._open_files()
        try:
            for name in state["files"]:
                self._read(saved_states.read_rows(self.folder, name))
            self._restore(state["buffer"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            text = f"state {number} of the replay buffer in {self.folder} is damaged ({error})"
            raise ConfigError.of(None, "invalid_file", text) from error
        self.generation, self._saved_files = number, state["files"]
        saved_states.keep_only(self.folder, [number])
        return state["buffer"]["max_priority"]

    def _read(self, arrays: Mapping[str, Array]) -> None:
        """Put the rows of one file in place."""
        self.columns["episode"][arrays["left"]] = -1
        for group, names in self._groups.items():
            rows = arrays[f"{group}_rows"]
            for name in names:
                column, values = self.columns[name], arrays[f"{group}_{name}"]
                if values.dtype != column.dtype or values.shape != (len(rows), *column.shape[1:]):
                    raise ValueError(f"{name} has dtype {values.dtype} and shape {values.shape}")
                column[rows] = values

    def _restore(self, numbers: Mapping[str, Any]) -> None:
        """Everything that follows from the columns, and the numbers that do not."""
        self._cursor, self._next_episode = numbers["cursor"], numbers["next_episode"]
        episode = self.columns["episode"]
        rows = np.flatnonzero(episode >= 0)
        rows = rows[np.lexsort((self.columns["step"][rows], episode[rows]))]
        self.live = len(rows)
        if self.live != numbers["live"]:
            raise ValueError(f"it has {self.live} rows instead of {numbers['live']}")
        if self.live:
            self._link(rows, np.diff(episode[rows]) != 0)
            firsts = rows[self.previous[rows] < 0]
            self.episodes = dict(zip(episode[firsts].tolist(), firsts.tolist()))
        if self._files:
            self._places.restore(self.columns["image_row"][rows])


def _explained(error: OSError, what: str) -> OSError:
    return OSError(error.errno, f"{what} ({error.strerror or error}); make room there, or name another folder")
