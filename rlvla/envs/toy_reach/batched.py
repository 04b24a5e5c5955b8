"""Batched `toy_reach`: positions and images are arrays over the slots.

A minimal example of a `BatchedEnv`. Its results equal those of `ToyReachEnv` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id, task_of
from rlvla.envs.toy_reach.env import (
    COLORS,
    DISC_RADIUS,
    HOLD_STEPS,
    MARKER,
    STEP_SIZE,
    TABLE,
    VIEW,
    ToyReachOptions,
    initial_scene,
    judge,
    list_tasks,
    paint_disc,
)


def paint_discs(images: np.ndarray, centers: np.ndarray, radius: float, color: tuple[int, int, int]) -> None:
    """Vectorized `paint_disc`: draw a disc of the same size and color in each image, in place.

    Args:
        images: [n, H, H, 3] uint8.
        centers: [n, 2] centers in table coordinates.
        radius: radius in table units.
        color: RGB in 0..255.
    """
    size = images.shape[1]
    scale = size / (2 * VIEW)  # pixels per table unit
    reach = radius * scale + 0.5
    width = np.arange(int(2 * reach) + 3)
    column, row = (centers[:, 0] + VIEW) * scale - 0.5, (VIEW - centers[:, 1]) * scale - 0.5
    # Equally sized windows that contain the disc. Past the edge of an image they repeat its last pixel.
    rows = np.clip((row - reach).astype(np.int64)[:, None] + width, 0, size - 1)  # [n, w]
    columns = np.clip((column - reach).astype(np.int64)[:, None] + width, 0, size - 1)
    d_row = rows.astype(np.float32) - row.astype(np.float32)[:, None]
    d_column = columns.astype(np.float32) - column.astype(np.float32)[:, None]
    distance = np.sqrt(d_row[:, :, None] ** 2 + d_column[:, None, :] ** 2)
    coverage = np.clip(np.float32(reach) - distance, 0.0, 1.0)[..., None]
    where = np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]
    patch = images[where]
    images[where] = (patch + coverage * (np.array(color, dtype=np.float32) - patch) + np.float32(0.5)).astype(np.uint8)


class BatchedToyReach:
    """`ToyReachEnv` for `num_slots` concurrent episodes; see `rlvla.envs.base.BatchedEnv` for the contract.

    Args:
        task: the task, including the step limit.
        num_slots: number of concurrent episodes.
        image_size: height and width of the image in pixels.
        use_proprio: whether observations include the effector's position [2].
        success_hold_steps: consecutive steps on the disc that end an episode.
        plays_on: play to the step limit, see `ChunkRunner`.
    """

    def __init__(
        self,
        task: TaskSpec,
        num_slots: int,
        *,
        image_size: int = 64,
        use_proprio: bool = False,
        success_hold_steps: int = HOLD_STEPS,
        plays_on: bool = False,
    ):
        self.task, self.use_proprio, self._hold_steps = task, use_proprio, success_hold_steps
        self._plays_on = plays_on
        self._backgrounds = np.empty((num_slots, image_size, image_size, 3), dtype=np.uint8)
        self._effectors = np.zeros((num_slots, 2))
        self._discs = np.zeros((num_slots, len(COLORS), 2))
        self._targets = np.zeros((num_slots, 2))
        self._instructions = [""] * num_slots
        self._steps = np.zeros(num_slots, dtype=np.int64)
        self._streaks = np.zeros(num_slots, dtype=np.int64)  # number of steps the effector has been on the disc
        self._begun = np.zeros(num_slots, dtype=bool)
        self._playing = np.zeros(num_slots, dtype=bool)
        self._closed = False

    def reset(self, slots: Sequence[int], init_state_ids: Sequence[int], seeds: Sequence[int]) -> list[Observation]:
        """Start episodes. The dynamics are deterministic, so `seeds` have no effect."""
        if self._closed:
            raise RuntimeError("this toy_reach environment is closed; make another")
        self._check(slots)
        for init_state_id in init_state_ids:
            check_init_state_id(self.task, init_state_id)
        for slot, init_state_id in zip(slots, init_state_ids):
            scene = initial_scene(init_state_id)
            self._effectors[slot], self._discs[slot] = scene.effector, scene.centers
            self._targets[slot] = scene.centers[scene.target]
            self._instructions[slot] = self.task.instruction.format(color=scene.colors[scene.target])
            self._backgrounds[slot] = TABLE
            for color, center in zip(scene.colors, scene.centers):
                paint_disc(self._backgrounds[slot], center, DISC_RADIUS, COLORS[color])
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
        executed, terminated = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
        events: list[list[frozenset[str]]] = [[] for _ in slots]
        frames: list[list[np.ndarray]] = [[] for _ in slots]
        for index in range(length):
            rows = np.flatnonzero(self._playing[chosen])
            if not len(rows):
                break
            going = chosen[rows]
            self._effectors[going] = np.clip(self._effectors[going] + STEP_SIZE * actions[rows, index], -1.0, 1.0)
            success, happened = judge(self._effectors[going], self._targets[going])
            self._steps[going] += 1
            self._streaks[going] = np.where(success, self._streaks[going] + 1, 0)
            going_on = self._steps[going] < self.task.max_steps
            held = (self._streaks[going] >= self._hold_steps) & ~(self._plays_on & going_on)
            self._playing[going] = ~held & going_on
            successes[rows, index], rewards[rows, index] = success, held
            terminated[rows] = held
            executed[rows] += 1
            pictures = self._draw(going) if record_frames else going
            for row, names, picture in zip(rows, happened, pictures):
                events[row].append(names)
                if record_frames:
                    frames[row].append(picture)
        return [
            ChunkResult(
                observation=observation,
                steps_executed=int(executed[row]),
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
        """See `ToyReachEnv.privileged_state`."""
        self._check([slot])
        if not self._begun[slot]:
            raise RuntimeError("no episode was started: call reset first")
        return {
            "effector": self._effectors[slot].copy(),
            "target": self._targets[slot].copy(),
            "discs": self._discs[slot].copy(),
        }

    def close(self) -> None:
        """Close the environment."""
        self._closed = True
        self._playing[:] = False

    def _check(self, slots: Sequence[int]) -> None:
        if len(set(slots)) < len(slots) or not all(0 <= slot < len(self._steps) for slot in slots):
            raise ValueError(f"slots must be different ones of 0..{len(self._steps) - 1}, not {list(slots)}")

    def _draw(self, slots: np.ndarray) -> np.ndarray:
        """Images [n, H, H, 3] of the slots."""
        images = self._backgrounds[slots]
        for radius, color in MARKER:
            paint_discs(images, self._effectors[slots], radius, color)
        return images

    def _observe(self, slots: np.ndarray) -> list[Observation]:
        images = self._draw(slots)[:, None]
        positions = self._effectors[slots].astype(np.float32)
        return [
            Observation(images[row], positions[row] if self.use_proprio else None, self._instructions[slot])
            for row, slot in enumerate(slots)
        ]


def make_batched(task_id: int, num_slots: int, **kw) -> BatchedToyReach:
    """Create the environment; `kw` are the fields of `ToyReachOptions`."""
    task, options = task_of("toy_reach", list_tasks(**kw), task_id), ToyReachOptions(**kw)
    return BatchedToyReach(
        task,
        num_slots,
        image_size=options.image_size,
        use_proprio=options.use_proprio,
        success_hold_steps=options.success_hold_steps,
        plays_on=options.plays_on,
    )
