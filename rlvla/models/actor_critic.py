"""A policy and its critic in one network: two heads on one backbone."""

from __future__ import annotations

from typing import Any

import torch

from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.config import ActorConfig
from rlvla.models.inputs import VLAInputs
from rlvla.models.value_models import scalar_head
from rlvla.models.vla.openvla import OpenVLAForActionPrediction


class ActorCritic(Actor):
    """An `Actor` with a linear value head next to its action head, both on the same hidden states.

    The value of an action is read at the position of its first token, as in `Critic`. Everything else comes from the
    actor: adapters, sampling, and `save_pretrained`, which writes a plain policy without the value head.

    Args:
        vla: the architecture with its weights.
        inputs: turns observations into model inputs.
        config: LoRA and memory options.
    """

    has_value_head = True

    def __init__(self, vla: OpenVLAForActionPrediction, inputs: VLAInputs, config: ActorConfig | None = None):
        super().__init__(vla, inputs, config)
        self.value_head = scalar_head(inputs.config.text_config.hidden_size)

    def score_values(self, batch: Experience) -> dict[str, Any]:
        """Keyword arguments of `forward` that ask only for the values of a batch, on the model's device.

        Observations without decisions work too: the first position does not depend on them.
        """
        if not batch.trace:
            batch = batch.with_fields(trace={"tokens": torch.zeros(len(batch), self.spec.columns, dtype=torch.long)})
        return super().score_values(batch)
