"""A compact policy for estimating memory: tensors with shapes but no storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.policy import CompactPolicy
from rlvla.models.compact.text import Sentences
from rlvla.models.config import ActorConfig
from rlvla.models.families import RowShape
from rlvla.models.value_models import scalar_head as new_scalar_head


@dataclass(frozen=True)
class CompactRowShape(RowShape):
    """Size of one decision, and of the instructions of all.

    Attributes:
        sentences: T, distinct instructions.
        word_features: F, most features of a word; see `Sentences.features`.
    """

    sentences: int
    word_features: int


class CompactSketch:
    """A policy, or with a scalar head a critic or reward model; see `rlvla.models.families.Sketch`.

    Args:
        config: sizes of the policy.
        row: size of one decision.
        actor: memory options.
        scalar_head: add the scalar head of a critic or reward model, and freeze the output layer.
        supervised: train on demonstrations, too, for which a flow is evaluated `PAIRS` times.
    """

    def __init__(
        self,
        config: CompactConfig,
        row: CompactRowShape,
        actor: ActorConfig,
        *,
        scalar_head: bool = False,
        supervised: bool = False,
    ):
        self._row, self._scalar_head, self._supervised = row, scalar_head, supervised
        self._policy: Any = CompactPolicy(config, {"": {}}, "")
        if actor.freeze_vision_backbone:
            self._policy.network.cameras.requires_grad_(False)
        self.module = nn.ModuleDict({"policy": self._policy})
        if scalar_head:
            self._policy.freeze_read_out()
            self.module["head"] = new_scalar_head(config.column_width)

    def loss(self, rows: int) -> Tensor:
        """See `Sketch.loss`."""
        hidden = self._hidden(rows)
        if self._scalar_head:
            return self.module["head"](self._policy.network(hidden)).squeeze(-1).float().mean()
        return self._policy.output.sketch_loss(self._policy, hidden, supervised=self._supervised)

    @torch.no_grad()
    def decide(self, rows: int) -> None:
        """See `Sketch.decide`."""
        self._policy.output.sketch_decision(self._policy, self._hidden(rows))

    def _hidden(self, rows: int) -> Tensor:
        config, row = self._policy.config, self._row
        images = torch.zeros(rows, row.num_images, config.image_size, config.image_size, 3, dtype=torch.uint8)
        proprio = torch.zeros(rows, config.proprio_dim) if config.proprio_dim else None
        features = torch.ones(min(rows, row.sentences), row.prompt_tokens, row.word_features, dtype=torch.long)
        return self._policy.network.encode(images, proprio, Sentences(features, torch.zeros(rows, dtype=torch.long)))
