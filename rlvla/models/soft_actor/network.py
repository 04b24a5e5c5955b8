"""Networks of soft actors and their critics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, relu

from rlvla.algorithms.flow import cfm_loss, flow_matching_time, interpolate, time_grid
from rlvla.algorithms.off_policy import (
    parameter_mask,
    primitive_log_probs,
    tanh_normal_sample,
)
from rlvla.models.compact.network import CameraEncoder, initialize_weights
from rlvla.models.compact.text import Sentences, TextEncoder
from rlvla.models.sac_policy import MatchingBatch
from rlvla.models.soft_actor.config import SoftActorConfig

_CAMERA_WIDTH = 64
_MIN_PROPRIO_STD = 0.02  # numbers that random actions hardly change may change later
_MAX_PROPRIO = 20.0  # after normalization
_INITIAL_STD = 0.3  # of parameters before tanh: the default initialization gives 1, which takes long to shrink
_LARGEST_IMITATED = 0.99  # action: larger ones are imitated as this one, as atanh(1) is infinite


class ObservationEncoder(nn.Module):
    """Observations to one vector: normalized proprio, goal, features of each camera, instruction.

    Args:
        config: sizes.

    Attributes:
        features: F, length of the vector.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: SoftActorConfig):
        super().__init__()
        self.register_buffer("mean", torch.zeros(config.proprio_dim))
        self.register_buffer("std", torch.ones(config.proprio_dim))
        self.text = TextEncoder(config.camera.text_buckets, config.text_width) if config.text_width else None
        cameras = [CameraEncoder(config.camera) for _ in range(config.num_images_in_input)]
        self.cameras = nn.ModuleList(cameras)
        self.joins = nn.ModuleList(
            nn.Sequential(nn.Linear(camera.features, _CAMERA_WIDTH), nn.LayerNorm(_CAMERA_WIDTH), nn.Tanh())
            for camera in cameras
        )
        self._condition = config.camera.text_width
        self.features = config.proprio_dim + config.goals + _CAMERA_WIDTH * len(cameras) + config.text_width
        for camera in cameras:
            initialize_weights(camera)

    def set_normalization(self, mean: Tensor, std: Tensor) -> None:
        """Normalize proprio by this mean and standard deviation, [P] each."""
        self.mean.copy_(mean)
        self.std.copy_(std.clamp_min(_MIN_PROPRIO_STD))

    def forward(self, proprio: Tensor | None, images: Tensor | None, sentences: Sentences | None) -> Tensor:
        """[B, F] features.

        Args:
            proprio: [B, P], not normalized; with goals [B, P + G], see `with_goals`.
            images: [B, N, H, W, 3] uint8.
            sentences: instructions.
        """
        features, size = [], len(self.mean)
        if size:
            assert proprio is not None
            normalized = ((proprio[:, :size] - self.mean) / self.std).clamp(-_MAX_PROPRIO, _MAX_PROPRIO)
            features += [normalized, proprio[:, size:]]
        text = None
        if self.text is not None:
            assert sentences is not None
            text = self.text(sentences.features)[sentences.rows]
            features.append(text)
        if len(self.cameras):
            assert images is not None
            if text is None:
                text = torch.zeros(len(images), self._condition, device=images.device)
            pixels = images.float().mul_(1 / 127.5).sub_(1.0)
            for index, (encoder, join) in enumerate(zip(self.cameras, self.joins)):
                features.append(join(encoder(pixels[:, index].permute(0, 3, 1, 2), text)))
        return torch.cat(features, 1)


