"""The flags of `cli/train_sac_vla.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import CHECKPOINTS
from rlvla.commands.custom_modules import CustomConfig
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.workers.config import WorkerConfig
from rlvla.rewards import RewardConfig, SuccessConfig
from rlvla.rollout import RolloutConfig
from rlvla.trainer.config import ScheduleConfig
from rlvla.trainer.off_policy.config import (
    ReplayConfig,
    SACBatchConfig,
    SACConfig,
    SACGuardConfig,
    SACRunConfig,
    SACStrategyConfig,
)


@dataclass(frozen=True)
class SACRun:
    """All groups of flags.

    Attributes:
        given: names of the flags present on the command line.
    """

    run: SACRunConfig
    env: EnvConfig
    split: SplitConfig
    rewards: RewardConfig
    batch: SACBatchConfig
    sac: SACConfig
    replay: ReplayConfig
    schedule: ScheduleConfig
    strategy: SACStrategyConfig
    success: SuccessConfig = SuccessConfig()
    workers: WorkerConfig = WorkerConfig()
    rollout: RolloutConfig = RolloutConfig()
    guards: SACGuardConfig = SACGuardConfig()
    custom: CustomConfig = CustomConfig()
    given: frozenset[str] = frozenset()

    @property
    def groups(self) -> dict[str, Any]:
        """The groups by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "given"}

    @property
    def ckpt_path(self) -> Path:
        """Folder of the training checkpoints."""
        return Path(self.run.ckpt_path) if self.run.ckpt_path else Path(self.run.save_path) / CHECKPOINTS
