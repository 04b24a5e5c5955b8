"""Atomic and best-effort writes, manifests with checksums, output folders, files of metrics."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from rlvla.utils.data_files import admit, check_types, inside, read_json
from rlvla.utils.terminal import log

MANIFEST = "manifest.json"
METRICS_FILE = "metrics.jsonl"
_UNFINISHED = ".rlvla_part"  # ends the names of temporary files
_UNFINISHED_SECONDS = 60  # between the creation of one and its lock
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: RLIMIT_FSIZE
_LEAST_ROOM = 1 << 20  # bytes; libraries that write in threads of their own fail noisily on a full disk
# Names of repositories as the Hub allows them: letters, digits, dots, dashes and underscores, with one slash.
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = (".hdf5", ".h5")
_TEMPORARY_NAME = 32  # bytes by which the name of a temporary file is longer


@contextmanager
def flushed_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; it is flushed to disk at the end of the block."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def manifest_entry(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file on disk."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, entries: dict[Path, dict[str, Any]]) -> None:
    """Write the manifest that marks a folder as complete, and flush the folder to disk.

    Args:
        folder: where the manifest goes.
        entries: `manifest_entry` of each file in the folder.
    """
    for parent in {folder, *(path.parent for path in entries)}:
        fsync_entry(parent)
    files = {str(path.relative_to(folder)): entry for path, entry in sorted(entries.items())}
    write_json(folder / MANIFEST, {"files": files})
    fsync_entry(folder)


def damage(folder: Path, *, checksums: bool = True) -> str | None:
    """The defect of a folder that `write_manifest` should have completed, or None.

    Args:
        folder: the folder to check.
        checksums: also read the files and compare checksums; otherwise only presence and size are checked.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return f"{MANIFEST} is missing: it was not completed, or not written by this program"
    try:
        admit(folder)
        content = read_json(path)
        check_types({"files": None} | content, {"files": dict[str, dict]}, path)
        if not content["files"]:
            return f"{MANIFEST} names no file"
        for name, entry in content["files"].items():
            check_types({"bytes": None, "sha256": None} | entry, {"bytes": int, "sha256": str}, f"{path}: {name}")
            problem = _file_damage(inside(folder, name), entry["bytes"], entry["sha256"] if checksums else None)
            if problem:
                return f"{name} {problem}"
    except (ValueError, OSError) as error:
        return f"{MANIFEST} cannot be used ({' '.join(str(error).split())})"
    return None


def _file_damage(path: Path, size: int, digest: str | None) -> str | None:
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes instead of {size}"
    changed = digest is not None and _sha256(path) != digest
    return "has changed since it was written (checksum)" if changed else None


