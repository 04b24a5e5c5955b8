"""Training rows of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.image_storage import image_array, read_ahead
from rlvla.experience import Experience
from rlvla.models.guidance import conditioned
from rlvla.models.policy import TRAINING_NOISE, Policy
from rlvla.utils.seeding import derive_rng


class _Preprocessor(Protocol):
    """A policy, or a value or reward model."""

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]: ...


def prepared(
    model: _Preprocessor,
    images: Sequence[np.ndarray],
    proprio: Sequence[np.ndarray] | None,
    joined: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Images [M, N, h, w, 3] and proprio [M, P] of all episodes after `model.prepare`, episode by episode.

    Args:
        model: prepares observations.
        images: per episode [S, N, H, W, 3].
        proprio: per episode [S, P], or None.
        joined: the array of which `images` are views, if any; it is returned if the model leaves images as they are.
    """
    rows, start = joined, 0
    states: list[np.ndarray] = []
    for of_episode, state in zip(images, [None] * len(images) if proprio is None else proprio):
        observed, state = model.prepare(of_episode, state)
        if not start and (joined is None or not np.may_share_memory(observed, joined)):
            rows = image_array((sum(map(len, images)), *observed.shape[1:]))
        assert rows is not None
        if rows is not joined:
            rows[start : start + len(observed)] = observed
        start += len(observed)
        states += [] if state is None else [state]
    assert rows is not None
    return rows, np.concatenate(states) if states else None


def observations_of(demos: Demonstrations, episodes: Sequence[int], model: _Preprocessor) -> Experience:
    """All observations of these episodes, prepared for the model."""
    state = None if demos.proprio is None else [demos.proprio[i] for i in episodes]
    images, proprio = prepared(model, [demos.images[i] for i in episodes], state)
    return Experience(
        images=torch.from_numpy(images),
        proprio=None if proprio is None else torch.from_numpy(proprio),
        instructions=[text for i in episodes for text in demos.row_instructions(i)],
    )


def rows_per_epoch(by_policy: np.ndarray, autonomous_weight: float) -> int:
    """Number of rows of an epoch: all demonstrated ones, and a fraction of the autonomous ones.

    Args:
        by_policy: [M] bool, the autonomous rows.
        autonomous_weight: the fraction.
    """
    return int((~by_policy).sum()) + round(autonomous_weight * int(by_policy.sum()))


