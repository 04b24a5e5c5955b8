"""The family of SmolVLA policies (`type: smolvla`)."""

from __future__ import annotations

from pathlib import Path

from rlvla.models.families import CONFIG_FILE, register_policy_family
from rlvla.models.lerobot.family import LeRobotFamily
from rlvla.models.smolvla.checkpoint import SmolVLAFiles, check_smolvla
from rlvla.models.smolvla.config import MODEL_TYPE, SmolVLAConfig
from rlvla.utils.data_files import read_json


class SmolVLAFamily(LeRobotFamily):
    """Checks folders with `type: smolvla`."""

    def read_config(self, folder: Path) -> SmolVLAConfig:
        """See `LeRobotFamily.read_config`."""
        return SmolVLAConfig.from_json(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)

    def read_files(self, folder: Path) -> SmolVLAFiles:
        """See `LeRobotFamily.read_files`."""
        return check_smolvla(folder)


register_policy_family(MODEL_TYPE, SmolVLAFamily())
