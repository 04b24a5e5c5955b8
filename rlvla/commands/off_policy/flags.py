"""The flags of `cli/train_sac_vla.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlvla.commands.custom_modules import CustomConfig
from rlvla.commands.runs.flags import TrainingRun
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.workers.config import WorkerConfig
from rlvla.rewards import RewardConfig, SuccessConfig
from rlvla.rollout import RolloutConfig
from rlvla.trainer.config import ScheduleConfig
from rlvla.trainer.off_policy.config import (
    DEFAULTS,
    DSRL,
    NoiseConfig,
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
    noise: NoiseConfig = NoiseConfig()
    success: SuccessConfig = SuccessConfig()
    workers: WorkerConfig = WorkerConfig()
    rollout: RolloutConfig = RolloutConfig()
    guards: SACGuardConfig = SACGuardConfig()
    custom: CustomConfig = CustomConfig()
    given: frozenset[str] = frozenset()
    unselected: Mapping[str, Any] = field(default_factory=dict)

    def completed(self) -> SACRun:
        """With the defaults that depend on --policy."""
        dsrl = self.sac.policy == DSRL
        missing = {
            name: {f: DEFAULTS[f][not dsrl] for f in DEFAULTS if getattr(getattr(self, name), f, 0) is None}
            for name in ("batch", "sac")
        }
        return replace(self, **{name: replace(getattr(self, name), **values) for name, values in missing.items()})
