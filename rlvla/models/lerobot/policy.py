"""Flow-matching policies in LeRobot's format: SmolVLA, pi0 and pi0.5."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from rlvla.models.lerobot.files import LeRobotFiles
from rlvla.models.lerobot.folder import tensor_problems
from rlvla.models.lerobot.network import FlowNetwork, Prefix
from rlvla.models.lerobot.processors import LeRobotCodec
from rlvla.models.lerobot.settings import PREFIX_FEATURES, SETTINGS_FILE, LeRobotSettings
from rlvla.models.lora import InitialModules
from rlvla.models.network_policy import NetworkPolicy
from rlvla.models.policy import PolicySpec
from rlvla.models.stored_tensors import read_head
from rlvla.models.value_models import scalar_head
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_json

# Head of the standard deviation, in a file that only rlvla reads.
STD_FILE = "flow_std.safetensors"


def lerobot_spec(files: LeRobotFiles, settings: LeRobotSettings) -> PolicySpec:
    """The spec of a policy with these files and settings."""
    config = files.config
    dims, actions = config.features.action_dim, settings.n_action_steps
    network = files.empty_network()
    prefix_width, expert_width = network.prefix_width, network.expert_width
    return PolicySpec(
        action_chunk_len=actions,
        action_dim=dims,
        cameras=len(settings.image_order(config.features.cameras)),
        image_size=files.image_size,
        keeps_aspect_ratio=files.image_size is None,
        proprio_dim=config.features.state_dim,
        proprio_limit=3.0 if files.processors.state.mode == "MEAN_STD" else 1.0,
        summary_dim=prefix_width + expert_width,
        feature_dim=prefix_width if settings.critic_features == PREFIX_FEATURES else expert_width,
        **flow_spec(settings.flow, (actions, dims), (config.chunk_size, config.max_action_dim)),
    )


class LeRobotPolicy(NetworkPolicy):
    """A network with a prefix and a velocity, as a policy.

    Args:
        files: the folder.
        settings: sampling, cameras and features of a critic.
        config: adapters and trained parts.
        network: replaces the network of the folder, e.g. one without weights.
        value_head: add a linear value head.
    """

    def __init__(
        self,
        files: LeRobotFiles,
        settings: LeRobotSettings,
        config: ActorConfig | None = None,
        *,
        network: FlowNetwork | None = None,
        value_head: bool = False,
    ):
        sizes = files.config
        chunk = (settings.n_action_steps, sizes.features.action_dim)
        codec = LeRobotCodec(files.processors, chunk)
        denoised = (sizes.chunk_size, sizes.max_action_dim)
        super().__init__(lerobot_spec(files, settings), codec, FlowHead(codec, settings.flow, chunk, denoised))
        self.files, self.settings, self.config = files, settings, config or ActorConfig()
        self._denoised, self._order = denoised, settings.image_order(sizes.features.cameras)
        self.network = files.load_network() if network is None else network
        choose_trainable(self.network, self.config)
        if self.config.lora_rank:
            add_flow_adapters(self.network, self.config)
        self.std_head: nn.Linear | None = None
        if settings.flow.learns_std:
            self.std_head = load_std_head(files.folder.path, self.network.expert_width, self.spec.action_dim)
        full = ("std_head",) if self.std_head is not None else ()  # trained in full even with adapters
        self._start = InitialModules(self, full) if self.config.lora_rank else None
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
        """Images in the order of the policy's features (rotated if `turned_images`), and normalized states."""
        if self._order != list(range(images.shape[-4])):
            images = np.ascontiguousarray(images[..., self._order, :, :, :])
        if self.settings.turned_images:
            images = np.ascontiguousarray(images[..., ::-1, ::-1, :])
        return super().prepare(images, proprio)

    def hidden(  # type: ignore[override]  # `observations` as named arguments
        self, trace: dict[str, Tensor], *, images: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> Prefix:
        """The prefix; frozen parts stay out of the graph."""
        image_mask = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
        return self.network.prefix(self.files.pixels(images), image_mask, tokens, token_mask, state)

    def read_out(self, hidden: Prefix) -> Prefix:
        """The prefix, on which the velocity is conditioned."""
        return hidden

    def velocity(self, condition: Prefix, x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """See `VelocityModel`."""
        states = self.network.expert_states(condition, x, t)
        velocity = self.network.velocity_of(states)
        if self.std_head is None:
            return velocity
        std = learned_std(self.std_head(states).float())
        return velocity, functional.pad(std, (0, x.shape[-1] - std.shape[-1]), value=1.0)

    def column_features(self, hidden: Prefix) -> Tensor:
        """[B, A * D, d]: the mean of the prefix, or the expert's output for each action at x = 0 and t = 1.

        The mean is normalized to mean 0 and variance 1.
        """
        (actions, dims), pooled = (self.spec.action_chunk_len, self.spec.action_dim), hidden.pooled
        if self.settings.critic_features == PREFIX_FEATURES:
            return _normalized(pooled).to(self._dtype)[:, None].expand(-1, actions * dims, -1)
        return self._first_states(hidden).repeat_interleave(dims, dim=1)

    def summary(self, hidden: Prefix) -> Tensor:
        """The mean of the prefix, and that of the expert's output where denoising starts, each normalized."""
        both = (hidden.pooled.float(), self._first_states(hidden).float().mean(1))
        return torch.cat([_normalized(part) for part in both], 1)

    def _first_states(self, hidden: Prefix) -> Tensor:
        """[B, A, d]: the expert's output for each action at x = 0 and t = 1."""
        x = torch.zeros(len(hidden), 1, *self._denoised, device=hidden.device)
        states = self.network.expert_states(hidden, x, torch.ones(len(hidden), 1, device=hidden.device))
        return states[:, 0, : self.spec.action_chunk_len]

    def freeze_read_out(self) -> None:
        """Freeze the parameters on which `features` does not depend."""
        for name, parameter in self.network.named_parameters():
            if not self.network.feeds(name, self.settings.critic_features):
                parameter.requires_grad_(False)
        for part in (self.std_head, self.value_head):
            if part is not None:
                part.requires_grad_(False)

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """See `LeRobotFiles.row_tokens`."""
        return self.files.row_tokens(instructions, num_images)

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """FLOPs of a forward and backward pass over one decision, with one evaluation of the velocity.

        Two per weight and position forward, two for the gradient of the activations and two for that of the weight,
        the latter only where they are computed (Kaplan et al. 2020). Attention scores are not counted.
        """
        patches, _ = self.files.image_tokens()
        chunk = self._denoised[0]
        positions = {"vision": patches * num_images, "language": tokens - chunk, "state": 1, "expert": chunk}
        positions["output"] = chunk
        policy: Any = getattr(model, "policy", model)  # of a critic, or the model itself
        total, names = 0.0, {id(p): name for name, p in policy.network.named_parameters()}
        trained = {self.network.part_of(names[id(p)]) for p in model.parameters() if p.requires_grad and id(p) in names}
        for parameter in model.parameters():
            part = self.network.part_of(names[id(parameter)]) if id(parameter) in names else "output"
            if not part or "embed_tokens" in names.get(id(parameter), ""):
                continue
            per_weight = 2 + 2 * (part in trained) + 2 * parameter.requires_grad
            total += per_weight * getattr(parameter, "ds_numel", parameter.numel()) * positions[part]
        return total

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
        """Write the policy in LeRobot's format, adapters merged, and rlvla's additional files."""
        folder, state = Path(folder), self.state_dict() if state_dict is None else state_dict
        weights = {name.removeprefix("network."): v for name, v in state.items() if name.startswith("network.")}
        files = self.files.with_sampling(self.settings.n_action_steps, self.settings.flow.steps)
        files.save(folder, merged(weights, self.config))
        write_json(folder / SETTINGS_FILE, {**self.settings.to_json(), **files.recorded_settings()})
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


def choose_trainable(network: FlowNetwork, config: ActorConfig) -> None:
    """Freeze all parameters but those that the run, or else the policy's config.json, trains."""
    network.set_trainable(
        train_expert_only=config.train_expert_only, freeze_vision_encoder=config.freeze_vision_backbone or None
    )


def load_std_head(folder: Path, width: int, action_dim: int) -> nn.Linear:
    """The head of the standard deviation; without a file it is zero, the middle of the range of `learned_std`.

    Args:
        folder: of the policy.
        width: of its inputs, the expert's states.
        action_dim: D, its outputs.

    Raises:
        ConfigError: a file that cannot be read, has tensors of other shapes, or NaN or infinity.
    """
    head, path = scalar_head(width, action_dim), folder / STD_FILE
    if not path.is_file():
        return head
    stored = read_head(path, remedy="use another copy, or delete it to start from the middle of the range")
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    problems = tensor_problems(path, expected, {name: tuple(tensor.shape) for name, tensor in stored.items()})
    if problems:
        raise ConfigError(problems)
    head.load_state_dict(stored)
    return head
