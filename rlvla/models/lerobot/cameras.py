"""Which camera of the environment a LeRobot policy sees as which of its image features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlvla.models.lerobot.features import EMPTY_CAMERA, IMAGES
from rlvla.utils.errors import Problem

FLAG = "camera_map"


def read_camera_map(entries: Sequence[str]) -> tuple[dict[str, str], list[Problem]]:
    """The mapping given by entries `camera=feature`, and what is wrong with them.

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
            problems.append(Problem(FLAG, "duplicate", f"--{FLAG} names the camera {camera} twice"))
        else:
            mapping[camera] = key if "." in key else IMAGES + key
    return mapping, problems


def default_camera_map(cameras: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """The mapping to use if none is given: features named like cameras, or the only feature for the only camera."""
    named = {camera: IMAGES + camera for camera in cameras if IMAGES + camera in keys}
    seen = [key for key in keys if not key.startswith(EMPTY_CAMERA)]
    if len(named) < len(cameras) == len(seen) == 1:
        return {cameras[0]: seen[0]}
    return named


def camera_problems(
    mapping: Mapping[str, str], cameras: Sequence[str], keys: Sequence[str], *, empty_cameras: int = 0
) -> list[Problem]:
    """Check a mapping of cameras to image features; every problem lists both sides.

    Args:
        mapping: camera of the environment -> key of an image feature.
        cameras: those of the environment.
        keys: image features of the policy, in its order.
        empty_cameras: how many features the policy allows to be missing.
    """
    sides = f"the environment has {_listed(cameras)}; the policy reads {_listed(keys)}"
    remedy = f"give --{FLAG} camera=feature for each"
    problems = []

    def add(reason: str, text: str) -> None:
        problems.append(Problem(FLAG, reason, f"--{FLAG}: {text}; {sides}; {remedy}"))

    unknown = [camera for camera in mapping if camera not in cameras]
    if unknown:
        add("unknown_name", f"{_listed(unknown)} is no camera of the environment")
    strange = [key for key in mapping.values() if key not in keys]
    if strange:
        add("unknown_name", f"{_listed(strange)} is no image feature of the policy")
    twice = sorted({key for key in mapping.values() if list(mapping.values()).count(key) > 1})
    if twice:
        add("duplicate", f"several cameras are mapped to {_listed(twice)}")
    unmapped = [camera for camera in cameras if camera not in mapping]
    if unmapped:
        add("mismatch", f"nothing says what {_listed(unmapped)} is to the policy")
    missing = [key for key in keys if key not in mapping.values()]
    if len(missing) > empty_cameras and not strange:
        allowed = f" (empty_cameras allows {empty_cameras})" if empty_cameras else ""
        add("mismatch", f"no camera is mapped to {_listed(missing)}{allowed}")
    return problems


def camera_order(mapping: Mapping[str, str], cameras: Sequence[str], keys: Sequence[str]) -> list[int]:
    """For each image that the network reads, in its order, the index of the environment's camera.

    Missing features are left out: their images would be masked, which changes nothing but the cost.
    """
    by_key = {key: cameras.index(camera) for camera, key in mapping.items()}
    return [by_key[key] for key in keys if key in by_key]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
