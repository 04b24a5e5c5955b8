"""A critic on privileged state instead of images: asymmetric actor-critic (Pinto et al. 2018, arXiv:1710.06542)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlvla.experience import Experience
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.text import SentenceCache, Sentences, TextEncoder
from rlvla.models.value_models import scalar_head

_TEXT_WIDTH, _WIDTH = 32, 256


class StateCritic(nn.Module):
    """State values from `Experience.critic_state` and the instruction, which tells tasks apart; zero at first.

    Args:
        state_dim: C, numbers of a state.
        columns: K, values of a decision.
    """

    def __init__(self, state_dim: int, columns: int):
        super().__init__()
        self.state_dim = state_dim
        self._sentences = SentenceCache(CompactConfig.text_buckets)
        with torch.random.fork_rng(devices=[]):  # the same for every run, and no draw from the global generator
            torch.default_generator.manual_seed(0)
            self.text = TextEncoder(CompactConfig.text_buckets, _TEXT_WIDTH)
            first, second = nn.Linear(state_dim + _TEXT_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
            self.head = scalar_head(_WIDTH, columns)
        self.body = nn.Sequential(first, nn.LayerNorm(_WIDTH), nn.ReLU(), second, nn.LayerNorm(_WIDTH), nn.ReLU())

    def forward(self, state: Tensor, sentences: Sentences) -> Tensor:
        """Values [B, K] float32 of normalized states [B, C]."""
        text = self.text(sentences.features)[sentences.rows]
        return self.head(self.body(torch.cat([state.to(text.dtype), text], 1))).float()

    def score(self, batch: Experience) -> dict[str, Any]:
        """Keyword arguments of `forward` for a batch, on the critic's device."""
        assert batch.critic_state is not None
        device = self.head.weight.device
        sentences = self._sentences(batch.instructions, device)
        return {"state": batch.critic_state.to(device), "sentences": sentences}

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """FLOPs of a forward and backward pass over one decision, without the instruction; see `Policy`."""
        layers = (*self.body.parameters(), *self.head.parameters())
        return 6.0 * sum(getattr(p, "ds_numel", p.numel()) for p in layers)


@dataclass(frozen=True)
class StateCriticSketch:
    """A state critic for estimating memory; see `rlvla.models.families.Sketch`."""

    module: StateCritic

    def loss(self, rows: int) -> Tensor:
        """See `Sketch.loss`."""
        sentences = Sentences(torch.ones(1, 16, 8, dtype=torch.long), torch.zeros(rows, dtype=torch.long))
        return self.module(torch.zeros(rows, self.module.state_dim), sentences).mean()

    def decide(self, rows: int) -> None:
        """Not supported."""
        raise NotImplementedError("a critic does not act")