def _mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), nn.LayerNorm(size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def _output_layer(mlp: nn.Sequential) -> nn.Linear:
    layer = mlp[-1]
    assert isinstance(layer, nn.Linear)
    return layer


class SoftActorNetwork(nn.Module):
    """Features to a distribution over primitives, and a tanh-normal distribution of each one's parameters.

    Args:
        config: sizes.
        features: F.
    """

    mask: Tensor

    def __init__(self, config: SoftActorConfig, features: int):
        super().__init__()
        self.kinds = max(1, len(config.primitives))
        self.width = config.parameters
        self.choice = _mlp(features, config.hidden_sizes, self.kinds) if config.primitives else None
        self.parameters_of = _mlp(features, config.hidden_sizes, 2 * self.kinds * self.width)
        sizes = config.primitive_sizes or (config.parameters,)
        self.register_buffer("mask", parameter_mask(sizes, self.width), persistent=False)
        with torch.no_grad():  # start near the middle of all ranges
            output = _output_layer(self.parameters_of)
            output.weight.mul_(0.1)
            output.bias.view(self.kinds, 2, self.width)[:, 0].zero_()
            output.bias.view(self.kinds, 2, self.width)[:, 1].fill_(math.log(_INITIAL_STD))
            if self.choice is not None:
                output = _output_layer(self.choice)
                output.weight.mul_(0.1)
                output.bias.zero_()

    def forward(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sample the parameters of every primitive from features [B, F]; see `SACPolicy.__call__`."""
        mean, log_std = self.parameter_distribution(features)
        values, log_probs = tanh_normal_sample(mean, log_std, noise, self.mask)
        return values, log_probs, None if self.choice is None else primitive_log_probs(self.choice(features))

    def parameter_distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation [B, n, D] of the parameters before tanh."""
        both = self.parameters_of(features).unflatten(1, (self.kinds, 2, self.width))
        return both[:, :, 0], both[:, :, 1]


class FlowActorNetwork(nn.Module):
    """Features to a flow over the actions of a chunk, whose last step is noisy.

    With u the action before tanh, K Euler steps of length 1 / K take u from standard normal noise x_1 (t = 1) along the
    velocity v(u, t) to t = 0; then u is given Gaussian noise of a learned standard deviation, which the network
    predicts with the last velocity, and the action is tanh(u). The log-density of an action is that of this last step
    given x_1. Its negative mean is the conditional entropy H(a | s, x_1), a lower bound of the policy's entropy
    H(a | s). Everything is differentiable; with noise 0 the action is deterministic.

    Args:
        config: sizes; K is `flow_steps`.
        features: F.
    """

    mask: Tensor
    kinds = 1
    choice = None

    def __init__(self, config: SoftActorConfig, features: int):
        super().__init__()
        self.steps, self.width = config.flow_steps, config.parameters
        self._chunk = (config.action_chunk_len, config.action_dim)
        self.velocity_of = _mlp(features + self.width + 1, config.hidden_sizes, 2 * self.width)
        self.register_buffer("mask", parameter_mask((self.width,)), persistent=False)
        with torch.no_grad():
            output = _output_layer(self.velocity_of)
            output.weight.mul_(0.1)
            output.bias[: self.width].zero_()
            output.bias[self.width :].fill_(math.log(_INITIAL_STD))

    def velocity(self, features: Tensor, u: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity and log standard deviation [B, D] at u [B, D] and times t [B, 1]."""
        velocity, log_std = self.velocity_of(torch.cat([features, u, t], 1)).chunk(2, 1)
        return velocity, log_std

    def forward(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, None]:
        """Actions and log-densities [B, 1, D] from features [B, F] and noise [B, 1, 2 D]: x_1, and the last step's."""
        start, last = noise[:, 0].chunk(2, 1)
        u, log_std = start, start
        for t in time_grid(self.steps, device=start.device)[:-1]:
            velocity, log_std = self.velocity(features, u, t.expand(len(u), 1))
            u = u - velocity / self.steps
        actions, log_densities = tanh_normal_sample(u, log_std, last)
        return actions[:, None], log_densities[:, None], None

    def matching_losses(self, features: Tensor, batch: MatchingBatch) -> Tensor:
        """[B] flow-matching losses at one time per row: mean squared error of the velocity over executed actions."""
        targets = torch.atanh(batch.actions.clamp(-_LARGEST_IMITATED, _LARGEST_IMITATED))
        noise, t = batch.noise[:, :-1], flow_matching_time(torch.special.ndtr(batch.noise[:, -1:]))
        velocity, _ = self.velocity(features, interpolate(targets, noise, t), t)
        executed = torch.arange(self._chunk[0], device=t.device) < batch.steps[:, None]
        velocity, targets, noise = (values.unflatten(1, self._chunk) for values in (velocity, targets, noise))
        return cfm_loss(velocity, targets, noise, executed[..., None])


class SoftCritic(nn.Module):
    """An ensemble of critics behind a shared encoder; implements `SACCritic`.

    Args:
        config: sizes.
        n_critics: M.
    """

    def __init__(self, config: SoftActorConfig, n_critics: int):
        super().__init__()
        self.encoder = ObservationEncoder(config)
        self.ensemble = CriticEnsemble(
            self.encoder.features + config.action_width, config.hidden_sizes, n_critics, init="orthogonal"
        )

    def proprio_normalization(self) -> tuple[Tensor, Tensor]:
        """See `SACCritic.proprio_normalization`."""
        return self.encoder.mean, self.encoder.std

    def set_proprio_normalization(self, mean: Tensor, std: Tensor) -> None:
        """See `SACCritic.set_proprio_normalization`."""
        self.encoder.set_normalization(mean, std)

    def forward(
        self,
        actions: Tensor,
        proprio: Tensor | None,
        images: Tensor | None,
        sentences: Sentences | None,
        critics: Tensor | None = None,
    ) -> Tensor:
        """See `SACCritic.__call__`."""
        features = self.encoder(proprio, images, sentences)
        if actions.dim() == 3:
            features = features[:, None].expand(-1, actions.shape[1], -1)
        return self.ensemble(torch.cat([features, actions], -1), critics)


INITIALISATIONS = ("default", "orthogonal")


class CriticEnsemble(nn.Module):
    """M independent critics Q(s, a): MLPs with LayerNorm and ReLU after each hidden layer (RLPD, Ball et al. 2023).

    LayerNorm bounds the values of actions that are not in the data. A layer of all critics is one batched product.

    Args:
        input_dim: F, features of state and action together.
        hidden_sizes: width of each hidden layer.
        n_critics: M.
        init: "default" (that of `nn.Linear`) or "orthogonal" (gain sqrt(2), output 1, biases 0).
        generator: of the initial weights.

    Raises:
        ValueError: a size that is not positive, or unknown init.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        n_critics: int = 10,
        *,
        init: str = "default",
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        sizes = [input_dim, *hidden_sizes, 1]
        if min(*sizes, n_critics) < 1:
            raise ValueError(f"input {input_dim}, hidden {list(hidden_sizes)} and {n_critics} critics must be positive")
        if init not in INITIALISATIONS:
            raise ValueError(f"unknown initialisation {init!r}; known: {', '.join(INITIALISATIONS)}")
        self.n_critics = n_critics
        linears = [EnsembleLinear(n_critics, i, o) for i, o in zip(sizes, sizes[1:])]
        for number, linear in enumerate(linears):
            linear.initialise(init, 2.0**0.5 if number < len(hidden_sizes) else 1.0, generator)
        self.linears = nn.ModuleList(linears)
        self.norms = nn.ModuleList(EnsembleLayerNorm(n_critics, size) for size in hidden_sizes)

    def forward(self, inputs: Tensor, critics: Tensor | None = None) -> Tensor:
        """Values of all critics, or of those whose indices are given.

        Args:
            inputs: [..., F], the same for all critics; computed in the dtype of the weights, also under autocast.
            critics: [m] int64, see `rlvla.algorithms.off_policy.random_critics`; the others are not evaluated.

        Returns:
            [M, ...] or [m, ...].
        """
        rows = inputs.reshape(-1, inputs.shape[-1]).to(next(self.parameters()).dtype)
        count = self.n_critics if critics is None else len(critics)
        with torch.autocast(inputs.device.type, enabled=False):
            x = rows.expand(count, *rows.shape)
            for linear, norm in zip(self.linears, self.norms):
                x = relu(norm(linear(x, critics), critics))
            return self.linears[-1](x, critics).reshape(count, *inputs.shape[:-1])


class EnsembleLinear(nn.Module):
    """M linear layers; weight [M, inputs, outputs], bias [M, 1, outputs], both uninitialised."""

    def __init__(self, members: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs))

    @torch.no_grad()
    def initialise(self, init: str, gain: float, generator: torch.Generator | None) -> None:
        """See `CriticEnsemble`; each member draws its own weights, `gain` is that of "orthogonal"."""
        if init == "orthogonal":
            for weight in self.weight:
                nn.init.orthogonal_(weight, gain, generator)
            nn.init.zeros_(self.bias)
            return
        bound = self.weight.shape[1] ** -0.5
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound, generator)

    def forward(self, x: Tensor, members: Tensor | None) -> Tensor:
        """[m, N, inputs] -> [m, N, outputs]."""
        return torch.baddbmm(_of(self.bias, members), x, _of(self.weight, members))


class EnsembleLayerNorm(nn.Module):
    """M layer norms over the last dimension, each with its own scale and shift."""

    def __init__(self, members: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, size))
        self.bias = nn.Parameter(torch.zeros(members, 1, size))

    def forward(self, x: Tensor, members: Tensor | None) -> Tensor:
        """[m, N, size] -> the same."""
        normalised = layer_norm(x, x.shape[-1:])
        return torch.addcmul(_of(self.bias, members), normalised, _of(self.weight, members))


def _of(parameter: Tensor, members: Tensor | None) -> Tensor:
    return parameter if members is None else parameter[members]
