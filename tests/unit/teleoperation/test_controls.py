"""Controls: the default keys, tables of one's own, taps, toggles and limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlvla.envs import TaskSpec
from rlvla.teleoperation.controls import ADVANCE, RESERVED, Controls, default_bindings, read_bindings
from rlvla.utils.errors import ConfigError

PLANE = TaskSpec(suite="plane", instruction="go", max_steps=9, action_dim=2)
ARM = TaskSpec(suite="arm", instruction="lift", max_steps=9, action_dim=7, gripper_dims=(-1,))


def test_an_arm_has_keys_for_each_dimension_and_a_toggle() -> None:
    bindings = default_bindings(ARM)
    assert [binding.dim for binding in bindings] == list(range(7))
    assert [binding.toggles for binding in bindings] == [False] * 6 + [True]
    assert (bindings[0].negative[0], bindings[0].positive[0]) == ("s", "w"), "x is forward"
    assert bindings[6].positive == ("space", "button0")
    plane = default_bindings(PLANE)
    assert [(b.negative, b.positive) for b in plane] == [
        (("a", "axis0-"), ("d", "axis0+")),
        (("s", "axis1+"), ("w", "axis1-")),
    ]


def test_default_controls_are_distinct_and_not_reserved() -> None:
    for dims, grippers in ((2, ()), (7, (6,)), (14, (6, 13)), (40, (0, 1, 2))):
        bindings = default_bindings(replace(ARM, action_dim=dims, gripper_dims=grippers))
        controls = [c for binding in bindings for c in (*binding.negative, *binding.positive)]
        assert len(controls) == len(set(controls)) and not set(controls) & set(RESERVED)


def test_keys_command_shares_of_the_limit_and_release_to_zero() -> None:
    controls = Controls(default_bindings(PLANE), replace(PLANE, action_limit=2.0), speed=0.25)
    assert not controls.active and not controls.action().any()
    controls.hold({"d": 1.0, "s": 0.5, "unknown": 1.0})
    np.testing.assert_allclose(controls.take(), [0.5, -0.25])
    controls.hold({"d": 1.0, "a": 1.0})
    np.testing.assert_allclose(controls.take(), [0, 0])
    controls.hold({})
    assert not controls.active and controls.action().dtype == np.float32


def test_a_tap_between_two_steps_counts_once() -> None:
    controls = Controls(default_bindings(PLANE), PLANE, speed=1.0)
    controls.hold({"w": 1.0})
    controls.hold({})
    assert controls.active
    np.testing.assert_allclose(controls.take(), [0, 1])
    assert not controls.active
    controls.hold({ADVANCE: 1.0})
    assert controls.active and not controls.take().any()


def test_a_gripper_toggles_on_each_press_and_keeps_its_value() -> None:
    controls = Controls(default_bindings(ARM), ARM, speed=0.5, gripper_start=-1)
    assert controls.action()[6] == -1
    for expected in (1, -1, 1):
        controls.hold({"space": 1.0})
        controls.hold({"space": 1.0, "w": 1.0})  # still held: not pressed again
        assert controls.take()[6] == expected
        controls.hold({})
    controls.release()
    assert controls.action()[6] == 1, "let go of by a closed page, it still holds the object"
    controls.begin()
    assert controls.action()[6] == -1


def test_own_tables_replace_the_default() -> None:
    bindings = read_bindings(["1:ArrowDown/ArrowUp", "0:q"], PLANE)
    assert [(b.dim, b.negative, b.positive, b.toggles) for b in bindings] == [
        (0, (), ("q",), True),
        (1, ("arrowdown",), ("arrowup",), False),
    ]


def test_all_mistakes_of_a_table_are_reported_at_once() -> None:
    entries = ["x:a/b", "0:a/", "2:c/d", "0:e/f", "0:g/h", "1:e/enter", "1:a/b/c"]
    with pytest.raises(ConfigError) as caught:
        read_bindings(entries, PLANE)
    text = str(caught.value)
    for part in (
        "--keys x:a/b: write DIM:NEGATIVE/POSITIVE",
        "0:a/: write",
        "2:c/d: the actions of plane have dimensions 0..1",
        "0:g/h: dimension 0 has keys already",
        "1:e/enter: e is a key of dimension 0 already",
        "1:e/enter: enter is a function of the page already",
        "1:a/b/c: write",
    ):
        assert part in text, part
