"""Reading HDF5 files of unknown origin: episodes `data/demo_<i>`, attributes and filters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlvla.data.validation import StoredArray, StoredEpisode, StoredValue, too_large
from rlvla.envs.pictures import ImageFit
from rlvla.utils.budgets import over_expansion

_EPISODE = re.compile(r"demo_(\d+)")
# Raised by h5py for damaged files.
UNREADABLE = (KeyError, OSError, RuntimeError, ValueError, MemoryError)
_ELSEWHERE = "lies in another file; copy the data into this one"


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open a file for reading that refers to no other file and whose arrays, or what they view, are stored in it.

    Raises:
        OSError: not an HDF5 file, an object in it is stored in another file, or its arrays far exceed the file.
    """
    with h5py.File(path, "r") as file:
        _check_objects(file, path.stat().st_size)
        yield file


def _check_objects(file: h5py.File, stored_bytes: int) -> None:
    """Visit every object once, however many links lead to it."""
    sizes: list[tuple[int, str]] = []
    viewed: list[tuple[str, str, str]] = []  # virtual dataset, file and name of a source
    root = file["/"].id
    groups, visited = [("", root)], {h5py.h5o.get_info(root).addr}
    while groups:
        prefix, group = groups.pop()
        for link in group:
            name, kind = prefix + link.decode(errors="replace"), group.links.get_info(link).type
            if kind == h5py.h5l.TYPE_SOFT:
                continue  # within the file, where the target is visited as well
            if kind != h5py.h5l.TYPE_HARD:
                raise OSError(f"{name} {_ELSEWHERE}")
            info = h5py.h5o.get_info(group, link)
            if info.addr in visited:
                continue
            visited.add(info.addr)
            if info.type == h5py.h5o.TYPE_GROUP:
                groups.append((f"{name}/", h5py.h5g.open(group, link)))
            elif info.type == h5py.h5o.TYPE_DATASET:
                dataset = h5py.h5d.open(group, link)
                stored = dataset.get_create_plist()
                if stored.get_external_count():
                    raise OSError(f"{name} {_ELSEWHERE}")
                if stored.get_layout() == h5py.h5d.VIRTUAL:
                    for index in range(stored.get_virtual_count()):
                        viewed.append((name, stored.get_virtual_filename(index), stored.get_virtual_dsetname(index)))
                chunk = stored.get_chunk() if stored.get_layout() == h5py.h5d.CHUNKED else ()  # read as a whole
                elements = max(math.prod(dataset.shape or (0,)), math.prod(chunk))
                sizes.append((elements * dataset.dtype.itemsize, f"{name} {list(dataset.shape or ())}"))
    for name, place, source in dict.fromkeys(viewed):
        if place != ".":
            raise OSError(f"{name} {_ELSEWHERE}")
        try:
            layout = h5py.h5d.open(root, source.encode()).get_create_plist().get_layout()
        except KeyError:
            continue  # the source was renamed: the view reads as zeros
        if layout == h5py.h5d.VIRTUAL:
            raise OSError(f"{name} is a view of a view, perhaps of itself; copy the data into it")
    problem = over_expansion(sum(size for size, _ in sizes), stored_bytes)
    if problem:
        raise OSError(f"{max(sizes)[1]} and {len(sizes) - 1} other arrays: all {problem}")


def member(group: h5py.Group, name: str) -> Any:
    """The dataset or group of that name; None if it is missing or its link leads nowhere."""
    try:
        return group.get(name)
    except UNREADABLE:
        return None


def attribute(place: h5py.Group, name: str) -> Any:
    """The value of an attribute; None if it is missing or cannot be read."""
    try:
        return place.attrs.get(name)
    except (*UNREADABLE, TypeError):
        return None


def episode_groups(file: h5py.File, problems: list[str]) -> list[tuple[str, h5py.Group]]:
    """(name, group) of the episodes `data/demo_<i>` in the order of their numbers.

    Groups with other names, numbers that occur twice, and filters (`mask/<name>`) that list an episode which does not
    exist are added to `problems`.
    """
    data = member(file, "data")
    if not isinstance(data, h5py.Group):
        problems.append("has no group 'data' with episodes 'demo_<number>'")
        return []
    numbered: dict[int, tuple[str, h5py.Group]] = {}
    for name in data:
        matched, group = _EPISODE.fullmatch(name), member(data, name)
        if matched is None:
            problems.append(f"data/{name!r} is not an episode; episodes are named demo_<number>")
        elif not isinstance(group, h5py.Group):
            problems.append(f"{name} is not a group")
        elif int(matched[1]) in numbered:
            problems.append(f"{name} and {numbered[int(matched[1])][0]} have the same number; rename one of them")
        else:
            numbered[int(matched[1])] = name, group
    problems += _filter_problems(file, set(data))
    return [numbered[number] for number in sorted(numbered)]


def episode_number(name: str) -> int:
    """The number of an episode of `episode_groups`."""
    return int(name.removeprefix("demo_"))


def filters_of(file: h5py.File) -> dict[str, list[str]]:
    """The lists of episodes `mask/<name>` of robomimic; without those that `episode_groups` refuses."""
    filters = member(file, "mask")
    lists = {name: member(filters, name) for name in filters} if isinstance(filters, h5py.Group) else {}
    return {
        name: [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in listed[:]]
        for name, listed in lists.items()
        if not _list_problem(listed)
    }


def _list_problem(listed: Any) -> str | None:
    if not isinstance(listed, h5py.Dataset) or listed.ndim != 1 or listed.dtype.kind not in "OS":
        return "is not a list of names"
    return too_large(listed)


def _filter_problems(file: h5py.File, episodes: set[str]) -> list[str]:
    """Filters of robomimic (lists of episode names, for training or validation) that do not fit the episodes."""
    filters = member(file, "mask")
    if not isinstance(filters, h5py.Group):
        return []
    problems = [f"mask/{name} {text}" for name in filters if (text := _list_problem(member(filters, name)))]
    for name, names in filters_of(file).items():
        missing = sorted(set(names) - episodes)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            problems.append(f"mask/{name} lists {', '.join(missing[:3])}{more}, which the file does not hold")
        if len(set(names)) < len(names):
            problems.append(f"mask/{name} lists an episode twice")
    return problems


def read_stored_images(
    stored: Sequence[h5py.Dataset], out: np.ndarray, fit: ImageFit | None = None, *, rest: int = 0, stride: int = 1
) -> np.ndarray:
    """Read the images of an episode and close their datasets, each of which keeps a cache of megabytes until then.

    `stored` are images [S + R, H, W, 3] of each of N cameras, resized by `fit`; R is `rest`. Every `stride`-th of the
    first S goes to `out` [ceil(S / stride), N, H, W, 3], the last R are returned, [R, N, H, W, 3].
    """
    resized = fit or (lambda images: images)
    final = []
    for index, dataset in enumerate(stored):
        pictures, steps = dataset[:], len(dataset) - rest
        out[:, index] = resized(pictures[:steps:stride])
        final.append(resized(pictures[steps:]))
    for dataset in stored:
        dataset.id.close()
    return np.stack(final, axis=1)


def hdf5_episode(
    name: str, group: h5py.Group, arrays: dict[str, StoredArray], values: dict[str, StoredValue]
) -> StoredEpisode:
    """An episode with these arrays and values, and the number of steps that the group records, if any."""
    steps = StoredValue("num_samples", attribute(group, "num_samples"), "number", optional=True)
    return StoredEpisode(name, arrays, values | {"num_samples": steps}, steps.value)
