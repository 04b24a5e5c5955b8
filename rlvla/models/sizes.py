"""Ranges of the sizes of networks, as read from files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvla.utils.data_files import fits

LARGEST, MOST_LAYERS = 2**20, 2**10  # of any size, so that nothing absurd is allocated


def size_problems(sizes: Mapping[str, Any], *, layers: str) -> list[str]:
    """Sizes of networks, by name, that are not whole numbers in range.

    The largest sizes keep every product countable before anything is allocated.

    Args:
        sizes: values from a file.
        layers: prefix of the names of numbers of layers.
    """
    most = {name: MOST_LAYERS if name.startswith(layers) else LARGEST for name in sizes}
    return [
        f"{name} is {value!r}, not a whole number from 1 to {most[name]}"
        for name, value in sizes.items()
        if not fits(value, int) or not 1 <= value <= most[name]
    ]
