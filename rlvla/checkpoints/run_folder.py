"""Folders of training runs, one run each; a run that ended before its first checkpoint may be replaced."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from rlvla.utils.cli.config_file import RUN_CONFIG_FILE
from rlvla.utils.data_files import read_yaml
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import METRICS_FILE, output_folder_problem, remove_leftovers, target_problem, write_atomic
from rlvla.utils.terminal import log

RUN_FILE = "run_config.json"  # all flags of a run of `cli/train_ppo_vla.py`; identifies its folder
CHECKPOINTS = "checkpoints"  # subfolder of the run folder
CURVE_FILE = "learning_curve.png"
EVALUATIONS_FILE, TOTALS_FILE = "evaluations.json", "totals.json"  # written at the end
POLICIES, CRITICS = "policies", "critics"  # subfolders with the exports of --save_hf_ckpt
_LOCK = ".running"  # locked while a process trains; the operating system releases it when the process ends
_MARKS = {RUN_CONFIG_FILE, RUN_FILE}
# Written before the first checkpoint; a new run may overwrite these.
_INITIAL = {*_MARKS, METRICS_FILE, "tensorboard", "start", "videos", "wandb", "wandb_run_id", CURVE_FILE}


def run_folder_problem(folder: str | Path, *, resuming: bool | None = None) -> str | None:
    """Reason why a run cannot start in `folder`, or None; a run without checkpoints may be replaced.

    Problems that `target_problem` reports are left out.
    """
    path = Path(folder)
    if target_problem(path, folder=True):
        return None
    if not resuming and path.is_dir() and _in_use(path):
        return f"another process is training in {path}; name another folder"
    return None if ended_early(path) else output_folder_problem(path, resuming=resuming)


def checkpoint_folder_problem(folder: str | Path, *, resuming: bool | None = None) -> str | None:
    """Reason why a separate folder cannot receive the checkpoints of a new run, or None.

    Problems that `target_problem` reports are left out.
    """
    if target_problem(folder, folder=True):
        return None
    return None if _holds_no_checkpoint(Path(folder)) else output_folder_problem(folder, resuming=resuming)


def ended_early(folder: str | Path, checkpoints: Path | None = None) -> bool:
    """Whether a folder holds only the start of a run: no checkpoint, no policy, no other files.

    Args:
        folder: the run folder.
        checkpoints: folder in which this command looks for checkpoints; the run may have used another one.
    """
    path = Path(folder)
    return path.is_dir() and not _in_use(path) and _holds_only_a_start(path, checkpoints)


def _holds_only_a_start(path: Path, checkpoints: Path | None) -> bool:
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if not names:  # killed before its first file
        return (path / _LOCK).is_file()
    if not names & _MARKS or names - _INITIAL - {CHECKPOINTS}:
        return False
    return all(map(_holds_no_checkpoint, (path / CHECKPOINTS, checkpoints, *_checkpoints_elsewhere(path))))


def remove_folders_without(run: Path, checkpoints: Iterable[Path]) -> None:
    """Remove exported policies and critics of a run whose checkpoints are gone.

    Args:
        run: the run folder.
        checkpoints: all remaining checkpoints of the run, in any folder.
    """
    kept = {path.name for path in checkpoints}
    for folder in (*(run / POLICIES).glob("iteration_*"), *(run / CRITICS).glob("iteration_*")):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


class Ranks(Protocol):
    """The part of `DeepspeedStrategy` that `claimed_run_folder` uses."""

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files."""

    def barrier(self) -> None:
        """Wait for all ranks."""


@contextmanager
def claimed_run_folder(
    folder: Path, ranks: Ranks, checkpoints: Path | None = None, *, resuming: bool = False
) -> Iterator[None]:
    """Lock the folders of this run for the duration of the block; leftovers of a run that ended early are removed.

    All ranks check the folder beforehand. The main rank waits for them before it takes the lock, because a slower rank
    would otherwise mistake the lock for another run's.

    Args:
        folder: created if it does not exist.
        ranks: the ranks of this run; only the main one takes the lock.
        checkpoints: folder in which this command looks for checkpoints; if it has any, nothing is removed.
        resuming: whether an earlier run goes on.

    Raises:
        ConfigError: another process is training in a folder, or another run has ended there since it was checked.
    """
    ranks.barrier()
    if not ranks.is_main:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_locked(folder))
        if checkpoints is not None and not checkpoints.resolve().is_relative_to(folder.resolve()):
            stack.enter_context(_locked(checkpoints))
        remove_leftovers(folder)
        if _holds_only_a_start(folder, checkpoints):
            _remove_start(folder)
        elif not resuming:
            raise ConfigError.of("save_path", "folder_in_use", f"--save_path: {output_folder_problem(folder)}")
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / _LOCK
    with ExitStack() as stack:
        while True:
            file = stack.enter_context(lock.open("a", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is training in {folder}; name another folder") from None
            except OSError:
                break  # a file system without locks
            with suppress(FileNotFoundError):  # a run that has ended since removed it
                if os.path.samestat(lock.stat(), os.fstat(file.fileno())):
                    break
        stack.callback(lock.unlink, missing_ok=True)
        yield


def _remove_start(folder: Path) -> None:
    """Remove the files of a run that ended before its first checkpoint; those that identify it last."""
    paths = [folder / name for name in sorted({*_INITIAL, CHECKPOINTS}, key=_MARKS.__contains__)]
    if any(path.exists() for path in paths):
        log.info(f"{folder} holds a run that ended before its first checkpoint; it is replaced")
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class FolderWatch:
    """Recreates the folder of a running run if it was deleted or moved.

    Args:
        folder: an existing folder; its run configuration, which a resumption needs, is kept in memory.
    """

    def __init__(self, folder: Path):
        self._folder, self._last_identity = folder, _identity(folder)
        self._lock: IO[str] | None = None  # open as long as the run
        self._records = {name: (folder / name).read_bytes() for name in _MARKS if (folder / name).is_file()}

    def restored(self) -> bool:
        """Recreate the folder if it is gone, with only the run configuration, and warn; returns whether it did."""
        if _identity(self._folder) == self._last_identity:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, content in self._records.items():
                write_atomic(self._folder / name, content)
            self._lock = (self._folder / _LOCK).open("a", encoding="utf-8")
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            log.warning(f"{self._folder} was deleted during the run, and cannot be created again ({error})")
            return False
        self._last_identity = _identity(self._folder)
        log.warning(
            f"{self._folder} was deleted or moved during the run. It was created again: metrics from now on, the next "
            "checkpoint and the policy will be in it, but not its former content"
        )
        return True


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _in_use(folder: Path) -> bool:
    """Whether a process is training in the folder, as far as locks can tell."""
    try:
        with (folder / _LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: all ranks of a run check at the same time
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _holds_no_checkpoint(folder: Path | None) -> bool:
    """Whether a folder has no checkpoint; hidden entries are incomplete ones."""
    return folder is None or not folder.is_dir() or all(entry.name.startswith(".") for entry in folder.iterdir())


def _checkpoints_elsewhere(folder: Path) -> list[Path]:
    """Other folders in which the run may have written checkpoints: `--ckpt_path`, and one in `--fallback_path`."""
    with suppress(ConfigError):
        flags = read_yaml(folder / RUN_CONFIG_FILE)
        if isinstance(flags, dict):
            places = {"ckpt_path": ".", "fallback_path": CHECKPOINTS}
            paths = {name: flags.get(name) for name in places}
            return [Path(path) / places[name] for name, path in paths.items() if isinstance(path, str) and path]
    return []
