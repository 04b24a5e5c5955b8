"""Critic and reward model of any policy family: a linear head on `Policy.features`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn

from rlvla.experience import Experience
from rlvla.models.policy import Policy
from rlvla.models.stored_heads import read_head
from rlvla.models.value_models import REWARD_HEAD_FILE, VALUE_HEAD_FILE, SuccessPredictor, scalar_head
from rlvla.utils.errors import ConfigError


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
