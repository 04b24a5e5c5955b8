"""Quality checks of demonstrations; arrays that do not fit together are refused earlier (`rlvla.data.validation`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.pictures import inspect_pictures
from rlvla.envs.base import TaskSpec
from rlvla.envs.splits import train_init_states
from rlvla.models.dataset_statistics import RANGES
from rlvla.utils.errors import ConfigError

ERROR, WARNING, NOTE = LEVELS = ("error", "warning", "note")
FEW_SUCCESSES = 0.5  # share of the episodes
_EQUAL = 1e-6  # relative to the largest magnitude
_DISCRETE = 16  # distinct values up to which a dimension counts as discrete: a gripper, or rounded actions
_FEW_VALUES = 3
_PILE = 0.1  # share of the values at one limit that is unlikely without clipping
_SATURATED = 0.95  # share of the values at the two limits that leaves little to imitate
_BEYOND = 0.01  # share of the values beyond the limits
_OUTSIDE = 0.1  # share of the values outside q01..q99, where 0.02 is usual
_CHANCE = 3  # values that may lie outside by chance
_TOO_WIDE = 5.0  # times the range of the data
_SHORT, _RARE = 2, 0.05  # steps; share of the episodes
_SHORTER = 4  # factor between a short episode and the median
_REPEATED = 0.1  # share of the episodes
_STEPS_OF_A_FILE = 100  # with fewer, dimensions may well be constant

_OFFSETS = (-1, 0, 1)  # of the action against the observation, in steps
_MOST_ROWS = 20_000  # of the regression
_ROWS_PER_COLUMN = 5
_EXPLAINED = 0.2  # share of the variance that the best offset must explain beyond position and previous motion
_CLEARER = 0.8  # largest unexplained variance of a shift, relative to that of offset 0


@dataclass(frozen=True)
class Finding:
    """A problem or remark about demonstrations.

    Attributes:
        kind: identifier for programs and tests, e.g. "constant_action".
        level: "error" (unusable), "warning" (probably a mistake) or "note".
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
        return self.high - self.low <= _EQUAL * max(abs(self.low), abs(self.high), 1.0)


def action_facts(actions: Sequence[np.ndarray]) -> list[ActionFacts]:
    """Facts about each dimension of actions [S, D] per episode."""
    values = np.concatenate(actions).astype(np.float64)
    low, high = values.min(0), values.max(0)
    near = _EQUAL * np.maximum(np.abs(low), np.abs(high))
    at_low, at_high = (values <= low + near).mean(0), (values >= high - near).mean(0)
    columns = [facts.tolist() for facts in (low, high, values.mean(0), values.std(0), at_low, at_high)]
    distinct = [len(np.unique(column)) for column in values.T]
    return [ActionFacts(*facts) for facts in zip(*columns, distinct)]


def quality(demos: Demonstrations, task: TaskSpec | None = None, *, every_picture: bool = True) -> list[Finding]:
    """All findings, errors first.

    Args:
        demos: one or more files as one dataset.
        task: the (first) task, for limits, gripper and split; None if its suite is unknown here.
        every_picture: inspect all pictures instead of a few of some episodes.
    """
    findings = [
        *_outcomes(demos),
        *_short_episodes(demos),
        *_actions(demos, task),
        *_statistics(demos),
        *_proprio(demos),
        *_alignment(demos),
        *_pictures(demos, every_picture),
        *_repetitions(demos),
        *_recorded(demos, task),
    ]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def quality_of_file(demos: Demonstrations, task: TaskSpec | None = None) -> list[Finding]:
    """Findings about one of several files that the other files could hide; arguments as in `quality`."""
    if demos.num_steps < _STEPS_OF_A_FILE:
        return []
    return [*_actions(demos, task), *_proprio(demos), *_alignment(demos)]


def _outcomes(demos: Demonstrations) -> list[Finding]:
    if not demos.success_recorded:
        return []
    count, good = len(demos.success), sum(demos.success)
    if not good:
        text = f"none of the {count} episodes succeeds: a policy that imitates them fails, too. Correct the expert, the"
        return [Finding("never_successful", ERROR, f"{text} success predicate or the recorded `success`")]
    findings = []
    if good < FEW_SUCCESSES * count:
        text = f"only {good} of {count} episodes succeed ({good / count:.0%}), and the others are imitated as well"
        failed = tuple(i for i, success in enumerate(demos.success) if not success)
        findings.append(Finding("few_successes", WARNING, text, failed))
    succeeding = {state[0] for state, success in zip(demos.init_states, demos.success) if success}
    failing = sorted({state[0] for state in demos.init_states} - succeeding)
    if failing:
        text = f"no episode of task {', '.join(map(str, failing))} succeeds"
        episodes = tuple(i for i, state in enumerate(demos.init_states) if state[0] in failing)
        findings.append(Finding("never_successful", ERROR, text, episodes))
    return findings


