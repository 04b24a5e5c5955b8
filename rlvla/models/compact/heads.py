"""Heads of a compact policy: its output layers, and the distribution of its actions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlvla.models.action_heads import (
    MISSING_OF_DENSITIES,
    MISSING_OF_TOKENS,
    ActionHead,
    GaussianHead,
    TokenHead,
    smooth_action_rows,
)
from rlvla.models.codec import StatisticsCodec
from rlvla.models.compact.config import HEADS, CompactConfig
from rlvla.models.compact.network import VelocityNetwork
from rlvla.models.flow.head import MISSING_OF_FLOWS, PAIRS, FlowHead, flow_spec
from rlvla.models.flow.settings import FLOW_SETTINGS
from rlvla.models.policy import select
from rlvla.models.vla.regression_head import ActionStd, OutputLayer


class CompactHead:
    """A head without state: its layers are attributes of the policy. By default actions are Gaussian.

    Args:
        config: the configuration of the policy, whose `head` are the options of this head.

    Attributes:
        missing: see `PolicySpec.missing`, as far as known without a configuration.
    """

    missing: ClassVar[Mapping[str, str]] = MISSING_OF_DENSITIES

    def __init__(self, config: CompactConfig):
        self.config = config

    def spec(self) -> dict[str, Any]:
        """The fields of `PolicySpec` that depend on the head."""
        chunk = (self.config.action_chunk_len, self.config.action_dim)
        return {"noise_shape": chunk, "noise": "normal", "missing": self.missing}

    def action_head(self, codec: StatisticsCodec) -> ActionHead:
        """Distributions from `read_out`, and supervised losses."""
        return GaussianHead(codec, self.config.action_noise_correlation)

    def layers(self) -> dict[str, nn.Module]:
        """New layers by name, under which the policy has and saves them."""
        raise NotImplementedError

    def initialize(self, policy: Any, seed: int) -> None:
        """Random weights of the layers, from the global generator or the seed."""
        raise NotImplementedError

    def read_out(self, policy: Any, hidden: Tensor) -> Any:
        """Vectors of the columns [B, K, d] -> parameters of the distribution; here mean and log std, [B, A, D]."""
        raise NotImplementedError

    def freeze_std(self, policy: Any) -> None:
        """Freeze the standard deviation of the actions, if it has weights."""

    # ------------------------------------------------------------------------------- estimates of memory, see `sketch`
    def sketch_loss(self, policy: Any, hidden: Tensor, *, supervised: bool) -> Tensor:
        """A scalar with the tensors of a loss: log-probs and entropy of blank actions."""
        wants = [name for name in ("log_probs", "entropy") if name not in self.missing]
        distribution = policy._head.distribution(policy, hidden, 1.0)
        quantities = select(distribution, wants, self._blank(policy, len(hidden)))
        return reduce(torch.add, quantities.values()).mean()

    def sketch_decision(self, policy: Any, hidden: Tensor) -> None:
        """Sample as in a rollout."""
        distribution = policy._head.distribution(policy, hidden, 1.0)
        distribution.sample(torch.zeros(len(hidden), *policy.spec.noise_shape, dtype=torch.float64))

    def _blank(self, policy: Any, rows: int) -> dict[str, Tensor]:
        return {"actions": torch.zeros(rows, *policy.spec.noise_shape)}


def register_compact_head(
    name: str, *, options: type | None = None, settings: Collection[str] = ()
) -> Callable[[type[CompactHead]], type[CompactHead]]:
    """Decorator that registers a subclass of `CompactHead`.

    Args:
        name: for --compact_head.
        options: frozen dataclass of `rlvla.options.arg` fields, which become flags of a new policy. They are saved in
            config.json; the head has them as `config.head`.
        settings: fields of `CompactConfig` that flags of later commands may change, see `PolicyConfig`.
    """
    return HEADS.register(name, options=options, settings=tuple(settings))


def make_head(config: CompactConfig) -> CompactHead:
    """The head of a configuration without `problems`."""
    return HEADS.get(config.action_head)(config)


@register_compact_head("tokens")
class Tokens(CompactHead):
    """A categorical over the bins of each number."""

    missing = MISSING_OF_TOKENS

    def spec(self) -> dict[str, Any]:
        """See `CompactHead`."""
        return {"noise_shape": (self.config.columns,), "noise": "uniform", "missing": self.missing}

    def action_head(self, codec: StatisticsCodec) -> ActionHead:
        """See `CompactHead`."""
        return TokenHead(codec)

    def layers(self) -> dict[str, nn.Module]:
        """See `CompactHead`."""
        return {"read_out_layer": nn.Linear(self.config.column_width, self.config.n_action_bins)}

    def initialize(self, policy: Any, seed: int) -> None:
        """Neighboring bins start with similar logits."""
        layer, generator = policy.read_out_layer, torch.Generator().manual_seed(seed)
        layer.bias.zero_()
        layer.weight.copy_(smooth_action_rows(self.config.n_action_bins, self.config.column_width, generator))

    def read_out(self, policy: Any, hidden: Tensor) -> Tensor:
        """Logits [B, K, bins]."""
        return policy.read_out_layer(hidden)

    def _blank(self, policy: Any, rows: int) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(rows, *policy.spec.noise_shape, dtype=torch.long)}


@register_compact_head("gaussian", settings=("action_std", "action_std_init", "action_noise_correlation"))
class Gaussian(CompactHead):
    """A Gaussian with the standard deviation of OpenVLA's regression head."""

    def layers(self) -> dict[str, nn.Module]:
        """See `CompactHead`."""
        config = self.config
        std = ActionStd(config.action_std, config.column_width, config.action_dim, config.action_std_init)
        return {"read_out_layer": OutputLayer(config.column_width, 1), "action_std": std}

    def initialize(self, policy: Any, seed: int) -> None:
        """Means start near 0."""
        policy.read_out_layer.reset_parameters()
        policy.read_out_layer.bias.zero_()
        policy.read_out_layer.weight.mul_(0.1)

    def read_out(self, policy: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, A, D] and log standard deviation."""
        return policy.read_out_layer(hidden).view(len(hidden), *policy.spec.noise_shape), policy.action_std(hidden)

    def freeze_std(self, policy: Any) -> None:
        """See `CompactHead`."""
        policy.action_std.requires_grad_(False)


@register_compact_head("flow", settings=FLOW_SETTINGS)
class Flow(CompactHead):
    """A velocity of flow matching."""

    missing = MISSING_OF_FLOWS

    @property
    def _chunk(self) -> tuple[int, int]:
        return self.config.action_chunk_len, self.config.action_dim

    def spec(self) -> dict[str, Any]:
        """See `CompactHead`."""
        return {**flow_spec(self.config.flow, self._chunk), "summary_dim": self.config.width}

    def action_head(self, codec: StatisticsCodec) -> ActionHead:
        """See `CompactHead`."""
        return FlowHead(codec, self.config.flow, self._chunk)

    def layers(self) -> dict[str, nn.Module]:
        """See `CompactHead`."""
        return {"velocity_network": VelocityNetwork(self.config)}

    def initialize(self, policy: Any, seed: int) -> None:
        """See `VelocityNetwork.initialize`."""
        policy.velocity_network.initialize()

    def read_out(self, policy: Any, hidden: Tensor) -> Tensor:
        """The condition of the velocity."""
        return policy.velocity_network.condition(hidden.flatten(1))

    def sketch_loss(self, policy: Any, hidden: Tensor, *, supervised: bool) -> Tensor:
        """The velocity of `PAIRS` samples, or of the noisy steps."""
        return self._velocity(policy, hidden, max(PAIRS * supervised, self.config.flow.evaluations)).mean()

    def sketch_decision(self, policy: Any, hidden: Tensor) -> None:
        """A denoising step."""
        self._velocity(policy, hidden, 1)

    def _velocity(self, policy: Any, hidden: Tensor, evaluations: int) -> Tensor:
        """Output of the velocity network, evaluated several times per row."""
        x = torch.zeros(len(hidden), evaluations, *self._chunk)
        output = policy.velocity(policy.read_out(hidden), x, torch.zeros(len(hidden), evaluations))
        return output[0] + output[1] if isinstance(output, tuple) else output
