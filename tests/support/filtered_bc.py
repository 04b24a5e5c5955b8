"""A learner of one's own: behaviour cloning on the episodes that came near the goal (`--algorithm filtered_bc`)."""

import torch

from rlvla.experience import Experience
from rlvla.trainer.algorithm import Algorithm, OptimizerStep, Plan, register_algorithm


@register_algorithm("filtered_bc")
class FilteredBC(Algorithm):
    def __init__(self, setup):
        super().__init__(setup)
        self.actor = setup.prepare(setup.models.actor, setup.config.optimization.actor_learning_rate, 1000)
        self.strategy, self.sampler = setup.strategy, setup.sampler()
        self.groups = setup.config.batch.rollout_batch_size // self.strategy.world_size  # on this rank
        self.samples, self.planned, self.learned_from = [], False, 0

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
        """One optimizer step on all kept episodes, on every rank; a rank that kept none contributes zero."""
        self.planned = False
        rows = Experience.cat([rows_of(sample) for sample in self.samples]).to(self.strategy.device)
        kept = torch.cat([torch.full((sample.num_decisions,), sample.score > 0) for sample in self.samples])
        mask = rows.action_mask & kept[:, None].to(self.strategy.device)
        mine = {"tokens": float(mask.sum()), "episodes": sum(sample.score > 0 for sample in self.samples)}
        total = self.strategy.all_reduce(mine, "sum")
        self.learned_from += int(total["episodes"])
        self.actor.train()
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
