"""Random batches with ragged rows, holes, fully masked rows and interleaved groups."""

import numpy as np
import torch


def random_mask(rng, rows, tokens, empty_row=True):
    """Ragged lengths, holes in every third row, and one fully masked row."""
    lengths = rng.integers(1, tokens + 1, size=rows)
    lengths[0] = tokens
    mask = np.arange(tokens) < lengths[:, None]
    holes = rng.random((rows, tokens)) < 0.3
    holes[::3] &= True
    holes[1::3] = holes[2::3] = False
    mask &= ~holes
    if empty_row and rows > 2:
        mask[rng.integers(1, rows)] = False
    return torch.from_numpy(mask)


def random_batch(seed=0, rows=13, tokens=11, dtype=torch.float64, garbage=float("nan")):
    """Tensors of an update as a dict; what stands outside the mask is `garbage`."""
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, rows, tokens)
    outside = torch.full((rows, tokens), garbage, dtype=dtype)

    def padded(array):
        return torch.where(mask, torch.from_numpy(np.asarray(array)).to(dtype), outside)

    old = rng.normal(-1.5, 0.7, (rows, tokens)).clip(-6, -0.01)
    new = (old + rng.normal(0, 0.3, (rows, tokens))).clip(-8, -0.001)
    return {
        "mask": mask,
        "rewards": padded(rng.normal(size=(rows, tokens)) * (rng.random((rows, tokens)) < 0.4)),
        "values": padded(rng.normal(size=(rows, tokens))),
        "old": padded(old),
        "new": padded(new),
        "adv": padded(rng.normal(size=(rows, tokens))),
        "squares": padded(rng.uniform(0.05, 0.9, (rows, tokens))),
        "weights": padded(rng.uniform(0.2, 2.0, (rows, tokens))),
        "baselines": torch.from_numpy(rng.normal(size=rows)).to(dtype),
        # interleaved, of mixed types and sizes, one group of one
        "ids": [("solo",)] + [["a", 7, ("b", 1), 2.5][k] for k in rng.integers(0, 4, size=rows - 1)],
    }


def pair_ids(rows, groups):
    """Interleaved ids with at least two rows per group."""
    return [f"g{i % groups}" for i in range(rows)]
