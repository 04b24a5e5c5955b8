"""Batched `toy_push`: positions and images are arrays over the slots.

Its results equal those of `ToyPushEnv` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id, task_of
from rlvla.envs.toy_push.env import (
    MARKER,
    OBJECTS,
    ToyPushOptions,
    initial_scene,
    judge,
    list_tasks,
    named,
    paint_background,
    state_of,
)
from rlvla.envs.toy_push.physics import ARRAYS, OBJECT_RADIUS, STEP_SIZE, push
from rlvla.envs.toy_reach.batched import paint_discs


class BatchedToyPush:
    """`ToyPushEnv` for `num_slots` concurrent episodes; see `rlvla.envs.base.BatchedEnv` for the contract.

    Args:
        task: the task, including the step limit.
        num_slots: number of concurrent episodes.
        options: image size and the other options.
    """

    def __init__(self, task: TaskSpec, num_slots: int, options: ToyPushOptions):
        self.task, self._options = task, options
        self._object, self._zone = named(task)
        size = options.image_size
        self._backgrounds = np.empty((num_slots, size, size, 3), dtype=np.uint8)
        self._positions = np.zeros((num_slots, 6))
        self._zones = [(0.0, 0.0)] * num_slots
        self._steps = np.zeros(num_slots, dtype=np.int64)
        self._streaks = np.zeros(num_slots, dtype=np.int64)  # number of steps the disc has been in its zone
        self._begun = np.zeros(num_slots, dtype=bool)
        self._playing = np.zeros(num_slots, dtype=bool)
        self._closed = False

    def reset(self, slots: Sequence[int], init_state_ids: Sequence[int], seeds: Sequence[int]) -> list[Observation]:
        """Start episodes. The dynamics are deterministic, so `seeds` have no effect."""
        if self._closed:
            raise RuntimeError("this toy_push environment is closed; make another")
        self._check(slots)
        for init_state_id in init_state_ids:
            check_init_state_id(self.task, init_state_id)
        for slot, init_state_id in zip(slots, init_state_ids):
            scene = initial_scene(init_state_id)
            self._positions[slot], self._zones[slot] = scene.positions, scene.zones[self._zone]
            paint_background(self._backgrounds[slot], scene.zones)
        chosen = np.array(slots)
        self._steps[chosen] = self._streaks[chosen] = 0
        self._begun[chosen] = self._playing[chosen] = True
        return self._observe(chosen)

    def step_chunk(
        self, slots: Sequence[int], actions: np.ndarray, *, record_frames: bool = False
    ) -> list[ChunkResult]:
        """Execute velocities [n, A, 2], in each slot until the end of the chunk or of the episode."""
        chosen = np.array(slots)
        self._check(slots)
        if not self._playing[chosen].all():
            raise RuntimeError(f"no episode is running in slots {chosen[~self._playing[chosen]]}: call reset first")
        actions = np.stack([check_actions(chunk, self.task.action_dim) for chunk in actions]).astype(np.float64)
        count, length = actions.shape[:2]
        rewards, successes = np.zeros((count, length), dtype=np.float32), np.zeros((count, length), dtype=bool)
        terminated = np.zeros(count, dtype=bool)
        events: list[list[frozenset[str]]] = [[] for _ in slots]
        frames: list[list[np.ndarray]] = [[] for _ in slots]
        for index in range(length):
            rows = np.flatnonzero(self._playing[chosen])
            if not len(rows):
                break
            going = chosen[rows]
            success, happened, held = self._advance(going, STEP_SIZE * actions[rows, index])
            successes[rows, index], rewards[rows, index], terminated[rows] = success, held, held
            pictures = self._draw(going) if record_frames else going
            for row, names, picture in zip(rows, happened, pictures):
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
                success_at_end=bool(terminated[row]),
                events=events[row],
                frames=np.stack(frames[row]) if record_frames else None,
            )
            for row, observation in enumerate(self._observe(chosen))
        ]

    def privileged_state(self, slot: int) -> dict[str, np.ndarray]:
        """See `ToyPushEnv.privileged_state`."""
        self._check([slot])
        if not self._begun[slot]:
            raise RuntimeError("no episode was started: call reset first")
        return state_of(self._positions[slot].copy(), self._object, self._zones[slot])

    def close(self) -> None:
        """Close the environment."""
        self._closed = True
        self._playing[:] = False

    def _advance(self, slots: np.ndarray, moves: np.ndarray) -> tuple[np.ndarray, list[frozenset[str]], np.ndarray]:
        """Make a step in running slots: success [n], events, and whether the episode ends with success [n].

        Args:
            slots: [n] the slots.
            moves: [n, 2] displacements of the pusher.
        """
        moved = push(tuple(self._positions[slots].T), moves[:, 0], moves[:, 1], ARRAYS)
        self._positions[slots] = np.stack(moved, axis=1)
        judged = [judge(tuple(self._positions[slot].tolist()), self._object, self._zones[slot]) for slot in slots]
        success = np.array([each for each, _ in judged])
        self._steps[slots] += 1
        self._streaks[slots] = np.where(success, self._streaks[slots] + 1, 0)
        going_on = self._steps[slots] < self.task.max_steps
        held = (self._streaks[slots] >= self._options.success_hold_steps) & ~(self._options.plays_on & going_on)
        self._playing[slots] = ~held & going_on
        return success, [events for _, events in judged], held

    def _check(self, slots: Sequence[int]) -> None:
        if len(set(slots)) < len(slots) or not all(0 <= slot < len(self._steps) for slot in slots):
            raise ValueError(f"slots must be different ones of 0..{len(self._steps) - 1}, not {list(slots)}")

    def _draw(self, slots: np.ndarray) -> np.ndarray:
        """Images [n, H, H, 3] of the slots."""
        images, centers = self._backgrounds[slots], self._positions[slots].reshape(-1, 3, 2)
        for index, color in enumerate(OBJECTS.values()):
            paint_discs(images, centers[:, 1 + index], OBJECT_RADIUS, color)
        for radius, color in MARKER:
            paint_discs(images, centers[:, 0], radius, color)
        return images

    def _observe(self, slots: np.ndarray) -> list[Observation]:
        images = self._draw(slots)[:, None]
        proprio = self._positions[slots, :2].astype(np.float32)
        return [
            Observation(images[row], proprio[row] if self._options.use_proprio else None, self.task.instruction)
            for row in range(len(slots))
        ]


def make_batched(task_id: int, num_slots: int, **kw) -> BatchedToyPush:
    """Create the environment; `kw` are the fields of `ToyPushOptions`."""
    return BatchedToyPush(task_of("toy_push", list_tasks(**kw), task_id), num_slots, ToyPushOptions(**kw))
