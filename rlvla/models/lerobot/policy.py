"""Flow-matching policies in LeRobot's format, whatever their network: SmolVLA, and others of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from rlvla.algorithms.flow import learned_std
from rlvla.models.config import ActorConfig
from rlvla.models.flow.head import FlowHead, flow_spec
from rlvla.models.lerobot.adapters import adapters_off, add_flow_adapters, merged
from rlvla.models.lerobot.choices import PREFIX
from rlvla.models.lerobot.codec import LeRobotCodec
from rlvla.models.lerobot.files import LeRobotFiles
from rlvla.models.lerobot.network import FlowNetwork, Prefix
from rlvla.models.lerobot.settings import SETTINGS_FILE, LeRobotSettings
from rlvla.models.lerobot.std_head import STD_FILE, load_std_head
from rlvla.models.lora import StartParts
from rlvla.models.network_policy import NetworkPolicy
from rlvla.models.policy import PolicySpec
from rlvla.models.value_models import scalar_head
from rlvla.utils.files import write_json


@dataclass(frozen=True)
class Encoded:
    """The prefix of B decisions, as `NetworkPolicy.hidden`."""

    prefix: Prefix

    def __len__(self) -> int:
        """B."""
        return len(self.prefix.mask)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.prefix.mask.device


def lerobot_spec(files: LeRobotFiles, settings: LeRobotSettings) -> PolicySpec:
    """The spec of a policy with these files and settings."""
    config = files.config
    dims, actions = config.features.action_dim, settings.n_action_steps
    with_widths = files.empty_network()
    return PolicySpec(
        action_chunk_len=actions,
        action_dim=dims,
        cameras=len(settings.image_order(config.features.cameras)),
        image_size=files.image_size,
        proprio_dim=config.features.state_dim,
        summary_dim=with_widths.prefix_width + with_widths.expert_width,
        feature_dim=with_widths.prefix_width if settings.critic_features == PREFIX else with_widths.expert_width,
        **flow_spec(settings.flow, (actions, dims), (config.chunk_size, config.max_action_dim)),
    )


class LeRobotPolicy(NetworkPolicy):
    """A network with a prefix and a velocity, as a policy.

    Args:
        files: the folder.
        settings: how it acts, and what a critic reads.
        config: adapters and what is trained.
        network: in place of that of the folder, e.g. without weights.
        value_head: add a linear value head.
    """

    def __init__(
        self,
        files: LeRobotFiles,
        settings: LeRobotSettings,
        config: ActorConfig | None = None,
        *,
        network: Any = None,
        value_head: bool = False,
    ):
        sizes = files.config
        chunk = (settings.n_action_steps, sizes.features.action_dim)
        codec = LeRobotCodec(files.processors, chunk)
        denoised = (sizes.chunk_size, sizes.max_action_dim)
        super().__init__(lerobot_spec(files, settings), codec, FlowHead(codec, settings.flow, chunk, denoised))
        self.files, self.settings, self.config = files, settings, config or ActorConfig()
        self._denoised, self._order = denoised, settings.image_order(sizes.features.cameras)
        self.network: Any = files.load_network() if network is None else network
        choose_trainable(self.network, self.config)
        if self.config.lora_rank:
            add_flow_adapters(self.network, self.config)
        place, widths = files.folder.path, (self.network.expert_width, self.spec.action_dim)
        self.std_head = load_std_head(place, *widths) if settings.flow.learns_std else None
        parts = ("std_head",) if self.std_head is not None else ()  # trained in full even with adapters
        self._start = StartParts(self, parts) if self.config.lora_rank else None
        self.value_head = scalar_head(self.spec.feature_dim) if value_head else None

    def observations(self, images: Tensor, proprio: Tensor | None, instructions: Sequence[str]) -> dict[str, Any]:
        """See `NetworkPolicy.observations`."""
        assert proprio is not None  # `PolicySpec.proprio_dim` asks for it
        device = self._device
        tokens, mask = self.files.prompts(instructions, proprio)
        missing = self.files.config.max_state_dim - proprio.shape[-1]
        state = functional.pad(proprio.float(), (0, missing)).to(device)
        return {"images": images.to(device), "tokens": tokens.to(device), "token_mask": mask.to(device), "state": state}

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Images in the order of the policy's features, turned if need be, states normalized."""
        if self._order != list(range(images.shape[-4])):
            images = np.ascontiguousarray(images[..., self._order, :, :, :])
        if self.settings.turned_images:
            images = np.ascontiguousarray(images[..., ::-1, ::-1, :])
        return super().prepare(images, proprio)

    def hidden(
        self, trace: dict[str, Tensor], *, images: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Encoded:
        """The prefix; parts of it whose weights are frozen stay out of the graph."""
        seen = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
        return Encoded(self.network.prefix(self.files.pixels(images), seen, tokens, token_mask, state))

    def read_out(self, hidden: Encoded) -> Any:
        """The prefix."""
        return hidden.prefix

    def velocity(self, condition: Any, x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """See `VelocityModel`."""
        states = self.network.expert_states(condition, x, t)
        velocity: Tensor = self.network.velocity_of(states)
        if self.std_head is None:
            return velocity
        std = learned_std(self.std_head(states).float())
        return velocity, functional.pad(std, (0, x.shape[-1] - std.shape[-1]), value=1.0)

    def column_features(self, hidden: Encoded) -> Tensor:
        """[B, A * D, d]: the mean of the prefix, or the expert's output for each action at x = 0 and t = 1.

        The mean is normalized to mean 0 and variance 1.
        """
        (actions, dims), pooled = (self.spec.action_chunk_len, self.spec.action_dim), hidden.prefix.pooled
        if self.settings.critic_features == PREFIX:
            return _normalized(pooled).to(self._dtype)[:, None].expand(-1, actions * dims, -1)
        return self._first_states(hidden).repeat_interleave(dims, dim=1)

    def summary(self, hidden: Encoded) -> Tensor:
        """The mean of the prefix, and that of the expert's output where denoising starts, each normalized."""
        both = (hidden.prefix.pooled.float(), self._first_states(hidden).float().mean(1))
        return torch.cat([_normalized(part) for part in both], 1)

    def _first_states(self, hidden: Encoded) -> Tensor:
        """[B, A, d]: the expert's output for each action at x = 0 and t = 1."""
        x = torch.zeros(len(hidden), 1, *self._denoised, device=hidden.device)
        states: Tensor = self.network.expert_states(hidden.prefix, x, torch.ones(len(hidden), 1, device=hidden.device))
        return states[:, 0, : self.spec.action_chunk_len]

    def freeze_read_out(self) -> None:
        """Freeze the parameters that `features` does not depend on."""
        for name, parameter in self.network.named_parameters():
            if not self.network.feeds(name, self.settings.critic_features):
                parameter.requires_grad_(False)
        for part in (self.std_head, self.value_head):
            if part is not None:
                part.requires_grad_(False)

    def freeze_std(self) -> None:
        """Freeze the head of the standard deviation, which flow matching does not train."""
        if self.std_head is not None:
            self.std_head.requires_grad_(False)

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """Length of each row's prefix and chunk."""
        return row_tokens(self.files, instructions, num_images)

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """FLOPs of a forward and backward pass over one decision, with one evaluation of the velocity.

        Two per weight and position forward, two for the gradient of the activations and two for that of the weight,
        the latter only where they are computed (Kaplan et al. 2020). Attention scores are not counted.
        """
        patches, _ = self.files.image_tokens()
        chunk = self._denoised[0]
        positions = {"vision": patches * num_images, "language": tokens - chunk, "state": 1, "expert": chunk}
        positions["output"] = chunk
        total, names = 0.0, {id(p): name for name, p in self._network_of(model).named_parameters()}
        trained = {self.network.part_of(names[id(p)]) for p in model.parameters() if p.requires_grad and id(p) in names}
        for parameter in model.parameters():
            part = self.network.part_of(names[id(parameter)]) if id(parameter) in names else "output"
            if not part or "embed_tokens" in names.get(id(parameter), ""):
                continue
            per_weight = 2 + 2 * (part in trained) + 2 * parameter.requires_grad
            total += per_weight * getattr(parameter, "ds_numel", parameter.numel()) * positions[part]
        return total

    def _network_of(self, model: nn.Module) -> nn.Module:
        """The network inside a policy, or a critic made of one."""
        network: nn.Module = getattr(model, "policy", model).network
        return network

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """Within the block, use the policy as it was before adapters were added, with its original standard deviation.

        Raises:
            ValueError: the policy has no adapters.
        """
        if self._start is None:
            raise ValueError("this policy has no adapters that could be disabled")
        with adapters_off(self.network), self._start.in_place_of(self):
            yield

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the policy in LeRobot's format, adapters merged, and beside it what only rlvla reads."""
        folder, state = Path(folder), self.state_dict() if state_dict is None else state_dict
        weights = {name.removeprefix("network."): v for name, v in state.items() if name.startswith("network.")}
        files = self.files.with_sampling(self.settings.n_action_steps, self.settings.flow.steps)
        files.save(folder, merged(weights, self.config))
        write_json(folder / SETTINGS_FILE, self.settings.to_json())
        std = {name.removeprefix("std_head."): v for name, v in state.items() if name.startswith("std_head.")}
        if std:
            tensors = {name: v.detach().cpu().contiguous() for name, v in std.items()}
            save_file(tensors, str(folder / STD_FILE), metadata={"format": "pt"})

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype


def _normalized(vectors: Tensor) -> Tensor:
    """[B, d] with mean 0 and variance 1 in each row."""
    return functional.layer_norm(vectors, vectors.shape[-1:])


def choose_trainable(network: Any, config: ActorConfig) -> None:
    """Freeze the parameters of a `FlowNetwork` that neither a run nor the policy's config.json wants trained."""
    network.set_trainable(
        train_expert_only=config.train_expert_only, freeze_vision_encoder=config.freeze_vision_backbone or None
    )


def row_tokens(files: LeRobotFiles, instructions: Sequence[str], num_images: int) -> list[int]:
    """See `LeRobotPolicy.row_tokens`."""
    chunk: int = files.config.chunk_size
    return [length + chunk for length in files.prefix_tokens(instructions, num_images)]
