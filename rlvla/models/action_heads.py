"""How a VLA's hidden states become actions: tokens, or a Gaussian around the output of a regression head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlvla.models.distributions import GaussianDistribution, TokenDistribution
from rlvla.models.policy import PolicyOutput, PolicySpec
from rlvla.models.vla.choices import REGRESSION

if TYPE_CHECKING:
    from rlvla.models.vla.configuration_openvla import OpenVLAConfig
    from rlvla.models.vla.inputs import VLAInputs

# A prediction within this distance of its label counts as correct: one fortieth of the range [-1, 1].
CORRECT_WITHIN = 0.05
# Angular frequencies (radians per unit of normalized action) of the smooth initialization of the action head, and the
# standard deviation of its logits.
HEAD_FREQUENCIES = (1.0, 20.0)
HEAD_LOGIT_STD = 1.7


class ActionCodec(Protocol):
    """Between the numbers of the environment and those of the network; see `StatisticsCodec` for each."""

    @property
    def effective_tokens(self) -> Tensor: ...  # noqa: D102
    @property
    def effective_numbers(self) -> Tensor: ...  # noqa: D102
    def encode_actions(self, actions: np.ndarray) -> np.ndarray: ...  # noqa: D102
    def decode_actions(self, columns: np.ndarray) -> np.ndarray: ...  # noqa: D102
    def normalize_actions(self, actions: np.ndarray) -> np.ndarray: ...  # noqa: D102
    def unnormalize_actions(self, actions: np.ndarray) -> np.ndarray: ...  # noqa: D102


class ReadOut(Protocol):
    """A network whose hidden states become logits, or mean and logarithm of the standard deviation."""

    def read_out(self, hidden: Tensor) -> Any: ...  # noqa: D102


class ActionHead(Protocol):
    """The part of a policy that depends on how actions are sampled; it has no weights."""

    def distribution(self, model: ReadOut, hidden: Tensor, temperature: float) -> Any:
        """The `ActionDistribution` that the model computes from hidden states [B, A*D, d]."""
        ...

    def supervised(
        self, distribution: Any, trace: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """`loss`, `error` (the loss to report) and `correct` for the labels in `trace`, each [B, K] float32."""
        ...

    def environment_actions(self, output: PolicyOutput) -> np.ndarray:
        """[B, A, D] float32: the actions that the environment executes."""
        ...

    def encode(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """The trace that stands for environment actions [..., A, D]."""
        ...

    def anneal_noise(self, end: float, progress: float) -> float:
        """Set the noise level of the decisions to come; only with `PolicySpec.anneals_noise`."""
        raise NotImplementedError

    def denoise(self, model: Any, hidden: Any, start: Tensor) -> np.ndarray:
        """See `NetworkPolicy.denoise`; only with `PolicySpec.start_shape`."""
        raise NotImplementedError

    @property
    def effective_columns(self) -> Tensor:
        """[K] bool: columns that can change the action."""
        ...


class TokenHead:
    """Discrete tokens from the language model head.

    Args:
        inputs: encodes and decodes actions.
    """

    def __init__(self, inputs: ActionCodec):
        self._inputs = inputs

    def distribution(self, model: ReadOut, hidden: Tensor, temperature: float) -> TokenDistribution:
        """Categorical, from the hidden states at the action positions."""
        return TokenDistribution(model.read_out(hidden).float(), temperature)

    def supervised(
        self, distribution: TokenDistribution, trace: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Cross-entropy; `error` leaves out `label_smoothing`."""
        log_probs, smoothing = distribution.log_prob(trace), options.get("label_smoothing", 0.0)
        every = distribution.all_log_probs
        loss = -log_probs
        if smoothing:
            loss = -(1 - smoothing) * log_probs - smoothing * every.mean(-1)
        correct = (every.argmax(-1) == trace["tokens"]).float()
        return {"loss": loss, "error": -log_probs.detach(), "correct": correct}

    def environment_actions(self, output: PolicyOutput) -> np.ndarray:
        """Decoded tokens."""
        return self._inputs.decode_actions(output.trace["tokens"].cpu().numpy())

    def encode(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """`tokens` [..., K] int64."""
        return {"tokens": self._inputs.encode_actions(actions)}

    @property
    def effective_columns(self) -> Tensor:
        """See `StatisticsCodec.effective_tokens`."""
        return self._inputs.effective_tokens


class GaussianHead:
    """Continuous actions around the mean of a regression head.

    Args:
        inputs: normalizes actions.
    """

    def __init__(self, inputs: ActionCodec):
        self._inputs = inputs

    def distribution(self, model: ReadOut, hidden: Tensor, temperature: float) -> GaussianDistribution:
        """Mean and standard deviation from the hidden states at the action positions."""
        return GaussianDistribution(*model.read_out(hidden), temperature)

    def supervised(
        self, distribution: GaussianDistribution, trace: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """`sft_loss` "l1": absolute error of the mean; "nll": negative log-likelihood."""
        distance = (distribution.mean - trace["actions"]).abs().flatten(1)
        loss = distance if options.get("sft_loss", "l1") == "l1" else -distribution.log_prob(trace)
        correct = (distance.detach() < CORRECT_WITHIN).float()
        return {"loss": loss, "error": loss.detach(), "correct": correct}

    def environment_actions(self, output: PolicyOutput) -> np.ndarray:
        """Unnormalized actions; clipping is left to the environment."""
        assert output.actions is not None
        return self._inputs.unnormalize_actions(output.actions.cpu().numpy())

    def encode(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """`actions` [..., A, D] float32, normalized."""
        return {"actions": self._inputs.normalize_actions(actions)}

    @property
    def effective_columns(self) -> Tensor:
        """See `StatisticsCodec.effective_numbers`."""
        return self._inputs.effective_numbers


def action_head(inputs: VLAInputs) -> ActionHead:
    """The head that the configuration asks for."""
    return GaussianHead(inputs) if inputs.config.has_regression_head else TokenHead(inputs)


def policy_spec(config: OpenVLAConfig) -> PolicySpec:
    """The spec of a policy with this configuration."""
    columns, continuous = config.num_action_tokens, config.has_regression_head
    shape = (config.action_chunk_len, config.action_dim)
    return PolicySpec(
        action_chunk_len=config.action_chunk_len,
        action_dim=config.action_dim,
        columns=columns,
        noise_shape=shape if continuous else (columns,),
        noise="normal" if continuous else "uniform",
        cameras=config.num_images_in_input,
        image_size=None if config.image_preprocessing != "none" or config.center_crop else config.image_size,
        proprio_dim=(config.proprio_dim or 0) if config.use_proprio else 0,
        feature_dim=config.text_config.hidden_size,
        token_by_token=config.is_autoregressive,
        missing=missing_of(config.model_variant),
    )


def missing_of(model_variant: str | None) -> dict[str, str]:
    """What a variant does not support (None: a token policy), see `PolicySpec.missing`."""
    return MISSING_OF_DENSITIES if model_variant == REGRESSION else MISSING_OF_TOKENS


MISSING_OF_TOKENS = {
    "rsample": "tokens are discrete: a sample has no gradient",
    "sft_loss": "action tokens are trained by cross-entropy",
}
MISSING_OF_DENSITIES = {
    "label_smoothing": "its actions are no tokens",
    "sum_pi_squared": "a density has no sum of squared probabilities",
    "probabilities": "the actions are continuous: a log-prob is the logarithm of a density, which may exceed 1",
}


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
