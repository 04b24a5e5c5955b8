"""Quality checks: each defect has a kind, and good data has no findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rlvla.data.demonstrations import UNKNOWN_STATE, Demonstrations, dataset_entry
from rlvla.data.quality import (
    ERROR,
    NOTE,
    WARNING,
    Finding,
    action_facts,
    action_offset,
    explained_variance,
    initial_states,
    quality,
    quality_of_file,
)
from rlvla.data.reading import joined
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, heldout_problems
from rlvla.envs.splits import LearnedStates

TASK = TaskSpec("box", 0, "push", "push it", 40, 1000, action_dim=3, proprio_dim=2, control_freq=10, gripper_dims=(2,))
Change = Callable[[Demonstrations], Demonstrations]


def good(episodes: int = 30, seed: int = 0) -> Demonstrations:
    """A point moves by a tenth of the action; the third dimension is a gripper."""
    rng = np.random.default_rng(seed)
    actions, proprio, images = [], [], []
    for _ in range(episodes):
        steps = int(rng.integers(12, 25))
        velocity = rng.uniform(-1, 1, (steps, 2))
        grip = np.where(np.arange(steps) > steps // 2, 1.0, -1.0)
        actions.append(np.concatenate([velocity, grip[:, None]], axis=1).astype(np.float32))
        moved = rng.uniform(-1, 1, 2) + 0.1 * np.cumsum(velocity, axis=0)
        proprio.append((moved - 0.1 * velocity).astype(np.float32))
        images.append(scene(rng, steps))
    return Demonstrations(
        env_args={"task_suite_name": "box", "cameras": ["front"]},
        statistics={"box": dataset_entry(actions, proprio, [2])},
        images=images,
        proprio=proprio,
        actions=actions,
        instructions=["push it"] * episodes,
        success=[True] * episodes,
        init_states=[(0, i) for i in range(episodes)],
        rewards=[np.zeros(len(a), np.float32) for a in actions],
        seeds=list(range(episodes)),
    )


def scene(rng: np.random.Generator, steps: int, side: int = 32) -> np.ndarray:
    """A blue sky above a brown table with a red object somewhere on it."""
    pictures = np.empty((steps, 1, side, side, 3), np.uint8)
    pictures[:, :, : side // 2], pictures[:, :, side // 2 :] = (90, 140, 220), (150, 110, 70)
    row, column = rng.integers(side // 2, side - 4), rng.integers(0, side - 12)
    for step in range(steps):
        pictures[step, :, row : row + 4, column + step % 8 : column + step % 8 + 4] = (220, 30, 30)
    return pictures


def kinds(findings: list[Finding], *levels: str) -> set[str]:
    return {finding.kind for finding in findings if finding.level in (levels or (ERROR, WARNING))}


def test_good_data_has_no_findings() -> None:
    assert quality(good(), TASK) == []
    assert quality(good(), None, every_picture=False) == [], "the suite is unknown here"


def test_intended_saturation_is_not_a_finding() -> None:
    full_speed = of_actions(lambda a: scaled(a, 1.3, 1.0))(good())
    assert action_facts(full_speed.actions)[0].at_high > 0.1 and quality(full_speed, TASK) == []
    demos = good()
    entry = dataset_entry([a * [1, 1, 0.04] for a in demos.actions], demos.proprio, [2])
    assert quality(replace(demos, statistics={"box": entry}), TASK) == [], "a gripper is not normalized"


def of_actions(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def changed(demos: Demonstrations) -> Demonstrations:
        actions = [change(values.copy()) for values in demos.actions]
        return replace(demos, actions=actions, statistics={"box": dataset_entry(actions, demos.proprio, [2])})

    return changed


def of_images(change: Callable[[np.ndarray], np.ndarray], every: int = 1) -> Change:
    return lambda demos: replace(
        demos, images=[change(frames) if i % every == 0 else frames for i, frames in enumerate(demos.images)]
    )


def scaled(values: np.ndarray, scale: float, limit: float) -> np.ndarray:
    values[:, :2] = np.clip(scale * values[:, :2], -limit, limit)
    return values


def constant(values: np.ndarray, value: float, dims: slice) -> np.ndarray:
    values[:, dims] = value
    return values


def black(frames: np.ndarray) -> np.ndarray:
    return np.zeros_like(frames)


def recorded_for_others(demos: Demonstrations) -> Demonstrations:
    return replace(demos, statistics={"box": dataset_entry([0.2 * a for a in demos.actions], demos.proprio, [2])})


DAMAGE: dict[str, tuple[Change, str, str]] = {
    "no success": (lambda d: replace(d, success=[False] * 30), "never_successful", ERROR),
    "few successes": (lambda d: replace(d, success=[i % 5 == 0 for i in range(30)]), "few_successes", WARNING),
    "a task without success": (
        lambda d: replace(d, success=[i < 20 for i in range(30)], init_states=[(int(i >= 20), i) for i in range(30)]),
        "never_successful",
        ERROR,
    ),
    "constant dimension": (of_actions(lambda a: constant(a, 0.3, slice(0, 1))), "constant_action", WARNING),
    "unused dimension": (of_actions(lambda a: constant(a, 0.0, slice(0, 1))), "constant_action", NOTE),
    "unused dimensions": (of_actions(lambda a: constant(a, 0.0, slice(0, 2))), "constant_action", WARNING),
    "constant actions": (of_actions(lambda a: constant(a, 0.5, slice(0, 3))), "constant_action", ERROR),
    "clipped": (of_actions(lambda a: scaled(a, 1.0, 0.5)), "clipped_action", WARNING),
    "scaled, then clipped": (of_actions(lambda a: scaled(a, 100.0, 1.0)), "clipped_action", WARNING),
    "in other units": (of_actions(lambda a: scaled(a, 30.0, 90.0)), "actions_beyond_limits", WARNING),
    "a gripper that is not marked": (
        of_actions(lambda a: np.sign(a) * [0, 1, 1] + a * [1, 0, 0]),
        "discrete_action",
        NOTE,
    ),
    "actions too early": (of_actions(lambda a: np.roll(a, -1, axis=0)), "shifted_actions", WARNING),
    "actions too late": (of_actions(lambda a: np.roll(a, 1, axis=0)), "shifted_actions", WARNING),
    "black": (of_images(black), "blank_pictures", ERROR),
    "some black": (of_images(black, every=7), "blank_pictures", WARNING),
    "frozen": (of_images(lambda frames: np.repeat(frames[:1], len(frames), axis=0)), "frozen_pictures", WARNING),
    "upside down": (of_images(lambda frames: frames[:, :, ::-1], every=7), "turned_pictures", WARNING),
    "red and blue swapped": (of_images(lambda frames: frames[..., ::-1], every=7), "turned_pictures", WARNING),
    "one start": (lambda d: replace(d, images=[d.images[0][: len(a)] for a in d.actions]), "same_start", WARNING),
    "one start, many instructions": (
        lambda d: replace(
            d, images=[d.images[0][: len(a)] for a in d.actions], instructions=[f"go to {i}" for i in range(30)]
        ),
        "same_start",
        NOTE,
    ),
    "constant proprio": (
        lambda d: replace(d, proprio=[np.ones_like(values) for values in d.proprio]),
        "constant_proprio",
        WARNING,
    ),
    "statistics of other data": (recorded_for_others, "other_statistics", WARNING),
    "no proprio": (lambda d: replace(d, proprio=None), "not_recorded", NOTE),
    "no seeds": (lambda d: replace(d, seeds=None), "not_recorded", NOTE),
    "held-out states": (lambda d: replace(d, init_states=[(0, 900)] * 30), "held_out_states", NOTE),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_has_a_name(name: str) -> None:
    change, kind, level = DAMAGE[name]
    findings = quality(change(good()), TASK)
    assert kind in kinds(findings, level), findings


def test_the_episodes_are_named() -> None:
    demos = good()
    turned = of_images(lambda frames: frames[:, :, ::-1], every=7)(demos)
    (finding,) = [one for one in quality(turned, TASK) if one.kind == "turned_pictures"]
    assert finding.episodes == (0, 7, 14, 21, 28)
    (finding,) = [one for one in quality(of_images(black, every=10)(demos), TASK) if one.kind == "blank_pictures"]
    assert finding.episodes == (0, 10, 20)


def test_episodes_that_are_there_twice() -> None:
    once = good()
    twice = replace(
        once,
        **{
            name: getattr(once, name) * 2
            for name in ("images", "actions", "proprio", "instructions", "success", "init_states", "rewards", "seeds")
        },
    )
    (finding,) = quality(twice, TASK)
    assert (finding.kind, finding.level, finding.episodes) == ("repeated_episodes", WARNING, tuple(range(30, 60)))


def test_an_episode_of_two_steps() -> None:
    demos = good()
    for values in (demos.actions, demos.images, demos.proprio, demos.rewards):
        values[4] = values[4][:2]
    (finding,) = quality(demos, TASK)
    assert (finding.kind, finding.level, finding.episodes) == ("short_episodes", NOTE, (4,))
    demos.success[4] = False
    assert kinds(quality(demos, TASK)) == {"short_episodes"}


def test_a_task_of_few_steps_has_short_episodes() -> None:
    demos = good()
    for values in (demos.actions, demos.images, demos.proprio, demos.rewards):
        values[:] = [rows[: 2 + i % 4] for i, rows in enumerate(values)]
    assert "short_episodes" not in {finding.kind for finding in quality(demos, TASK)}


def test_a_file_is_judged_alone_only_if_it_is_long_enough() -> None:
    still = of_actions(lambda a: constant(a, 0.3, slice(0, 1)))
    assert kinds(quality_of_file(still(good()), TASK)) == {"constant_action"}
    assert quality_of_file(still(good(episodes=2)), TASK) == []


def test_facts_of_actions() -> None:
    facts = action_facts([np.array([[0.0, 2.0], [1.0, 2.0]]), np.array([[1.0, 2.0], [0.5, 2.0]])])
    assert (facts[0].low, facts[0].high, facts[0].at_high, facts[0].at_low, facts[0].distinct) == (0, 1, 0.5, 0.25, 3)
    assert [fact.constant for fact in facts] == [False, True]


def test_initial_states_by_task() -> None:
    demos = replace(good(3), init_states=[(1, 7), (0, -1), (1, 3)])
    assert initial_states(demos) == {1: [3, 7]}
    recorded, unknown = [LearnedStates("box", 1, 3, 8)], [LearnedStates("box", task, 0, 0) for task in (1, 2)]
    assert replace(demos, env_args=demos.env_args | {"task_ids": [1, 2]}).states_learned_from == recorded + unknown
    every = replace(demos, init_states=[(1, 7), (1, 7), (1, 3)], env_args=demos.env_args | {"task_ids": [1, 2]})
    assert every.states_learned_from == recorded, "all episodes are of task 1"


def test_tasks_that_are_not_recorded_may_be_any() -> None:
    some = replace(good(3), init_states=[(1, 7), UNKNOWN_STATE, (1, 3)])
    any_task = LearnedStates("box", None, 0, 0)
    assert some.states_learned_from == [LearnedStates("box", 1, 3, 8), any_task]
    none = replace(good(3), init_states=[])
    assert none.states_learned_from == [any_task]
    assert any_task in joined([some, none]).states_learned_from
    stateless = replace(good(3), init_states=[(3, -1), (1, 7), (3, -1)])
    assert stateless.states_learned_from == [LearnedStates("box", 3, 0, 0), LearnedStates("box", 1, 7, 8)]
    toy = EnvConfig(task_suite_name="toy_reach")
    told = [LearnedStates("toy_reach", None, 0, 0)]
    (problem,) = heldout_problems(("reach",), toy, (), told, "demos.hdf5")
    assert "does not record its training tasks" in problem and problem.reason == "mismatch"
    assert len(heldout_problems(("reach",), toy, (), [any_task], "demos.hdf5")) == 1, "a name that may be anything's"
    elsewhere = [LearnedStates("metaworld", None, 0, 0)]
    assert heldout_problems(("reach",), toy, (), elsewhere, "demos.hdf5") == [], "another suite"


def recorded(inertia: float = 0.0, *, smooth: float = 0.0, absolute: bool = False, decide: int = 1) -> Demonstrations:
    """Episodes of a point whose velocity follows the action (or the way to the position that the action names)."""
    rng = np.random.default_rng(0)
    actions, proprio, decisions = [], [], []
    for _ in range(40):
        wanted = rng.normal(size=(30, 2))
        for t in range(1, 30):
            wanted[t] = smooth * wanted[t - 1] + (1 - smooth) * wanted[t]
        position, velocity, observed = np.zeros(2), np.zeros(2), []
        for action in wanted:
            observed.append(position)
            push = 0.3 * (action - position) if absolute else 0.1 * action
            velocity = inertia * velocity + (1 - inertia) * push
            position = position + velocity + 0.002 * rng.normal(size=2)
        steps = np.arange(0, 30, decide)
        actions.append(wanted.astype(np.float32))
        proprio.append(np.stack(observed)[steps].astype(np.float32))
        decisions.append(steps)
    return Demonstrations(
        env_args={},
        statistics={},
        images=[],
        proprio=proprio,
        actions=actions,
        instructions=[],
        success=[],
        init_states=[],
        decision_steps=None if decide == 1 else decisions,
    )


def moved(demos: Demonstrations, steps: int) -> Demonstrations:
    return replace(demos, actions=[np.roll(actions, steps, axis=0) for actions in demos.actions])


@pytest.mark.parametrize(
    "robot",
    [
        {},
        {"inertia": 0.5},
        {"inertia": 0.5, "smooth": 0.8},
        {"inertia": 0.8, "smooth": 0.8},
        {"smooth": 0.8},
        {"absolute": True},
        {"inertia": 0.3, "smooth": 0.6, "absolute": True},
    ],
    ids=str,
)
def test_every_robot_in_time_early_and_late(robot: dict) -> None:
    demos = recorded(**robot)
    assert [action_offset(moved(demos, steps)) for steps in (0, -1, 1)] == [0, -1, 1]


def test_rollouts_with_observations_at_decisions() -> None:
    demos = recorded(inertia=0.2, decide=3)
    gains = explained_variance(demos)
    assert action_offset(demos) == 0 and gains is not None and gains[0] == max(gains.values()) > 0.5


def test_slowly_changing_actions_have_no_offset() -> None:
    demos = recorded(inertia=0.7, smooth=0.98)
    assert [action_offset(moved(demos, steps)) for steps in (0, -1, 1)] == [0, 0, 0]


def test_too_little_data_for_an_offset() -> None:
    demos = recorded()
    assert explained_variance(replace(demos, proprio=None)) is None
    assert explained_variance(replace(demos, proprio=[np.zeros_like(values) for values in demos.proprio])) is None
    few = replace(demos, actions=[a[:3] for a in demos.actions[:4]], proprio=[p[:3] for p in demos.proprio[:4]])
    assert explained_variance(few) is None
    rng = np.random.default_rng(1)
    assert action_offset(replace(demos, actions=[rng.normal(size=a.shape) for a in demos.actions])) == 0