class DemonstrationRows:
    """One training row per observation: the observation and the chunk of actions that followed it.

    In episodes with interventions, the chunk of a person or an expert is masked from where the policy acts again.

    Args:
        demos: the episodes; their images are replaced by views of one array.
        policy: prepares observations and encodes actions.

    Attributes:
        episodes: [M] int64, the episode of each row.
        by_policy: [M] bool, the rows in which a policy acted, in episodes with interventions.
    """

    def __init__(self, demos: Demonstrations, policy: Policy):
        spec = policy.spec
        traces, masks = [], []
        self._chunk, self._training_noise = spec.action_chunk_len, spec.training_noise
        self._positive: np.ndarray | None = None
        self._dropout = 0.0
        first, end, offset = [], [], 0
        for index, actions in enumerate(demos.actions):
            starts = demos.row_steps(index)
            ends = np.full(len(actions), len(actions))
            for begin, stop in demos.demonstrated(index):
                ends[begin:stop] = stop
            steps = starts[:, None] + np.arange(spec.demonstrated_actions)  # [S, A]
            ahead = actions[np.minimum(steps, len(actions) - 1)]  # past the end the last action is repeated and masked
            traces.append(policy.encode_actions(ahead))
            masks.append(np.repeat(steps < ends[starts][:, None], spec.columns_per_action, axis=1))
            first.append(offset + starts)
            end.append(offset + ends[starts])
            offset += len(actions)
        self.episodes = np.repeat(np.arange(len(first)), [len(starts) for starts in first])
        self.by_policy = np.concatenate([demos.rows_by_policy(index) for index in range(len(first))])
        self._actions, self._first, self._end = np.concatenate(demos.actions), *map(np.concatenate, (first, end))
        whole = demos.joined_images()
        self._images, proprio = prepared(policy, demos.images, demos.proprio if spec.proprio_dim else None, whole)
        self._rows = Experience(
            images=torch.from_numpy(self._images),
            proprio=None if proprio is None else torch.from_numpy(proprio),
            instructions=[text for index in range(len(first)) for text in demos.row_instructions(index)],
            trace={name: torch.from_numpy(np.concatenate([trace[name] for trace in traces])) for name in traces[0]},
            action_mask=torch.from_numpy(np.concatenate(masks)),
        )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def take(self, rows: np.ndarray) -> Experience:
        """The rows [M] (int64) as a batch; one fully masked row if `rows` is empty."""
        read_ahead(self._images, rows)
        return self._conditioned(self._rows.take(torch.from_numpy(rows)), rows)

    def condition_on(self, positive: np.ndarray, dropout: float) -> None:
        """Let the instructions of positive rows [M] bool carry the condition; in `batches` with dropout."""
        self._positive, self._dropout = positive, dropout

    def weight_by(self, weights: np.ndarray) -> None:
        """Multiply the loss of each row by its weight [M]."""
        self._rows = self._rows.with_fields(row_weights=torch.from_numpy(weights).float())

    def _conditioned(self, batch: Experience, rows: np.ndarray, dropped: np.ndarray | bool = False) -> Experience:
        """The batch of these rows, with the condition where they are positive and it is not dropped."""
        if self._positive is None:
            return batch
        texts = zip(batch.instructions, self._positive[rows] & ~np.asarray(dropped))
        return batch.with_fields(instructions=[conditioned(text) if positive else text for text, positive in texts])

    def of_episodes(self, episodes: Sequence[int]) -> np.ndarray:
        """The rows of these episodes, [m] int64, in their order."""
        return np.flatnonzero(np.isin(self.episodes, np.asarray(episodes, dtype=np.int64)))

    def labels_of(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The encoded actions of the rows [m], name -> [m, ...], and the mask of their columns [m, K]."""
        trace, mask = self._rows.trace, self._rows.action_mask
        assert trace is not None and mask is not None
        return {name: labels.numpy()[rows] for name, labels in trace.items()}, mask.numpy()[rows]

    def actions_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The demonstrated actions [m, A, D] of the rows [m] in units of the environment, and their mask [m, A]."""
        steps, end = self._first[rows][:, None] + np.arange(self._chunk), self._end[rows][:, None]
        return self._actions[np.minimum(steps, end - 1)], steps < end

    def batches(
        self,
        size: int,
        epochs: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        rows: np.ndarray | None = None,
        autonomous_weight: float = 0.0,
        start_step: int = 0,
    ) -> Iterator[Experience]:
        """The batches of one rank for all optimizer steps of a run, reshuffled each epoch.

        Args:
            size: rows per step over all ranks, capped at the number of rows; an incomplete last batch is dropped.
            epochs: passes over the rows.
            seed: seed of the shuffles.
            rank: the rank whose share of each batch is returned.
            world_size: number of ranks.
            rows: the rows to train on, [m] int64; default all.
            autonomous_weight: fraction of the autonomous rows in an epoch, resampled every epoch.
            start_step: number of steps left out at the start of the run.
        """
        rows = np.arange(len(self)) if rows is None else rows
        demonstrated, own = rows[~self.by_policy[rows]], rows[self.by_policy[rows]]
        size = min(size, total := rows_per_epoch(self.by_policy[rows], autonomous_weight))
        for epoch in range(epochs):
            if len(own):
                drawn = derive_rng(seed, "rows of the policy", epoch).permutation(own)[: total - len(demonstrated)]
                rows = np.concatenate([demonstrated, drawn])
            order = rows[derive_rng(seed, "sft", epoch).permutation(len(rows))]
            starts = range(0, len(rows) - size + 1, size)
            start_step, starts = max(0, start_step - len(starts)), starts[start_step:]
            for start in starts:
                share = order[start + rank : start + size : world_size]
                read_ahead(self._images, order[start + size + rank : start + 2 * size : world_size])  # of the next step
                batch = self._rows.index(torch.from_numpy(share))
                numbers = derive_rng(seed, "condition dropout", epoch, start).random(size)[rank::world_size]
                batch = self._conditioned(batch, share, numbers < self._dropout)
                yield self.with_noise(batch, derive_rng(seed, "sft noise", epoch, start), size, rank, world_size)

    def with_noise(
        self, batch: Experience, rng: np.random.Generator, size: int, rank: int, world_size: int
    ) -> Experience:
        """Add the noise of the supervised loss to the batch of one rank; unchanged if the loss needs none.

        The noise is drawn for the rows of all ranks, so that it does not depend on the number of ranks.

        The batch holds the rows `rank::world_size` of `size` rows.
        """
        if not self._training_noise:
            return batch
        numbers = rng.standard_normal((size, self._training_noise), dtype=np.float32)[rank::world_size]
        if not len(numbers):  # one fully masked row
            numbers = np.zeros((len(batch), self._training_noise), dtype=np.float32)
        return batch.with_fields(trace={**(batch.trace or {}), TRAINING_NOISE: torch.from_numpy(numbers)})
