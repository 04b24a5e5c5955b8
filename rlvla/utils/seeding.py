"""Seeds and generators derived from the run's seed and the name of a purpose."""

from __future__ import annotations

import random
import zlib

import numpy as np


def derive_seed(*keys: int | str) -> int:
    """A 63-bit seed that depends on all keys and their order; the same on every platform."""
    entropy = [zlib.crc32(key.encode()) if isinstance(key, str) else key for key in keys]
    return int(np.random.SeedSequence(entropy).generate_state(2, np.uint32).view(np.uint64)[0] >> 1)


def derive_rng(*keys: int | str) -> np.random.Generator:
    """A numpy generator seeded by `derive_seed`."""
    return np.random.default_rng(derive_seed(*keys))


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, for library code that draws from the global generators."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
