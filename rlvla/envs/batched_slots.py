"""Bases for batched environments: `BatchedSlots` for any simulator, `BatchedTable` for drawn tabletops, `SlotEnv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlvla.envs.base import BatchedEnv, ChunkResult, Observation, TaskSpec, check_chunk, check_init_state_id
from rlvla.envs.options import SuiteOptions


class Advanced(NamedTuple):
    """Result of a step in n slots.

    Attributes:
        success: [n] bool, the success predicate.
        events: for each slot the set of propositions that hold.
        rewards: [n] native rewards; None gives 1 at the step that ends an episode with success.
        terminated: [n] bool, whether the simulator ended the episode: with success at a successful step, which need not
            be held, otherwise with failure; None: it never does.
    """

    success: np.ndarray
    events: Sequence[frozenset[str]]
    rewards: np.ndarray | None = None
    terminated: np.ndarray | None = None


class BatchedSlots:
    """`num_slots` concurrent episodes; see `rlvla.envs.base.BatchedEnv` for the contract.

    Subclasses implement `_begin`, `_advance`, `_observe`, `_frames` and `_state`. An episode terminates once success
    has held for `success_hold_steps` steps (None: 1), or where `Advanced.terminated` is set.

    Args:
        task: the task, including the step limit.
        num_slots: number of concurrent episodes.
        options: options of the suite.
    """

    def __init__(self, task: TaskSpec, num_slots: int, options: SuiteOptions):
        self.task, self._options = task, options
        self._steps = np.zeros(num_slots, dtype=np.int64)
        self._streaks = np.zeros(num_slots, dtype=np.int64)  # consecutive successful steps
        self._begun = np.zeros(num_slots, dtype=bool)
        self._playing = np.zeros(num_slots, dtype=bool)
        self._closed = False

    def _begin(self, slot: int, init_state_id: int) -> None:
        """Set up an initial state in a slot."""
        raise NotImplementedError

    def _advance(self, slots: np.ndarray, actions: np.ndarray) -> Advanced | tuple:
        """Execute actions [n, D] float64 in the slots [n] only; a tuple holds the first fields of `Advanced`."""
        raise NotImplementedError

    def _observe(self, slots: np.ndarray) -> list[Observation]:
        """Observations of the slots [n]."""
        raise NotImplementedError

    def _frames(self, slots: np.ndarray) -> np.ndarray | list[np.ndarray]:
        """Video frames, n x [H, W, 3] uint8, of the first camera in the slots [n]."""
        raise NotImplementedError

    def _state(self, slot: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def reset(self, slots: Sequence[int], init_state_ids: Sequence[int], seeds: Sequence[int]) -> list[Observation]:
        """Start episodes; `seeds` have no effect."""
        self._require_open()
        self._check(slots)
        for init_state_id in init_state_ids:
            check_init_state_id(self.task, init_state_id)
        chosen = np.array(slots)
        self._playing[chosen] = False
        for slot, init_state_id in zip(slots, init_state_ids):
            self._begin(slot, init_state_id)
        self._steps[chosen] = self._streaks[chosen] = 0
        self._begun[chosen] = self._playing[chosen] = True
        return self._observe(chosen)

    def step_chunk(
        self, slots: Sequence[int], actions: np.ndarray, *, record_frames: bool = False
    ) -> list[ChunkResult]:
        """Execute actions [n, A, D], in each slot until the end of the chunk or of the episode."""
        self._require_open()
        self._check(slots)
        chosen = np.array(slots)
        if not self._playing[chosen].all():
            raise RuntimeError(f"no episode is running in slots {chosen[~self._playing[chosen]]}: call reset first")
        actions = np.stack([check_chunk(chunk, self.task) for chunk in actions]).astype(np.float64)
        count, length = actions.shape[:2]
        rewards, successes = np.zeros((count, length), dtype=np.float32), np.zeros((count, length), dtype=bool)
        terminated, succeeded = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        events: list[list[frozenset[str]]] = [[] for _ in slots]
        frames: list[list[np.ndarray]] = [[] for _ in slots]
        for index in range(length):
            rows = np.flatnonzero(self._playing[chosen])
            if not len(rows):
                break
            going = chosen[rows]
            done = Advanced(*self._advance(going, actions[rows, index]))
            over = np.zeros(len(going), dtype=bool) if done.terminated is None else done.terminated
            held = self._count_step(going, done.success, over)
            successes[rows, index], succeeded[rows], terminated[rows] = done.success, held, held | over
            rewards[rows, index] = held if done.rewards is None else done.rewards
            pictures = self._frames(going) if record_frames else going
            for row, names, picture in zip(rows, done.events, pictures):
                events[row].append(names)
                if record_frames:
                    frames[row].append(picture)
        return [
            ChunkResult(
                observation=observation,
                steps_executed=len(events[row]),
                rewards=rewards[row],
                successes=successes[row],
                terminated=bool(terminated[row]),
                truncated=not (terminated[row] or self._playing[chosen[row]]),
                success_at_end=bool(succeeded[row]),
                events=events[row],
                frames=np.stack(frames[row]) if record_frames else None,
            )
            for row, observation in enumerate(self._observe(chosen))
        ]

    def privileged_state(self, slot: int) -> dict[str, np.ndarray]:
        """See `BatchedEnv.privileged_state`."""
        self._require_open()
        self._check([slot])
        if not self._begun[slot]:
            raise RuntimeError("no episode was started: call reset first")
        return self._state(slot)

    def close(self) -> None:
        """Close the environment."""
        self._closed = True

    def _count_step(self, slots: np.ndarray, success: np.ndarray, over: np.ndarray) -> np.ndarray:
        """Update the counters of running slots; returns [n] bool, whether the episode ends with success."""
        self._steps[slots] += 1
        self._streaks[slots] = np.where(success, self._streaks[slots] + 1, 0)
        below_limit = (self._steps[slots] < self.task.max_steps) & ~over
        lasted = (self._streaks[slots] >= (self._options.success_hold_steps or 1)) | (over & success)
        held = lasted & ~(self._options.plays_on & below_limit)
        self._playing[slots] = ~held & below_limit
        return held

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {self.task.suite} environment is closed; make another")

    def _check(self, slots: Sequence[int]) -> None:
        if len(set(slots)) < len(slots) or not all(0 <= slot < len(self._steps) for slot in slots):
            raise ValueError(f"slots must be distinct and in 0..{len(self._steps) - 1}, not {list(slots)}")


class BatchedTable(BatchedSlots):
    """A tabletop for `num_slots` concurrent episodes.

    Subclasses implement `_begin`, which also draws the background, `_advance`, `_paint`, `_position`, `_state` and, if
    the task has several instructions, `_instruction`. The dynamics are deterministic.
    """

    def __init__(self, task: TaskSpec, num_slots: int, options: SuiteOptions):
        super().__init__(task, num_slots, options)
        size = options.image_size
        self._backgrounds = np.empty((num_slots, size, size, 3), dtype=np.uint8)  # constant during an episode

    def _paint(self, images: np.ndarray, slots: np.ndarray) -> None:
        """Draw moving objects over the backgrounds [n, H, H, 3] of the slots [n], in place."""
        raise NotImplementedError

    def _position(self, slots: np.ndarray) -> np.ndarray:
        """Proprio [n, P] of the slots [n]."""
        raise NotImplementedError

    def _instruction(self, slot: int) -> str:
        return self.task.instruction

    def _frames(self, slots: np.ndarray) -> np.ndarray:
        images = self._backgrounds[slots]
        self._paint(images, slots)
        return images

    def _observe(self, slots: np.ndarray) -> list[Observation]:
        images, proprio = self._frames(slots)[:, None], self._position(slots).astype(np.float32)
        return [
            Observation(images[row], proprio[row] if self._options.use_proprio else None, self._instruction(slot))
            for row, slot in enumerate(slots)
        ]


class SlotEnv:
    """One slot of a batched environment as an `Env`.

    Args:
        batch: the batched environment; closing the view closes it.
        slot: index of the slot.
    """

    def __init__(self, batch: BatchedEnv, slot: int):
        self.task = batch.task
        self._batch, self._slot = batch, slot

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode in the slot."""
        return self._batch.reset([self._slot], [init_state_id], [seed])[0]

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] in the slot."""
        actions = check_chunk(actions, self.task)
        return self._batch.step_chunk([self._slot], actions[None], record_frames=record_frames)[0]

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state of the slot."""
        return self._batch.privileged_state(self._slot)

    def close(self) -> None:
        """Close the whole environment."""
        self._batch.close()
