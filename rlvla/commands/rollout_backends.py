"""Flags of the backend that plays the training episodes: what it is told of the run, and its checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.commands.setup import CheckedRun
from rlvla.envs.registry import located
from rlvla.rollout.config import ROLLOUT_BACKENDS, BackendSetup
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun


def backend_setup(flags: PPORun, setting: CheckedRun | None) -> BackendSetup:
    """What a backend is told of the run; `setting` is None if the rest of its configuration is wrong."""
    return BackendSetup(
        flags.backend,
        None if setting is None else setting.checkpoint,
        flags.actor,
        flags.workers.ray_address or "auto",
        tuple(map(located, flags.custom.custom_module)),
        Path(flags.run.save_path),
        bf16=flags.strategy.bf16,
        episodes=flags.rollout.rollout_max_batch or flags.run.num_envs,
        ranks=launched_world_size(),
    )


def backend_problems(flags: PPORun, setting: CheckedRun | None) -> list[Problem]:
    """Why the chosen backend cannot play."""
    if flags.schedule.val_only:  # evaluations use the policy itself
        return []
    return ROLLOUT_BACKENDS.get(flags.backend.rollout_backend).problems(backend_setup(flags, setting))
