"""The scripted expert of LIBERO's tasks and its planners."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from rlvla.envs.base import Env
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import ExpertEpisode, play_expert_episode
from rlvla.envs.libero.env import in_order
from rlvla.envs.libero.expert import LiberoExpert
from rlvla.envs.libero.grasps import (
    HALF_OPENING,
    MAX_RELIABLE_COST,
    MOST_TILT,
    REACH_MARGIN,
    HeightMap,
    candidates_of,
    overreach,
    plan_grasp,
    plan_placement,
    reaching_tilt,
)
from rlvla.envs.registry import make_env
from rlvla.envs.robosuite.rotation import HOME_YAW, wrapped
from rlvla.utils.errors import ConfigError
from tests.support.libero_requirements import require_libero, require_package

BASE = np.array([-0.6, 0.0, 0.0])
NOTHING = np.zeros((0, 3))


def box(half: tuple[float, float, float], center: tuple[float, float, float] = (0, 0, 0)) -> np.ndarray:
    """Points on the surface of a box."""
    axes = [np.linspace(-h, h, max(3, round(2 * h / 0.006))) for h in half]
    grid = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 3)
    return grid[(np.abs(np.abs(grid) - half) < 1e-9).any(axis=1)] + center


def ring(radius: float, height: float) -> np.ndarray:
    """Points on an open cylinder, such as a bowl's wall."""
    angles, levels = np.linspace(0, 2 * math.pi, 120), np.linspace(0, height, 8)
    angle, level = (axis.ravel() for axis in np.meshgrid(angles, levels))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), level], axis=1)


# ---------------------------------------------------------------------------------------------------- grasps
def test_a_long_box_is_grasped_across_at_its_middle() -> None:
    for yaw in (0.0, 0.4, -1.0):
        grasp = plan_grasp(
            candidates_of(box((0.08, 0.02, 0.03)), np.zeros(2)), np.array([0.1, 0.05, 0.03]), yaw, NOTHING, BASE
        )
        assert grasp is not None and grasp.cost < 1 and abs(grasp.width - 0.04) < 0.003
        assert abs(wrapped(grasp.yaw - (yaw + math.pi / 2), math.pi)) < 0.01
        np.testing.assert_allclose(grasp.position[:2], [0.1, 0.05], atol=0.02)
        assert abs(grasp.yaw - HOME_YAW) <= math.pi / 2


def test_a_bowl_is_grasped_by_its_rim_and_a_wide_box_at_best_badly() -> None:
    bowl = candidates_of(ring(0.06, 0.05), np.zeros(2))
    grasp = plan_grasp(bowl, np.zeros(3), 0.0, NOTHING, BASE)
    assert grasp is not None and grasp.width < 0.02
    assert abs(np.linalg.norm(grasp.position[:2]) - 0.06) < 0.008
    radial = grasp.position[:2] / np.linalg.norm(grasp.position[:2])
    assert abs(radial @ [math.cos(grasp.yaw), math.sin(grasp.yaw)]) > 0.95, "one finger inside, one outside"
    wide = candidates_of(box((0.06, 0.06, 0.05)), np.zeros(2))
    corner = plan_grasp(wide, np.zeros(3), 0.0, NOTHING, BASE)
    assert corner is None or corner.cost > 1


def test_fingers_keep_clear_of_neighbors_and_of_grasps_that_failed() -> None:
    cube = candidates_of(box((0.02, 0.02, 0.03)), np.zeros(2))
    free = plan_grasp(cube, np.zeros(3), 0.0, NOTHING, BASE)
    assert free is not None and abs(wrapped(free.yaw - HOME_YAW, math.pi)) < 0.01, "the hand need not turn"
    walls = np.concatenate([box((0.02, 0.01, 0.03), (0, side * (HALF_OPENING + 0.01), 0)) for side in (-1, 1)])
    turned = plan_grasp(cube, np.zeros(3), 0.0, walls, BASE)
    assert turned is not None and abs(wrapped(turned.yaw - HOME_YAW, math.pi)) > 0.6
    other = plan_grasp(cube, np.zeros(3), 0.0, NOTHING, BASE, [free])
    assert other is not None and not np.allclose(other.position, free.position, atol=0.004)


def test_the_hand_tilts_beside_a_ledge_that_hangs_over_the_object() -> None:
    bowl = candidates_of(ring(0.05, 0.05), np.zeros(2))
    ledge = box((0.1, 0.2, 0.03), (0.12, 0.0, 0.18))  # from 2 cm behind the middle of the bowl, away from the robot
    free = plan_grasp(bowl, np.zeros(3), 0.0, NOTHING, BASE)
    below = plan_grasp(bowl, np.zeros(3), 0.0, ledge, BASE)
    assert free is not None and free.tilt == 0.0
    assert below is not None and below.tilt > 0 and below.cost < MAX_RELIABLE_COST
    assert below.cost > free.cost, "a hand that points down is preferred"


def test_a_plate_is_pinched_by_its_sloping_rim() -> None:
    well = [ring(radius, 0.0) + [0, 0, 0.008] for radius in np.linspace(0.0, 0.045, 10)]
    slope = [ring(radius, 0.0) + [0, 0, 0.6 * radius - 0.019] for radius in np.linspace(0.045, 0.065, 8)]
    plate = np.unique(np.concatenate([ring(0.03, 0.004), *well, *slope]), axis=0)
    grasp = plan_grasp(candidates_of(plate, np.zeros(2)), np.zeros(3), 0.0, NOTHING, BASE)
    assert grasp is not None and grasp.width < 0.02
    radial = grasp.position[:2] / np.linalg.norm(grasp.position[:2])
    assert abs(radial @ [math.cos(grasp.yaw), math.sin(grasp.yaw)]) > 0.95
    assert grasp.position[2] > plate[:, 2].max(), "only the fingertips fit between plate and table"


