"""Action heads: hidden states to distributions over action tokens, or to Gaussians over continuous actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvla.models.codec import Codec, StatisticsCodec
from rlvla.models.distributions import GaussianDistribution, TokenDistribution
from rlvla.models.guidance import guided
from rlvla.models.policy import PolicyOutput
from rlvla.models.vla.choices import REGRESSION

# A prediction within this distance of its label is correct: one fortieth of the range [-1, 1].
CORRECT_WITHIN = 0.05
# Angular frequencies (radians per unit of normalized action) of the smooth initialization of the action head, and the
# standard deviation of its logits.
HEAD_FREQUENCIES = (1.0, 20.0)
HEAD_LOGIT_STD = 1.7


class ActionHead:
    """The part of a policy that depends on how actions are sampled; it has no weights.

    By default actions are continuous. `codec` normalizes them; clipping is left to the environment.
    """

    def __init__(self, codec: Codec):
        self._codec = codec

    def distribution(self, model: Any, hidden: Any, temperature: float) -> Any:
        """The `ActionDistribution` of hidden states [B, A*D, d]; `model.read_out` computes its parameters."""
        raise NotImplementedError

    def guided(self, model: Any, none: Any, positive: Any, weight: float, temperature: float) -> Any:
        """`distribution` guided between hidden states without and with the condition, see `rlvla.models.guidance`."""
        raise NotImplementedError(f"{type(self).__name__} has no guidance: implement `guided`")

    def supervised(
        self, distribution: Any, trace: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """`loss`, `error` (the loss to report) and `correct` for the labels in `trace`, each [B, K] float32."""
        raise NotImplementedError

    def environment_actions(self, output: PolicyOutput) -> np.ndarray:
        """[B, A, D] float32: the actions that the environment executes."""
        assert output.actions is not None
        return self._codec.unnormalize_actions(output.actions.cpu().numpy())

    def encode(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """The trace of environment actions [..., A, D] as labels: `actions`, normalized, float32."""
        return {"actions": self._codec.normalize_actions(actions)}

    def anneal_noise(self, end: float, progress: float) -> float:
        """See `NetworkPolicy.anneal_noise`; only with `PolicySpec.anneals_noise`."""
        raise NotImplementedError

    def denoise(self, model: Any, hidden: Any, start: Tensor) -> np.ndarray:
        """See `NetworkPolicy.denoise`; only with `PolicySpec.start_shape`."""
        raise NotImplementedError

    @property
    def effective_columns(self) -> Tensor:
        """[K] bool: columns that can change the action."""
        return self._codec.effective_numbers


class TokenHead(ActionHead):
    """Discrete action tokens; `codec` discretizes actions."""

    _codec: StatisticsCodec

    def distribution(self, model: Any, hidden: Any, temperature: float) -> TokenDistribution:
        """Categorical distributions, from the logits of the model."""
        return TokenDistribution(model.read_out(hidden).float(), temperature)

    def guided(self, model: Any, none: Any, positive: Any, weight: float, temperature: float) -> TokenDistribution:
        """Guided logits: as guided log-probs, renormalized."""
        logits = guided(model.read_out(none).float(), model.read_out(positive).float(), weight)
        return TokenDistribution(logits, temperature)

    def supervised(
        self, distribution: TokenDistribution, trace: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Cross-entropy; `error` leaves out `label_smoothing`."""
        log_probs, smoothing = distribution.log_prob(trace), options.get("label_smoothing", 0.0)
        loss = -log_probs
        if smoothing:
            loss = -(1 - smoothing) * log_probs - smoothing * distribution.all_log_probs.mean(-1)
        correct = (distribution.all_log_probs.argmax(-1) == trace["tokens"]).float()
        return {"loss": loss, "error": -log_probs.detach(), "correct": correct}

    def environment_actions(self, output: PolicyOutput) -> np.ndarray:
        """Decoded tokens."""
        return self._codec.decode_actions(output.trace["tokens"].cpu().numpy())

    def encode(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """`tokens` [..., K] int64."""
        return {"tokens": self._codec.encode_actions(actions)}

    @property
    def effective_columns(self) -> Tensor:
        """See `StatisticsCodec.effective_tokens`."""
        return self._codec.effective_tokens


class GaussianHead(ActionHead):
    """Continuous actions around the mean of a regression head.

    Args:
        codec: normalizes the actions.
        correlation: AR(1) coefficient of the noise over a chunk, see `GaussianDistribution`.
    """

    def __init__(self, codec: Codec, correlation: float = 0.0):
        super().__init__(codec)
        self._correlation = correlation

    def distribution(self, model: Any, hidden: Any, temperature: float) -> GaussianDistribution:
        """Gaussians, from the mean and log standard deviation of the model."""
        mean, log_std = model.read_out(hidden)
        return GaussianDistribution(mean, log_std, temperature, self._correlation)

    def guided(self, model: Any, none: Any, positive: Any, weight: float, temperature: float) -> GaussianDistribution:
        """Guided means; the standard deviation is that with the condition."""
        (mean, _), (positive_mean, log_std) = model.read_out(none), model.read_out(positive)
        return GaussianDistribution(guided(mean, positive_mean, weight), log_std, temperature, self._correlation)

    def supervised(
        self, distribution: GaussianDistribution, trace: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """`sft_loss` "l1": absolute error of the mean; "nll": marginal negative log-likelihood."""
        distance = (distribution.mean - trace["actions"]).abs().flatten(1)
        loss = distance if options.get("sft_loss", "l1") == "l1" else -distribution.marginals.log_prob(trace)
        correct = (distance.detach() < CORRECT_WITHIN).float()
        return {"loss": loss, "error": loss.detach(), "correct": correct}


MISSING_OF_TOKENS = {
    "rsample": "tokens are discrete: a sample has no gradient",
    "sft_loss": "action tokens are trained by cross-entropy",
}
MISSING_OF_DENSITIES = {
    "label_smoothing": "its actions are not tokens",
    "sum_pi_squared": "a density has no sum of squared probabilities",
    "probabilities": "the actions are continuous: a log-prob is the logarithm of a density, which may exceed 1",
}


def missing_of(model_variant: str | None) -> dict[str, str]:
    """`PolicySpec.missing` of a variant of OpenVLA; None: a token policy."""
    return MISSING_OF_DENSITIES if model_variant == REGRESSION else MISSING_OF_TOKENS


def smooth_action_rows(n_bins: int, dim: int, generator: torch.Generator) -> Tensor:
    """Rows [n_bins, dim] of an action head whose logits are smooth functions of the action.

    Channel j is a cosine of the bin's action with a log-uniform frequency and a random phase. Independent rows would
    have to learn the order of the bins; with these, an example of one action generalizes to its neighbors (on a
    one-object localization task, loss 0.94 instead of 1.37 after 200 steps).
    """
    low, high = (torch.tensor(f, dtype=torch.float64).log() for f in HEAD_FREQUENCIES)
    frequencies = (low + (high - low) * torch.rand(dim, dtype=torch.float64, generator=generator)).exp()
    phases = 2 * torch.pi * torch.rand(dim, dtype=torch.float64, generator=generator)
    actions = torch.linspace(1.0, -1.0, n_bins, dtype=torch.float64)
    # Normed hidden states have unit variance, and a cosine has mean square 1/2.
    scale = HEAD_LOGIT_STD * (2.0 / dim) ** 0.5
    return (scale * torch.cos(actions[:, None] * frequencies + phases)).float()
