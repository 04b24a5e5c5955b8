"""The flags of reinforcement-learning commands: what their groups share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

from rlvla.checkpoints.run_folder import CHECKPOINTS
from rlvla.commands.custom_modules import CustomConfig
from rlvla.envs.config import EnvConfig
from rlvla.envs.workers.config import WorkerConfig


class TrainingRun:
    """All groups of flags of a reinforcement-learning command; a command's own is a dataclass of them.

    Attributes:
        run: folders, workers and seed (`BasicRunConfig`).
        batch: how many episodes are played and learned from.
        schedule: evaluation, checkpoints, logging (`ScheduleConfig`).
        strategy: how DeepSpeed is run (`StrategyConfig`).
        env: the environment.
        workers: its processes.
        custom: the user's modules.
        given: names of the flags present on the command line.
    """

    run: Any
    batch: Any
    schedule: Any
    strategy: Any
    env: EnvConfig
    workers: WorkerConfig
    custom: CustomConfig
    given: frozenset[str]

    @classmethod
    def kinds(cls) -> dict[str, type]:
        """The dataclass of each group."""
        return {name: kind for name, kind in get_type_hints(cls).items() if name != "given"}

    @property
    def groups(self) -> dict[str, Any]:
        """The groups by name."""
        return {name: group for name, group in vars(self).items() if name != "given"}

    @property
    def ckpt_path(self) -> Path:
        """Folder of the training checkpoints."""
        return Path(self.run.ckpt_path) if self.run.ckpt_path else Path(self.run.save_path) / CHECKPOINTS
