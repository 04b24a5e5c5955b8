"""The families of pi0 and pi0.5 policies (`type: pi0`, `type: pi05`)."""

from __future__ import annotations

from rlvla.models.families import register_policy_family
from rlvla.models.lerobot.family import LeRobotFamily
from rlvla.models.pi0.checkpoint import check_pi0
from rlvla.models.pi0.config import PI0, PI05, Pi0Config


class Pi0Family(LeRobotFamily):
    """Folders with `type: pi0` or `type: pi05`."""


for _name in (PI0, PI05):
    register_policy_family(_name, Pi0Family(Pi0Config, check_pi0))