def _short_episodes(demos: Demonstrations) -> list[Finding]:
    lengths = np.array([len(actions) for actions in demos.actions])
    short = np.flatnonzero((lengths <= _SHORT) & (_SHORTER * lengths < np.median(lengths)))
    if not len(short):
        return []
    plausible = all(demos.success[i] for i in short) and len(short) <= _RARE * len(lengths)
    text = f"{_counted(len(short))} of at most {_SHORT} steps, where {np.median(lengths):.0f} are usual"
    return [Finding("short_episodes", NOTE if plausible else WARNING, text, tuple(short.tolist()))]


def _actions(demos: Demonstrations, task: TaskSpec | None) -> list[Finding]:
    facts = action_facts(demos.actions)
    grippers = set(demos.unnormalized_dims) | set(() if task is None else task.gripper_dims)
    findings = []
    constant = [i for i, fact in enumerate(facts) if fact.constant]
    if len(constant) == len(facts):
        findings.append(Finding("constant_action", ERROR, "all actions are the same: there is nothing to imitate"))
    elif constant:
        unused = all(facts[i].low == 0 for i in constant) and 2 * len(constant) < len(facts)
        values = ", ".join(f"{i} (always {facts[i].low:.4g})" for i in constant)
        text = f"constant action dimension{'s' * (len(constant) > 1)} {values}: a policy learns nothing else there"
        findings.append(Finding("constant_action", NOTE if unused else WARNING, text))
    limit = 1.0 if task is None else task.action_limit
    for i, fact in enumerate(facts):
        if fact.constant or i in grippers:
            continue
        share, value = max((fact.at_high, fact.high), (fact.at_low, fact.low))
        inside = abs(abs(value) - limit) > 1e-3 * limit
        saturated = fact.at_low + fact.at_high
        if fact.distinct > _DISCRETE and share >= _PILE and inside:
            text = f"action dimension {i} is clipped: {share:.0%} of its values are exactly {value:.4g}"
            findings.append(Finding("clipped_action", WARNING, f"{text}, and the rest differ"))
        elif saturated >= _SATURATED and fact.distinct > _FEW_VALUES:
            text = f"action dimension {i} is {fact.low:.4g} or {fact.high:.4g} in {saturated:.0%} of the steps"
            findings.append(Finding("clipped_action", WARNING, f"{text}: scaled too much before clipping?"))
        elif fact.distinct <= _FEW_VALUES:
            text = f"action dimension {i} has only {fact.distinct} values; if it commands a gripper, name it in"
            findings.append(
                Finding("discrete_action", NOTE, f"{text} `TaskSpec.gripper_dims`: it is not normalized then")
            )
    if task is not None:
        beyond = np.mean(np.abs(np.concatenate(demos.actions)) > limit * (1 + 1e-3), axis=0)
        for i in np.flatnonzero(beyond > _BEYOND).tolist():
            text = f"action dimension {i}: {beyond[i]:.0%} of the values lie beyond +-{limit:g}, to which {task.suite}"
            findings.append(Finding("actions_beyond_limits", WARNING, f"{text} clips them; are they in its units?"))
    return findings


def _statistics(demos: Demonstrations) -> list[Finding]:
    """Action ranges in the statistics that do not fit the actions."""
    if not demos.statistics:
        return []
    suite = str(demos.env_args.get("task_suite_name"))
    entry = demos.statistics.get(suite, next(iter(demos.statistics.values())))["action"]
    low, high = next((np.array(entry[a]), np.array(entry[b])) for a, b in RANGES if a in entry and b in entry)
    actions = np.concatenate(demos.actions).astype(np.float64)
    spread, range_ = np.ptp(np.quantile(actions, [0.01, 0.99], axis=0), axis=0), high - low
    near = 1e-4 * np.maximum(np.abs(low), np.abs(high)) + 1e-6
    outside = ((actions < low - near) | (actions > high + near)).mean(0)
    many = outside * len(actions) > _OUTSIDE * len(actions) + _CHANCE
    wrong = many | ((spread > 0) & (range_ > _TOO_WIDE * spread))
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
    constant = np.ptp(values, axis=0) <= _EQUAL * np.maximum(np.abs(values).max(0), 1.0)
    if constant.all():
        return [Finding("constant_proprio", WARNING, "proprio never changes: was it recorded from the right source?")]
    dims = ", ".join(map(str, np.flatnonzero(constant)))
    return [Finding("constant_proprio", NOTE, f"proprio never changes in dimension {dims}")] if constant.any() else []


