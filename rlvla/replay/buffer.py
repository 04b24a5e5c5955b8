"""Prioritized replay buffer of decisions, with exact and incremental saved states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlvla.replay import targets
from rlvla.replay.priorities import Priority, make_priority, unscored
from rlvla.replay.row_store import RowStore
from rlvla.replay.sampling import draw, draw_uniform, importance_weights, mixture_probabilities
from rlvla.replay.schema import Array, BufferConfig, Episode
from rlvla.replay.sum_tree import Floats, Indices, SumTree, last_of_each
from rlvla.utils.errors import ConfigError

_EPISODE_FIELDS = (
    "rewards",
    "steps",
    "terminated",
    "truncated",
    "init_state",
    "policy_version",
    "action_score",
    "progress",
)
_PROTECTED = 0.1  # fraction of the episodes, the newest ones, that eviction by value keeps


@dataclass(frozen=True)
class Drawn:
    """A batch of drawn rows.

    Attributes:
        rows: [B] rows of the buffer.
        episodes: [B] their episodes, by which `ReplayBuffer.update` recognizes evicted rows.
        probabilities: [B] of the draws.
        weights: [B] see `importance_weights`.
    """

    rows: Indices
    episodes: Indices
    probabilities: Floats
    weights: Floats


@dataclass(frozen=True)
class NStep:
    """n-step returns of rows; the target is returns + discounts * value of the observation of `next_rows`.

    Attributes:
        returns: [B] discounted rewards.
        discounts: [B], 0 after a terminated row.
        next_rows: [B] rows with the observation to bootstrap from.
    """

    returns: Floats
    discounts: Floats
    next_rows: Indices


class ReplayBuffer:
    """Ring buffer of whole episodes.

    Saved states lie in the buffer's folder and refer to its mapped files: an image is on the disk once.

    Args:
        config: columns and capacity.
        folder: for mapped files and saved states; created with its parents.
        priority: priorities from (action_score, progress, td_error), see `make_priority`; uniform by default. A row for
            which it is NaN keeps its priority; new rows have the largest priority so far.

    Attributes:
        tree: priorities of the rows that can be drawn.

    Raises:
        ConfigError: the folder holds saved states; `load` continues from them.
    """

    def __init__(self, config: BufferConfig, folder: Path, priority: Priority | None = None):
        self._set_up(config, folder, priority)
        self._store.start_empty()

    def _set_up(self, config: BufferConfig, folder: Path, priority: Priority | None) -> None:
        self.config = config
        self.tree = SumTree(config.capacity)
        self._priority = priority or make_priority("uniform")
        self._store = RowStore(config, folder)
        self._columns = self._store.columns

    def close(self) -> None:
        """Close the mapped files."""
        self._store.close()

    def __len__(self) -> int:
        """Number of rows that can be drawn."""
        return self._store.live - len(self._store.episodes)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self._store.episodes)

    @property
    def drawable(self) -> NDArray[np.bool_]:
        """[capacity] mask of the rows that can be drawn, one per decision."""
        return self._store.next >= 0

    @property
    def occupied(self) -> NDArray[np.bool_]:
        """[capacity] mask of the rows in use: decisions and last observations."""
        return self._store.first >= 0

    # ------------------------------------------------------------------------------------------------ adding
    def append(self, episodes: Sequence[Episode], *, now: int = 0) -> None:
        """Add episodes.

        Args:
            episodes: finished episodes.
            now: updates so far, from which the age of their scores is counted.

        Raises:
            ValueError: an episode does not have the declared columns, or is longer than the buffer. Nothing is added.
            OSError: the disk is full; the episodes before have been added.
        """
        prepared = [episode.rows(self.config.columns, self.config.chunk_len) for episode in episodes]
        counts = [len(values["steps"]) for values in prepared]
        if max(counts, default=0) > self.config.capacity:
            raise ValueError(
                f"an episode takes {max(counts)} rows, one of them for its last observation; the buffer has "
                f"{self.config.capacity}"
            )
        full = self._store.live + sum(counts) > self.config.capacity
        eviction: Iterator[int] = iter(self._eviction_order() if full else ())
        fresh = {"td_error": np.nan, "prioritised_at": -1, "priority": self.tree.max or 1.0}
        changed = [np.empty(0, dtype=np.int64)]
        try:
            for values, count in zip(prepared, counts):
                self._store.write_mapped(values, count)
                while self._store.live + count > self.config.capacity:
                    oldest = next(iter(self._store.episodes))
                    changed.append(self._store.evict(next(eviction, oldest)))
                scored = ~np.isnan(values["action_score"]) | ~np.isnan(values["progress"])
                scored_at = np.where(scored, now, -1)
                changed.append(self._store.add({**values, **fresh, "scored_at": scored_at}, count))
        finally:
            rows = np.concatenate(changed)
            free = self._store.next[rows] < 0
            self.tree.set(rows[free], 0.0)
            self._update_tree(rows[~free])

    def _eviction_order(self) -> list[int]:
        """Episodes in order of eviction; by value without the newest 10 %."""
        numbers = list(self._store.episodes)
        if self.config.eviction == "fifo":
            return numbers
        rows, capacity = np.flatnonzero(self.drawable), self.config.capacity
        first = self._store.first[rows]
        heads = np.fromiter(self._store.episodes.values(), dtype=np.int64, count=len(numbers))
        sums = np.bincount(first, self._columns["priority"][rows], minlength=capacity)[heads]
        means = sums / np.bincount(first, minlength=capacity)[heads]
        old = len(numbers) - int(np.ceil(_PROTECTED * len(numbers)))
        return [numbers[i] for i in np.argsort(means[:old], kind="stable")]

    # ------------------------------------------------------------------------------------------------ drawing
    def sample(
        self,
        k: int,
        rng: np.random.Generator,
        *,
        beta: float = 1.0,
        share: float = 1.0,
        stratified: bool = True,
        normalise: str | None = "max",
        max_weight: float = 10.0,
    ) -> Drawn:
        """Draw k rows.

        Args:
            k: number of rows.
            rng: for the draws.
            beta: see `importance_weights`.
            share: fraction of the batch that is drawn by priority, rounded to whole rows; the rest is uniform.
                `Drawn.probabilities` refer to the mixture.
            stratified: one draw by priority from each of equal segments; otherwise independent draws.
            normalise: see `importance_weights`.
            max_weight: see `importance_weights`.

        Raises:
            ValueError: the buffer is empty, or all priorities are 0.
        """
        if not len(self):
            raise ValueError(f"{k} rows cannot be drawn from an empty buffer")
        by_priority = round(share * k)
        rows = np.empty(0, dtype=np.int64)
        if by_priority:
            rows = draw(self.tree, by_priority, rng, stratified=stratified)
        if by_priority < k:
            rows = np.append(rows, self.draw_uniform(k - by_priority, rng))
        least = self.tree.min if by_priority == k or self.tree.positive == len(self) else 0.0
        probabilities = mixture_probabilities(
            np.append(self.tree.get(rows), least), self.tree.total, len(self), by_priority / k
        )
        weights = importance_weights(
            probabilities[:-1],
            len(self),
            beta,
            normalise=normalise,
            max_weight=max_weight,
            smallest=float(probabilities[-1]),
        )
        return Drawn(rows, self._columns["episode"][rows], probabilities[:-1], weights)

    def draw_uniform(self, k: int, rng: np.random.Generator) -> Indices:
        """Uniform draws of rows [k]."""
        return draw_uniform(lambda rows: self._store.next[rows] >= 0, self._store.extent, len(self), k, rng)

    def gather(self, rows: Indices, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Columns of rows [...] by name; by default the declared ones.

        Raises:
            KeyError: unknown column.
        """
        return self._store.gather(rows, [c.name for c in self.config.columns] if names is None else names)

    def rows_of(self, number: int) -> Indices:
        """The rows of an episode in order, including the one of its last observation.

        Raises:
            KeyError: the episode is not in the buffer.
        """
        return self._store.rows_of(number)

    def stored_episodes(self) -> Iterator[Episode]:
        """The episodes as appended, oldest first, with their current scores."""
        observed = {column.name for column in self.config.columns if column.observation}
        for number in self._store.episodes:
            rows = self.rows_of(number)
            columns, fields = self.gather(rows), self.gather(rows[:-1], _EPISODE_FIELDS)
            yield Episode(
                {name: values if name in observed else values[:-1] for name, values in columns.items()},
                fields["rewards"],
                fields["steps"],
                bool(fields["terminated"][-1]),
                bool(fields["truncated"][-1]),
                int(fields["init_state"][0]),
                fields["policy_version"],
                fields["action_score"],
                fields["progress"],
            )

    def windows(self, rows: Indices, length: int) -> tuple[Indices, NDArray[np.bool_]]:
        """Windows [B, length] of decisions from rows [B] on, and their mask, see `targets.follow`."""

        def successor(at: Indices) -> Indices:
            following = self._store.next[at]
            return np.where(self._store.next[following] >= 0, following, -1)  # not the last observation

        return targets.follow(rows, successor, length)

    def n_step(self, rows: Indices, n: int, gamma: float) -> NStep:
        """Returns over at most n rows from rows [B] on; `gamma` discounts per env step."""
        window, mask = self.windows(rows, n)
        steps = self._columns["steps"][window]
        rewards = targets.row_rewards(self._columns["rewards"][window], steps, gamma)
        ends = self._columns["terminated"][window]
        returns, discounts, last = targets.window_returns(rewards, gamma**steps, ends, mask)
        return NStep(returns, discounts, self._store.next[window[np.arange(len(rows)), last]])

    # ------------------------------------------------------------------------------------------------ scores
    def update(
        self,
        rows: Indices,
        episodes: Indices,
        *,
        now: int,
        td_error: ArrayLike | None = None,
        action_score: ArrayLike | None = None,
        progress: ArrayLike | None = None,
    ) -> int:
        """Store TD errors and scores of rows [B], and update their priorities.

        Args:
            rows: [B]; the last of duplicates holds.
            episodes: [B] their episodes when they were drawn; rows evicted since are skipped.
            now: updates so far.
            td_error: [B].
            action_score: [B]; NaN keeps the stored value.
            progress: [B], as action_score.

        Returns:
            Number of rows that were skipped.

        Raises:
            ValueError: a TD error is not finite, or the priority rejects a score. Nothing is stored.
        """
        here = np.flatnonzero((self._columns["episode"][rows] == episodes) & (self._store.next[rows] >= 0))
        skipped = len(rows) - len(here)
        here = here[last_of_each(rows[here])]
        at = rows[here]
        new = {name: self._columns[name][at] for name in ("action_score", "progress", "td_error")}
        for name, values in (("action_score", action_score), ("progress", progress), ("td_error", td_error)):
            if values is not None:
                updates = np.asarray(values, dtype=np.float64)[here]
                if name == "td_error" and not np.isfinite(updates).all():
                    raise ValueError("a TD error is not finite: the critic has diverged")
                new[name] = np.where(np.isnan(updates), new[name], updates)
        priorities = self._priority(new["action_score"], new["progress"], new["td_error"])
        if td_error is not None:
            self._columns["prioritised_at"][at] = now
        if action_score is not None or progress is not None:
            self._columns["scored_at"][at] = now
        for name, column in new.items():
            self._columns[name][at] = column
        self._store.scores_changed(at)
        valid = ~np.isnan(priorities)
        self.set_priorities(at[valid], priorities[valid])
        return skipped

    def set_priorities(self, rows: Indices, priorities: ArrayLike) -> None:
        """Set the priorities [B] of unique rows [B] that can be drawn.

        Raises:
            ValueError: a row cannot be drawn, or a priority is negative, NaN or infinite. Nothing is set.
        """
        values = np.asarray(priorities, dtype=np.float64)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError("a priority is negative, NaN or infinite")
        if (self._store.next[rows] < 0).any():
            raise ValueError("a row is free, or holds a last observation; it has no priority")
        self._columns["priority"][rows] = values
        self._store.scores_changed(rows)
        self._update_tree(rows)

    def _update_tree(self, rows: Indices) -> None:
        self.tree.set(rows, self._columns["priority"][rows])

    def due(self, now: int, interval: int, budget: int, *, of: str = "scored_at") -> Indices:
        """At most `budget` rows whose scores are outdated: never scored first, then oldest first.

        Args:
            now: updates so far.
            interval: rows are due when this many updates have passed.
            budget: largest number of rows.
            of: "scored_at" for scores, "prioritised_at" for TD errors.
        """
        updated = self._columns[of]
        rows = np.flatnonzero(self.drawable & ((updated < 0) | (updated <= now - interval)))
        if len(rows) > budget:
            rows = np.sort(rows[np.argpartition(updated[rows], budget)[:budget]])
        return rows[np.argsort(updated[rows], kind="stable")]

    def score_age(self, now: int, *, of: str = "scored_at") -> float:
        """Mean number of updates since rows were scored (`of` as in `due`); NaN without scores."""
        updated = self._columns[of][self.drawable]
        updated = updated[updated >= 0]
        return float(now - updated.mean()) if len(updated) else float("nan")

    @property
    def missing_score_fraction(self) -> float:
        """Fraction of the rows without a judge's score, whose priority is by TD error alone; NaN without rows."""
        scores = (self._columns[name][self.drawable] for name in ("action_score", "progress"))
        missing = unscored(*scores)
        return float(missing.mean()) if len(missing) else float("nan")

    # ------------------------------------------------------------------------------------------------ saving
    def keep_only(self, numbers: Collection[int]) -> None:
        """Delete all saved states but these, at least one."""
        self._store.keep_only(numbers)

    def save(self, *, keep: int | None = 2) -> int:
        """Save the state: the rows changed since the last save, and occasionally all of them.

        If the process is killed, earlier states stay complete. To resume exactly from a checkpoint, save first and put
        the number into the checkpoint.

        Args:
            keep: number of newest states to keep, this one included, with their images; None: all, until `keep_only`.

        Returns:
            The number of the state.

        Raises:
            OSError: it could not be written (disk full); earlier states are untouched.
        """
        return self._store.save(self.tree.max, keep)

    @classmethod
    def load(
        cls,
        config: BufferConfig,
        folder: Path,
        priority: Priority | None = None,
        *,
        generation: int | None = None,
        only: bool = True,
    ) -> ReplayBuffer:
        """Restore a saved state; all other states in the folder are deleted.

        Args:
            config: as saved; the eviction may differ.
            folder: the folder of the buffer.
            priority: see the class.
            generation: number of the state; by default the newest.
            only: delete the other states; otherwise the buffer is for reading.

        Raises:
            ConfigError: no such state ("missing_file"), a file that is missing, changed or not that of a buffer
                ("invalid_file"), or another capacity or other columns ("mismatch"). Nothing is deleted.
        """
        buffer = cls.__new__(cls)
        buffer._set_up(config, folder, priority)
        try:
            largest = buffer._store.load(generation, only=only)
        except ConfigError:
            buffer.close()
            raise
        buffer._update_tree(np.flatnonzero(buffer.drawable))
        buffer.tree.max = largest
        return buffer
