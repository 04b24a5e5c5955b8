"""The policy: a `CompactNetwork` with an action head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlvla.experience import Experience
from rlvla.models.action_heads import (
    MISSING_OF_DENSITIES,
    MISSING_OF_TOKENS,
    ActionHead,
    GaussianHead,
    TokenHead,
    smooth_action_rows,
)
from rlvla.models.compact.codec import CompactCodec
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.network import CompactNetwork
from rlvla.models.compact.text import SentenceCache, Sentences
from rlvla.models.distributions import ActionDistribution
from rlvla.models.families import CONFIG_FILE
from rlvla.models.policy import Decision, PolicySpec, on_host, select
from rlvla.models.value_models import scalar_head
from rlvla.models.vla.checkpoint import STATISTICS_FILE
from rlvla.models.vla.regression_head import ActionStd, OutputLayer
from rlvla.utils.files import write_json

WEIGHTS_FILE = "model.safetensors"


def compact_spec(config: CompactConfig) -> PolicySpec:
    """The spec of a policy with this configuration."""
    chunk = (config.action_chunk_len, config.action_dim)
    return PolicySpec(
        action_chunk_len=config.action_chunk_len,
        action_dim=config.action_dim,
        columns=config.columns,
        noise_shape=chunk if config.is_gaussian else (config.columns,),
        noise="normal" if config.is_gaussian else "uniform",
        cameras=config.num_images_in_input,
        image_size=config.image_size,
        proprio_dim=config.proprio_dim,
        feature_dim=config.column_width,
        missing=MISSING_OF_DENSITIES if config.is_gaussian else MISSING_OF_TOKENS,
    )


class CompactPolicy(nn.Module):
    """A policy that learns from scratch.

    Args:
        config: sizes and conventions.
        statistics: content of dataset_statistics.json.
        unnorm_key: the entry in use.
        value_head: add a linear value head on the vectors of the columns.
    """

    def __init__(
        self, config: CompactConfig, statistics: Mapping[str, Any], unnorm_key: str, *, value_head: bool = False
    ):
        super().__init__()
        self.config, self.spec = config, compact_spec(config)
        self._statistics, self._codec = dict(statistics), CompactCodec(config, statistics[unnorm_key])
        self._head: ActionHead = GaussianHead(self._codec) if config.is_gaussian else TokenHead(self._codec)
        self._sentences = SentenceCache(config.text_buckets)
        self.network = CompactNetwork(config)
        self.read_out_layer = nn.Linear(config.column_width, config.n_action_bins)
        self.action_std = None
        if config.is_gaussian:
            self.read_out_layer = OutputLayer(config.column_width, 1)
            self.action_std = ActionStd(
                config.action_std, config.column_width, config.action_dim, config.action_std_init
            )
        self.value_head = scalar_head(config.column_width) if value_head else None

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random weights; neighboring bins start out alike, Gaussian means near 0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network.initialize()
            self.read_out_layer.reset_parameters()
        self.read_out_layer.bias.zero_()
        if self.config.is_gaussian:
            self.read_out_layer.weight.mul_(0.1)
        else:
            generator = torch.Generator().manual_seed(seed)
            rows = smooth_action_rows(self.config.n_action_bins, self.config.column_width, generator)
            self.read_out_layer.weight.copy_(rows)

    def read_out(self, hidden: Tensor) -> Any:
        """[B, K, d] -> logits [B, K, bins], or mean [B, A, D] and log of the standard deviation."""
        outputs = self.read_out_layer(hidden)
        if self.action_std is None:
            return outputs
        return outputs.view(len(hidden), *self.spec.noise_shape), self.action_std(hidden)

    def forward(
        self,
        images: Tensor,
        proprio: Tensor | None,
        features: Tensor,
        rows: Tensor,
        trace: dict[str, Tensor],
        temperature: float = 1.0,
        wants: Sequence[str] = ("log_probs", "entropy"),
        reference: dict[str, Tensor] | None = None,
        **supervision: Any,
    ) -> dict[str, Tensor]:
        """Score given decisions; see `Policy.forward`. `features` and `rows` are those of `Sentences`."""
        hidden = self.network(images, proprio, Sentences(features, rows))
        quantities = {}
        if "values" in wants:
            if self.value_head is None:
                raise ValueError("this policy has no value head")
            quantities["values"] = self.value_head(hidden).squeeze(-1).float()
        if set(wants) - {"values"}:
            distribution = self._head.distribution(self, hidden, temperature)
            quantities |= select(distribution, wants, trace)
            if "kl" in wants:
                assert reference is not None
                quantities["kl"] = distribution.kl(reference)
            if "loss" in wants:
                quantities |= self._head.supervised(distribution, trace, supervision)
        return quantities

    def _observations(self, images: Tensor, proprio: Tensor | None, instructions: Sequence[str]) -> dict[str, Any]:
        device = self.read_out_layer.weight.device
        sentences = self._sentences(instructions, device)
        state = None if proprio is None or not self.config.proprio_dim else proprio.to(device)
        return {"images": images.to(device), "proprio": state, "features": sentences.features, "rows": sentences.rows}

    def score(self, batch: Experience, temperature: float) -> dict[str, Any]:
        """Keyword arguments of `forward` for a batch of decisions, on the policy's device."""
        seen = self._observations(batch.images, batch.proprio, batch.instructions)
        trace = {name: value.to(seen["images"].device) for name, value in (batch.trace or {}).items()}
        return {**seen, "trace": trace, "temperature": temperature}

    def score_values(self, batch: Experience) -> dict[str, Any]:
        """Keyword arguments of `forward` that ask only for the values of a batch."""
        return {**self.score(batch, 1.0), "wants": ("values",)}

    def features(self, batch: Experience) -> Tensor:
        """[B, K, d]: the vectors of the columns."""
        seen = self._observations(batch.images, batch.proprio, batch.instructions)
        return self.network(seen["images"], seen["proprio"], Sentences(seen["features"], seen["rows"]))

    def freeze_read_out(self) -> None:
        """Freeze the parameters that `features` does not depend on."""
        for part in (self.read_out_layer, self.action_std, self.value_head):
            if part is not None:
                part.requires_grad_(False)

    def distribution(self, batch: Experience, temperature: float = 1.0) -> ActionDistribution:
        """The action distributions for a batch of prepared observations."""
        return self._head.distribution(self, self.features(batch), temperature)

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Images as they are, proprio normalized."""
        if proprio is None or not self.config.proprio_dim:
            return images, proprio
        return images, self._codec.normalize_proprio(proprio)

    @torch.inference_mode()
    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        noise: np.ndarray | None,
        temperature: float = 1.0,
    ) -> Decision:
        """Choose actions for prepared observations; see `RolloutPolicy.act`."""
        state = None if proprio is None else torch.from_numpy(proprio)
        seen = self._observations(torch.from_numpy(images), state, instructions)
        hidden = self.network(seen["images"], seen["proprio"], Sentences(seen["features"], seen["rows"]))
        distribution = self._head.distribution(self, hidden, temperature)
        output = distribution.sample(None if noise is None else torch.from_numpy(noise).to(hidden.device))
        return on_host(output, self._head.environment_actions(output))

    def encode_actions(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """Environment actions [..., A, D] as `tokens` [..., K] int64 or normalized `actions` [..., A, D]."""
        return self._head.encode(actions)

    @property
    def effective_columns(self) -> Tensor:
        """[K] bool: columns that can change the action."""
        return self._head.effective_columns

    @property
    def normalized_dims(self) -> list[bool]:
        """[D]: whether an action dimension is normalized by the statistics."""
        return self._codec.action_mask

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """One per row: all rows cost the same."""
        return [1] * len(instructions)

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """FLOPs of a forward and backward pass over one decision: 6 per weight and position where it is applied."""
        sides, total = self.config.map_sides(), 0.0
        for name, parameter in model.named_parameters():
            if "embedding" in name or "coordinates" in name:
                continue
            layer = int(name.split("convs.")[1].split(".")[0]) if "convs." in name else None
            times = sides[layer] ** 2 if layer is not None else self.config.columns if "read_out" in name else 1
            total += 6.0 * getattr(parameter, "ds_numel", parameter.numel()) * times
        return total

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """There are none."""
        raise ValueError("compact policies have no adapters")

    def freeze_action_std(self) -> None:
        """Freeze the standard deviation of continuous actions, if there is one."""
        if self.action_std is not None:
            self.action_std.requires_grad_(False)

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config.json, dataset_statistics.json and model.safetensors, without a value head."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = self.state_dict() if state_dict is None else state_dict
        kept = {name: value.detach().cpu().contiguous() for name, value in state.items() if "value_head" not in name}
        save_file(kept, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
        write_json(folder / STATISTICS_FILE, self._statistics)
        write_json(folder / CONFIG_FILE, self.config.to_json())
