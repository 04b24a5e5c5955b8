"""Checking on real observations whether training can start from a policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlvla.envs.base import Observation
from rlvla.experience import Experience
from rlvla.models.families import Checkpoint
from rlvla.models.policy import Policy


def check_first_decisions(checkpoint: Checkpoint, policy: Policy, observations: Sequence[Observation]) -> None:
    """Check the policy's decisions on observations of its task; see `Checkpoint.check_decisions`.

    Raises:
        ConfigError: the decisions are unsuitable as a starting point, such as action tokens that are close to random.
    """
    seen = [policy.prepare(observation.images, observation.proprio) for observation in observations]
    proprio = None if seen[0][1] is None else torch.from_numpy(np.stack([state for _, state in seen]))
    images = torch.from_numpy(np.stack([images for images, _ in seen]))
    instructions = [observation.instruction for observation in observations]
    checkpoint.check_decisions(policy, Experience(images=images, proprio=proprio, instructions=instructions))
