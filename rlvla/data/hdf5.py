"""Opening HDF5 files of unknown origin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """The file, open for reading; every part of it lies in the file itself.

    Raises:
        OSError: it is no HDF5 file, or a part is a link to another file or has its data in one.
    """
    with h5py.File(path, "r") as file:
        _refuse_other_files(file, "")
        yield file


def _refuse_other_files(group: h5py.Group, prefix: str) -> None:
    for name in group:
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.SoftLink):
            continue  # within the file, where the target is looked at as well
        part = None if isinstance(link, h5py.ExternalLink) else group[name]
        if part is None or (isinstance(part, h5py.Dataset) and (part.external or part.is_virtual)):
            raise OSError(f"{prefix}{name} lies in another file; copy the data into this one")
        if isinstance(part, h5py.Group):
            _refuse_other_files(part, f"{prefix}{name}/")