def fsync_entry(folder: Path) -> None:
    """Flush the directory entries of a folder (new names, renames) to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a complete folder to its final name, replacing an existing one.

    The existing folder is removed only after the rename; `recover` restores it after a crash in between.
    """
    aside = final.with_name(f".old_{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        final.rename(aside)
    temporary.rename(final)
    fsync_entry(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def recover(folder: Path) -> None:
    """Clean up after a crash during `put_in_place`."""
    for aside in folder.glob(".old_*"):
        final = aside.with_name(aside.name.removeprefix(".old_"))
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(final)


def target_problem(target: str | Path, *, folder: bool) -> str | None:
    """Why nothing can be written at a path, or None; tried with a temporary file.

    Args:
        target: a file to be written or replaced, or a folder to be written into; either is created with its parents.
        folder: whether it is a folder. That it exists as a file is left to the command, which may allow it.
    """
    path = Path(target)
    try:
        if not folder and path.is_dir():
            return f"{path} is a folder; name a file"
        existing = path if folder and path.exists() else path.absolute().parent
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            return None if existing == path else f"{existing} is a file, so nothing can be written below it"
        longest = os.pathconf(existing, "PC_NAME_MAX") - _TEMPORARY_NAME
        if "\0" in str(path):
            return "it holds a null character; name another place"
        if any(len(os.fsencode(part)) > longest for part in path.parts):
            return f"a name in it is too long for the file system of {existing}; use at most {longest} bytes"
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"nothing can be written there ({error.strerror}); name another place, or make this one writable"


def output_folder_problem(folder: str | Path, *, resuming: bool | None = None) -> str | None:
    """Why `folder` cannot receive a new run, or None; problems that `target_problem` reports are left out.

    Args:
        folder: where the run would go.
        resuming: whether an earlier run goes on there; None: the command cannot do that.
    """
    path = Path(folder)
    if target_problem(path, folder=True):
        return None
    if path.exists() and not path.is_dir():
        return f"{path} is a file; name a folder"
    if not resuming and path.is_dir() and any(path.iterdir()):
        text = f"{path} already holds another run; name another folder or remove it"
        return text if resuming is None else f"{text}, or continue that run with --load_checkpoint"
    return None


def unused_folder(path: Path) -> Path:
    """The path, with the first number behind its name, from 2 on, for which there is nothing yet."""
    return next(p for n in count(1) if not os.path.lexists(p := path.with_name(path.name + f"_{n}" * (n > 1))))


def no_folder(folder: str | Path) -> str:
    """The message about a missing folder: the directory searched, and a similar name."""
    path = Path(folder)
    if path.exists():
        return f"{path} is not a folder"
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    missing = next(place for place in [*reversed(path.parents), path] if not place.exists())
    similar: list[str] = []
    with suppress(OSError):  # a folder that may not be listed
        similar = get_close_matches(missing.name, [place.name for place in missing.parent.iterdir()])
    candidates = (missing.parent / name / path.relative_to(missing) for name in similar)
    near = next((place for place in candidates if place.is_dir()), None)
    return f"there is no folder {path}{where}" + (f"; did you mean {near}?" if near else "")


def is_repo_id(name: str | Path) -> bool:
    """Whether a name has the form OWNER/NAME of a repository on the Hub and is not the name of a file."""
    text = str(name)
    return _REPO_ID.fullmatch(text) is not None and not text.startswith(".") and not text.endswith(_FILES)


def no_policy(folder: str | Path) -> str:
    """The message about a missing policy folder, see `no_folder`, with the download of a repository of the Hub."""
    text = f"{no_folder(folder)}; name the folder of a policy (config.json) or of a run"
    if not is_repo_id(folder) or Path(folder).parent.exists():  # or just not in this folder
        return text
    name = Path(folder).name
    return f"{text}. Nothing is downloaded, but `hf download {folder} --local-dir {name}` does that; then name {name}"


def cache_dir() -> Path:
    """`$RLVLA_CACHE_DIR`, else `$XDG_CACHE_HOME/rlvla`, else `~/.cache/rlvla`."""
    if os.environ.get("RLVLA_CACHE_DIR"):
        return Path(os.environ["RLVLA_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rlvla"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` that is renamed to it at the end of the block.

    Readers see either the old file or the complete new one; after an error the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path.parent.glob(f".{glob.escape(path.name)}.*{_UNFINISHED}"))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED)
    temporary = Path(name)
    try:
        with os.fdopen(handle):
            _lock(handle)  # until it is complete; a file of a process that was killed is not locked
            yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # temporary files are readable by their owner only
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _lock(handle: int) -> bool:
    """Lock an open file for this process; False if another one has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _remove_unfinished(files: Iterable[Path]) -> None:
    """Remove temporary files of `atomic_path` whose process has ended."""
    for path in files:
        with suppress(OSError):  # it has just got its final name, or belongs to somebody else
            old = time.time() - path.stat().st_mtime > _UNFINISHED_SECONDS
            with path.open("rb") as file:
                if old and _lock(file.fileno()):
                    path.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove hidden temporary files and folders of killed processes from a folder that nobody else uses."""
    recover(folder)
    _remove_unfinished(folder.rglob(f".*{_UNFINISHED}"))
    for unfinished in folder.glob(".*.part"):
        if unfinished.is_dir() and not unfinished.is_symlink():
            shutil.rmtree(unfinished, ignore_errors=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old content or the new one, never a part."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, formatted by `json_text`."""
    write_atomic(path, json_text(content).encode())


def json_text(content: Any) -> str:
    """Indented JSON."""
    return json.dumps(content, indent=2) + "\n"


def open_lines(path: Path) -> Any:
    """Open a text file to append lines; an incomplete last line, as a kill may leave, is terminated first."""
    file = path.open("a+", encoding="utf-8")
    if file.tell():
        with path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            if before.read(1) != b"\n":
                file.write("\n")
    return file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of metrics; incomplete lines, as a kill or a full disk leaves them, are skipped."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The records of `metrics.jsonl` by step; if a step was logged twice (a resumed run), the later values win."""
    path = folder / METRICS_FILE
    by_step: dict[int, dict[str, float]] = {}
    for record in read_lines(path) if path.exists() else []:
        by_step.setdefault(record["step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step)]


class BestEffortWriter:
    """Writes that may fail without ending the run; the first failure is reported, and the next success.

    Args:
        name: of the file or folder, for messages.
    """

    def __init__(self, name: str):
        self._name = name
        self.failing = False

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`; returns whether it succeeded."""
        try:
            write()
        except (OSError, RuntimeError) as error:  # h5py and torch raise RuntimeError on a full disk
            if not self.failing:
                log.warning(f"{self._name} cannot be written ({error}); the run goes on and tries again")
            self.failing = True
            return False
        if self.failing:
            log.info(f"{self._name}: written again")
        self.failing = False
        return True


def is_full(error: BaseException) -> bool:
    """Whether an error reports a full disk or a size limit; libraries may pass on only the system's text."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(os.strerror(code) in str(error) for code in _FULL)


def require_room(folder: Path, size: int = 0) -> None:
    """OSError unless the file system of a folder has room for `size` bytes and 1 MiB more."""
    if shutil.disk_usage(folder).free < size + _LEAST_ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


class LineFile:
    """Appends lines to a text file; lines that do not fit on the disk are kept and written before the next one.

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
        """Write pending lines, if there is room, and close the file."""
        if self._unwritten and not self._best_effort.attempt(self._write):
            log.warning(f"{self._path}: the last {self._unwritten.count(bytes([10]))} line(s) are lost")
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
