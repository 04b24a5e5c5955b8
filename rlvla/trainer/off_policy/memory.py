"""The replay buffer of a rank: storage of episodes, and batches drawn from the buffers of all ranks."""

from __future__ import annotations

import heapq
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvla.data.demonstrations import Demonstrations
from rlvla.experience import Sample
from rlvla.models.compact.text import Sentences
from rlvla.models.sac_policy import SACPolicy, StoredSizes, with_goals
from rlvla.replay.buffer import Drawn, ReplayBuffer
from rlvla.replay.priorities import make_priority
from rlvla.replay.sampling import importance_weights, mixture_probabilities, rank_prefix_sums
from rlvla.replay.schema import BufferConfig, Column, Episode
from rlvla.trainer.off_policy.config import ReplayConfig
from rlvla.trainer.off_policy.hindsight import GOAL
from rlvla.utils.data_files import check_types
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError

_SAVED_TYPES = {"generation": int, "sentences": list[str]}  # of a buffer in a checkpoint
TASK = "task"  # column: id of the task


@dataclass
class Observations:
    """Network inputs of a batch, see `SACPolicy` and `SACCritic`."""

    proprio: Tensor | None
    images: Tensor | None
    sentences: Sentences | None


@dataclass
class Batch:
    """Decisions for an update, on the device.

    Attributes:
        now, later: observations before the decision, and where its target bootstraps.
        actions: [B, E].
        returns: [B] discounted rewards up to there.
        discounts: [B], 0 after a terminated row.
        weights: [B] importance weights.
        mask: [B] bool; False only in the placeholder of a rank whose share is empty.
        steps: [B] int64, executed actions of the decision.
        demonstrated: [B] bool, rows of demonstrations.
        recorded_returns: [B] discounted rewards until the end of the episode; None unless `Memory.rows` computed them.
    """

    now: Observations
    later: Observations
    actions: Tensor
    returns: Tensor
    discounts: Tensor
    weights: Tensor
    mask: Tensor
    steps: Tensor
    demonstrated: Tensor
    recorded_returns: Tensor | None = None


