"""Mapping of an environment's cameras to the image features of a LeRobot policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlvla.models.lerobot.config import EMPTY_CAMERA, IMAGES
from rlvla.utils.errors import Problem

FLAG = "camera_map"


def read_camera_map(entries: Sequence[str]) -> tuple[dict[str, str], list[Problem]]:
    """The mapping in entries `camera=feature` of the flag, and the problems with them.

    `observation.images.` may be left out in front of a feature without a dot.
    """
    mapping: dict[str, str] = {}
    problems = []
    for entry in entries:
        camera, equals, key = entry.partition("=")
        if not equals or not camera or not key:
            text = f"--{FLAG} {entry}: write camera=feature, e.g. agentview={IMAGES}image"
            problems.append(Problem(FLAG, "invalid_value", text))
        elif camera in mapping:
            problems.append(Problem(FLAG, "duplicate", f"--{FLAG} names the camera {camera} repeated"))
        else:
            mapping[camera] = key if "." in key else IMAGES + key
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
    remedy = f"give --{FLAG} camera=feature for each"
    problems = []

    def add(reason: str, text: str) -> None:
        problems.append(Problem(FLAG, reason, f"--{FLAG}: {text}; {sides}; {remedy}"))

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


def camera_order(mapping: Mapping[str, str], cameras: Sequence[str], keys: Sequence[str]) -> list[int]:
    """Index of the environment's camera for each image that the network reads, in its order.

    Missing features are left out: their masked images would only add cost.
    """
    by_key = {key: cameras.index(camera) for camera, key in mapping.items()}
    return [by_key[key] for key in keys if key in by_key]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
