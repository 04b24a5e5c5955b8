"""A rollout backend of one's own: the policy plays in a lower precision (`--rollout_backend bf16`)."""

import copy

import torch

from rlvla.rollout.backends import register_rollout_backend
from rlvla.rollout.backends.colocated import PolicyCopy
from rlvla.utils.errors import Problem


@register_rollout_backend("bf16")
class LowPrecision(PolicyCopy):
    """Rollouts with bfloat16 weights, independent of the training precision."""

    @classmethod
    def problems(cls, setup):
        if setup.checkpoint is not None and setup.checkpoint.spec.noise != "uniform":
            text = "--rollout_backend bf16 rounds sampled actions, unless they are tokens; choose such a policy"
            return [Problem("rollout_backend", "mismatch", text)]
        return []

    def load(self, policy, version):
        super().load(copy.deepcopy(policy).to(torch.bfloat16), version)

    def stage(self, policy, version):
        super().stage(copy.deepcopy(policy).to(torch.bfloat16), version)
