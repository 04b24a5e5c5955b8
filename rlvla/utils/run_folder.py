"""Folders of training runs: one run in each; one that ended before there was anything to keep gives its place up."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlvla.utils.config_file import CONFIG_FILE
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import METRICS_FILE, log
from rlvla.utils.runs import output_folder_problem

RUN_FILE = "run_config.json"  # every flag of a run of `cli/train_ppo_vla.py`; marks its folder
CHECKPOINTS = "checkpoints"  # of a run, below its folder
_LOCK = ".running"  # locked by the process that trains; the system unlocks it however the process ends
_MARKS = {CONFIG_FILE, RUN_FILE}
# What a run writes before its first checkpoint, and the next one writes again.
_BEGINNINGS = {*_MARKS, METRICS_FILE, "tensorboard", "start", "videos", "wandb", "wandb_run_id"}


def run_folder_problem(folder: str | Path, *, resuming: bool = False) -> str | None:
    """Why a run cannot start in `folder`, or None; a run that left nothing to keep is no reason."""
    path = Path(folder)
    if not resuming and path.is_dir() and _in_use(path):
        return f"another process is training in {path}; name another folder"
    return None if ended_early(path) else output_folder_problem(path, resuming=resuming)


def checkpoint_folder_problem(folder: str | Path, *, resuming: bool = False) -> str | None:
    """Why a folder of its own cannot receive the checkpoints of a new run, or None."""
    return None if _holds_no_checkpoint(Path(folder)) else output_folder_problem(folder, resuming=resuming)


def ended_early(folder: str | Path) -> bool:
    """Whether a folder holds the beginning of a run alone: no checkpoint, no policy, nothing of anybody else."""
    path = Path(folder)
    if not path.is_dir() or _in_use(path):
        return False
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if not names & _MARKS or names - _BEGINNINGS - {CHECKPOINTS}:
        return False
    return _holds_no_checkpoint(path / CHECKPOINTS) and _holds_no_checkpoint(_checkpoints_elsewhere(path))


@contextmanager
def claimed_run_folder(folder: Path, *, is_main: bool) -> Iterator[None]:
    """Keep `folder` for this process while the block runs; what a run that ended early has left is removed first.

    Args:
        folder: is made where it does not exist.
        is_main: other ranks of the same run do nothing.

    Raises:
        ConfigError: another process trains there.
    """
    if not is_main:
        yield
        return
    replaced = ended_early(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / _LOCK
    with lock.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is training in {folder}; name another folder") from None
        except OSError:
            pass  # a file system without locks
        try:
            if replaced:
                log.info(f"{folder} held a run that ended before it had saved anything; it is replaced")
                _remove_beginnings(folder)
            yield
        finally:
            lock.unlink(missing_ok=True)


def _in_use(folder: Path) -> bool:
    """Whether a process trains there, as far as can be known."""
    try:
        with (folder / _LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: the ranks of a run look at the same time
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _remove_beginnings(folder: Path) -> None:
    for name in (*_BEGINNINGS, CHECKPOINTS):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _holds_no_checkpoint(folder: Path | None) -> bool:
    """Hidden entries are parts of checkpoints whose writing was cut short."""
    return folder is None or not folder.is_dir() or all(entry.name.startswith(".") for entry in folder.iterdir())


def _checkpoints_elsewhere(folder: Path) -> Path | None:
    """The folder that the run's --ckpt_path named."""
    import yaml

    with suppress(OSError, yaml.YAMLError, AttributeError):
        named = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8")).get("ckpt_path")
        return Path(named) if named else None
    return None
