"""The families of pi0 and pi0.5 policies (`type: pi0`, `type: pi05`)."""

from __future__ import annotations

from pathlib import Path

from rlvla.models.families import CONFIG_FILE, register_policy_family
from rlvla.models.lerobot.family import LeRobotFamily
from rlvla.models.pi0.checkpoint import Pi0Files, check_pi0
from rlvla.models.pi0.config import PI0, PI05, Pi0Config
from rlvla.utils.data_files import read_json


class Pi0Family(LeRobotFamily):
    """Checks folders with `type: pi0` or `type: pi05`."""

    def read_config(self, folder: Path) -> Pi0Config:
        """See `LeRobotFamily.read_config`."""
        return Pi0Config.from_json(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)

    def read_files(self, folder: Path) -> Pi0Files:
        """See `LeRobotFamily.read_files`."""
        return check_pi0(folder)


for _name in (PI0, PI05):
    register_policy_family(_name, Pi0Family())
