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
    """An `Actor` with a linear value head beside the head of its tokens, both on the same hidden states.

    The value of an action is read at the position of its first token, as in `Critic`. Everything else is the actor's:
    adapters, sampling, and the folder that `save_pretrained` writes, which is a plain policy without the value head.

    Args:
        vla: the architecture with its weights.
        inputs: how observations become model inputs.
        config: LoRA and memory options.
    """

    def __init__(self, vla: OpenVLAForActionPrediction, inputs: VLAInputs, config: ActorConfig | None = None):
        super().__init__(vla, inputs, config)
        self.value_head = scalar_head(inputs.config)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        images: torch.Tensor,
        proprio: torch.Tensor | None,
        action_tokens: torch.Tensor,
        temperature: float = 1.0,
        all_columns: bool = False,
        values: str = "none",
    ) -> Any:
        """As `Actor.forward`, and values.

        Args:
            input_ids: like the next six as there.
            attention_mask: as there.
            images: as there.
            proprio: as there.
            action_tokens: as there.
            temperature: as there.
            all_columns: as there.
            values: "none", "only", or "also" from the same pass.

        Returns:
            "none": as there. "only": one number per action-token position, [B, T] float32. "also": a pair of the two.
        """
        if values == "none":
            return super().forward(input_ids, attention_mask, images, proprio, action_tokens, temperature, all_columns)
        pixels, proprio = self.inputs.pixels_and_proprio(images, proprio, next(self.parameters()).dtype)
        ids = self.inputs.processor.action_tokenizer.columns_to_ids(action_tokens)
        hidden = self.base.action_hidden_states(input_ids, attention_mask, pixels, proprio, ids)
        found = self.value_head(hidden).squeeze(-1).float()
        if values == "only":
            return found
        logits = self.base.language_model.lm_head(hidden).float()  # [B, T, 256]
        return self.log_probs_of(logits, action_tokens, temperature, all_columns), found

    def score_values(self, batch: Experience) -> dict[str, object]:
        """Keyword arguments of `forward` for the values alone of a batch of decisions, on the model's device.

        Observations without tokens are taken as well: the first position does not depend on them.
        """
        if batch.action_tokens is None:
            blank = torch.zeros(len(batch), self.tokens_per_decision, dtype=torch.long)
            batch = batch.with_fields(action_tokens=blank)
        return {**self.score(batch, 1.0), "values": "only"}
