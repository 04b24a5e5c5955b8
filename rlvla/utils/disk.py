"""Writing what a run can do without: a full disk costs a warning, and writing goes on when there is room again."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rlvla.utils.files import open_lines
from rlvla.utils.terminal import log

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEAST_ROOM = 1 << 20  # bytes; libraries that write in threads of their own fail noisily on a full disk


class BestEffortWriter:
    """Writes that may fail without ending the run; an outage is reported once, and its end.

    Args:
        what: what is written, for the messages.
    """

    def __init__(self, what: str):
        self._what = what
        self.failing = False

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`; returns whether it succeeded."""
        try:
            write()
        except (OSError, RuntimeError) as error:  # h5py and torch raise RuntimeError on a full disk
            if not self.failing:
                log.warning(f"{self._what} cannot be written ({error}); the run goes on and tries again")
            self.failing = True
            return False
        if self.failing:
            log.info(f"{self._what}: written again")
        self.failing = False
        return True


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk, or a quota on it, is full; libraries pass on the words of the system."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(os.strerror(code) in str(error) for code in _FULL)


def require_room(folder: Path, size: int = 0) -> None:
    """Check that a folder has room for `size` bytes, and some more.

    Raises:
        OSError: it has not.
    """
    if shutil.disk_usage(folder).free < size + _LEAST_ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


class LineFile:
    """Appends lines to a text file; what finds no room is kept and written before the next line.

    Args:
        path: the file, created with the first line.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = -1
        self._unwritten = b""
        self._best_effort = BestEffortWriter(str(path))

    def append(self, line: str) -> None:
        """Write a line, without its line break."""
        self._unwritten += f"{line}\n".encode()
        self._best_effort.attempt(self._write)

    def _write(self) -> None:
        if self._descriptor < 0:
            open_lines(self._path).close()
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]

    def close(self) -> None:
        """Write what is left, if there is room, and close the file."""
        if self._unwritten and not self._best_effort.attempt(self._write):
            log.warning(f"{self._path}: the last {self._unwritten.count(bytes([10]))} line(s) are lost")
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
