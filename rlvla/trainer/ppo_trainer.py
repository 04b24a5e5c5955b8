"""PPO and related methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvla.algorithms.kl import AdaptiveKLController, FixedKLController
from rlvla.data.demonstrations import Demonstrations
from rlvla.envs.base import TaskSpec
from rlvla.rollout import RolloutEngine
from rlvla.trainer.algorithm import AlgorithmSetup, register_algorithm
from rlvla.trainer.algorithm_config import OF_POLICY_LOSS
from rlvla.trainer.config import PPOConfig
from rlvla.trainer.models import Models
from rlvla.trainer.on_policy import OnPolicy
from rlvla.trainer.trainer import Trainer
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy


@register_algorithm("ppo")
class PPO(OnPolicy):
    """On-policy learning with any advantage estimator and policy loss of `rlvla.algorithms`.

    Attributes:
        kl: controls the KL coefficient.
    """

    uses_critic = uses_reference = True
    scores = OF_POLICY_LOSS

    def __init__(self, setup: AlgorithmSetup):
        super().__init__(setup)
        algorithm = setup.config.algorithm
        self.kl = FixedKLController(algorithm.init_kl_coef)
        if algorithm.kl_target is not None:
            self.kl = AdaptiveKLController(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)

    @property
    def kl_coef(self) -> float:
        """The KL coefficient."""
        return self.kl.value

    def finish_update(self, values: dict[str, float], groups: int) -> None:
        """Adapt the KL coefficient to the KL measured."""
        if self.setup.config.algorithm.init_kl_coef:
            values["actor/kl_coef"] = self.kl.value
        if "actor/ref_kl" in values:
            self.kl.update(values["actor/ref_kl"], groups * self.setup.config.batch.n_samples_per_prompt)

    def state_dict(self) -> dict[str, Any]:
        """The KL coefficient, and the state of `OnPolicy`."""
        return {"kl": self.kl.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.kl.load_state_dict(state["kl"])
        super().load_state_dict(state)


class PPOTrainer(Trainer):
    """The training loop with PPO, or with the algorithm that `config.algorithm.algorithm` names.

    Args:
        models: actor, critic and reference policy.
        strategy: process group and DeepSpeed engines.
        rollout: plays episodes on this rank's workers.
        tasks: tasks for training and evaluation.
        config: the configuration of the run.
        save_path: run folder, which receives metrics, TensorBoard files, and `policy/` at the end.
        ckpt_path: folder of the training checkpoints.
        demos: demonstrations for a supervised loss, or None.
    """

    def __init__(
        self,
        models: Models,
        strategy: DeepspeedStrategy,
        rollout: RolloutEngine,
        tasks: Sequence[TaskSpec],
        config: PPOConfig,
        save_path: Path,
        ckpt_path: Path,
        demos: Demonstrations | None = None,
    ):
        setup = AlgorithmSetup(models, strategy, config, tasks, demos)
        super().__init__(setup, rollout, save_path, ckpt_path)
