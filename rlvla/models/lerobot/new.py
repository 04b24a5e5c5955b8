"""Small new policies in LeRobot's format for given demonstrations."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvla.models.config import ActorConfig
from rlvla.models.flow.settings import FlowSettings
from rlvla.models.lerobot.config import ACTION, IMAGES, STATE, Features
from rlvla.models.lerobot.settings import SETTINGS_FILE, LeRobotSettings
from rlvla.utils.errors import Problem
from rlvla.utils.files import write_json

# Choices of `--pretrain tiny`: a transformer on action tokens, or a flow policy in LeRobot's format.
TINY_FAMILIES = ("openvla", "smolvla")
# Family -> module with `new_policy(folder, facts, sizes, *, seed)` and `new_policy_problems(sizes)`.
_HOMES = {"smolvla": "rlvla.models.smolvla.tiny"}


@dataclass(frozen=True)
class NewPolicySizes:
    """Sizes of a new policy; None: the default of the family.

    Attributes:
        patch_size: side of a patch in pixels.
        vision_dim: width of the vision tower.
        vision_depth: its layers.
        llm_dim: width of the decoder.
        llm_layers: its layers.
    """

    patch_size: int | None = None
    vision_dim: int | None = None
    vision_depth: int | None = None
    llm_dim: int | None = None
    llm_layers: int | None = None

    def given(self) -> dict[str, int]:
        """Sizes that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class NewPolicyFacts:
    """Data that a new policy is made for.

    Attributes:
        sentences: all instructions.
        statistics: one entry of dataset statistics, with "action" and "proprio".
        unnorm_key: its name.
        cameras: names, in the order of the images.
        camera_map: camera -> image feature; {}: features named like the cameras.
        image_shape: height and width of the images in pixels.
        chunk_len: actions predicted and executed per decision.
        state_dim: length of the state.
        action_dim: dimensions of an action.
    """

    sentences: Sequence[str]
    statistics: Mapping[str, Any]
    unnorm_key: str
    cameras: Sequence[str]
    image_shape: tuple[int, int]
    chunk_len: int
    state_dim: int
    action_dim: int
    camera_map: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, str]:
        """Camera -> image feature."""
        return {camera: self.camera_map.get(camera, IMAGES + camera) for camera in self.cameras}

    def lerobot_statistics(self) -> dict[str, Any]:
        """Statistics by LeRobot's names."""
        names = {STATE: "proprio", ACTION: "action"}
        return {key: {n: v for n, v in self.statistics[name].items() if n != "mask"} for key, name in names.items()}

    def features(self) -> Features:
        """Inputs and outputs of the policy."""
        return Features.of(self.keys.values(), self.image_shape, self.state_dim, self.action_dim)


def build_new_policy(family: str, folder: Path, facts: NewPolicyFacts, sizes: NewPolicySizes, *, seed: int) -> None:
    """Write a policy with random weights; the same arguments give identical files."""
    importlib.import_module(_HOMES[family]).new_policy(folder, facts, sizes, seed=seed)
    write_settings(folder, facts, facts.chunk_len)


def write_settings(
    folder: Path, facts: NewPolicyFacts, n_action_steps: int, *, further: Mapping[str, str] | None = None
) -> None:
    """Record the image feature of each camera, and `further` settings of the family."""
    cameras = tuple(facts.cameras)
    settings = LeRobotSettings(n_action_steps, FlowSettings(), cameras, facts.keys, unnorm_key=facts.unnorm_key)
    write_json(folder / SETTINGS_FILE, {**settings.to_json(), **(further or {})})


def new_policy_problems(family: str, sizes: NewPolicySizes, actor: ActorConfig | None) -> list[Problem]:
    """Impossible sizes, and a choice of trained parts where none has been trained before."""
    problems: list[Problem] = importlib.import_module(_HOMES[family]).new_policy_problems(sizes)
    if actor is not None and actor.train_expert_only:
        text = "--train_expert_only: no part of a new policy has been trained yet; leave it out"
        problems.append(Problem("train_expert_only", "mismatch", text))
    return problems
