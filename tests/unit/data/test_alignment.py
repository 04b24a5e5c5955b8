"""Whether actions stand beside the observations they were chosen from, for robots that answer at once or with delay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.quality import explained, shifted_by


def recorded(inertia: float = 0.0, *, smooth: float = 0.0, absolute: bool = False, decide: int = 1) -> Demonstrations:
    """Episodes of a point whose velocity follows the action (or the way to the position that the action names)."""
    rng = np.random.default_rng(0)
    actions, proprio, decisions = [], [], []
    for _ in range(40):
        wanted = rng.normal(size=(30, 2))
        for t in range(1, 30):
            wanted[t] = smooth * wanted[t - 1] + (1 - smooth) * wanted[t]
        position, velocity, seen = np.zeros(2), np.zeros(2), []
        for action in wanted:
            seen.append(position)
            push = 0.3 * (action - position) if absolute else 0.1 * action
            velocity = inertia * velocity + (1 - inertia) * push
            position = position + velocity + 0.002 * rng.normal(size=2)
        steps = np.arange(0, 30, decide)
        actions.append(wanted.astype(np.float32))
        proprio.append(np.stack(seen)[steps].astype(np.float32))
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
    assert [shifted_by(moved(demos, steps)) for steps in (0, -1, 1)] == [0, -1, 1]


def test_rollouts_with_observations_at_decisions() -> None:
    demos = recorded(inertia=0.2, decide=3)
    gains = explained(demos)
    assert shifted_by(demos) == 0 and gains is not None and gains[0] == max(gains.values()) > 0.5


def test_nothing_is_said_of_actions_that_hardly_change_from_step_to_step() -> None:
    demos = recorded(inertia=0.7, smooth=0.98)
    assert [shifted_by(moved(demos, steps)) for steps in (0, -1, 1)] == [0, 0, 0]


def test_where_nothing_can_be_said() -> None:
    demos = recorded()
    assert explained(replace(demos, proprio=None)) is None
    assert explained(replace(demos, proprio=[np.zeros_like(values) for values in demos.proprio])) is None
    few = replace(demos, actions=[a[:3] for a in demos.actions[:4]], proprio=[p[:3] for p in demos.proprio[:4]])
    assert explained(few) is None
    rng = np.random.default_rng(1)
    assert shifted_by(replace(demos, actions=[rng.normal(size=a.shape) for a in demos.actions])) == 0
