"""Critics (value per action), reward models (success of an observation) and return models (how its episode will end).

Each is a policy's body with a linear head.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlvla.algorithms.off_policy.target_networks import update_target
from rlvla.algorithms.recap import BINS, expected_return
from rlvla.experience import Experience
from rlvla.models.config import ActorConfig
from rlvla.models.stored_tensors import read_head
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.models.vla.inputs import VLAInputs
    from rlvla.models.vla.openvla import OpenVLAForActionPrediction

VALUE_HEAD_FILE = "value_head.safetensors"
REWARD_HEAD_FILE = "reward_head.safetensors"
RETURN_HEAD_FILE = "return_head.safetensors"
ACTION_VALUE_HEAD_FILE = "action_value_head.safetensors"
ACTION_CHUNK = "action_chunk"  # entry of the trace of batches for an `ActionValuePredictor`
CRITIC_WIDTH = 256
MIDDLE_RETURN = -0.5  # of [-1, 0]: where values start


def scalar_head(width: int, outputs: int = 1) -> nn.Linear:
    """A linear layer with zero weights, so that the first advantages are the returns."""
    head = nn.Linear(width, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class _HeadModel(nn.Module):
    """The body of a policy with a linear head."""

    body_name: ClassVar[str]  # attribute of the body, and its prefix in a state dict
    head_file: ClassVar[str]
    head: Any

    def load_head(self, folder: str | Path) -> bool:
        """Read the head from a folder; False if there is none.

        Raises:
            ConfigError: a file that cannot be read, has NaN or infinity, or does not fit the head.
        """
        path = Path(folder) / self.head_file
        if not path.is_file():
            return False
        expected = {name: tensor.shape for name, tensor in self.head.state_dict().items()}
        stored = {name.removeprefix("head."): tensor for name, tensor in read_head(path).items()}
        if {name: tensor.shape for name, tensor in stored.items()} != expected:
            raise ConfigError.of(None, "mismatch", f"{path}: its tensors do not fit the policy in this folder")
        self.head.load_state_dict(stored)
        return True

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the policy in its own format plus the head; `state_dict`: full parameters, if this is sharded."""
        state, prefix = self.state_dict() if state_dict is None else state_dict, f"{self.body_name}."
        body = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        getattr(self, self.body_name).save_pretrained(folder, state_dict=body)
        head = {name: value.detach().cpu().contiguous() for name, value in state.items() if name.startswith("head.")}
        save_file(head, str(Path(folder) / self.head_file))


