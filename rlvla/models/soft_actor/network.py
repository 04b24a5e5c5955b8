"""The networks of soft actors and their critics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlvla.algorithms.off_policy import (
    critic_actions,
    parameter_mask,
    primitive_log_probs,
    tanh_normal_log_prob,
    tanh_normal_sample,
)
from rlvla.models.compact.network import CameraEncoder, initialize_weights
from rlvla.models.compact.text import Sentences, TextEncoder
from rlvla.models.critic_ensemble import CriticEnsemble
from rlvla.models.soft_actor.config import SoftActorConfig

_CAMERA_WIDTH = 64
_SMALLEST_STD = 0.02  # of proprio: what random actions hardly move may move later
_LARGEST = 20.0  # of normalized proprio
_INITIAL_STD = 0.3  # of parameters before tanh: that of a new network, 1, takes long to shrink


class ObservationEncoder(nn.Module):
    """Observations to one vector: the normalized proprio, the goal, what each camera shows, and the instruction.

    Args:
        config: sizes.

    Attributes:
        features: F, length of the vector.
    """

    def __init__(self, config: SoftActorConfig):
        super().__init__()
        self.register_buffer("mean", torch.zeros(config.proprio_dim))
        self.register_buffer("std", torch.ones(config.proprio_dim))
        camera = config.camera if config.num_images_in_input else None
        self.text = TextEncoder(config.camera.text_buckets, config.text_width) if config.text_width else None
        self.cameras = nn.ModuleList(CameraEncoder(camera) for _ in range(config.num_images_in_input) if camera)
        self.joins = nn.ModuleList(
            nn.Sequential(nn.Linear(encoder.features, _CAMERA_WIDTH), nn.LayerNorm(_CAMERA_WIDTH), nn.Tanh())
            for encoder in self.cameras
        )
        self._condition = config.camera.text_width
        self.features = config.proprio_dim + config.goals + _CAMERA_WIDTH * len(self.cameras) + config.text_width
        for encoder in self.cameras:
            initialize_weights(encoder)

    def set_normalization(self, mean: Tensor, std: Tensor) -> None:
        """Normalize proprio by this mean and standard deviation, [P] each."""
        self.mean.copy_(mean)
        self.std.copy_(std.clamp_min(_SMALLEST_STD))

    def forward(self, proprio: Tensor | None, images: Tensor | None, sentences: Sentences | None) -> Tensor:
        """[B, F] from what was observed.

        Args:
            proprio: [B, P] as the environment gives it; with goals [B, P + G], see `with_goals`.
            images: [B, N, H, W, 3] uint8.
            sentences: instructions.
        """
        parts, size = [], len(self.mean)
        if size:
            assert proprio is not None
            normalized = ((proprio[:, :size] - self.mean) / self.std).clamp(-_LARGEST, _LARGEST)
            parts += [normalized, proprio[:, size:]]
        text = None
        if self.text is not None:
            assert sentences is not None
            text = self.text(sentences.features)[sentences.rows]
            parts.append(text)
        if len(self.cameras):
            assert images is not None
            if text is None:
                text = torch.zeros(len(images), self._condition, device=images.device)
            pixels = images.float().mul_(1 / 127.5).sub_(1.0)
            for index, (encoder, join) in enumerate(zip(self.cameras, self.joins)):
                parts.append(join(encoder(pixels[:, index].permute(0, 3, 1, 2), text)))
        return torch.cat(parts, 1)


def _mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), nn.LayerNorm(size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class SoftActorNetwork(nn.Module):
    """Features to tanh-normal distributions, one for each primitive, and to the choice of the primitive.

    Args:
        config: sizes.
        features: F.
    """

    def __init__(self, config: SoftActorConfig, features: int):
        super().__init__()
        self.kinds = max(1, len(config.primitives))
        self.width = config.parameters
        self.choice = _mlp(features, config.hidden_sizes, self.kinds) if config.primitives else None
        self.parameters_of = _mlp(features, config.hidden_sizes, 2 * self.kinds * self.width)
        sizes = config.primitive_sizes or (config.parameters,)
        self.register_buffer("mask", parameter_mask(sizes, self.width), persistent=False)
        with torch.no_grad():  # begin near the middle of all ranges
            self.parameters_of[-1].weight.mul_(0.1)
            self.parameters_of[-1].bias.view(self.kinds, 2, self.width)[:, 0].zero_()
            self.parameters_of[-1].bias.view(self.kinds, 2, self.width)[:, 1].fill_(math.log(_INITIAL_STD))
            if self.choice is not None:
                self.choice[-1].weight.mul_(0.1)
                self.choice[-1].bias.zero_()

    def forward(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """A sample for every primitive.

        Args:
            features: [B, F].
            noise: [B, n, D] standard normal; n is 1 without primitives.

        Returns:
            Parameters [B, n, D] in [-1, 1], 0 where unused; log-densities [B, n, D]; log-probs [B, n] of the choice, or
            None without primitives.
        """
        mean, log_std = self._distribution(features)
        values, log_probs = tanh_normal_sample(mean, log_std, noise, self.mask)
        return values, log_probs, None if self.choice is None else primitive_log_probs(self.choice(features))

    def log_prob(self, features: Tensor, values: Tensor) -> Tensor:
        """[B, n, D]: log-densities of given parameters [B, n, D]."""
        mean, log_std = self._distribution(features)
        return tanh_normal_log_prob(values, mean, log_std, self.mask)

    def _distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        both = self.parameters_of(features).unflatten(1, (self.kinds, 2, self.width))
        return both[:, :, 0], both[:, :, 1]


class SoftCritic(nn.Module):
    """An ensemble of critics behind an encoder of their own.

    Args:
        config: sizes, see `SoftActorPolicy.critic_config`.
        n_critics: M.
    """

    def __init__(self, config: SoftActorConfig, n_critics: int):
        super().__init__()
        self.encoder = ObservationEncoder(config)
        self.ensemble = CriticEnsemble(
            self.encoder.features + config.action_width, config.hidden_sizes, n_critics, init="orthogonal"
        )

    def forward(
        self,
        actions: Tensor,
        proprio: Tensor | None,
        images: Tensor | None,
        sentences: Sentences | None,
        critics: Tensor | None = None,
    ) -> Tensor:
        """Values [M, B] of stored actions [B, E], or [M, B, n] of [B, n, E]; `critics` [m]: only those."""
        features = self.encoder(proprio, images, sentences)
        if actions.dim() == 3:
            features = features[:, None].expand(-1, actions.shape[1], -1)
        return self.ensemble(torch.cat([features, actions], -1), critics)


def with_goals(proprio: Tensor, goals: Tensor, count: int) -> Tensor:
    """[B, P + G]: proprio [B, P] followed by the one-hot vectors of goals [B] int64, of which there are `count` G."""
    return torch.cat([proprio, functional.one_hot(goals, count).to(proprio.dtype)], 1)


def stored_actions(values: Tensor, mask: Tensor, kinds: Tensor | None) -> Tensor:
    """Decisions as they are stored and judged.

    Args:
        values: parameters [..., D].
        mask: [n, D] bool.
        kinds: primitives [...] int64, or None without.

    Returns:
        [..., n + D] with primitives, see `critic_actions`; else the values.
    """
    return values if kinds is None else critic_actions(kinds, values, mask)
