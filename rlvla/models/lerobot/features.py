"""What a LeRobot policy reads and writes: `input_features` and `output_features` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
EMPTY_CAMERA = IMAGES + "empty_camera_"
# The statistics that each normalization mode needs, as named in LeRobot's data sets.
STATISTICS: dict[str, tuple[str, ...]] = {
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


@dataclass(frozen=True)
class Feature:
    """One entry of `input_features` or `output_features`.

    Attributes:
        kind: "STATE", "VISUAL", "ACTION", ...
        shape: of one observation or action, without batch.
    """

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Features:
    """Features of a policy by key, in the order of its config.json."""

    inputs: Mapping[str, Feature]
    outputs: Mapping[str, Feature]

    @property
    def state_dim(self) -> int:
        """Length of the state vector before padding."""
        return self.inputs[STATE].shape[0]

    @property
    def action_dim(self) -> int:
        """D, dimensions of an action before padding."""
        return self.outputs[ACTION].shape[0]

    @property
    def cameras(self) -> list[str]:
        """Keys of the images, in the order in which the network reads them."""
        return [key for key, feature in self.inputs.items() if feature.kind == "VISUAL"]

    def kinds(self) -> dict[str, str]:
        """Kind of every feature by key."""
        return {key: feature.kind for key, feature in {**self.inputs, **self.outputs}.items()}


def read_features(raw: Mapping[str, Any]) -> tuple[Features, list[str]]:
    """The features in a config.json, and what is wrong with them in words."""
    sides: list[dict[str, Feature]] = []
    problems = []
    for name in ("input_features", "output_features"):
        side = {}
        entries = raw.get(name)
        if not isinstance(entries, Mapping):
            problems.append(f"{name} is missing; it lists what the policy reads or writes")
            entries = {}
        for key, entry in entries.items():
            shape = entry.get("shape") if isinstance(entry, Mapping) else None
            kind = entry.get("type") if isinstance(entry, Mapping) else None
            fits = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
            if not isinstance(kind, str) or not fits or not isinstance(shape, list):
                problems.append(f"{name}[{key!r}] needs a type and a shape of positive whole numbers")
                continue
            side[key] = Feature(kind, tuple(shape))
        sides.append(side)
    features = Features(*sides)
    if not problems:
        for key, side in ((STATE, features.inputs), (ACTION, features.outputs)):
            if key not in side or len(side[key].shape) != 1:
                problems.append(f"{key} must be one of its features, as a vector")
        if not features.cameras:
            problems.append("no input feature has type VISUAL; the policy needs a camera")
    return features, problems


def mode_problems(modes: Mapping[str, Any], where: str) -> list[str]:
    """What is wrong with a map from kinds of features to normalization modes."""
    known = ", ".join(STATISTICS)
    problems = [
        f"{where}[{kind!r}] is {mode!r}; known are {known}"
        for kind, mode in modes.items()
        if not isinstance(mode, str) or mode not in STATISTICS
    ]
    if not problems and modes.get("VISUAL", "IDENTITY") != "IDENTITY":
        problems.append(f"{where}['VISUAL'] is {modes['VISUAL']}; images are supported with IDENTITY alone")
    return problems
