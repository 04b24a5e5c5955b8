"""What makes demonstrations bad to learn from although their arrays fit together; pure functions on `Demonstrations`.

What does not fit together is refused when a file is read, see `rlvla.data.validation`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvla.data.demonstrations import UNKNOWN_STATE, Demonstrations
from rlvla.data.pictures import PictureFindings, look_at
from rlvla.envs.base import TaskSpec
from rlvla.envs.splits import train_init_states
from rlvla.models.dataset_statistics import RANGES
from rlvla.utils.errors import ConfigError

ERROR, WARNING, NOTE = LEVELS = ("error", "warning", "note")
FEW_SUCCESSES = 0.5  # share of the episodes
_SAME = 1e-6  # of the largest magnitude: what counts as equal
_DISCRETE = 16  # distinct values up to which a dimension counts as discrete: a gripper, or rounded actions
_FEW_VALUES = 3
_PILE = 0.1  # share of the values at one limit that is unlikely without clipping
_STUCK = 0.95  # share of the values at the limits of the environment with which little is left to imitate
_BEYOND = 0.01  # share of the values beyond the limits
_OUTSIDE = 0.1  # share of the values outside q01..q99, where 0.02 is usual
_CHANCE = 3  # values that may lie outside by chance
_TOO_WIDE = 5.0  # times the range of the data
_SHORT, _RARE = 2, 0.05  # steps; share of the episodes
_SHORTER = 4  # times as long are the usual ones
_REPEATED = 0.1  # share of the episodes
_STEPS_OF_A_FILE = 100  # with fewer, dimensions may well be constant


@dataclass(frozen=True)
class Finding:
    """Something about demonstrations that their user should know.

    Attributes:
        kind: a name for programs and tests, e.g. "constant_action".
        level: "error" (not usable as it is), "warning" (probably a mistake) or "note".
        text: a sentence with the figures and the remedy.
        episodes: names or numbers of the episodes concerned; empty for all.
        where: the file; "" for all files.
    """

    kind: str
    level: str
    text: str
    episodes: tuple[int | str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class ActionFacts:
    """One dimension of the actions of all episodes.

    Attributes:
        low, high: smallest and largest value.
        mean, std: mean and standard deviation.
        at_low, at_high: shares of the values that equal `low` and `high`.
        distinct: number of different values.
    """

    low: float
    high: float
    mean: float
    std: float
    at_low: float
    at_high: float
    distinct: int

    @property
    def constant(self) -> bool:
        """Whether there is only one value."""
        return self.high - self.low <= _SAME * max(abs(self.low), abs(self.high), 1.0)


def action_facts(actions: Sequence[np.ndarray]) -> list[ActionFacts]:
    """Facts of each dimension of actions [S, D] per episode."""
    values = np.concatenate(actions).astype(np.float64)
    low, high = values.min(0), values.max(0)
    near = _SAME * np.maximum(np.abs(low), np.abs(high))
    at_low, at_high = (values <= low + near).mean(0), (values >= high - near).mean(0)
    columns = zip(low, high, values.mean(0), values.std(0), at_low, at_high)
    return [ActionFacts(*map(float, column), len(np.unique(values[:, i]))) for i, column in enumerate(columns)]


def quality(demos: Demonstrations, task: TaskSpec | None = None, *, every_picture: bool = True) -> list[Finding]:
    """Everything that these checks find, errors first.

    Args:
        demos: one or more files as one dataset.
        task: the (first) task, for limits, gripper and split; None if its suite is unknown here.
        every_picture: look at every picture instead of at a few of some episodes.
    """
    found = [
        *_outcomes(demos),
        *_lengths(demos),
        *_actions(demos, task),
        *_statistics(demos),
        *_proprio(demos),
        *_order(demos),
        *_pictures(look_at(demos.images, demos.env_args.get("cameras") or [], every=every_picture), demos),
        *_repetitions(demos),
        *_recorded(demos, task),
    ]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def quality_of_file(demos: Demonstrations, task: TaskSpec | None = None) -> list[Finding]:
    """What can be wrong with one of several files and be hidden among the others; arguments as in `quality`."""
    if demos.num_steps < _STEPS_OF_A_FILE:
        return []
    return [*_actions(demos, task), *_proprio(demos), *_order(demos)]


def _outcomes(demos: Demonstrations) -> list[Finding]:
    count, good = len(demos.success), sum(demos.success)
    if not good:
        text = f"none of the {count} episodes succeeds: a policy that imitates them fails, too. Mend the expert, or the"
        return [Finding("never_successful", ERROR, f"{text} success predicate or recorded `success`")]
    found = []
    if good < FEW_SUCCESSES * count:
        text = f"only {good} of {count} episodes succeed ({good / count:.0%}), and the others are imitated as well"
        failed = tuple(i for i, success in enumerate(demos.success) if not success)
        found.append(Finding("few_successes", WARNING, text, failed))
    by_task = Counter(state[0] for state in demos.init_states)
    succeeding = {state[0] for state, success in zip(demos.init_states, demos.success) if success}
    hopeless = sorted(set(by_task) - succeeding)
    if hopeless:
        text = f"no episode of task {', '.join(map(str, hopeless))} succeeds"
        episodes = tuple(i for i, state in enumerate(demos.init_states) if state[0] in hopeless)
        found.append(Finding("never_successful", ERROR, text, episodes))
    return found


def _lengths(demos: Demonstrations) -> list[Finding]:
    lengths = np.array([len(actions) for actions in demos.actions])
    short = np.flatnonzero((lengths <= _SHORT) & (_SHORTER * lengths < np.median(lengths)))
    if not len(short):
        return []
    meant = all(demos.success[i] for i in short) and len(short) <= _RARE * len(lengths)
    text = f"{_counted(len(short), 'episode')} of at most {_SHORT} steps, where {np.median(lengths):.0f} are usual"
    return [Finding("short_episodes", NOTE if meant else WARNING, text, tuple(short.tolist()))]


def _actions(demos: Demonstrations, task: TaskSpec | None) -> list[Finding]:
    facts = action_facts(demos.actions)
    grippers = set(demos.unnormalized_dims) | set(() if task is None else task.gripper_dims)
    found = []
    constant = [i for i, fact in enumerate(facts) if fact.constant]
    if len(constant) == len(facts):
        found.append(Finding("constant_action", ERROR, "all actions are the same: there is nothing to imitate"))
    elif constant:
        usual = all(facts[i].low == 0 for i in constant) and 2 * len(constant) < len(facts)
        values = ", ".join(f"{i} (always {facts[i].low:.4g})" for i in constant)
        text = f"constant action dimension{'s' * (len(constant) > 1)} {values}: a policy learns nothing else there"
        found.append(Finding("constant_action", NOTE if usual else WARNING, text))
    limit = 1.0 if task is None else task.action_limit
    for i, fact in enumerate(facts):
        if fact.constant or i in grippers:
            continue
        at, value = max((fact.at_high, fact.high), (fact.at_low, fact.low))
        inside = abs(abs(value) - limit) > 1e-3 * limit
        if fact.distinct > _DISCRETE and at >= _PILE and inside:
            text = f"action dimension {i} is clipped: {at:.0%} of its values are exactly {value:.4g}"
            found.append(Finding("clipped_action", WARNING, f"{text}, and the rest differ"))
        elif fact.at_low + fact.at_high >= _STUCK and fact.distinct > _FEW_VALUES:
            share = fact.at_low + fact.at_high
            text = f"action dimension {i} is {fact.low:.4g} or {fact.high:.4g} in {share:.0%} of the steps"
            found.append(Finding("clipped_action", WARNING, f"{text}: was it scaled too much before it was clipped?"))
        elif fact.distinct <= _FEW_VALUES:
            text = f"action dimension {i} has only {fact.distinct} values; if it commands a gripper, say so in"
            found.append(Finding("discrete_action", NOTE, f"{text} `TaskSpec.gripper_dims`, and it is not normalized"))
    if task is not None:
        beyond = np.mean(np.abs(np.concatenate(demos.actions)) > limit * (1 + 1e-3), axis=0)
        for i in np.flatnonzero(beyond > _BEYOND):
            text = f"action dimension {i}: {beyond[i]:.0%} of the values lie beyond +-{limit:g}, to which {task.suite}"
            found.append(Finding("actions_beyond_limits", WARNING, f"{text} clips them; are they in its units?"))
    return found


def _statistics(demos: Demonstrations) -> list[Finding]:
    """Whether the statistics describe the actions, which are normalized by them."""
    if not demos.statistics:
        return []
    suite = str(demos.env_args.get("task_suite_name"))
    entry = demos.statistics.get(suite, next(iter(demos.statistics.values())))["action"]
    low, high = next((np.array(entry[a]), np.array(entry[b])) for a, b in RANGES if a in entry and b in entry)
    actions = np.concatenate(demos.actions).astype(np.float64)
    reach, range_ = np.ptp(np.quantile(actions, [0.01, 0.99], axis=0), axis=0), high - low
    near = 1e-4 * np.maximum(np.abs(low), np.abs(high)) + 1e-6
    outside = ((actions < low - near) | (actions > high + near)).mean(0)
    many = outside * len(actions) > _OUTSIDE * len(actions) + _CHANCE
    wrong = many | ((reach > 0) & (range_ > _TOO_WIDE * reach))
    wrong[demos.unnormalized_dims] = False
    if not wrong.any():
        return []
    dims = np.flatnonzero(wrong)
    worst = dims[np.argmax(outside[dims])]
    text = (
        "dataset_statistics.json describes other data: the range of action dimension "
        f"{', '.join(map(str, dims))} does not fit (dimension {worst}: {low[worst]:.4g} to {high[worst]:.4g}, with "
        f"{outside[worst]:.0%} of the values outside); delete the file, and it is computed again"
    )
    return [Finding("other_statistics", WARNING, text)]


def _proprio(demos: Demonstrations) -> list[Finding]:
    if demos.proprio is None:
        return []
    values = np.concatenate(demos.proprio).astype(np.float64)
    constant = np.ptp(values, axis=0) <= _SAME * np.maximum(np.abs(values).max(0), 1.0)
    if constant.all():
        return [Finding("constant_proprio", WARNING, "proprio never changes: was it recorded from the right source?")]
    dims = ", ".join(map(str, np.flatnonzero(constant)))
    return [Finding("constant_proprio", NOTE, f"proprio never changes in dimension {dims}")] if constant.any() else []


def _order(demos: Demonstrations) -> list[Finding]:
    """Whether each action stands beside the observation it was chosen from."""
    shift = shifted_by(demos)
    if not shift:
        return []
    which = "executed one step later" if shift < 0 else "executed before its observation"
    text = (
        f"each row seems to hold the action that was {which}: the change of proprio from t to t + 1 follows from "
        f"action t {'-' if shift < 0 else '+'} 1 rather than t. Observation t belongs before action t"
    )
    return [Finding("shifted_actions", WARNING, text)]


def _pictures(seen: PictureFindings, demos: Demonstrations) -> list[Finding]:
    found = []
    for camera, blank in seen.blank.items():
        if len(blank) == len(seen.looked_at):
            text = f"camera {camera} shows nothing: every picture has a single colour"
            found.append(Finding("blank_pictures", ERROR, text))
        elif blank:
            text = f"camera {camera} shows nothing (a single colour) in {_counted(len(blank), 'episode')}"
            found.append(Finding("blank_pictures", WARNING, text, tuple(blank)))
    for camera, frozen in seen.frozen.items():
        if frozen:
            level = WARNING if len(frozen) > 0.5 * len(seen.looked_at) else NOTE
            text = f"camera {camera} shows the same picture at every step of {_counted(len(frozen), 'episode')}"
            found.append(Finding("frozen_pictures", level, text, tuple(frozen)))
    for how, episodes in seen.turned.items():
        text = f"pictures of {_counted(len(episodes), 'episode')} are {how} compared with the others"
        found.append(Finding("turned_pictures", WARNING, text, tuple(episodes)))
    if seen.same_start and len(demos.actions) > 1:
        text = "all episodes start from the same picture: a policy sees no other scene before it is evaluated"
        level = WARNING if len(set(demos.instructions)) == 1 else NOTE
        found.append(Finding("same_start", level, text))
    return found


def _repetitions(demos: Demonstrations) -> list[Finding]:
    first: dict[tuple[int, int], int] = {}
    copies = []
    for i, (actions, images) in enumerate(zip(demos.actions, demos.images)):
        key = hash(actions.tobytes()), hash(images[0].tobytes())
        if first.setdefault(key, i) != i:
            copies.append(i)
    if not copies:
        return []
    level = WARNING if len(copies) > _REPEATED * len(demos.actions) else NOTE
    text = f"{_counted(len(copies), 'episode')} repeat another one exactly"
    return [Finding("repeated_episodes", level, text, tuple(copies))]


def _recorded(demos: Demonstrations, task: TaskSpec | None) -> list[Finding]:
    """What is not recorded although it is useful, and from where the episodes start."""
    found, lost = [], []
    if demos.proprio is None:
        lost.append("proprio (so it cannot be told whether actions are shifted against observations)")
    if demos.seeds is None or not demos.init_states or UNKNOWN_STATE in demos.init_states:
        lost.append("seeds or initial states (so episodes cannot be played again)")
    if demos.rewards is None:
        lost.append("rewards")
    if lost:
        found.append(Finding("not_recorded", NOTE, f"optional, not recorded: {', '.join(lost)}"))
    suites = sorted({seen.suite for seen in demos.states_learned_from if seen.recorded})
    if len(suites) > 1:
        text = f"the files hold episodes of different suites: {', '.join(suites)}; the policy records the first file's"
        found.append(Finding("mixed_suites", WARNING, text))
    elif task is not None:
        found += _held_out(demos, task)
    return found


def _held_out(demos: Demonstrations, task: TaskSpec) -> list[Finding]:
    try:
        training = train_init_states(task)
    except ConfigError:
        return []
    own = [i for i, (task_id, state) in enumerate(demos.init_states) if task_id == task.task_id and state >= 0]
    held_out = [i for i in own if demos.init_states[i][1] not in training]
    if not held_out:
        return []
    text = f"{_counted(len(held_out), 'episode')} start from states that the protocol heldout evaluates on"
    return [Finding("held_out_states", NOTE, text, tuple(held_out))]


def initial_states(demos: Demonstrations) -> dict[int, list[int]]:
    """Task -> initial states of its episodes, sorted, as far as they are known."""
    states: defaultdict[int, list[int]] = defaultdict(list)
    for known in demos.init_states:
        if known != UNKNOWN_STATE:
            states[known[0]].append(known[1])
    return {task_id: sorted(ids) for task_id, ids in sorted(states.items())}


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1)


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
