"""Forward passes over finished episodes: old log-probs, reference log-probs, values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlvla.experience import Experience, Sample
from rlvla.models.policy import parameters_of
from rlvla.models.reference import ReferenceModel
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.replay import micro_batches
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy


@dataclass
class Networks:
    """The networks that score an episode; `critic` and `reference` are None if not used.

    With a shared backbone, `critic` is the engine of the actor.
    """

    actor: Engine
    critic: Engine | None
    reference: ReferenceModel | None

    @property
    def shared(self) -> bool:
        """Whether actor and critic are one network."""
        return self.critic is self.actor


@dataclass
class Scores:
    """Outputs of the networks before an update, on the host; all [B, K] float32, or None if not needed.

    Attributes:
        old_log_probs: log-probs under the actor.
        ref_log_probs: log-probs under the reference.
        exact_kl: exact KL from actor to reference.
        reference: parameters of the reference's distributions, name -> [B, ...], if the exact KL is a loss.
        sum_pi_squared: sum of squared probabilities under the actor, if the estimator needs it.
        values: raw output of the critic.
    """

    old_log_probs: Tensor
    ref_log_probs: Tensor | None = None
    exact_kl: Tensor | None = None
    reference: dict[str, Tensor] | None = None
    sum_pi_squared: Tensor | None = None
    values: Tensor | None = None


class ModelPasses:
    """Runs the networks over rows in micro-batches, the same number on each rank, as ZeRO-3 requires.

    Args:
        networks: actor, critic and reference.
        strategy: used to agree on the number of micro-batches.
        batch: sampling temperature and micro-batch size.
        algorithm: determines which outputs are needed.
    """

    def __init__(self, networks: Networks, strategy: DeepspeedStrategy, batch: BatchConfig, algorithm: AlgorithmConfig):
        self.networks = networks
        self._strategy, self._batch, self._algorithm = strategy, batch, algorithm

    def scores(self, rows: Experience) -> Scores:
        """Run all networks over the rows."""
        self.networks.actor.train(False)
        outputs = self._passes(rows, self._policies)
        reference = parameters_of(outputs) or None
        values = outputs.get("values")
        if values is None and self.networks.critic is not None:
            values = self.values(rows)
        return Scores(
            outputs["log_probs"],
            outputs.get("ref_log_probs"),
            outputs.get("kl"),
            reference,
            outputs.get("sum_pi_squared"),
            values,
        )

    def scores_of_rollout(self, rows: Experience) -> Scores:
        """Log-probs as they were at sampling time, and values; the actor makes no pass."""
        return Scores(rows.rollout_log_probs, values=None if self.networks.critic is None else self.values(rows))

    def _policies(self, micro: Experience) -> dict[str, Tensor]:
        """Run actor and reference on a micro-batch."""
        networks, temperature, algorithm = self.networks, self._batch.temperature, self._algorithm
        wants = ["log_probs"]
        if "sum_pi_squared" in algorithm.estimator_parameters:
            wants.append("sum_pi_squared")
        if networks.shared:
            wants.append("values")
        outputs: dict[str, Tensor] = {}
        reference = None
        if networks.reference is not None and algorithm.exact_kl:
            reference = networks.reference.parameters_of(micro, temperature)
            wants.append("kl")
        elif networks.reference is not None:
            outputs["ref_log_probs"] = networks.reference.log_probs(micro, temperature)
        inputs = networks.actor.module.score(micro, temperature)
        outputs |= networks.actor(**inputs, wants=wants, reference=reference)
        if reference is not None and algorithm.kl_in_loss:
            outputs |= {f"parameters/{name}": value for name, value in reference.items()}
        return outputs

    def values(self, rows: Experience) -> Tensor:
        """[B, K]: raw output of the critic."""
        engine = self.networks.critic
        assert engine is not None
        engine.train(False)
        return self._passes(rows, lambda micro: {"values": critic_values(engine, micro)})["values"]

    def _passes(self, rows: Experience, forward: Callable[[Experience], dict[str, Tensor]]) -> dict[str, Tensor]:
        size = self._batch.micro_rollout_batch_size
        count = int(self._strategy.all_reduce({"n": -(-len(rows) // size)}, "max")["n"])
        with torch.no_grad():
            outputs = [
                {name: value.cpu() for name, value in forward(micro).items()}
                for micro in micro_batches(rows, size, count)
            ]
        return {name: torch.cat([output[name] for output in outputs])[: len(rows)] for name in outputs[0]}


def critic_values(engine: Engine, rows: Experience) -> Tensor:
    """[B, K]: forward pass of a critic, or of the network it shares with the actor."""
    critic = engine.module
    values = engine(**getattr(critic, "score_values", critic.score)(rows))
    return values["values"] if isinstance(values, dict) else values


def last_observations(samples: Sequence[Sample]) -> Experience:
    """The observation after the last action of each episode (at least one) as rows with empty masks."""
    proprio = [sample.last_proprio for sample in samples if sample.last_proprio is not None]
    blank = torch.zeros(len(samples), samples[0].log_probs.shape[1], dtype=torch.bool)
    return Experience(
        images=torch.stack([sample.last_images for sample in samples]),
        proprio=torch.stack(proprio) if proprio else None,
        instructions=[sample.last_instruction for sample in samples],
        action_mask=blank,
        policy_mask=blank,
        value_mask=blank,
    )
