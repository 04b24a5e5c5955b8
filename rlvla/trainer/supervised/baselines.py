"""What a policy must beat: predictions that look at nothing, or at proprioception and instruction alone.

Chunks of actions are [N, A, D] in units of the environment, with a mask [N, A] of the actions that exist.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 64  # queries whose distances to all references are in memory at a time


def majority_tokens(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The most frequent token of each column, [K] int64; the smallest of equally frequent ones, 0 without any.

    Args:
        tokens: [M, K] non-negative integers.
        mask: [M, K] bool, the tokens that count.
    """
    columns = zip(tokens.T, mask.T)
    return np.array([np.bincount(column[valid], minlength=1).argmax() for column, valid in columns], dtype=np.int64)


def median_actions(actions: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The median of each number in a chunk, [A, D]: the constant prediction with the least absolute error.

    Actions of the chunk that never exist are 0.
    """
    counted = np.where(valid[:, :, None], actions, np.nan)
    existing = valid.any(0)
    medians = np.zeros(actions.shape[1:])
    medians[existing] = np.nanmedian(counted[:, existing], axis=0)
    return medians


def nearest_rows(
    references: np.ndarray,
    queries: np.ndarray,
    *,
    kinds: tuple[np.ndarray, np.ndarray],
    episodes: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """The nearest reference of each query, [N] int64, among those of the same kind but of other episodes.

    Distances are Euclidean after each dimension is divided by its standard deviation over the references.

    Args:
        references: [M, P].
        queries: [N, P].
        kinds: of references [M] and queries [N], e.g. the number of the instruction.
        episodes: of references [M] and queries [N].

    Returns:
        Rows of `references`; -1 where none is of the same kind and of another episode.
    """
    spread = references.std(0)
    scale = np.where(spread > 0, spread, 1.0)
    known, asked = references / scale, queries / scale
    squares = np.square(known).sum(1)
    nearest = np.full(len(asked), -1, dtype=np.int64)
    for start in range(0, len(asked), _BLOCK):
        block = slice(start, start + _BLOCK)
        distances = squares - 2.0 * asked[block] @ known.T  # squared, without the square of the query
        comparable = (kinds[1][block, None] == kinds[0]) & (episodes[1][block, None] != episodes[0])
        distances[~comparable] = np.inf
        nearest[block] = np.where(comparable.any(1), distances.argmin(1), -1)
    return nearest


def mean_errors(predicted: np.ndarray, actions: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Mean absolute error of each action dimension, [D]; NaN without any action.

    Args:
        predicted: [N, A, D], or broadcastable to it.
        actions: [N, A, D].
        valid: [N, A].
    """
    errors = np.abs(predicted - actions)[valid]
    return errors.mean(0) if len(errors) else np.full(actions.shape[2], np.nan)
