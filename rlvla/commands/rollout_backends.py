"""Flags of the backend that plays the training episodes: what it is told of the run, and its checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.commands.problem_texts import unread
from rlvla.commands.setup import CheckedRun
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
        flags.custom.custom_module,
        Path(flags.run.save_path),
        ranks=launched_world_size(),
    )


def backend_problems(flags: PPORun, setting: CheckedRun | None) -> list[Problem]:
    """Why the chosen backend cannot play, and flags that it does not read."""
    config, unread_flags = flags.backend, []
    if config.rollout_actors is not None and config.rollout_backend != "actors":
        typed = f"--rollout_actors {config.rollout_actors}"
        why = {"switch": "rollout_backend", "value": config.rollout_backend}
        unread_flags.append(unread("rollout_actors", typed, "value", **why))
    if flags.schedule.val_only:  # evaluations use the policy itself
        return unread_flags
    chosen = ROLLOUT_BACKENDS.get(config.rollout_backend)
    return unread_flags + chosen.problems(backend_setup(flags, setting))
