"""The flags of `cli/train_ppo_vla.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvla.commands.custom_modules import CustomConfig
from rlvla.commands.runs.flags import TrainingRun
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.registry import located
from rlvla.envs.workers.config import WorkerConfig
from rlvla.models.config import ActorConfig, PolicyConfig
from rlvla.rewards import RewardConfig, SuccessConfig
from rlvla.rollout.config import ROLLOUT_BACKENDS, BackendConfig, BackendSetup, RolloutConfig
from rlvla.trainer.algorithm_config import AlgorithmConfig, CorrectionConfig, FilterConfig
from rlvla.trainer.config import (
    AsyncConfig,
    BatchConfig,
    GuardConfig,
    OptimizationConfig,
    RunConfig,
    ScheduleConfig,
)
from rlvla.utils.deepspeed.config import StrategyConfig, launched_world_size

if TYPE_CHECKING:
    from rlvla.commands.setup import CheckedRun


@dataclass(frozen=True)
class PPORun(TrainingRun):
    """All groups of flags."""

    run: RunConfig
    rewards: RewardConfig
    policy: PolicyConfig
    env: EnvConfig
    split: SplitConfig
    batch: BatchConfig
    algorithm: AlgorithmConfig
    filters: FilterConfig
    correction: CorrectionConfig
    optimization: OptimizationConfig
    schedule: ScheduleConfig
    actor: ActorConfig
    strategy: StrategyConfig
    success: SuccessConfig = SuccessConfig()
    workers: WorkerConfig = WorkerConfig()
    rollout: RolloutConfig = RolloutConfig()
    guards: GuardConfig = GuardConfig()
    backend: BackendConfig = BackendConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    custom: CustomConfig = CustomConfig()
    given: frozenset[str] = frozenset()
    unselected: Mapping[str, Any] = field(default_factory=dict)

    @property
    def policies_on_ray(self) -> bool:
        """Whether policies run on the cluster of --ray_address."""
        return ROLLOUT_BACKENDS.get(self.backend.rollout_backend).uses_ray

    @property
    def critic_folder(self) -> str | None:
        """The folder that the critic starts from; None: that of the policy."""
        if self.run.critic_from == "policy":
            return self.run.critic_pretrain
        scores = "rm_model" in self.rewards.source_names
        return self.rewards.reward_pretrain or (self.rewards.rm_model_path if scores else None)

    def backend_setup(self, setting: CheckedRun | None) -> BackendSetup:
        """Facts of the run for the rollout backend; `setting` is None if other flags are wrong."""
        return BackendSetup(
            self.backend,
            None if setting is None else setting.checkpoint,
            self.actor,
            self.workers.ray_address or "auto",
            tuple(map(located, self.custom.custom_module)),
            Path(self.run.save_path),
            bf16=self.strategy.bf16,
            episodes=self.rollout.rollout_max_batch or self.run.num_envs,
            ranks=launched_world_size(),
        )
