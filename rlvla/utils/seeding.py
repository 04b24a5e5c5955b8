"""Seeds and generators derived from the seed of a run and a name, one for each purpose."""

from __future__ import annotations

import random
import zlib

import numpy as np


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts and their order; the same on every platform."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in parts]
    return int(np.random.SeedSequence(words).generate_state(2, np.uint32).view(np.uint64)[0] >> 1)


def derive_rng(*parts: int | str) -> np.random.Generator:
    """A numpy generator seeded by `derive_seed`."""
    return np.random.default_rng(derive_seed(*parts))


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, for library code that draws from the global generators."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