class Memory:
    """Episodes of one rank as rows of a replay buffer.

    Args:
        actor: encodes instructions, observations and actions for storage.
        config: sizes and priorities.
        folder: folder of the buffer.
    """

    def __init__(self, actor: SACPolicy, config: ReplayConfig, folder: Path):
        self._actor, self._config, self.folder = actor, config, folder
        self.sentences: list[str] = []  # by their numbers in the buffer
        self._buffer: ReplayBuffer | None = None
        self._demonstrated = False  # see `of_demonstrations`
        self._saved, self._needed = 0, list[int]()  # saved states of the buffer: the last, and those in checkpoints
        self._priority = make_priority(config.replay_priority, config.priority_options)
        self._settings = BufferConfig(
            columns_of(actor.stored_sizes, named_tasks=config.replay_rescore_interval > 0),
            config.replay_capacity,
            actor.spec.action_chunk_len,
            config.replay_eviction,
        )

    @classmethod
    def of_demonstrations(
        cls, actor: SACPolicy, demos: Demonstrations, indices: Sequence[int], scale: float, folder: Path
    ) -> Memory:
        """A memory with these demonstrations only, see `append_demonstrations`."""
        length = actor.stored_sizes.action_chunk_len
        steps = [end - first for index in indices for first, end in demos.demonstrated(index)]
        capacity = 2 + sum(2 * min(length, count) + count for count in steps)
        memory = cls(actor, ReplayConfig(replay_capacity=capacity), folder)
        memory._demonstrated = True
        memory.append_demonstrations(demos, indices, scale)
        return memory

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer; a new one unless `load` was called before."""
        if self._buffer is None:
            shutil.rmtree(self.folder, ignore_errors=True)  # left over from a run that ended before its first save
            self._buffer = ReplayBuffer(self._settings, self.folder, self._priority)
        return self._buffer

    def append(
        self,
        samples: Sequence[Sample],
        *,
        scale: float,
        version: int,
        now: int,
        relabel: Callable[[Sample, Episode], Sequence[Episode]] | None = None,
    ) -> None:
        """Add played episodes.

        Args:
            samples: the episodes.
            scale: factor on their rewards.
            version: version of the policy that played.
            now: updates so far.
            relabel: returns relabelled copies of an episode, which are added as well.
        """
        episodes = []
        for sample, observed in zip(samples, self._actor.stored_observations(samples)):
            scores = sample.scores.get(self._config.replay_score_source or "")
            columns: dict[str, Any] = {"action": sample.trace["action"].numpy(), **observed}
            if self._actor.stored_sizes.text_width:
                instructions = [*sample.decision_instructions, sample.last_instruction]
                columns["sentence"] = self.sentence_ids(instructions)
            if self._config.replay_rescore_interval:
                columns[TASK] = np.full(sample.num_decisions, sample.task_id, np.int32)
            if self._actor.stored_sizes.goals:
                columns[GOAL] = np.zeros(sample.num_decisions + 1, np.int32)
            episode = Episode(
                columns,
                sample.rewards.numpy() * np.float32(scale),
                sample.executed.sum(1).numpy(),
                sample.terminated,
                sample.truncated,
                sample.init_state_id,
                version,
                None if scores is None else scores[:, 0].numpy(),
                None if scores is None else scores[:, 1].numpy(),
            )
            episodes += [episode, *(relabel(sample, episode) if relabel is not None else ())]
        self.buffer.append(episodes, now=now)

    def sentence_ids(self, instructions: Sequence[str]) -> np.ndarray:
        """Indices [N] int32 in `sentences`, to which new instructions are added."""
        self.sentences += [text for text in dict.fromkeys(instructions) if text not in self.sentences]
        return np.array([self.sentences.index(text) for text in instructions], np.int32)

    def rows(self, drawn: Drawn, n_step: int, gamma: float, horizon: int = 0) -> dict[str, np.ndarray]:
        """The rows that were drawn, for `make_batch`; a masked placeholder if there are none.

        `horizon`: with the returns recorded within this many decisions; 0: without them.
        """
        rows, mask, weights = drawn.rows, np.ones(len(drawn.rows), np.bool_), drawn.weights
        if not len(rows):
            rows, mask, weights = np.flatnonzero(self.buffer.drawable)[:1], np.zeros(1, np.bool_), np.ones(1)
        ahead = self.buffer.n_step(rows, n_step, gamma)
        columns = {"returns": ahead.returns, "discounts": ahead.discounts, "weights": weights, "mask": mask}
        columns |= self.buffer.gather(rows, ["action", "steps"])
        columns["demonstrated"] = np.full(len(rows), self._demonstrated)
        if horizon:
            columns["recorded_returns"] = self.buffer.n_step(rows, horizon, gamma).returns
        for when, at in (("now", rows), ("later", ahead.next_rows)):
            observations = self.buffer.gather(at, self._observation_columns)
            if "sentence" in observations:
                observations["sentence"] = np.array(self.sentences, dtype=object)[observations["sentence"]]
            columns |= {f"{when}/{name}": values for name, values in observations.items()}
        return columns

    @property
    def _observation_columns(self) -> list[str]:
        return [column.name for column in self._settings.columns if column.observation]

    def instructions(self, rows: np.ndarray) -> list[str]:
        """The instructions of rows that hold observations; [] if instructions are not stored."""
        if not self._actor.stored_sizes.text_width:
            return []
        return [self.sentences[number] for number in self.buffer.gather(rows, ["sentence"])["sentence"]]

    @property
    def relabelled(self) -> int:
        """Number of decisions with a relabelled goal."""
        return int(np.count_nonzero(self.buffer.gather(np.flatnonzero(self.buffer.drawable), [GOAL])[GOAL]))

    def proprio_sums(self) -> tuple[int, np.ndarray, np.ndarray]:
        """Number of observations, and the sums [P] of proprio and of its square over them."""
        rows = np.flatnonzero(self.buffer.drawable)
        proprio = self.buffer.gather(rows, ["proprio"])["proprio"].astype(np.float64)
        return len(rows), proprio.sum(0), (proprio**2).sum(0)

    def append_demonstrations(self, demos: Demonstrations, indices: Sequence[int], scale: float) -> None:
        """Add the demonstrations with these indices; their only reward is `scale` for success, at the end.

        A decision is a chunk of their actions. Windows of a chunk begin at each step of its first chunk, so that every
        step is the beginning of a decision. Of episodes with interventions, each segment of the person or the expert
        is added, truncated where the policy acts again.
        """
        length, width = self._actor.stored_sizes.action_chunk_len, demos.actions[0].shape[1]
        episodes = []
        for index in indices:
            actions = demos.actions[index]
            windows = [
                (begin, end)
                for first, end in demos.demonstrated(index)
                for begin in range(first, min(first + length, end))
            ]
            for begin, end in windows:
                starts = np.arange(begin, end, length)
                stops = np.minimum(starts + length, end)
                chunks = np.zeros((len(starts), length, width), np.float32)
                for row, (start, stop) in enumerate(zip(starts, stops)):
                    chunks[row, : stop - start] = actions[start:stop]
                rewards = np.zeros((len(starts), length), np.float32)
                success = bool(demos.success[index]) and end == len(actions)
                rewards[-1, stops[-1] - starts[-1] - 1] = scale * success
                columns: dict[str, Any] = dict(self._actor.encode_actions(np.clip(chunks, -1.0, 1.0)))
                for name in self._observation_columns:
                    columns[name] = self._demonstrated_observations(demos, name, index, starts, end)
                state = demos.init_states[index][1] if demos.init_states else -1
                episodes.append(Episode(columns, rewards, stops - starts, success, not success, state))
        self.buffer.append(episodes)

    def _demonstrated_observations(
        self, demos: Demonstrations, name: str, index: int, starts: np.ndarray, end: int
    ) -> np.ndarray:
        """Observations of one demonstration at its decisions and at step `end`; those after a success are not read."""
        if name == "sentence":
            texts = demos.row_instructions(index)
            return self.sentence_ids([texts[step] for step in (*starts, min(end, len(texts) - 1))])
        lists = {"proprio": (demos.proprio, demos.last_proprio), "images": (demos.images, demos.last_images)}
        during, after = lists[name]
        assert during is not None
        last = during[index][-1] if after is None else after[index]
        last = during[index][end] if end < len(during[index]) else last
        return np.concatenate([during[index][starts], last[None]])

    def save(self) -> dict[str, Any]:
        """Save the buffer and return its entry in the checkpoint; OSError if it cannot be written.

        States of earlier checkpoints stay until `checkpoint_written`, as this checkpoint may not be completed.
        """
        self._saved = self.buffer.save(keep=None)
        return {"generation": self._saved, "sentences": list(self.sentences)}

    def checkpoint_written(self, keep: int) -> None:
        """Delete all saved states but the last `keep`: the checkpoint with the last result of `save` is complete."""
        self._needed = [*self._needed, self._saved][-keep:]
        self.buffer.keep_only(self._needed)

    def take_over(self, saved: Sequence[tuple[Path, dict[str, Any]]], indices: slice) -> None:
        """Append some of the episodes that other memories saved, in the order in which they were played.

        Args:
            saved: folder and result of `save` of each memory.
            indices: selects from the episodes of all of them together.

        Raises:
            ConfigError: as in `ReplayBuffer.load`.
        """
        others = []
        for folder, state in saved:
            others.append(Memory(self._actor, self._config, folder))
            others[-1].load(state)
        episodes = (zip(other.buffer.stored_episodes(), repeat(other)) for other in others)
        played = heapq.merge(*episodes, key=lambda entry: int(np.asarray(entry[0].policy_version).flat[0]))
        for episode, other in islice(played, indices.start, indices.stop, indices.step):
            if "sentence" in episode.columns:
                texts = [other.sentences[number] for number in np.asarray(episode.columns["sentence"], np.int64)]
                episode = replace(episode, columns={**episode.columns, "sentence": self.sentence_ids(texts)})
            self.buffer.append([episode])
        for other in others:
            other.buffer.close()

    def load(self, state: dict[str, Any], *, only: bool = True) -> None:
        """Restore the result of `save`; `only` and ConfigError as in `ReplayBuffer.load`."""
        check_types({"generation": None, "sentences": None} | state, _SAVED_TYPES, self.folder)
        buffer = ReplayBuffer.load(
            self._settings, self.folder, self._priority, generation=state["generation"], only=False
        )
        rows = np.flatnonzero(buffer.occupied)
        for name, count in (("sentence", len(state["sentences"])), (GOAL, self._actor.stored_sizes.goals)):
            numbers = buffer.gather(rows, [name])[name] if name in self._observation_columns else np.zeros(0)
            if ((numbers < 0) | (numbers >= count)).any():
                text = f"the replay buffer in {self.folder} is damaged (a {name} of {numbers.max()}, of {count})"
                raise ConfigError.of(None, "invalid_file", text)
        self.sentences, self._needed, self._buffer = list(state["sentences"]), [state["generation"]], buffer
        if only:
            buffer.keep_only(self._needed)


def make_batch(columns: Sequence[dict[str, np.ndarray]], actor: SACPolicy, device: torch.device | str) -> Batch:
    """One batch of the rows from several buffers, see `Memory.rows`."""
    joined = {name: np.concatenate([of_buffer[name] for of_buffer in columns]) for name in columns[0]}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(joined[name]).to(device)

    def observations(when: str) -> Observations:
        proprio, images = (tensor(f"{when}/{n}") if f"{when}/{n}" in joined else None for n in ("proprio", "images"))
        if actor.stored_sizes.goals and proprio is not None:
            proprio = with_goals(proprio, tensor(f"{when}/{GOAL}").long(), actor.stored_sizes.goals)
        instructions = joined.get(f"{when}/sentence")
        sentences = None if instructions is None else actor.sentences(instructions.tolist())
        return Observations(proprio, images, sentences)

    returns, discounts, weights = (tensor(name).float() for name in ("returns", "discounts", "weights"))
    return Batch(
        now=observations("now"),
        later=observations("later"),
        actions=tensor("action"),
        returns=returns,
        discounts=discounts,
        weights=weights,
        mask=tensor("mask"),
        steps=tensor("steps"),
        demonstrated=tensor("demonstrated"),
        recorded_returns=tensor("recorded_returns") if "recorded_returns" in columns[0] else None,
    )


def columns_of(config: StoredSizes, *, named_tasks: bool = False) -> tuple[Column, ...]:
    """Columns of a decision in the replay buffer; `named_tasks` adds the task id."""
    columns = [Column("action", (config.action_width,))]
    if config.proprio_dim:
        columns.append(Column("proprio", (config.proprio_dim,), observation=True))
    if config.num_images_in_input:
        shape = (config.num_images_in_input, config.image_size, config.image_size, 3)
        columns.append(Column("images", shape, "uint8", observation=True, mapped=True))
    if config.text_width:
        columns.append(Column("sentence", (), "int32", observation=True))
    if config.goals:
        columns.append(Column(GOAL, (), "int32", observation=True))
    if named_tasks:
        columns.append(Column(TASK, (), "int32"))
    return tuple(columns)


def normalize_weights(columns: dict[str, np.ndarray], strategy: DeepspeedStrategy) -> None:
    """Scale the importance weights of rows, see `Memory.rows`, to a mean of 1 over all ranks."""
    sums = {"weights": float((columns["weights"] * columns["mask"]).sum()), "rows": float(columns["mask"].sum())}
    sums = strategy.all_reduce(sums, "sum")
    columns["weights"] = columns["weights"] * (sums["rows"] / sums["weights"])


def draw_share(
    buffer: ReplayBuffer,
    k: int,
    rng: np.random.Generator,
    shared: np.random.Generator,
    strategy: DeepspeedStrategy,
    config: ReplayConfig,
    *,
    beta: float,
    share: float,
) -> Drawn:
    """This rank's part of k rows drawn from the buffers of all ranks together; it may be empty.

    Args:
        buffer: buffer of this rank.
        k: rows over all ranks.
        rng: generator of this rank.
        shared: generator with the same state on all ranks.
        strategy: exchanges priorities and sizes.
        config: normalization of the weights, stratification.
        beta: see `importance_weights`.
        share: fraction of the rows that is drawn by priority.
    """
    normalise = None if config.replay_weights == "none" else config.replay_weights
    if strategy.world_size == 1:
        return buffer.sample(
            k,
            rng,
            beta=beta,
            share=share,
            stratified=config.replay_stratified,
            normalise=normalise,
            max_weight=config.replay_max_is_weight,
        )
    by_priority = round(share * k)
    least = buffer.tree.min if by_priority == k or buffer.tree.positive == len(buffer) else 0.0
    totals, sizes, minima = zip(*strategy.gather_objects((buffer.tree.total, len(buffer), least)))
    noise = shared.random(k)
    fractions = (np.arange(by_priority) + noise[:by_priority]) / max(1, by_priority)
    if not config.replay_stratified:
        fractions = noise[:by_priority]
    rows = np.empty(0, dtype=np.int64)
    if by_priority and len(prefix_sums := rank_prefix_sums(totals, strategy.rank, fractions)):
        rows = buffer.tree.find(prefix_sums)
    owners = np.searchsorted(np.cumsum(sizes), noise[by_priority:] * sum(sizes), side="right")
    uniform = int((owners == strategy.rank).sum())
    if uniform:
        rows = np.append(rows, buffer.draw_uniform(uniform, rng))
    priorities = np.append(buffer.tree.get(rows), min(minima))
    probabilities = mixture_probabilities(priorities, sum(totals), sum(sizes), by_priority / k)
    weights = importance_weights(
        probabilities[:-1],
        sum(sizes),
        beta,
        smallest=float(probabilities[-1]),
        normalise=normalise,
        max_weight=config.replay_max_is_weight,
    )
    return Drawn(rows, buffer.gather(rows, ["episode"])["episode"], probabilities[:-1], weights)
