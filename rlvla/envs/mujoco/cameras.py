"""Additional cameras for MuJoCo models."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class CameraPlacement:
    """Position and target of a camera (meters, world frame), and its vertical field of view in degrees.

    The target is at the center of the image; it must not be directly above or below the position.
    """

    position: tuple[float, float, float]
    target: tuple[float, float, float]
    fovy: float

    def axes(self) -> np.ndarray:
        """[6] unit vectors to the right and upwards in the image (world frame), as MuJoCo's `xyaxes`."""
        forward = np.subtract(self.target, self.position)
        right = np.cross(forward, [0.0, 0.0, 1.0])
        up = np.cross(right, forward)
        return np.concatenate([right / np.linalg.norm(right), up / np.linalg.norm(up)])


def add_camera(xml: str, name: str, placement: CameraPlacement) -> str:
    """Add a fixed camera to the XML of a MuJoCo model."""
    root = ET.fromstring(xml)
    worldbody = root.find("worldbody")
    assert worldbody is not None, "a MuJoCo model has a worldbody"
    numbers: dict[str, ArrayLike] = {"pos": placement.position, "xyaxes": placement.axes(), "fovy": placement.fovy}
    texts = {key: " ".join(repr(float(x)) for x in np.atleast_1d(value)) for key, value in numbers.items()}
    ET.SubElement(worldbody, "camera", {"name": name, "mode": "fixed", **texts})
    return ET.tostring(root, encoding="unicode")