class _OpenVLAHeadModel(_HeadModel):
    """An OpenVLA network with linear outputs, by default one, per action-token position.

    Args:
        vla: the architecture with its weights.
        inputs: turns observations into model inputs.
    """

    body_name = "vla"
    outputs: ClassVar[int] = 1

    def __init__(self, vla: OpenVLAForActionPrediction, inputs: VLAInputs):
        super().__init__()
        self.vla, self.inputs = vla, inputs
        self.head = self._new_head()

    def _new_head(self) -> nn.Module:
        return scalar_head(self.inputs.config.text_config.hidden_size, self.outputs)

    @classmethod
    def _load(
        cls, path: str | Path, unnorm_key: str | None, config: ActorConfig | None = None, **overrides: Any
    ) -> Self:
        """The body of a policy folder, with a head that starts at zero."""
        from rlvla.models.vla.inputs import VLAInputs
        from rlvla.models.vla.openvla import OpenVLAForActionPrediction

        vla = OpenVLAForActionPrediction.from_pretrained(path, body_only=True, **overrides)
        vla.configure(config or ActorConfig())
        return cls(vla, VLAInputs.from_pretrained(path, config=vla.config, unnorm_key=unnorm_key))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        images: Tensor,
        proprio: Tensor | None,
        trace: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """One number per action position, [B, K] float32, or several [B, K, outputs]; inputs as in `Actor.forward`.

        The first position never depends on `trace`. In the autoregressive variant later positions do, and their outputs
        are meaningless without it.
        """
        return self.head(self._hidden(input_ids, attention_mask, images, proprio, trace)).squeeze(-1).float()

    def _hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        images: Tensor,
        proprio: Tensor | None,
        trace: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """[B, K, d], inputs as for `forward`."""
        dtype = next(self.parameters()).dtype
        pixels, state = self.inputs.pixel_values(images, dtype), None if proprio is None else proprio.to(dtype)
        tokens = (trace or {}).get("tokens")
        if tokens is None:
            tokens = input_ids.new_zeros(len(input_ids), self.inputs.config.num_action_tokens)
        ids = self.inputs.action_tokenizer.columns_to_ids(tokens)
        return self.vla.action_hidden_states(input_ids, attention_mask, pixels, state, ids)

    def observed(self, **inputs: Any) -> Tensor:
        """[B, d]: features of the observation, at the first action position."""
        return self._hidden(**inputs)[:, 0]

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RolloutPolicy.prepare`; proprio only if the network reads it."""
        return self.inputs.prepare(images, proprio if self.inputs.config.use_proprio else None)

    def score(self, batch: Experience) -> dict[str, Any]:
        """Keyword arguments of `forward` for a batch, on its device; proprio only if the network reads it."""
        inputs = self.inputs.to_device(batch, next(self.parameters()).device)
        return inputs if self.inputs.config.use_proprio else {**inputs, "proprio": None}


class Critic(_OpenVLAHeadModel):
    """State values from a separate network with a value head.

    The value of an action is read at the position of its first token.
    """

    head_file = VALUE_HEAD_FILE

    @classmethod
    def from_pretrained(
        cls, path: str | Path, unnorm_key: str | None = None, config: ActorConfig | None = None, **overrides: Any
    ) -> Critic:
        """Load a policy or critic folder; without a stored value head the head starts at zero.

        Arguments as in `Actor.from_pretrained`, but a critic has no adapters. Images must be prepared as for the actor,
        or the critic evaluates a different state.
        """
        critic = cls._load(path, unnorm_key, config, **overrides)
        critic.load_head(path)
        return critic


class SuccessPredictor(nn.Module):
    """The predictions of a reward model: column 0 of its logits is success, column 1 progress."""

    score: Callable[..., dict[str, Any]]

    @torch.inference_mode()
    def progress(self, batch: Experience) -> Tensor:
        """[B] in (0, 1): the fraction of the task completed in each observation of a batch."""
        return torch.sigmoid(self(**self.score(batch))[:, 1])

    @torch.no_grad()  # not inference_mode: ZeRO-3 could not reuse the parameters gathered in it
    def success_probability(self, batch: Experience) -> Tensor:
        """[B] in (0, 1) for the observations of a batch."""
        return torch.sigmoid(self(**self.score(batch))[:, 0])


class RewardModel(SuccessPredictor, _OpenVLAHeadModel):
    """Probability that an episode succeeded, and its progress, from an observation and the instruction.

    The success logit is read at the first action position, the progress logit at the second.
    """

    head_file = REWARD_HEAD_FILE

    @classmethod
    def from_policy(cls, path: str | Path, unnorm_key: str | None = None, **overrides: Any) -> RewardModel:
        """An untrained reward model from a policy folder; its head starts at zero."""
        return cls._load(path, unnorm_key, **overrides)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, unnorm_key: str | None = None, config: ActorConfig | None = None, **overrides: Any
    ) -> RewardModel:
        """Load a folder written by `save_pretrained`; arguments as in `Critic.from_pretrained`.

        Raises:
            ConfigError: the folder has no reward head and so is not a reward model.
        """
        if not (Path(path) / REWARD_HEAD_FILE).is_file():
            raise _not_a("reward model", path, REWARD_HEAD_FILE)
        model = cls._load(path, unnorm_key, config, **overrides)
        model.load_head(path)
        return model


class ReturnPredictor(nn.Module):
    """The predictions of a return model, whose logits [B, `BINS`] are those of `rlvla.algorithms.recap`."""

    score: Callable[..., dict[str, Any]]
    prepare: Callable[[np.ndarray, np.ndarray | None], tuple[np.ndarray, np.ndarray | None]]

    @torch.no_grad()
    def expected_returns(self, batch: Experience) -> Tensor:
        """[B] float32 in [-1, 0]: normalized returns from the observations of a batch."""
        return expected_return(self(**self.score(batch)))


class ReturnModel(ReturnPredictor, _OpenVLAHeadModel):
    """Categorical distribution of the normalized return (Bellemare et al. 2017), read at the first action position."""

    head_file, outputs = RETURN_HEAD_FILE, BINS

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[B, `BINS`] float32 logits; inputs as in `Actor.forward`."""
        return super().forward(*args, **kwargs)[:, 0]


class ActionValuePredictor(ReturnPredictor):
    """The predictions of implicit Q-learning: state values V(s), and Q(s, a) of action chunks.

    Scored batches carry the normalized chunks, [B, A, D], in their trace (`ACTION_CHUNK`).
    """

    head: Any  # an `ActionValueHead`
    observed: Callable[..., Tensor]

    def forward(self, chunk: Tensor, **inputs: Any) -> dict[str, Tensor]:
        """`values` [B], `action_values` and `target_values` [B, 2], `returns` [B, `BINS`] (logits); float32."""
        return self.head(self.observed(**inputs), chunk)

    def score(self, batch: Experience) -> dict[str, Any]:
        """Keyword arguments of `forward` for a batch."""
        assert batch.trace is not None
        observations: dict[str, Any] = super().score(batch.with_fields(trace=None))
        return {**observations, "chunk": batch.trace[ACTION_CHUNK]}

    @torch.no_grad()
    def expected_returns(self, batch: Experience) -> Tensor:
        """[B] float32 in [-1, 0]: V(s) of the observations of a batch, with or without chunks."""
        features = self.observed(**super().score(batch.with_fields(trace=None)))
        return self.head.state_values(features).clamp(-1.0, 0.0)

    @torch.no_grad()
    def advantages(self, batch: Experience) -> Tensor:
        """[B] float32: min Q(s, a) - V(s), by the target networks."""
        output = self(**self.score(batch))
        return output["target_values"].amin(1) - output["values"]


class ActionValueHead(nn.Module):
    """V(s), twin Q(s, a) and their target networks, on features of the observation.

    The features are learned from returns alone, with a categorical distribution as in a `ReturnModel`: temporal
    differences, which say little at first, would make them constant.

    Args:
        width: of the features.
        numbers: A * D, of an action chunk.
    """

    def __init__(self, width: int, numbers: int):
        super().__init__()
        self.returns = scalar_head(width, BINS)
        self.value = self._network(width)
        self.action_values = nn.ModuleList([self._network(width + numbers) for _ in range(2)])
        self.targets = deepcopy(self.action_values).requires_grad_(False)

    @staticmethod
    def _network(inputs: int) -> nn.Sequential:
        width, out = CRITIC_WIDTH, scalar_head(CRITIC_WIDTH)
        nn.init.constant_(out.bias, MIDDLE_RETURN)
        return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), out)

    def forward(self, features: Tensor, chunk: Tensor) -> dict[str, Tensor]:
        """See `ActionValuePredictor.forward`; `features` [B, d], `chunk` [B, A, D]."""

        def evaluated(critics: nn.ModuleList) -> Tensor:
            inputs = torch.cat([features.detach(), chunk.flatten(1).to(features.dtype)], 1)
            dtype = next(critics.parameters()).dtype  # target networks stay in float32
            return torch.cat([critic(inputs.to(dtype)) for critic in critics], 1).float()

        return {
            "values": self.state_values(features),
            "action_values": evaluated(self.action_values),
            "target_values": evaluated(self.targets),
            "returns": self.returns(features).float(),
        }

    def state_values(self, features: Tensor) -> Tensor:
        """[B] float32: V of features [B, d]."""
        return self.value(features.detach()).squeeze(-1).float()

    def update_targets(self, tau: float) -> None:
        """Polyak average of the target networks."""
        update_target(self.targets, self.action_values, tau)


class ActionValueModel(ActionValuePredictor, _OpenVLAHeadModel):  # type: ignore[misc]  # it has more outputs
    """Implicit Q-learning on the first action position of an OpenVLA network."""

    head_file = ACTION_VALUE_HEAD_FILE

    def _new_head(self) -> nn.Module:
        config = self.inputs.config
        return ActionValueHead(config.text_config.hidden_size, config.action_chunk_len * config.action_dim)


class _FeatureModel(_HeadModel):
    """The body of a policy of any family, with a head on `Policy.features`.

    Args:
        policy: a `Policy` with `freeze_read_out`, which freezes the parameters that `features` does not depend on.
        head: the head.
    """

    body_name = "policy"

    def __init__(self, policy: Any, head: nn.Module):
        super().__init__()
        self.policy = policy
        policy.freeze_read_out()
        self.head = head

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RolloutPolicy.prepare`."""
        return self.policy.prepare(images, proprio)

    def score(self, batch: Experience) -> dict[str, Any]:
        """Keyword arguments of `forward` for a batch."""
        return {"batch": batch}

    def observed(self, batch: Experience) -> Tensor:
        """[B, d]: features of the observation, at the first column."""
        return self.policy.features(batch)[:, 0]


class FeatureCritic(_FeatureModel):
    """State values from a separate network; the value of an action is read at its first column."""

    head_file = VALUE_HEAD_FILE

    def __init__(self, policy: Any):
        super().__init__(policy, scalar_head(policy.spec.feature_dim))

    def forward(self, batch: Experience) -> Tensor:
        """[B, K] float32."""
        return self.head(self.policy.features(batch)).squeeze(-1).float()


class FeatureRewardModel(SuccessPredictor, _FeatureModel):
    """Probability that an episode succeeded, and its progress, read at the first column."""

    head_file = REWARD_HEAD_FILE

    def __init__(self, policy: Any):
        super().__init__(policy, scalar_head(policy.spec.feature_dim, 2))

    def forward(self, batch: Experience) -> Tensor:
        """[B, 2] float32: logits of success and progress."""
        return self.head(self.observed(batch)).float()


class FeatureReturnModel(ReturnPredictor, _FeatureModel):
    """Categorical distribution of the normalized return, read at the first column."""

    head_file = RETURN_HEAD_FILE

    def __init__(self, policy: Any):
        super().__init__(policy, scalar_head(policy.spec.feature_dim, BINS))

    def forward(self, batch: Experience) -> Tensor:
        """[B, `BINS`] float32 logits."""
        return self.head(self.observed(batch)).float()


class FeatureActionValueModel(ActionValuePredictor, _FeatureModel):
    """Implicit Q-learning on the features of a policy of any family."""

    head_file = ACTION_VALUE_HEAD_FILE

    def __init__(self, policy: Any):
        spec = policy.spec
        super().__init__(policy, ActionValueHead(spec.feature_dim, spec.action_chunk_len * spec.action_dim))


def load_feature_critic(policy: Any, folder: Path) -> FeatureCritic:
    """The critic of a folder whose policy has been loaded; without a stored head it starts at zero."""
    critic = FeatureCritic(policy)
    critic.load_head(folder)
    return critic


def load_feature_reward_model(policy: Any, folder: Path, *, new: bool) -> FeatureRewardModel:
    """The reward model of a folder whose policy has been loaded, or a new one.

    Raises:
        ConfigError: the folder has no reward head.
    """
    model = FeatureRewardModel(policy)
    if not new and not model.load_head(folder):
        raise _not_a("reward model", folder, REWARD_HEAD_FILE)
    return model


def load_feature_return_model(
    policy: Any, folder: Path, *, new: bool, action_values: bool
) -> FeatureReturnModel | FeatureActionValueModel:
    """The return model of a folder whose policy has been loaded, or a new one; ConfigError without its head."""
    model = FeatureActionValueModel(policy) if action_values else FeatureReturnModel(policy)
    if not new and not model.load_head(folder):
        raise _not_a("return model", folder, model.head_file)
    return model


def load_openvla_return_model(
    folder: Path, unnorm_key: str | None, *, new: bool, action_values: bool, **overrides: Any
) -> ReturnModel | ActionValueModel:
    """As `load_feature_return_model`, for a folder of an OpenVLA policy."""
    model = (ActionValueModel if action_values else ReturnModel)._load(folder, unnorm_key, **overrides)
    if not new and not model.load_head(folder):
        raise _not_a("return model", folder, model.head_file)
    return model


def _not_a(kind: str, folder: str | Path, head_file: str) -> ConfigError:
    return ConfigError(f"{folder} is not a {kind}: {head_file} is missing there")
