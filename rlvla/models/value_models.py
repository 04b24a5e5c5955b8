"""Networks with a scalar head: the critic (value per action token) and the reward model (success of an observation)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlvla.experience import Experience
from rlvla.models.backbone import prepare_backbone
from rlvla.models.config import ActorConfig
from rlvla.models.policy import Policy
from rlvla.models.stored_tensors import read_head
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.models.vla.inputs import VLAInputs
    from rlvla.models.vla.openvla import OpenVLAForActionPrediction

VALUE_HEAD_FILE = "value_head.safetensors"
REWARD_HEAD_FILE = "reward_head.safetensors"


def scalar_head(width: int, outputs: int = 1) -> nn.Linear:
    """A linear layer, by default with one output, that starts at zero, so that the first advantages are the returns."""
    head = nn.Linear(width, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class _ScalarHead(nn.Module):
    """A VLA with one linear output per action-token position.

    Args:
        vla: the architecture with its weights.
        inputs: turns observations into model inputs.
    """

    def __init__(self, vla: OpenVLAForActionPrediction, inputs: VLAInputs):
        super().__init__()
        self.vla, self.inputs = vla, inputs
        self.head = scalar_head(inputs.config.text_config.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        images: torch.Tensor,
        proprio: torch.Tensor | None,
        trace: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """One number per action position, [B, K] float32; inputs as in `Actor.forward`.

        The first position never depends on `trace`. In the autoregressive variant later positions do, and their outputs
        are meaningless without it.
        """
        dtype = next(self.parameters()).dtype
        pixels, state = self.inputs.pixel_values(images, dtype), None if proprio is None else proprio.to(dtype)
        tokens = (trace or {}).get("tokens")
        if tokens is None:
            tokens = input_ids.new_zeros(len(input_ids), self.inputs.config.num_action_tokens)
        ids = self.inputs.action_tokenizer.columns_to_ids(tokens)
        hidden = self.vla.action_hidden_states(input_ids, attention_mask, pixels, state, ids)
        return self.head(hidden).squeeze(-1).float()

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Observations as the network reads them, with proprio only if it uses any; see `RolloutPolicy.prepare`."""
        return self.inputs.prepare(images, proprio if self.inputs.config.use_proprio else None)

    def score(self, batch: Experience) -> dict[str, object]:
        """Keyword arguments of `forward` for a batch, on its device; proprio only if the network uses it."""
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
    from rlvla.models.vla.inputs import VLAInputs
    from rlvla.models.vla.openvla import OpenVLAForActionPrediction

    vla = OpenVLAForActionPrediction.from_pretrained(path, body_only=True, **overrides)
    prepare_backbone(vla, config or ActorConfig())
    return vla, VLAInputs.from_pretrained(path, config=vla.config, unnorm_key=unnorm_key)


class Critic(_ScalarHead):
    """State values from a separate network with a value head.

    The value of an action is read at the position of its first token.
    """

    @classmethod
    def from_pretrained(
        cls, path: str | Path, unnorm_key: str | None = None, config: ActorConfig | None = None, **overrides: Any
    ) -> Critic:
        """Load a policy or critic folder; without a stored value head the head starts at zero.

        Arguments as in `Actor.from_pretrained`, but a critic has no adapters. Images must be prepared as for the actor,
        or the critic evaluates a different state.
        """
        critic = cls(*_load(path, unnorm_key, config, **overrides))
        head = Path(path) / VALUE_HEAD_FILE
        if head.exists():
            critic.load_state_dict(load_file(str(head)), strict=False)
        return critic

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the public format plus the value head."""
        self._save(folder, VALUE_HEAD_FILE, state_dict)


class SuccessPredictor(nn.Module):
    """The predictions of a reward model: column 0 of its logits is success, column 1 progress."""

    @torch.inference_mode()
    def progress(self, batch: Experience) -> torch.Tensor:
        """[B] in (0, 1): the fraction of the task completed in each observation of a batch."""
        return torch.sigmoid(self(**self.score(batch))[:, 1])

    @torch.no_grad()  # not inference_mode: ZeRO-3 could not reuse the parameters gathered in it
    def success_probability(self, batch: Experience) -> torch.Tensor:
        """[B] in (0, 1) for the observations of a batch."""
        return torch.sigmoid(self(**self.score(batch))[:, 0])


class RewardModel(SuccessPredictor, _ScalarHead):
    """Probability that an episode succeeded, and its progress, from an observation and the instruction.

    The success logit is read at the first action position, the progress logit at the second.
    """

    @classmethod
    def from_policy(cls, path: str | Path, unnorm_key: str | None = None) -> RewardModel:
        """An untrained reward model from a policy folder; its head starts at zero."""
        return cls(*_load(path, unnorm_key))

    @classmethod
    def from_pretrained(
        cls, path: str | Path, unnorm_key: str | None = None, config: ActorConfig | None = None
    ) -> RewardModel:
        """Load a folder written by `save_pretrained`; arguments as in `Critic.from_pretrained`.

        Raises:
            ConfigError: the folder has no reward head and so is not a reward model.
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


