"""The flags of `cli/train_sac_vla.py`."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.commands.custom_modules import CustomConfig
from rlvla.commands.runs.flags import TrainingRun
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
class SACRun(TrainingRun):
    """All groups of flags."""

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
