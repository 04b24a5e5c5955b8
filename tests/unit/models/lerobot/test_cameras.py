"""Cameras of the environment and image features of the policy."""

from __future__ import annotations

import pytest

from rlvla.models.lerobot.cameras import camera_order, camera_problems, default_camera_map, read_camera_map

KEYS = ["observation.images.image", "observation.images.wrist", "observation.images.empty_camera_0"]
CAMERAS = ["agentview", "eye_in_hand"]
MAP = {"agentview": KEYS[0], "eye_in_hand": KEYS[1]}


def test_reading() -> None:
    mapping, problems = read_camera_map(["agentview=image", f"eye_in_hand={KEYS[1]}"])
    assert (mapping, problems) == (MAP, [])
    _, problems = read_camera_map(["agentview", "a=image", "a=wrist"])
    assert [(p.flag, p.reason) for p in problems] == [("camera_map", "invalid_value"), ("camera_map", "duplicate")]


def test_a_complete_mapping() -> None:
    assert camera_problems(MAP, CAMERAS, KEYS, empty_cameras=1) == []
    assert camera_order(MAP, CAMERAS, KEYS) == [0, 1]
    turned = {"agentview": KEYS[1], "eye_in_hand": KEYS[0]}
    assert camera_order(turned, CAMERAS, KEYS) == [1, 0]


@pytest.mark.parametrize(
    ("mapping", "empty", "reasons"),
    [
        (MAP, 0, ["mismatch"]),
        ({}, 3, ["mismatch"]),
        (MAP | {"front": KEYS[2]}, 1, ["unknown_name"]),
        (MAP | {"eye_in_hand": "observation.images.hand"}, 1, ["unknown_name"]),
        (MAP | {"eye_in_hand": KEYS[0]}, 2, ["duplicate"]),
        ({"agentview": KEYS[0]}, 2, ["mismatch"]),
    ],
)
def test_problems_list_both_sides(mapping: dict[str, str], empty: int, reasons: list[str]) -> None:
    problems = camera_problems(mapping, CAMERAS, KEYS, empty_cameras=empty)
    assert [problem.reason for problem in problems] == reasons
    for problem in problems:
        assert problem.flag == "camera_map"
        assert all(name in problem for name in (*CAMERAS, *KEYS))


def test_defaults() -> None:
    assert default_camera_map(["image", "wrist"], KEYS) == {"image": KEYS[0], "wrist": KEYS[1]}
    assert default_camera_map(["agentview"], [KEYS[0], KEYS[2]]) == {"agentview": KEYS[0]}
    assert default_camera_map(CAMERAS, KEYS) == {}
