"""An OpenVLA network for estimating memory: tensors with shapes but no storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlvla.models.config import ActorConfig
from rlvla.models.distributions import GaussianDistribution, pick_tokens
from rlvla.models.families import RowShape
from rlvla.models.lora import add_adapters, lora_layers
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction


class OpenVLASketch:
    """A policy, or with a scalar head a critic or reward model; see `rlvla.models.families.Sketch`.

    Args:
        config: configuration of the architecture.
        row: size of one decision.
        actor: adapters and memory options; no adapters for a critic or reward model.
        scalar_head: add the scalar head of a critic or reward model.
    """

    def __init__(self, config: OpenVLAConfig, row: RowShape, actor: ActorConfig, *, scalar_head: bool = False):
        self._config, self._row, self._scalar_head = config, row, scalar_head
        vla: Any = OpenVLAForActionPrediction(config)
        vla.configure(replace(actor, attn_implementation="sdpa"))  # the flash kernel needs storage
        if actor.lora_rank:
            targets = lora_layers(vla, actor.lora_targets, vision=not actor.freeze_vision_backbone)
            vla = add_adapters(vla, targets, actor.lora_rank, actor.lora_alpha)
        self.module = nn.ModuleDict({"vla": vla})
        if scalar_head:
            self.module["head"] = nn.Linear(config.text_config.hidden_size, 1)

    def loss(self, rows: int) -> Tensor:
        """See `Sketch.loss`."""
        actions = torch.zeros(rows, self._config.num_action_tokens, dtype=torch.long)
        inputs = (*self._observations(rows), actions)
        vla: Any = self.module["vla"]
        if self._scalar_head:
            return self.module["head"](vla.action_hidden_states(*inputs)).squeeze(-1).float().mean()
        output = vla(*inputs)
        if isinstance(output, tuple):  # mean and standard deviation of continuous actions
            distribution = GaussianDistribution(*output)
            return (distribution.log_prob({"actions": torch.zeros_like(output[0])}) + distribution.entropy()).mean()
        log_probs = torch.log_softmax(output.float(), dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return (log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1) + entropy).mean()

    @torch.no_grad()
    def decide(self, rows: int) -> None:
        """See `Sketch.decide`: token by token with a cache, or all at once."""
        inputs, draws = self._observations(rows), torch.zeros(rows, self._config.num_action_tokens)
        vla: Any = self.module["vla"]
        if not self._config.is_autoregressive:
            output = vla(*inputs)
            if isinstance(output, tuple):
                GaussianDistribution(*output).sample(draws.view_as(output[0]))
            else:
                pick_tokens(output.float(), 1.0, draws)
            return

        def choose(logits: Tensor, step: int) -> Tensor:
            return pick_tokens(logits[:, None].float(), 1.0, draws[:, step : step + 1])[:, 0]

        vla.act_step_by_step(*inputs, choose)

    def _observations(self, rows: int) -> tuple[Tensor, None, Tensor, Tensor | None]:
        """Prompt ids, no attention mask, pixel values and proprio, all placeholders."""
        config, dtype = self._config, next(self.module.parameters()).dtype
        ids = torch.zeros(rows, self._row.prompt_tokens, dtype=torch.long)
        pixels = torch.zeros(rows, 6 * self._row.num_images, config.image_size, config.image_size).to(dtype)
        proprio = torch.zeros(rows, config.proprio_width).to(dtype) if config.use_proprio else None
        return ids, None, pixels, proprio