def test_the_hand_tilts_only_where_it_would_not_reach() -> None:
    near, far = np.array([-0.1, 0.0, 0.0]), np.array([0.15, 0.0, 0.0])
    assert reaching_tilt(near, BASE) == 0.0
    tilt = reaching_tilt(far, BASE)
    assert 0 < tilt < MOST_TILT and overreach(far, BASE) > -REACH_MARGIN >= overreach(far, BASE, tilt)


# ------------------------------------------------------------------------------------------------- placements
def test_heights_between_two_places() -> None:
    heights = HeightMap(box((0.05, 0.05, 0.1), (0.2, 0.0, 0.1)), floor=0.0)
    assert heights.at(np.array([0.2, 0.0])) == pytest.approx(0.2) and heights.at(np.array([5.0, 5.0])) == 0.0
    assert heights.highest_on_way(np.zeros(2), np.array([0.4, 0.0]), 0.02) == pytest.approx(0.2)
    assert heights.highest_on_way(np.zeros(2), np.array([0.0, 0.4]), 0.02) == 0.0


def test_an_object_is_put_on_the_free_spot_and_turned_into_a_slot() -> None:
    held = box((0.02, 0.02, 0.03), (0, 0, -0.02))  # its lowest points are 5 cm below the grip site
    table = box((0.3, 0.3, 0.01), (0, 0, -0.01))
    spots = np.array([[0.0, 0.0], [0.1, 0.0], [-0.1, 0.0]])
    turns = np.array([0.0, math.pi / 4, -math.pi / 4, math.pi / 2])

    def plan(held: np.ndarray, obstacles: np.ndarray):
        heights = HeightMap(np.concatenate([table, obstacles]), 0.0)
        return plan_placement(held, np.zeros(2), HOME_YAW, spots=spots, turns=turns, heights=heights)

    free = plan(held, NOTHING)
    assert free.turn == 0 and free.height == pytest.approx(0.05, abs=1e-6)
    np.testing.assert_array_equal(free.origin, spots[0])
    occupied = plan(held, box((0.02, 0.02, 0.04), (0, 0, 0.04)))
    assert abs(occupied.origin[0]) == 0.1 and occupied.height == pytest.approx(0.05, abs=1e-6)
    # A slot along y for a bar that is held along x.
    bar = box((0.06, 0.01, 0.03), (0, 0, -0.02))
    walls = np.concatenate([box((0.005, 0.2, 0.02), (x, 0, 0.02)) for x in (-0.15, -0.05, 0.05, 0.15)])
    assert abs(plan(bar, walls).turn) == pytest.approx(math.pi / 2)


def test_predicates_in_an_order_in_which_they_can_be_met() -> None:
    goal = (
        ("close", "drawer_region"),
        ("on", "cup_1", "plate_1"),
        ("on", "plate_1", "tray_1"),
        ("turnon", "stove_1"),
    )
    assert [p[1] for p in in_order(goal)] == ["stove_1", "plate_1", "cup_1", "drawer_region"]


# ---------------------------------------------------------------------------------------------- with a simulator
@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    require_libero()
    env = make_env("libero_spatial", 0, cameras=(), use_proprio=True)
    yield env
    env.close()


def expert(**settings) -> LiberoExpert:
    made = make_expert("libero_spatial", 0, ExpertConfig(**settings))
    assert isinstance(made, LiberoExpert)
    return made


@pytest.fixture(scope="module")
def solution(env: Env) -> ExpertEpisode:
    return play_expert_episode(env, expert(), 0, seed=0)


def test_the_expert_solves_a_task_from_its_goal_also_with_noise(env: Env, solution: ExpertEpisode) -> None:
    assert solution["success_at_end"] and len(solution["actions"]) < 120
    noisy = play_expert_episode(env, expert(noise_std=0.15), 1, seed=0)
    assert noisy["success_at_end"]


def test_the_expert_takes_over_before_and_after_the_grasp(env: Env, solution: ExpertEpisode) -> None:
    actions = solution["actions"]
    for takeover in (len(actions) // 4, 2 * len(actions) // 3):
        episode = play_expert_episode(env, expert(), 0, seed=0, prefix=actions[:takeover])
        assert episode["success_at_end"] and len(episode["actions"]) < len(actions) + 20


@pytest.mark.parametrize(("task_id", "most_steps"), [(3, 270), (5, 120)], ids=["under_an_open_drawer", "plate_dragged"])
def test_the_expert_solves_what_cannot_be_grasped_from_straight_above(task_id: int, most_steps: int) -> None:
    require_libero()
    env = make_env("libero_goal", task_id, cameras=(), use_proprio=True)
    for state in range(2):
        episode = play_expert_episode(env, make_expert("libero_goal", task_id, ExpertConfig()), state, seed=0)
        assert episode["success_at_end"] and len(episode["actions"]) < most_steps
    env.close()


def test_the_fingers_cannot_close_early() -> None:
    require_package()
    with pytest.raises(ConfigError, match="cannot close early"):
        expert(gripper_shift=-1)
