"""Settings in a file that only rlvla reads, and flags that override them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvla.models.flow.settings import FlowSettings
from rlvla.models.lerobot.config import Features
from rlvla.models.lerobot.settings import (
    SETTINGS_FILE,
    LeRobotSettings,
    camera_problems,
    default_camera_map,
    read_camera_map,
    read_settings,
)
from rlvla.models.pi0.config import PI0, Pi0Config
from rlvla.utils.errors import ConfigError, Problem

KEYS = ["observation.images.top", "observation.images.wrist"]
ORDERED = {"cameras": ["hand", "top"], "camera_map": {"hand": KEYS[1], "top": KEYS[0]}}
FEATURES = ["observation.images.image", "observation.images.wrist", "observation.images.empty_camera_0"]
CAMERAS = ["agentview", "eye_in_hand"]
MAP = {"agentview": FEATURES[0], "eye_in_hand": FEATURES[1]}


def read(folder: Path, recorded: dict[str, Any] | None = None, **given: Any) -> tuple[LeRobotSettings, list[Problem]]:
    """Settings of a policy that predicts 8 actions, executes 5 and denoises in 10 steps."""
    if recorded is not None:
        (folder / SETTINGS_FILE).write_text(json.dumps(recorded))
    features = Features.of(KEYS, (8, 8), 2, 2)
    config = Pi0Config(type=PI0, features=features, chunk_size=8, n_action_steps=5, num_inference_steps=10)
    return read_settings(folder, config, given)


def kinds(problems: list[Problem]) -> list[tuple[str | None, str]]:
    return [(problem.flag, problem.reason) for problem in problems]


def test_a_folder_of_lerobot(tmp_path: Path) -> None:
    settings, problems = read(tmp_path)
    assert not problems and (settings.n_action_steps, settings.flow.steps) == (5, 10)
    assert settings.cameras == () and settings.image_order(KEYS) == [0, 1]


def test_flags_precede_the_record_and_the_record_the_defaults(tmp_path: Path) -> None:
    recorded = {"flow_method": "cps", "flow_noise_level": 0.3, "critic_features": "prefix"}
    settings, problems = read(tmp_path, recorded, flow_noise_level=0.7, flow_steps=3, action_chunk_len=2)
    assert not problems and settings.n_action_steps == 2 and settings.critic_features == "prefix"
    assert (settings.flow.method, settings.flow.noise_level, settings.flow.steps) == ("cps", 0.7, 3)


def test_written_settings_are_read_back(tmp_path: Path) -> None:
    settings, _ = read(tmp_path, {**ORDERED, "unnorm_key": "toy", "flow_eval_noise": "zero"}, flow_method="noise")
    again, problems = read(tmp_path, settings.to_json())
    assert not problems and again == settings


@pytest.mark.parametrize(
    ("recorded", "given", "order"),
    [
        (ORDERED, {}, [1, 0]),
        (ORDERED, {"cameras": ("top", "hand")}, [0, 1]),
        ({}, {"cameras": ("wrist", "top")}, [1, 0]),  # features named like cameras
        (ORDERED, {"cameras": ("a", "b"), "camera_map": ("a=wrist", "b=top")}, [1, 0]),
    ],
)
def test_images_come_in_the_order_of_the_features(
    recorded: dict[str, Any], given: dict[str, Any], order: list[int], tmp_path: Path
) -> None:
    settings, problems = read(tmp_path, recorded, **given)
    assert not problems and settings.image_order(KEYS) == order


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"action_chunk_len": 9}, ("action_chunk_len", "mismatch")),
        ({"cameras": ("front", "hand")}, ("camera_map", "mismatch")),
        ({"cameras": ("a", "b"), "camera_map": ("a=top", "a=wrist")}, ("camera_map", "duplicate")),
        ({"flow_method": "cps", "flow_steps": 1}, ("flow_steps", "out_of_range")),
        ({"critic_features": "both"}, ("critic_features", "out_of_range")),
    ],
)
def test_invalid_settings(given: dict[str, Any], expected: tuple[str, str], tmp_path: Path) -> None:
    assert expected in kinds(read(tmp_path, **given)[1])


def test_all_problems_at_once(tmp_path: Path) -> None:
    problems = read(tmp_path, {"flow_noise_level": 3.0}, action_chunk_len=9, cameras=("front",))[1]
    assert {(None, "invalid_file"), ("action_chunk_len", "mismatch"), ("camera_map", "mismatch")} == set(
        kinds(problems)
    )


def test_a_record_of_other_types(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cameras"):
        read(tmp_path, {"cameras": "top"})


def test_camera_map_flag() -> None:
    mapping, problems = read_camera_map(["agentview=image", f"eye_in_hand={FEATURES[1]}"])
    assert (mapping, problems) == (MAP, [])
    _, problems = read_camera_map(["agentview", "a=image", "a=wrist"])
    assert [(p.flag, p.reason) for p in problems] == [("camera_map", "invalid_value"), ("camera_map", "duplicate")]


def test_complete_camera_map() -> None:
    assert camera_problems(MAP, CAMERAS, FEATURES, empty_cameras=1) == []
    swapped = {"agentview": FEATURES[1], "eye_in_hand": FEATURES[0]}
    for mapping, order in ((MAP, [0, 1]), (swapped, [1, 0])):
        settings = LeRobotSettings(1, FlowSettings(), tuple(CAMERAS), mapping)
        assert settings.image_order(FEATURES) == order


@pytest.mark.parametrize(
    ("mapping", "empty", "reasons"),
    [
        (MAP, 0, ["mismatch"]),
        ({}, 3, ["mismatch"]),
        (MAP | {"front": FEATURES[2]}, 1, ["unknown_name"]),
        (MAP | {"eye_in_hand": "observation.images.hand"}, 1, ["unknown_name"]),
        (MAP | {"eye_in_hand": FEATURES[0]}, 2, ["duplicate"]),
        ({"agentview": FEATURES[0]}, 2, ["mismatch"]),
    ],
)
def test_camera_problems_list_both_sides(mapping: dict[str, str], empty: int, reasons: list[str]) -> None:
    problems = camera_problems(mapping, CAMERAS, FEATURES, empty_cameras=empty)
    assert [problem.reason for problem in problems] == reasons
    for problem in problems:
        assert problem.flag == "camera_map"
        assert all(name in problem for name in (*CAMERAS, *FEATURES))


def test_default_camera_map() -> None:
    assert default_camera_map(["image", "wrist"], FEATURES) == {"image": FEATURES[0], "wrist": FEATURES[1]}
    assert default_camera_map(["agentview"], [FEATURES[0], FEATURES[2]]) == {"agentview": FEATURES[0]}
    assert default_camera_map(CAMERAS, FEATURES) == {}