def _alignment(demos: Demonstrations) -> list[Finding]:
    offset = action_offset(demos)
    if not offset:
        return []
    which = "executed one step later" if offset < 0 else "executed before its observation"
    text = (
        f"each row seems to hold the action that was {which}: the change of proprio from t to t + 1 follows from "
        f"action t {'-' if offset < 0 else '+'} 1 rather than t. Observation t belongs before action t"
    )
    return [Finding("shifted_actions", WARNING, text)]


def _pictures(demos: Demonstrations, every: bool) -> list[Finding]:
    pictures = inspect_pictures(demos.images, demos.env_args.get("cameras") or [], every=every)
    findings = []
    for camera, blank in pictures.blank.items():
        if len(blank) == len(pictures.inspected):
            text = f"camera {camera} shows nothing: every picture has a single colour"
            findings.append(Finding("blank_pictures", ERROR, text))
        elif blank:
            text = f"camera {camera} shows nothing (a single colour) in {_counted(len(blank))}"
            findings.append(Finding("blank_pictures", WARNING, text, tuple(blank)))
    for camera, frozen in pictures.frozen.items():
        if frozen:
            level = WARNING if len(frozen) > 0.5 * len(pictures.inspected) else NOTE
            text = f"camera {camera} shows the same picture at every step of {_counted(len(frozen))}"
            findings.append(Finding("frozen_pictures", level, text, tuple(frozen)))
    for how, episodes in pictures.turned.items():
        text = f"pictures of {_counted(len(episodes))} are {how} compared with the others"
        findings.append(Finding("turned_pictures", WARNING, text, tuple(episodes)))
    if pictures.same_start and len(demos.actions) > 1:
        text = "all episodes start from the same picture: a policy sees no other scene before it is evaluated"
        level = WARNING if len(set(demos.instructions)) == 1 else NOTE
        findings.append(Finding("same_start", level, text))
    return findings


def _repetitions(demos: Demonstrations) -> list[Finding]:
    first: dict[tuple[int, int], int] = {}
    keys = [
        (hash(actions.tobytes()), hash(images[0].tobytes())) for actions, images in zip(demos.actions, demos.images)
    ]
    copies = [i for i, key in enumerate(keys) if first.setdefault(key, i) != i]
    if not copies:
        return []
    level = WARNING if len(copies) > _REPEATED * len(demos.actions) else NOTE
    return [Finding("repeated_episodes", level, f"{_counted(len(copies))} repeat another one exactly", tuple(copies))]


def _recorded(demos: Demonstrations, task: TaskSpec | None) -> list[Finding]:
    """Useful data that are not recorded, mixed suites, and episodes from held-out states."""
    findings, missing = [], [] if demos.success_recorded else ["success"]
    if demos.proprio is None:
        missing.append("proprio (so shifted actions cannot be detected)")
    if not demos.starts_recorded:
        missing.append("seeds or initial states (so episodes cannot be replayed)")
    if demos.rewards is None:
        missing.append("rewards")
    if missing:
        findings.append(Finding("not_recorded", NOTE, f"optional, not recorded: {', '.join(missing)}"))
    suites = sorted({states.suite for states in demos.states_learned_from if states.recorded})
    if len(suites) > 1:
        text = f"the files hold episodes of different suites: {', '.join(suites)}; the policy records the first file's"
        return [*findings, Finding("mixed_suites", WARNING, text)]
    try:
        training = None if task is None else train_init_states(task)
    except ConfigError:
        training = None
    if task is not None and training is not None:
        starts = [(i, state) for i, (task_id, state) in enumerate(demos.init_states) if task_id == task.task_id]
        held_out = tuple(i for i, state in starts if state >= 0 and state not in training)
        if held_out:
            text = f"{_counted(len(held_out))} start from states that the protocol heldout evaluates on"
            findings.append(Finding("held_out_states", NOTE, text, held_out))
    return findings


