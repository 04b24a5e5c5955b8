"""Networks that judge: the critic (value per action token) and the reward model (success of a final observation)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlvla.experience import Experience
from rlvla.models.backbone import prepare_backbone
from rlvla.models.config import ActorConfig
from rlvla.models.inputs import VLAInputs
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.errors import ConfigError

VALUE_HEAD_FILE = "value_head.safetensors"
REWARD_HEAD_FILE = "reward_head.safetensors"


def scalar_head(config: OpenVLAConfig) -> nn.Linear:
    """One output on the hidden states, zero everywhere at first: the first advantages are then the plain returns."""
    head = nn.Linear(config.text_config.hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class _ScalarHead(nn.Module):
    """A VLA with one linear output per action-token position.

    Args:
        vla: the architecture with its weights.
        inputs: how observations become model inputs.
    """

    def __init__(self, vla: OpenVLAForActionPrediction, inputs: VLAInputs):
        super().__init__()
        self.vla, self.inputs = vla, inputs
        self.head = scalar_head(inputs.config)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        images: torch.Tensor,
        proprio: torch.Tensor | None,
        action_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One number per action-token position, [B, T] float32; inputs as for `Actor.forward`.

        The first position never depends on `action_tokens`. Later ones do in the autoregressive variant; without
        tokens they mean nothing there.
        """
        pixels, proprio = self.inputs.pixels_and_proprio(images, proprio, next(self.parameters()).dtype)
        if action_tokens is None:
            action_tokens = input_ids.new_zeros(len(input_ids), self.inputs.config.num_action_tokens)
        ids = self.inputs.processor.action_tokenizer.columns_to_ids(action_tokens)
        hidden = self.vla.action_hidden_states(input_ids, attention_mask, pixels, proprio, ids)
        return self.head(hidden).squeeze(-1).float()

    def score(self, batch: Experience) -> dict[str, object]:
        """Keyword arguments of `forward` for a batch of decisions, on its device; proprio only where it reads any."""
        inputs = self.inputs.to_device(batch, next(self.parameters()).device)
        return inputs if self.inputs.config.use_proprio else {**inputs, "proprio": None}

    def _save(self, folder: str | Path, head_file: str, state: dict[str, torch.Tensor] | None) -> None:
        state = self.state_dict() if state is None else state
        body = {name.removeprefix("vla."): tensor for name, tensor in state.items() if name.startswith("vla.")}
        self.vla.save_pretrained(folder, state_dict=body)
        head = {name: tensor.contiguous() for name, tensor in state.items() if name.startswith("head.")}
        save_file(head, str(Path(folder) / head_file))


def _load(
    path: str | Path, unnorm_key: str | None, config: ActorConfig | None = None, **overrides: Any
) -> tuple[OpenVLAForActionPrediction, VLAInputs]:
    vla = OpenVLAForActionPrediction.from_pretrained(path, **overrides)
    prepare_backbone(vla, config or ActorConfig())
    return vla, VLAInputs.from_pretrained(path, config=vla.config, unnorm_key=unnorm_key)


class Critic(_ScalarHead):
    """State values: a network of its own with a value head.

    The value of an action is read at the position of its first token.
    """

    @classmethod
    def from_pretrained(
        cls, path: str | Path, unnorm_key: str | None = None, config: ActorConfig | None = None, **overrides: Any
    ) -> Critic:
        """Load a policy or critic folder; without a stored value head the head starts at zero.

        Arguments as for `Actor.from_pretrained`, but for adapters, which a critic has none of. A critic that sees other
        pixels than its actor judges another state.
        """
        critic = cls(*_load(path, unnorm_key, config, **overrides))
        head = Path(path) / VALUE_HEAD_FILE
        if head.exists():
            critic.load_state_dict(load_file(str(head)), strict=False)
        return critic

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the public format plus the value head."""
        self._save(folder, VALUE_HEAD_FILE, state_dict)


class RewardModel(_ScalarHead):
    """Probability that an episode succeeded, and its progress, from an observation and the instruction.

    The success logit is read at the first action position, the progress logit at the second.
    """

    @torch.inference_mode()
    def progress(self, batch: Experience) -> torch.Tensor:
        """[B] in (0, 1): the share of the task that is done in the observations of a batch."""
        return torch.sigmoid(self(**self.score(batch))[:, 1])

    @classmethod
    def from_policy(cls, path: str | Path, unnorm_key: str | None = None) -> RewardModel:
        """A reward model to be trained, from a policy folder; its head starts at zero."""
        return cls(*_load(path, unnorm_key))

    @classmethod
    def from_pretrained(
        cls, path: str | Path, unnorm_key: str | None = None, config: ActorConfig | None = None
    ) -> RewardModel:
        """Load a folder written by `save_pretrained`; arguments as for `Critic.from_pretrained`.

        Raises:
            ConfigError: the folder has no reward head: it is a policy, not a reward model.
        """
        head = Path(path) / REWARD_HEAD_FILE
        if not head.exists():
            raise ConfigError(f"{path} is not a reward model: {REWARD_HEAD_FILE} is missing there")
        model = cls(*_load(path, unnorm_key, config))
        model.load_state_dict(load_file(str(head)), strict=False)
        return model

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the public format plus the reward head."""
        self._save(folder, REWARD_HEAD_FILE, state_dict)

    @torch.no_grad()  # and no inference mode: ZeRO-3 could not use the parameters that it gathers there again outside
    def success_probability(self, batch: Experience) -> torch.Tensor:
        """[B] in (0, 1) for the observations of a batch (read at the first action position)."""
        return torch.sigmoid(self(**self.score(batch))[:, 0])
