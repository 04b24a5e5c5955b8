"""Splits of the episodes of a dataset by initial state."""

from __future__ import annotations

import numpy as np

from rlvla.data.demonstrations import UNKNOWN_STATE, Demonstrations


def split_by_state(
    demos: Demonstrations, share: float, rng: np.random.Generator, *, least: int = 0
) -> tuple[list[int], list[int]]:
    """Split into (training, held-out) episodes; those of the same task and initial state are on the same side.

    Episodes whose initial states are not recorded are split one by one.

    Args:
        demos: the episodes.
        share: share of the initial states to hold out, in [0, 1].
        rng: chooses them.
        least: minimum number of initial states to hold out.
    """
    everything = range(len(demos.actions))
    known = demos.init_states or [UNKNOWN_STATE] * len(everything)
    start = [(task, state, i if (task, state) == UNKNOWN_STATE else 0) for i, (task, state) in enumerate(known)]
    states = sorted(set(start))
    order = rng.permutation(len(states))
    held_out = {states[i] for i in order[: max(least, round(share * len(states)))]}
    return [i for i in everything if start[i] not in held_out], [i for i in everything if start[i] in held_out]
