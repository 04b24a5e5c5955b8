"""Output folders: never mix two runs, never leave a half-written file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def output_folder_problem(folder: str | Path, *, resuming: bool = False) -> str | None:
    """Why `folder` cannot receive a new run, or None."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        return f"{path} is a file; name a folder"
    if not resuming and path.is_dir() and any(path.iterdir()):
        return (
            f"{path} already holds another run; name another folder, remove it, or continue a training run "
            "with --load_checkpoint"
        )
    return None


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, as `json_text`."""
    write_atomic(path, json_text(content).encode())


def json_text(content: Any) -> str:
    """JSON as a person reads it: indented."""
    return json.dumps(content, indent=2) + "\n"


def fsync_folder(folder: Path) -> None:
    """Flush every file below `folder`, and the folders themselves, to the disk."""
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
