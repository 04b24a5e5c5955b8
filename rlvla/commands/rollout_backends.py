"""Flags of the backend that plays the training episodes: what it is told of the run, and its checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.commands.problem_texts import unread
from rlvla.commands.setup import CheckedRun
from rlvla.envs.registry import located
from rlvla.rollout.config import ROLLOUT_BACKENDS, VLLM, BackendSetup
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun

_READ_BY = {"rollout_actors": "actors", "rollout_python": VLLM}


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
    """Why the chosen backend cannot play, and flags that it does not read."""
    config = flags.backend
    given = {name: getattr(config, name) for name, backend in _READ_BY.items() if backend != config.rollout_backend}
    why = {"switch": "rollout_backend", "value": config.rollout_backend}
    unread_flags = [
        unread(name, f"--{name} {value}", "value", **why) for name, value in given.items() if value is not None
    ]
    if flags.schedule.val_only:  # evaluations use the policy itself
        return unread_flags
    chosen = ROLLOUT_BACKENDS.get(config.rollout_backend)
    return unread_flags + chosen.problems(backend_setup(flags, setting))
