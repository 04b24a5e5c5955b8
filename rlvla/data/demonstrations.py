"""Demonstrations, and their dataset statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.data.image_storage import image_array, mapping_of
from rlvla.data.validation import refuse, shortened
from rlvla.envs.splits import LearnedStates
from rlvla.utils.data_files import fits

STATISTICS_FILE = "dataset_statistics.json"
PLAYER, POLICY = "player", "policy"  # entry of `Demonstrations.env_args`, and its value for a policy's own episodes
UNKNOWN_STATE = (0, -1)  # task and initial state of an episode for which they were not recorded


def statistics(values: np.ndarray, unnormalized: Sequence[int] = ()) -> dict[str, list[float] | list[bool]]:
    """Per dimension of values [M, D]: mean, std, min, max, q01, q99, and a mask of the dimensions to normalize."""
    values = values.astype(np.float64)
    q01, q99 = np.quantile(values, [0.01, 0.99], axis=0)
    numbers = {
        "mean": values.mean(0),
        "std": values.std(0),
        "min": values.min(0),
        "max": values.max(0),
        "q01": q01,
        "q99": q99,
    }
    mask = [dim not in unnormalized for dim in range(values.shape[1])]
    return {**{name: column.tolist() for name, column in numbers.items()}, "mask": mask}


def dataset_entry(
    actions: Sequence[np.ndarray], proprio: Sequence[np.ndarray] | None, unnormalized: Sequence[int] = ()
) -> dict[str, Any]:
    """The entry of a dataset in `dataset_statistics.json`, from the actions and proprio of its episodes."""
    entry: dict[str, Any] = {"action": statistics(np.concatenate(actions), unnormalized)}
    if proprio:
        entry["proprio"] = statistics(np.concatenate(proprio))
    entry["num_transitions"] = sum(len(episode) for episode in actions)
    entry["num_trajectories"] = len(actions)
    return entry


@dataclass
class Demonstrations:
    """The episodes of a dataset; images that do not fit into memory are memory-mapped (`rlvla.data.image_storage`).

    Attributes:
        env_args: options of the recorded environment; `cameras` gives the order of `images`.
        statistics: content of `dataset_statistics.json`.
        images: per episode [S, N, H, W, 3] uint8.
        proprio: per episode [S, P] float32, or None.
        actions: per episode [S, D] float32.
        instructions: per episode the language instruction of its task.
        success: per episode whether it ended in success; assumed where it is not recorded, see `outcome`.
        init_states: per episode (task id, initial state id); -1: not recorded (without the task, too, `UNKNOWN_STATE`);
            empty if none is recorded.
        decision_steps: per episode [S] int, the steps at which images were recorded; None means every step. They begin
            after 0 where an expert took over from a policy.
        last_images: per episode [N, H, W, 3] uint8 after its last action; None if not recorded.
        last_proprio: per episode [P] float32 after its last action; None if not recorded.
        rewards: per episode [S] float32; None if not recorded.
        seeds: per episode the seed of its reset; None if not recorded.
        interventions: per episode [S] bool, the steps at which a person or an expert acted instead of a policy; None if
            not recorded.
        autonomous: per episode whether a policy played it alone; None: no episode, as far as recorded.
        ranks: per episode its rank within its task, smaller is better; None if not recorded.
        control_freq: environment steps per second; None if not recorded, see `control_frequency`.
        names: per episode its name in the file; None if they have none.
        learned_from: recorded initial states of several files, perhaps of different suites; None: see `init_states`.
        success_recorded: whether the data say which episodes of all files ended in success.
        action_names: names of the action dimensions, such as joints; None if not recorded.
        proprio_names: names of the dimensions of `proprio`; None if not recorded.
        step_instructions: per episode the instruction of each step (`--instruction_source`); None: `instructions`.
    """

    env_args: dict[str, Any]
    statistics: dict[str, Any]
    images: list[np.ndarray]
    proprio: list[np.ndarray] | None
    actions: list[np.ndarray]
    instructions: list[str]
    success: list[bool]
    init_states: list[tuple[int, int]]
    decision_steps: list[np.ndarray] | None = None
    last_images: list[np.ndarray] | None = None
    last_proprio: list[np.ndarray] | None = None
    rewards: list[np.ndarray] | None = None
    seeds: list[int] | None = None
    interventions: list[np.ndarray] | None = None
    autonomous: list[bool] | None = None
    ranks: list[int] | None = None
    control_freq: float | None = None
    names: list[str] | None = None
    learned_from: list[LearnedStates] | None = None
    success_recorded: bool = True
    action_names: list[str] | None = None
    proprio_names: list[str] | None = None
    step_instructions: list[list[str]] | None = None

    def outcome(self, episode: int) -> bool | None:
        """Whether an episode ended in success; None if that is not recorded."""
        return bool(self.success[episode]) if self.success_recorded else None

    @property
    def num_steps(self) -> int:
        """Number of environment steps of all episodes."""
        return sum(len(actions) for actions in self.actions)

    @property
    def num_rows(self) -> int:
        """Number of observations, which is the number of training rows."""
        return sum(len(images) for images in self.images)

    @property
    def has_corrections(self) -> bool:
        """Whether some episodes are recorded from the step on where an expert took over from a policy."""
        return self.decision_steps is not None and any(steps[0] for steps in self.decision_steps)

    def row_steps(self, episode: int) -> np.ndarray:
        """The steps [S] at which an episode has observations, and so training rows."""
        return np.arange(len(self.actions[episode])) if self.decision_steps is None else self.decision_steps[episode]

    def row_instructions(self, episode: int) -> list[str]:
        """The instruction of each training row of an episode."""
        if self.step_instructions is None:
            return [self.instructions[episode]] * len(self.images[episode])
        return [self.step_instructions[episode][step] for step in self.row_steps(episode)]

    @property
    def distinct_instructions(self) -> list[str]:
        """Distinct instructions of training rows, sorted."""
        return sorted({text for episode in range(len(self.actions)) for text in self.row_instructions(episode)})

    def rows_by_policy(self, episode: int) -> np.ndarray:
        """[S] bool: the training rows of an episode in which a policy acted, not a person or an expert."""
        steps = self.row_steps(episode)
        return np.zeros(len(steps), bool) if self.interventions is None else ~self.interventions[episode][steps]

    def expert_rows(self, episode: int) -> np.ndarray:
        """[S] bool: the training rows of an episode in which a person or an expert acted, none of `autonomous` ones."""
        alone = self.autonomous is not None and self.autonomous[episode]
        return ~self.rows_by_policy(episode) & (not alone)

    def demonstrated(self, episode: int) -> list[tuple[int, int]]:
        """(first step, end) of each segment of an episode in which a person or an expert acted."""
        if self.interventions is None:
            return [(0, len(self.actions[episode]))]
        changes = np.flatnonzero(np.diff(self.interventions[episode].astype(np.int8), prepend=0, append=0))
        return [(int(first), int(end)) for first, end in changes.reshape(-1, 2)]

    @property
    def demonstrated_episodes(self) -> list[int]:
        """The episodes in which a person or an expert acted at all."""
        return [episode for episode in range(len(self.actions)) if self.demonstrated(episode)]

    @property
    def unnormalized_dims(self) -> list[int]:
        """Action dimensions that are not normalized, by the statistics of the suite (else the first)."""
        entry = self.statistics.get(str(self.env_args.get("task_suite_name")), next(iter(self.statistics.values())))
        return [dim for dim, normalized in enumerate(entry["action"].get("mask") or ()) if not normalized]

    @property
    def states_learned_from(self) -> list[LearnedStates]:
        """The initial states of the episodes, one range per task; an empty range if some are not recorded.

        If the task is not recorded either, the empty range stands for any task of the suite.
        """
        if self.learned_from is not None:
            return self.learned_from
        states: dict[int, list[int]] = {}
        for task_id, state in self.init_states:
            if (task_id, state) != UNKNOWN_STATE:
                states.setdefault(task_id, []).extend([state] if state >= 0 else [])
        suite = str(self.env_args.get("task_suite_name"))
        ends = {task_id: (min(ids), max(ids) + 1) if ids else (0, 0) for task_id, ids in states.items()}
        ranges = [LearnedStates(suite, task_id, *range_) for task_id, range_ in ends.items()]
        if self.init_states and UNKNOWN_STATE not in self.init_states:
            return ranges
        return ranges + [LearnedStates(suite, task_id, 0, 0) for task_id in self.env_args.get("task_ids") or (None,)]

    @property
    def starts_recorded(self) -> bool:
        """Whether initial state and seed of every episode are recorded, so that all can be replayed."""
        states = [state for _, state in self.init_states]
        return self.seeds is not None and bool(states) and min(states) >= 0

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        height, width = self.images[0].shape[2:4]
        return height, width

    @property
    def image_bytes(self) -> int:
        """Size of the images in memory, in bytes."""
        return sum(images.nbytes for images in self.images if mapping_of(images) is None)

    def joined_images(self) -> np.ndarray:
        """The images of all episodes in one array [M, N, H, W, 3] uint8; `images` become views of it.

        Images take up most of the memory of a supervised run, so there is only one copy. Images read into
        `empty_images` are joined already; images of several files are copied, episode by episode.
        """
        whole = self.images[0].base
        if isinstance(whole, np.ndarray) and whole.ndim:
            views = np.split(whole, np.cumsum([len(images) for images in self.images])[:-1])
            if [view.__array_interface__ for view in views] == [images.__array_interface__ for images in self.images]:
                return whole
        joined = image_array((sum(map(len, self.images)), *self.images[0].shape[1:]))
        start = 0
        for position, images in enumerate(self.images):  # an array is released as soon as all of it has been copied
            self.images[position] = joined[start : start + len(images)]
            self.images[position][:] = images
            start += len(images)
        return joined


def changes_of(texts: Sequence[str]) -> list[tuple[int, str]]:
    """(first step, text) of each segment with one text; the inverse of `at_each_step`."""
    return [(step, text) for step, text in enumerate(texts) if not step or text != texts[step - 1]]


def at_each_step(changes: Any, steps: int, where: str | Path) -> list[str]:
    """The text of each of so many steps, from the content of a file.

    Raises:
        DataError: `changes` is not a list of [step, text] with increasing steps from 0 on.
    """
    valid = isinstance(changes, list) and all(fits(entry, list) and len(entry) == 2 for entry in changes)
    valid = valid and all(fits(step, int) and fits(text, str) for step, text in changes)
    starts = [step for step, _ in changes] if valid else []
    if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= steps:
        refuse(where, [f"is {shortened(changes)}; expected [step, text] of increasing steps from 0 on"])
    ends = [*starts[1:], steps]
    return [text for (start, text), end in zip(changes, ends) for _ in range(end - start)]


def split_by_state(
    demos: Demonstrations, share: float, rng: np.random.Generator, *, least: int = 0
) -> tuple[list[int], list[int]]:
    """Split into (training, held-out) episodes; episodes of the same task and initial state stay together.

    Episodes whose initial states are not recorded are split one by one.

    Args:
        demos: the episodes.
        share: share of the initial states to hold out, in [0, 1].
        rng: chooses them.
        least: minimum number of initial states to hold out.
    """
    recorded = demos.init_states or [UNKNOWN_STATE] * len(demos.actions)
    starts = [(task, state, i if state < 0 else 0) for i, (task, state) in enumerate(recorded)]
    states = sorted(set(starts))
    order = rng.permutation(len(states))
    held_out = {states[i] for i in order[: max(least, round(share * len(states)))]}
    split: tuple[list[int], list[int]] = ([], [])
    for episode, start in enumerate(starts):
        split[start in held_out].append(episode)
    return split
