import math

import numpy as np
import pytest

from rlvla.envs.toy_push.env import initial_scene
from rlvla.envs.toy_push.physics import (
    ARRAYS,
    CONTACT,
    NUMBERS,
    OBJECT_RADIUS,
    PUSHER_RADIUS,
    STEP_SIZE,
    TOLERANCE,
    push,
)

FAR = (-0.7, 0.7)  # an object that is out of the way


def rough_play(scenes: int, steps: int) -> list[np.ndarray]:
    """Positions [scenes, 6] after each step of pushers that keep a random direction for a while."""
    positions = tuple(np.array([initial_scene(i).positions for i in range(scenes)]).T)
    rng, trace = np.random.default_rng(0), []
    for step in range(steps):
        if step % 20 == 0:
            # Toward the middle of an object at first, so that objects are pushed into walls and corners.
            target = np.stack(positions, axis=1).reshape(-1, 3, 2)[:, 1 + step // 20 % 2]
            way = target - np.stack(positions[:2], axis=1) + rng.normal(0, 0.05, target.shape)
            move = STEP_SIZE * way / np.abs(way).max(axis=1, keepdims=True)
        positions = push(positions, move[:, 0], move[:, 1], ARRAYS)
        trace.append(np.stack(positions, axis=1))
    return trace


def test_nothing_overlaps_and_nothing_leaves_the_table():
    squeezed = 0
    for positions in rough_play(300, 120):
        pusher, first, second = positions.reshape(-1, 3, 2).transpose(1, 0, 2)
        for a, b, reach in ((pusher, first, CONTACT), (pusher, second, CONTACT), (first, second, 2 * OBJECT_RADIUS)):
            assert np.linalg.norm(a - b, axis=1).min() >= reach - 1.001 * TOLERANCE
        assert np.abs(pusher).max() <= 1 - PUSHER_RADIUS and np.abs(positions[:, 2:]).max() <= 1 - OBJECT_RADIUS
        at_a_wall = np.abs(positions[:, 2:]).max(axis=1) >= 1 - OBJECT_RADIUS - 1e-6
        squeezed += int(at_a_wall.sum())
    assert squeezed > 1000, "the test should push objects into walls"


def test_numbers_and_arrays_give_equal_bits():
    scenes, rng = 12, np.random.default_rng(1)
    alone = [initial_scene(i).positions for i in range(scenes)]
    together = tuple(np.array(alone).T)
    contacts = 0
    for step in range(150):
        if step % 15 == 0:
            moves = rng.uniform(-STEP_SIZE, STEP_SIZE, (scenes, 2))
        before = alone
        alone = [push(positions, *move, NUMBERS) for positions, move in zip(alone, moves.tolist())]
        together = push(together, moves[:, 0], moves[:, 1], ARRAYS)
        np.testing.assert_array_equal(np.array(alone), np.stack(together, axis=1))
        contacts += sum(new[2:] != old[2:] for new, old in zip(alone, before))
    assert contacts > 50


def test_without_contact_only_the_pusher_moves():
    before = (0.0, 0.0, 0.5, 0.0, *FAR)
    assert push(before, 0.05, -0.03, NUMBERS) == pytest.approx((0.05, -0.03, 0.5, 0.0, *FAR), abs=1e-12)


@pytest.mark.parametrize("angle", [0.0, 0.7, -1.1, 2.5])
def test_an_object_moves_along_the_contact_normal(angle):
    normal = np.array([math.cos(angle), math.sin(angle)])
    x, y = CONTACT * normal
    moved = push((0.0, 0.0, x, y, *FAR), *(0.01 * normal), NUMBERS)
    assert np.array(moved[2:4]) - (x, y) == pytest.approx(0.01 * normal, abs=1e-6), "through the center: it keeps up"
    # Half of the way is along the normal, and that is how far the object goes.
    askew = 0.002 * np.array([math.cos(angle + math.pi / 3), math.sin(angle + math.pi / 3)])
    moved = push((0.0, 0.0, x, y, *FAR), *askew, NUMBERS)
    assert np.array(moved[2:4]) - (x, y) == pytest.approx(0.001 * normal, abs=2e-5)
    assert push((0.0, 0.0, x, y, *FAR), *(-0.01 * normal), NUMBERS)[2:4] == (x, y), "it does not stick to the pusher"


def test_an_object_that_is_pushed_beside_its_center_slips_away():
    positions = (0.0, 0.02, CONTACT, 0.0, *FAR)
    for _ in range(12):
        positions = push(positions, STEP_SIZE / 2, 0.0, NUMBERS)
    assert positions[3] < -0.06


def test_a_wall_stops_an_object_and_the_pusher_behind_it():
    at_wall = 1 - OBJECT_RADIUS
    positions = (at_wall - CONTACT - 0.05, 0.0, at_wall, 0.0, *FAR)
    for _ in range(5):
        positions = push(positions, STEP_SIZE, 0.0, NUMBERS)
    assert positions[2:4] == pytest.approx((at_wall, 0.0), abs=1e-6)
    assert at_wall - CONTACT - STEP_SIZE / 2 - 1e-6 <= positions[0] <= at_wall - CONTACT + TOLERANCE
    for _ in range(5):
        positions = push(positions, STEP_SIZE, -STEP_SIZE, NUMBERS)
    assert positions[1] < -0.2, "the pusher slides past it"
    assert positions[2] == pytest.approx(at_wall, abs=1e-6) and positions[3] > 0.1, "and it along the wall"


def test_a_pushed_object_pushes_the_other_until_the_wall_stops_both():
    positions = (-0.1, 0.0, -0.1 + CONTACT, 0.0, 0.55, 0.0)
    for _ in range(2):
        positions = push(positions, STEP_SIZE, 0.0, NUMBERS)
    assert positions[4] - positions[2] == pytest.approx(2 * OBJECT_RADIUS, abs=TOLERANCE)
    assert positions[4] > 0.57 and positions[3] == positions[5] == 0.0
    for _ in range(10):
        positions = push(positions, STEP_SIZE, 0.0, NUMBERS)
    assert positions[4] == pytest.approx(1 - OBJECT_RADIUS, abs=STEP_SIZE / 2)
    assert positions[2] <= positions[4] - 2 * OBJECT_RADIUS + TOLERANCE
    assert positions[0] <= positions[2] - CONTACT + TOLERANCE
