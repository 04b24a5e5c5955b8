"""Does each action stand beside the observation it was chosen from? A regression of the motion on the actions tells."""

from __future__ import annotations

import numpy as np

from rlvla.data.demonstrations import Demonstrations

_OFFSETS = (-1, 0, 1)
_MOST_ROWS = 20_000
_ROWS_PER_COLUMN = 5
_EXPLAINED = 0.2  # share of the variance that the best offset must explain beyond position and previous motion
_CLEARER = 0.8  # of the unexplained variance with the actions where they are: what the better offset may leave


def shifted_by(demos: Demonstrations) -> int:
    """-1 if the motion from t to t + 1 clearly follows from action t - 1, 1 if from action t + 1, else 0."""
    gains = explained(demos)
    if gains is None:
        return 0
    best = max(gains, key=lambda offset: gains[offset])
    clear = gains[best] >= _EXPLAINED and 1 - gains[best] <= _CLEARER * (1 - gains[0])
    return best if clear else 0


def explained(demos: Demonstrations) -> dict[int, float] | None:
    """Offset k -> how much better the change of proprio from t to t + 1 is predicted with action t + k than without.

    The change of each dimension is regressed (least squares) on the position, the previous change, which stands for
    inertia and delays, and the action. With observations at decisions only, actions are averaged from one to the next.

    Returns:
        Share of the remaining variance that the action explains, 0 to 1, averaged over the dimensions that move; None
        without proprio, or with too few steps.
    """
    if demos.proprio is None:
        return None
    moved, known, acted = _rows(demos)
    columns = known.shape[1] + acted.shape[2] + 1
    if len(moved) < _ROWS_PER_COLUMN * columns:
        return None
    alone = _unexplained(known, moved)
    moving = alone > 1e-6 * np.maximum(moved.var(0), 1e-12)
    moving &= moved.std(0) > 1e-6
    if not moving.any():
        return None
    with_action = [_unexplained(np.concatenate([known, a], axis=1), moved) for a in acted]
    shares = np.stack([1 - rest[moving] / alone[moving] for rest in with_action])  # [offsets, dimensions]
    weights = shares.max(0)  # dimensions that no offset explains (joints held still, noise) say nothing
    if weights.sum() <= 0:
        return None
    return {offset: float(share @ weights / weights.sum()) for offset, share in zip(_OFFSETS, shares)}


def _rows(demos: Demonstrations) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(motion [M, P], position and previous motion [M, 2 P], actions by offset [3, M, D]) of all usable steps."""
    assert demos.proprio is not None
    moved, known = [], []
    acted: list[list[np.ndarray]] = [[] for _ in _OFFSETS]
    for episode, (actions, proprio) in enumerate(zip(demos.actions, demos.proprio)):
        seen = np.arange(len(actions)) if demos.decision_steps is None else demos.decision_steps[episode]
        total = np.concatenate([np.zeros((1, actions.shape[1])), np.cumsum(actions, axis=0, dtype=np.float64)])
        rows = np.array([i for i in range(1, len(seen) - 1) if seen[i + 1] < len(actions)], dtype=np.int64)
        if not len(rows):
            continue
        values = np.asarray(proprio, np.float64)
        moved.append(values[rows + 1] - values[rows])
        known.append(np.concatenate([values[rows], values[rows] - values[rows - 1]], axis=1))
        start, stop = seen[rows], seen[rows + 1]
        for offset, of_offset in zip(_OFFSETS, acted):
            of_offset.append((total[stop + offset] - total[start + offset]) / (stop - start)[:, None])
    if not moved:
        return np.zeros((0, 1)), np.zeros((0, 2)), np.zeros((len(_OFFSETS), 0, 1))
    every = max(1, -(-sum(map(len, moved)) // _MOST_ROWS))
    return (
        np.concatenate(moved)[::every],
        np.concatenate(known)[::every],
        np.stack([np.concatenate(of_offset)[::every] for of_offset in acted]),
    )


def _unexplained(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Variance [P] of the outputs [M, P] that a linear function of the inputs [M, C] leaves."""
    inputs = inputs - inputs.mean(0)
    scale = inputs.std(0)
    inputs = inputs[:, scale > 1e-9] / scale[scale > 1e-9]
    outputs = outputs - outputs.mean(0)
    solution = np.linalg.lstsq(inputs, outputs, rcond=1e-6)[0]
    return ((outputs - inputs @ solution) ** 2).mean(0)
