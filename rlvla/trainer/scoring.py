"""Forward passes over finished episodes: old log-probs, reference, values, the reward model's opinion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.kl import kl_penalty
from rlvla.experience import Experience, Sample
from rlvla.models.actor import Actor
from rlvla.models.actor_critic import ActorCritic
from rlvla.models.inputs import VLAInputs
from rlvla.models.reference import ReferenceModel
from rlvla.models.value_models import Critic, RewardModel
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.episode_grid import last_action
from rlvla.trainer.replay import micro_batches
from rlvla.utils.strategy import DeepspeedStrategy, Engine

REWARD_MODEL_COMPONENT = "reward_model"


@dataclass
class Judges:
    """The models that look at an episode. `critic`, `reference` and `reward_model` are None where not used.

    With a shared backbone `critic` is the engine of the actor.
    """

    actor: Engine
    critic: Engine | None
    reference: ReferenceModel | None
    reward_model: RewardModel | None

    @property
    def shared(self) -> bool:
        """Whether actor and critic are one network."""
        return self.critic is self.actor


class Scorer:
    """Runs the judges over rows, in micro-batches, equally many on every rank (ZeRO-3 needs that).

    Args:
        judges: the models.
        strategy: collectives.
        batch: temperature and micro-batch size.
        algorithm: what is asked for.
    """

    def __init__(self, judges: Judges, strategy: DeepspeedStrategy, batch: BatchConfig, algorithm: AlgorithmConfig):
        self.judges = judges
        self._strategy, self._batch, self._algorithm = strategy, batch, algorithm

    def policy(self, rows: Experience) -> dict[str, Tensor]:
        """What actor and reference say about the rows, on the host.

        Returns:
            `old_log_probs` [B, T]; with a KL `ref_log_probs` [B, T] or, for the exact one, `exact_kl` [B, T] and, if it
            is a loss, `ref_all_log_probs` [B, T, 256]; `sum_pi_squared` [B, T] if the estimator reads it; with a
            shared backbone `values` [B, T], from the same pass.
        """
        self.judges.actor.train(False)
        wants_squares = "sum_pi_squared" in self._algorithm.estimator_options
        if wants_squares or self._algorithm.exact_kl:
            return self._passes(rows, lambda micro: self._all_columns(micro, wants_squares))
        return self._passes(rows, self._sampled_columns)

    def _sampled_columns(self, micro: Experience) -> dict[str, Tensor]:
        actor: Actor = self.judges.actor.module
        temperature = self._batch.temperature
        output, found = self._with_values(actor.score(micro, temperature))
        found["old_log_probs"] = output[0]
        if self.judges.reference is not None:
            found["ref_log_probs"] = self.judges.reference.log_probs(micro, temperature)
        return found

    def _all_columns(self, micro: Experience, wants_squares: bool) -> dict[str, Tensor]:
        actor: Actor = self.judges.actor.module
        inputs = actor.score(micro, self._batch.temperature)
        every, found = self._with_values({**inputs, "all_columns": True})  # [B, T, 256]
        found["old_log_probs"] = every.gather(-1, inputs["action_tokens"].unsqueeze(-1)).squeeze(-1)
        if wants_squares:
            found["sum_pi_squared"] = every.exp().square().sum(-1)
        if self.judges.reference is None:
            return found
        reference = self.judges.reference.all_log_probs(micro, self._batch.temperature)
        if not self._algorithm.exact_kl:
            found["ref_log_probs"] = reference.gather(-1, inputs["action_tokens"].unsqueeze(-1)).squeeze(-1)
            return found
        found["exact_kl"] = kl_penalty(every, reference, "full")
        if self._algorithm.kl_in_loss:
            found["ref_all_log_probs"] = reference
        return found

    def _with_values(self, inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """What the actor puts out, and the values if it has them."""
        if not self.judges.shared:
            return self.judges.actor(**inputs), {}
        output, values = self.judges.actor(**inputs, values="also")
        return output, {"values": values}

    def values(self, rows: Experience) -> Tensor:
        """[B, T]: what the critic puts out."""
        engine = self.judges.critic
        assert engine is not None
        engine.train(False)
        critic: Critic | ActorCritic = engine.module
        inputs = critic.score_values if isinstance(critic, ActorCritic) else critic.score
        return self._passes(rows, lambda micro: {"values": engine(**inputs(micro))})["values"]

    def judge(self, samples: Sequence[Sample], coef: float, action_dim: int) -> list[Sample]:
        """The episodes with the reward model's weighted score as a further component, at the last executed action.

        A rank without episodes takes part in the passes of the others.
        """
        model = self.judges.reward_model
        if model is None or not self._strategy.all_reduce({"n": float(len(samples))}, "max")["n"]:
            return list(samples)
        rows = last_observations(samples) if samples else _no_observation(model.inputs)
        opinion = self._passes(rows, lambda micro: {"score": model.success_probability(micro)})
        judged = []
        for sample, score in zip(samples, opinion["score"]):
            component = torch.zeros_like(sample.rewards)
            component.view(-1)[last_action(sample, action_dim)] = coef * score
            components = {**sample.reward_components, REWARD_MODEL_COMPONENT: component}
            judged.append(replace(sample, rewards=sample.rewards + component, reward_components=components))
        return judged

    def _passes(self, rows: Experience, forward: Callable[[Experience], dict[str, Tensor]]) -> dict[str, Tensor]:
        size = self._batch.micro_rollout_batch_size
        count = int(self._strategy.all_reduce({"n": -(-len(rows) // size)}, "max")["n"])
        with torch.no_grad():
            parts = [
                {name: value.cpu() for name, value in forward(micro).items()}
                for micro in micro_batches(rows, size, count)
            ]
        return {name: torch.cat([part[name] for part in parts])[: len(rows)] for name in parts[0]}


def _no_observation(inputs: VLAInputs) -> Experience:
    """A row that a model with these inputs can look at, and that means nothing."""
    config = inputs.config
    pictures = (1, config.num_images_in_input or 1, config.image_size, config.image_size, 3)
    blank = torch.zeros(1, config.num_action_tokens, dtype=torch.bool)
    return Experience(
        images=torch.zeros(pictures, dtype=torch.uint8),
        proprio=torch.zeros(1, config.proprio_dim) if config.use_proprio else None,
        instructions=[""],
        action_mask=blank,
        policy_mask=blank,
        value_mask=blank,
    )


def last_observations(samples: Sequence[Sample]) -> Experience:
    """One row per episode (at least one) with what came after its last action; only observation fields matter."""
    has_proprio = samples[0].last_proprio is not None
    blank = torch.zeros(len(samples), samples[0].action_mask.shape[1], dtype=torch.bool)
    return Experience(
        images=torch.stack([sample.last_images for sample in samples]),
        proprio=torch.stack([sample.last_proprio for sample in samples]) if has_proprio else None,
        instructions=[sample.last_instruction for sample in samples],
        action_mask=blank,
        policy_mask=blank,
        value_mask=blank,
    )
