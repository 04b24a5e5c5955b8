"""The family of SmolVLA policies (`type: smolvla`)."""

from __future__ import annotations

from rlvla.models.families import register_policy_family
from rlvla.models.lerobot.family import LeRobotFamily
from rlvla.models.smolvla.checkpoint import check_smolvla
from rlvla.models.smolvla.config import MODEL_TYPE, SmolVLAConfig


class SmolVLAFamily(LeRobotFamily):
    """Folders with `type: smolvla`."""


register_policy_family(MODEL_TYPE, SmolVLAFamily(SmolVLAConfig, check_smolvla))
