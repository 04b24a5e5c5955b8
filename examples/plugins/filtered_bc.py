"""A learner of one's own: behaviour cloning of the episodes with a high score (`--algorithm filtered_bc`)."""

from dataclasses import dataclass

import torch

from rlvla.experience import Experience
from rlvla.options import arg
from rlvla.trainer.algorithm import Algorithm, OptimizerStep, Plan, register_algorithm


@dataclass(frozen=True)
class FilteredBCOptions:
    bc_threshold: float = arg(0.0, "clone episodes whose score exceeds this")
    bc_steps: int = arg(1, "optimizer steps per iteration", minimum=1)


@register_algorithm("filtered_bc", options=FilteredBCOptions)
class FilteredBC(Algorithm):
    def __init__(self, setup):
        super().__init__(setup)
        self.actor = setup.prepare(setup.models.actor, setup.config.optimization.actor_learning_rate, 1000)
        self.strategy, self.sampler = setup.strategy, setup.sampler()
        self.groups = setup.config.batch.rollout_batch_size // self.strategy.world_size  # on this rank
        self.samples, self.planned, self.learned_from = [], False, 0
        self.options = setup.config.algorithm.learner_options

    def plan(self, iteration):
        if self.planned:
            return None
        self.iteration, self.planned = iteration, True
        first = (iteration * self.strategy.world_size + self.strategy.rank) * self.groups
        return Plan(self.sampler.at(range(first, first + self.groups)))

    def ingest(self, samples):
        self.samples = list(samples)

    def interrupt(self):
        self.planned = False

    def update(self, metrics):
        """Optimizer steps on all kept episodes, on every rank; a rank that kept none contributes zero."""
        self.planned = False
        rows = Experience.cat([rows_of(sample) for sample in self.samples]).to(self.strategy.device)
        good = [sample.score > self.options.bc_threshold for sample in self.samples]
        kept = torch.cat([torch.full((sample.num_decisions,), is_good) for sample, is_good in zip(self.samples, good)])
        mask = rows.action_mask & kept[:, None].to(self.strategy.device)
        total = self.strategy.all_reduce({"tokens": float(mask.sum()), "episodes": sum(good)}, "sum")
        self.learned_from += int(total["episodes"])
        self.actor.train()
        for _ in range(self.options.bc_steps):
            loss = self.actor(**self.actor.module.score(rows, 1.0), wants=("loss",))["loss"]
            loss = torch.where(mask, loss, 0.0).sum() / max(1.0, total["tokens"])
            norm = self.actor.backward(loss * self.strategy.world_size, last=True)  # gradients are averaged over ranks
            self.after_step(OptimizerStep("actor", self.actor, norm, rows, self.iteration, metrics))
        metrics.total({"actor/loss": float(loss.detach())})
        return {"actor/kept": float(self.learned_from), "actor/lr": self.actor.learning_rate}

    def state_dict(self):
        return {"learned_from": self.learned_from}

    def load_state_dict(self, state):
        self.learned_from = state["learned_from"]


def rows_of(sample):
    return Experience(
        images=sample.images,
        proprio=sample.proprio,
        instructions=sample.decision_instructions,
        trace=sample.trace,
        action_mask=sample.action_mask,
    )