def initial_states(demos: Demonstrations) -> dict[int, list[int]]:
    """Task -> sorted initial states of its episodes, as far as recorded."""
    states: defaultdict[int, list[int]] = defaultdict(list)
    for task_id, state in demos.init_states:
        if state >= 0:
            states[task_id].append(state)
    return {task_id: sorted(ids) for task_id, ids in sorted(states.items())}


def _counted(episodes: int) -> str:
    return f"{episodes:,} episode" + "s" * (episodes != 1)


def action_offset(demos: Demonstrations) -> int:
    """-1 if the motion from t to t + 1 clearly follows from action t - 1, 1 if from action t + 1, else 0."""
    gains = explained_variance(demos)
    if gains is None:
        return 0
    best = max(gains, key=lambda offset: gains[offset])
    clear = gains[best] >= _EXPLAINED and 1 - gains[best] <= _CLEARER * (1 - gains[0])
    return best if clear else 0


def explained_variance(demos: Demonstrations) -> dict[int, float] | None:
    """Offset k -> share of the variance of the change of proprio from t to t + 1 that action t + k explains.

    The change of each dimension is regressed (least squares) on the position, the previous change, which stands for
    inertia and delays, and the action. With observations at decisions only, actions are averaged from one to the next.

    Returns:
        Share, 0 to 1, of the variance that remains without the action, averaged over the dimensions that move; None
        without proprio, or with too few steps.
    """
    if demos.proprio is None:
        return None
    changes, states, actions = _regression_rows(demos)
    columns = states.shape[1] + actions.shape[2] + 1
    if len(changes) < _ROWS_PER_COLUMN * columns:
        return None
    without = _residual_variance(states, changes)
    moving = without > 1e-6 * np.maximum(changes.var(0), 1e-12)
    moving &= changes.std(0) > 1e-6
    if not moving.any():
        return None
    residuals = [_residual_variance(np.concatenate([states, a], axis=1), changes) for a in actions]
    shares = np.stack([1 - residual[moving] / without[moving] for residual in residuals])  # [offsets, dimensions]
    weights = shares.max(0)  # 0 for dimensions that no offset explains (joints held still, noise)
    if weights.sum() <= 0:
        return None
    return {offset: float(share @ weights / weights.sum()) for offset, share in zip(_OFFSETS, shares)}


def _regression_rows(demos: Demonstrations) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(change [M, P], position and previous change [M, 2 P], actions by offset [3, M, D]) of all usable steps."""
    assert demos.proprio is not None
    changes, states = [], []
    actions_at: list[list[np.ndarray]] = [[] for _ in _OFFSETS]
    for episode, (actions, proprio) in enumerate(zip(demos.actions, demos.proprio)):
        steps = np.arange(len(actions)) if demos.decision_steps is None else demos.decision_steps[episode]
        total = np.concatenate([np.zeros((1, actions.shape[1])), np.cumsum(actions, axis=0, dtype=np.float64)])
        rows = np.array([i for i in range(1, len(steps) - 1) if steps[i + 1] < len(actions)], dtype=np.int64)
        if not len(rows):
            continue
        values = np.asarray(proprio, np.float64)
        changes.append(values[rows + 1] - values[rows])
        states.append(np.concatenate([values[rows], values[rows] - values[rows - 1]], axis=1))
        start, stop = steps[rows], steps[rows + 1]
        for offset, columns in zip(_OFFSETS, actions_at):
            columns.append((total[stop + offset] - total[start + offset]) / (stop - start)[:, None])
    if not changes:
        return np.zeros((0, 1)), np.zeros((0, 2)), np.zeros((len(_OFFSETS), 0, 1))
    every = max(1, -(-sum(map(len, changes)) // _MOST_ROWS))
    return (
        np.concatenate(changes)[::every],
        np.concatenate(states)[::every],
        np.stack([np.concatenate(columns)[::every] for columns in actions_at]),
    )


def _residual_variance(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Variance [P] of the outputs [M, P] that a linear function of the inputs [M, C] leaves."""
    inputs = inputs - inputs.mean(0)
    scale = inputs.std(0)
    inputs = inputs[:, scale > 1e-9] / scale[scale > 1e-9]
    outputs = outputs - outputs.mean(0)
    solution = np.linalg.lstsq(inputs, outputs, rcond=1e-6)[0]
    return ((outputs - inputs @ solution) ** 2).mean(0)
