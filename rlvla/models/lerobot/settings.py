"""Settings of a LeRobot policy that only rlvla reads, in a file beside LeRobot's: sampling, cameras, critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlvla.models.flow.settings import ASKED_SCORES, FLOW_SETTINGS, PREFIX, FlowSettings
from rlvla.models.lerobot.config import EMPTY_CAMERA, IMAGES, LeRobotConfig, image_feature
from rlvla.utils.data_files import check_types, read_json
from rlvla.utils.errors import Problem

# Inputs of a critic: the expert's output at t = 1, or the mean of the prefix.
PREFIX_FEATURES = "prefix"
CRITIC_FEATURES = ("expert", PREFIX_FEATURES)
# LeRobot reads config.json strictly and ignores files that it does not know.
SETTINGS_FILE = "rlvla_policy.json"
# Command-line settings of LeRobot policies.
LEROBOT_SETTINGS = ("camera_map", "critic_features", "platform")
ROTATED_PLATFORM = "libero"  # LeRobot rotates its images by 180 degrees
_TYPES = {
    "cameras": list[str],
    "camera_map": dict[str, str],
    "critic_features": str,
    "unnorm_key": str,
    "turned_images": bool,
}
_TYPES |= {PREFIX + name: kind for name, kind in (("method", str), ("noise_level", float), ("noisy_steps", str))}
_TYPES |= {PREFIX + "eval_noise": str}


@dataclass(frozen=True)
class LeRobotSettings:
    """Sampling, cameras and critic of a policy.

    Attributes:
        n_action_steps: A, actions of a chunk that are executed.
        flow: sampling of actions; `steps` goes into config.json, as `num_steps` or `num_inference_steps`.
        cameras: of the environment, in its order; (): unknown, images come in the order of the features.
        camera_map: camera -> image feature.
        critic_features: inputs of a critic, one of `CRITIC_FEATURES`.
        turned_images: images are rotated by 180 degrees in `prepare`.
        unnorm_key: data set of the statistics; "" if unknown.
    """

    n_action_steps: int
    flow: FlowSettings
    cameras: tuple[str, ...] = ()
    camera_map: Mapping[str, str] = field(default_factory=dict)
    critic_features: str = CRITIC_FEATURES[0]
    unnorm_key: str = ""
    turned_images: bool = False

    def image_order(self, keys: list[str]) -> list[int]:
        """Index of the environment's camera for each image that the network reads, in the order of the features `keys`.

        Missing features are left out: their masked images would only add cost.
        """
        if not self.cameras:
            return list(range(len(present_features(keys))))
        by_key = {key: self.cameras.index(camera) for camera, key in self.camera_map.items()}
        return [by_key[key] for key in keys if key in by_key]

    def to_json(self) -> dict[str, Any]:
        """The content of `SETTINGS_FILE`, without the settings in config.json."""
        flow = {PREFIX + name: getattr(self.flow, name) for name in ("method", "noise_level", "noisy_steps")}
        flow[PREFIX + "eval_noise"] = self.flow.eval_noise
        cameras = {"cameras": list(self.cameras), "camera_map": dict(self.camera_map)} if self.cameras else {}
        key = {"unnorm_key": self.unnorm_key} if self.unnorm_key else {}
        turned = {"turned_images": True} if self.turned_images else {}
        return {**flow, **cameras, "critic_features": self.critic_features, **key, **turned}


def read_camera_map(entries: Sequence[str]) -> tuple[dict[str, str], list[Problem]]:
    """The mapping in entries `camera=feature` of the flag, and the problems with them.

    `observation.images.` may be left out in front of a feature without a dot.
    """
    mapping: dict[str, str] = {}
    problems = []
    for entry in entries:
        camera, equals, key = entry.partition("=")
        if not equals or not camera or not key:
            text = f"--camera_map {entry}: write camera=feature, e.g. agentview={IMAGES}image"
            problems.append(Problem("camera_map", "invalid_value", text))
        elif camera in mapping:
            problems.append(Problem("camera_map", "duplicate", f"--camera_map names the camera {camera} twice"))
        else:
            mapping[camera] = image_feature(key)
    return mapping, problems


def default_camera_map(cameras: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """The mapping without a flag: features named like cameras, or the only feature for the only camera."""
    named = {camera: IMAGES + camera for camera in cameras if IMAGES + camera in keys}
    present = present_features(keys)
    if len(named) < len(cameras) == len(present) == 1:
        return {cameras[0]: present[0]}
    return named


def present_features(keys: Sequence[str]) -> list[str]:
    """Image features without the placeholders of missing cameras."""
    return [key for key in keys if not key.startswith(EMPTY_CAMERA)]


def camera_problems(
    mapping: Mapping[str, str], cameras: Sequence[str], keys: Sequence[str], *, empty_cameras: int = 0
) -> list[Problem]:
    """Check a mapping of cameras to image features; every problem lists both sides.

    Args:
        mapping: camera of the environment -> key of an image feature.
        cameras: of the environment.
        keys: image features of the policy, in its order.
        empty_cameras: number of features that may be missing.
    """
    sides = f"the environment has {_listed(cameras)}; the policy reads {_listed(keys)}"
    remedy = "give --camera_map camera=feature for each"
    problems = []

    def add(reason: str, text: str) -> None:
        problems.append(Problem("camera_map", reason, f"--camera_map: {text}; {sides}; {remedy}"))

    unknown = [camera for camera in mapping if camera not in cameras]
    if unknown:
        add("unknown_name", f"{_listed(unknown)} is not a camera of the environment")
    undefined = [key for key in mapping.values() if key not in keys]
    if undefined:
        add("unknown_name", f"{_listed(undefined)} is not an image feature of the policy")
    repeated = sorted({key for key in mapping.values() if list(mapping.values()).count(key) > 1})
    if repeated:
        add("duplicate", f"several cameras are mapped to {_listed(repeated)}")
    unmapped = [camera for camera in cameras if camera not in mapping]
    if unmapped:
        add("mismatch", f"{_listed(unmapped)} is not mapped to an image feature")
    missing = [key for key in keys if key not in mapping.values()]
    if len(missing) > empty_cameras and not undefined:
        allowed = f" (empty_cameras allows {empty_cameras})" if empty_cameras else ""
        add("mismatch", f"no camera is mapped to {_listed(missing)}{allowed}")
    return problems


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def read_settings(
    folder: Path, config: LeRobotConfig, overrides: Mapping[str, Any]
) -> tuple[LeRobotSettings, list[Problem]]:
    """Settings in a folder, overridden by the flags of a run, and their problems.

    Args:
        folder: of the policy.
        config: its config.json.
        overrides: flags by name: `action_chunk_len`, `camera_map`, `critic_features`, `platform` and the fields of
            `FlowSettings`; `cameras` of the environment.

    Raises:
        ConfigError: the file in the folder cannot be read, or holds values of other types.
    """
    path = folder / SETTINGS_FILE
    recorded = read_json(path) if path.is_file() else {}
    check_types({name: recorded[name] for name in _TYPES if name in recorded}, _TYPES, path)
    values = {**recorded, **{name: value for name, value in overrides.items() if value is not None}}
    flow = FlowSettings.of({name: values.get(name) for name in FLOW_SETTINGS})
    if PREFIX + "steps" not in overrides:
        flow = replace(flow, steps=config.steps)
    flow = replace(flow, asked_scores=overrides.get(ASKED_SCORES) or flow.asked_scores)
    problems = [_problem(PREFIX + name, text, overrides, path) for name, text in flow.problems()]
    actions = overrides.get("action_chunk_len") or config.n_action_steps
    if actions > config.chunk_size:
        text = f"--action_chunk_len {actions}: the policy predicts {config.chunk_size} actions; execute at most as many"
        problems.append(Problem("action_chunk_len", "mismatch", text))
        actions = config.n_action_steps
    critic = values.get("critic_features", CRITIC_FEATURES[0])
    if critic not in CRITIC_FEATURES:
        text = f"is {critic!r}; it must be one of {', '.join(CRITIC_FEATURES)}"
        problems.append(_problem("critic_features", text, overrides, path))
    cameras, mapping, wrong = _cameras(recorded, config, overrides)
    platform = overrides.get("platform")
    problems += platform_problems(platform)
    turned = platform == ROTATED_PLATFORM or recorded.get("turned_images", False)
    key = recorded.get("unnorm_key", "")
    return LeRobotSettings(actions, flow, cameras, mapping, critic, key, turned), [*problems, *wrong]


def platform_problems(platform: str | None) -> list[Problem]:
    """A platform without conventions for images in LeRobot."""
    if platform in (None, ROTATED_PLATFORM):
        return []
    text = f"--platform {platform}: for policies in LeRobot's format only {ROTATED_PLATFORM} has a meaning"
    return [Problem("platform", "mismatch", f"{text} (rotated images); leave it out")]


def _cameras(
    recorded: Mapping[str, Any], config: LeRobotConfig, overrides: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, str], list[Problem]]:
    """The environment's cameras and their mapping: from the flag, else the file, else equal names."""
    from_flag, problems = read_camera_map(overrides.get("camera_map") or ())
    cameras = tuple(overrides.get("cameras") or recorded.get("cameras") or from_flag)
    if not cameras:
        return (), {}, problems
    keys = config.features.cameras
    from_file = {camera: key for camera, key in recorded.get("camera_map", {}).items() if camera in cameras}
    mapping = from_flag or from_file or default_camera_map(cameras, keys)
    return cameras, mapping, problems or camera_problems(mapping, cameras, keys, empty_cameras=config.empty_cameras)


def _problem(name: str, text: str, overrides: Mapping[str, Any], path: Path) -> Problem:
    if name in overrides:
        return Problem(name, "out_of_range", f"--{name} {text}")
    return Problem(None, "invalid_file", f"{path}: {name} {text}")
