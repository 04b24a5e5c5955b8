"""Weights that are the same with every version of every library; needs numpy alone."""

from __future__ import annotations

import numpy as np


def numbers(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """The same random weights in every version of every library."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith(("norm.weight", "layernorm.weight", "norm1.weight", "norm2.weight")):
        return 1 + values / 10
    return values / 10 if len(shape) < 2 else values / np.sqrt(np.prod(shape[1:]), dtype=np.float32)