class FeaturePolicy(Policy, Protocol):
    """A policy of which critic and reward model can be made."""

    def freeze_read_out(self) -> None:
        """Freeze the parameters that `features` does not depend on."""
        ...


class _FeatureModel(nn.Module):
    """A policy's body with a linear head, which starts at zero.

    Args:
        policy: a `FeaturePolicy`; its body is trained, its action head is frozen and saved as it is.
        outputs: of the head.
    """

    head_file: str

    def __init__(self, policy: Any, outputs: int):
        super().__init__()
        self.policy = policy
        policy.freeze_read_out()
        self.head = scalar_head(policy.spec.feature_dim, outputs)

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Observations as the network reads them; see `RolloutPolicy.prepare`."""
        return self.policy.prepare(images, proprio)

    def score(self, batch: Experience) -> dict[str, Any]:
        """Keyword arguments of `forward` for a batch."""
        return {"batch": batch}

    def load_head(self, folder: Path) -> bool:
        """Read the head from a folder; False if there is none.

        Raises:
            ConfigError: a file that cannot be read, has NaN or infinity, or other tensors than the head.
        """
        path = folder / self.head_file
        if not path.is_file():
            return False
        wanted = {name: tensor.shape for name, tensor in self.head.state_dict().items()}
        stored = {name.removeprefix("head."): tensor for name, tensor in read_head(path).items()}
        if {name: tensor.shape for name, tensor in stored.items()} != wanted:
            raise ConfigError.of(None, "mismatch", f"{path}: its tensors do not fit the policy in this folder")
        self.head.load_state_dict(stored)
        return True

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the policy's folder plus the head."""
        state = self.state_dict() if state_dict is None else state_dict
        body = {name.removeprefix("policy."): value for name, value in state.items() if name.startswith("policy.")}
        self.policy.save_pretrained(folder, state_dict=body)
        head = {name: value.detach().cpu().contiguous() for name, value in state.items() if name.startswith("head.")}
        save_file(head, str(Path(folder) / self.head_file))


class FeatureCritic(_FeatureModel):
    """State values from a separate network; the value of an action is read at its first column."""

    head_file = VALUE_HEAD_FILE

    def __init__(self, policy: Any):
        super().__init__(policy, 1)

    def forward(self, batch: Experience) -> Tensor:
        """[B, K] float32."""
        return self.head(self.policy.features(batch)).squeeze(-1).float()


class FeatureRewardModel(SuccessPredictor, _FeatureModel):
    """Probability that an episode succeeded, and its progress, read at the first column."""

    head_file = REWARD_HEAD_FILE

    def __init__(self, policy: Any):
        super().__init__(policy, 2)

    def forward(self, batch: Experience) -> Tensor:
        """[B, 2] float32: logits of success and progress."""
        return self.head(self.policy.features(batch)[:, 0]).float()


def load_feature_critic(policy: Any, folder: Path) -> FeatureCritic:
    """A critic from a folder whose policy has been loaded; without a stored head it starts at zero."""
    critic = FeatureCritic(policy)
    critic.load_head(folder)
    return critic


def load_feature_reward_model(policy: Any, folder: Path, *, new: bool) -> FeatureRewardModel:
    """The reward model in a folder whose policy has been loaded, or a new one.

    Raises:
        ConfigError: the folder holds no reward model.
    """
    model = FeatureRewardModel(policy)
    if not new and not model.load_head(folder):
        raise ConfigError(f"{folder} is not a reward model: {REWARD_HEAD_FILE} is missing there")
    return model
