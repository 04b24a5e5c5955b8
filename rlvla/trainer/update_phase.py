"""The update of an iteration: epochs of optimizer steps over its experience."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlvla.experience import Experience
from rlvla.trainer.config import BatchConfig, OptimizationConfig
from rlvla.trainer.demonstration_loss import DemonstrationLoss
from rlvla.trainer.ema import WeightAverage
from rlvla.trainer.guards import Guards
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.replay import ReplayList
from rlvla.trainer.throughput import Throughput
from rlvla.trainer.updates import Updater
from rlvla.utils.logging import progress_bar
from rlvla.utils.seeding import derive_rng
from rlvla.utils.strategy import DeepspeedStrategy, Engine


@dataclass
class UpdatePhase:
    """Trains actor and critic on the experience of an iteration.

    Attributes:
        strategy: collectives.
        batch: amounts.
        optimization: when the actor is left alone.
        updater: runs one step.
        guards: look at its gradient.
        actor: trained from the end of `freezing_actor_steps` on.
        critic: None where the estimator has none, or where it shares the actor's network.
        throughput: counts the rows of each step.
        average: of the actor's weights, or None.
        demonstrations: loss that is mixed into every step of the actor, or None.
    """

    strategy: DeepspeedStrategy
    batch: BatchConfig
    optimization: OptimizationConfig
    updater: Updater
    guards: Guards
    actor: Engine
    critic: Engine | None
    throughput: Throughput
    average: WeightAverage | None = None
    demonstrations: DemonstrationLoss | None = None

    def run(self, iteration: int, experience: Experience, kl_coef: float, metrics: Metrics) -> None:
        """All epochs of an iteration, counted from 0; measurements go to `metrics`.

        Once `actor/ppo_kl` of a step exceeds `target_kl`, or is NaN or infinite, which all ranks see alike, the policy
        is left alone until the next iteration; a critic of its own goes on.
        """
        batch, replay = self.batch, ReplayList()
        replay.append(experience)
        per_step = batch.train_batch_size // self.strategy.world_size
        own = len(experience.episode_index.unique())
        num_steps = int(self.strategy.all_reduce({"n": -(-own // per_step)}, "max")["n"])
        target_kl = self.optimization.target_kl
        train_actor, first = iteration >= self.optimization.freezing_actor_steps, True
        phase = f"iteration {iteration + 1}/{batch.iterations} update"
        with progress_bar(batch.max_epochs * num_steps, phase, enabled=self.strategy.is_main, unit="step") as bar:
            for epoch in range(batch.max_epochs):
                rng = derive_rng(self.strategy.seed, "update", iteration, epoch, self.strategy.rank)
                for number, step in enumerate(replay.optimizer_steps(per_step, rng, num_steps)):
                    step = self.updater.spread(step)
                    trained = [e for e, on in ((self.actor, train_actor), (self.critic, True)) if on and e is not None]
                    self.throughput.count_step(trained, step, metrics)
                    if train_actor:
                        kl = self._policy_step((iteration, epoch, number), step, kl_coef, metrics, first)
                        train_actor = target_kl is None or (math.isfinite(kl) and kl <= target_kl)
                    if self.critic is not None:
                        norm = self.updater.value_step(self.critic, step, metrics)
                        self._look("critic", norm, step, iteration, metrics)
                    first = False
                    bar.update(1)

    def _look(self, model: str, norm: float, step: Experience, iteration: int, metrics: Metrics) -> None:
        """Count a step that was left out; too many in a row end the run."""
        if not math.isfinite(norm):
            metrics.total({f"{model}/skipped_steps": 1.0 / self.strategy.world_size})
        self.guards.look_at_step(model, norm, step, iteration + 1)  # as on the screen, counted from 1

    def _policy_step(
        self, key: tuple[int, int, int], step: Experience, kl_coef: float, metrics: Metrics, first: bool
    ) -> float:
        """One step of the actor, known by iteration, epoch and number; returns how far the policy has moved (nats)."""
        if self.demonstrations is not None:
            self.demonstrations.accumulate(self.actor, key, metrics)
        before = metrics.so_far("actor/ppo_kl")
        norm = self.updater.policy_step(self.actor, step, kl_coef, metrics, first_of_iteration=first)
        self._look("actor", norm, step, key[0], metrics)
        if math.isfinite(norm):
            metrics.total({"actor/optimizer_steps": 1.0 / self.strategy.world_size})
            if self.average is not None:
                self.average.update()
        if self.optimization.target_kl is None:
            return 0.0
        after = metrics.so_far("actor/ppo_kl")
        own = {"kl": after[0] - before[0], "tokens": after[1] - before[1]}
        sums = self.strategy.all_reduce(own, "sum")
        return sums["kl"] / max(1.0, sums["tokens"])
