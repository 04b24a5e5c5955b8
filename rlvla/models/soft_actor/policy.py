"""Policies of soft actor-critic: actions, tanh-normal or of a flow, or a primitive with tanh-normal parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlvla.algorithms.off_policy import critic_actions, over_primitives
from rlvla.experience import Experience, Sample
from rlvla.models.compact.text import SentenceCache, Sentences
from rlvla.models.distributions import sample_by_inverse_cdf
from rlvla.models.families import CONFIG_FILE
from rlvla.models.policy import QUANTITIES, Decision, PolicySpec
from rlvla.models.sac_policy import MatchingBatch, SampledDecisions, with_goals
from rlvla.models.soft_actor.config import CriticView, SoftActorConfig
from rlvla.models.soft_actor.network import FlowActorNetwork, ObservationEncoder, SoftActorNetwork, SoftCritic
from rlvla.utils.files import write_json

WEIGHTS_FILE = "model.safetensors"
_MISSING = MappingProxyType(dict.fromkeys(QUANTITIES, "it is trained by train_sac_vla.py only"))


def soft_actor_spec(config: SoftActorConfig) -> PolicySpec:
    """The spec of an actor with this configuration; its one log-prob per decision is in the first column."""
    return PolicySpec(
        action_chunk_len=config.action_chunk_len,
        action_dim=config.action_dim,
        columns=config.action_chunk_len,
        noise_shape=(1 + config.noise_width,),
        noise="normal",
        cameras=config.num_images_in_input or None,
        reads_images=bool(config.num_images_in_input),
        image_size=config.image_size or None,
        reads_instruction=bool(config.text_width),
        proprio_dim=config.proprio_dim,
        missing=_MISSING,
    )


class SoftActorPolicy(nn.Module):
    """A policy with bounded continuous decisions; implements `SACPolicy`.

    Args:
        config: sizes.
        view: what its critics observe; None: the same as the policy.
    """

    def __init__(self, config: SoftActorConfig, view: CriticView | None = None):
        super().__init__()
        self.config, self.view, self.spec = config, view, soft_actor_spec(config)
        self.encoder = ObservationEncoder(config)
        network = FlowActorNetwork if config.flow_steps else SoftActorNetwork
        self.network: FlowActorNetwork | SoftActorNetwork = network(config, self.encoder.features)
        self.random_actions = self.random_primitives = False
        self._sentences = SentenceCache(config.camera.text_buckets)

    @property
    def has_primitives(self) -> bool:
        """See `SACPolicy.has_primitives`."""
        return bool(self.config.primitives)

    @property
    def parameter_mask(self) -> Tensor:
        """See `SACPolicy.parameter_mask`."""
        return self.network.mask

    @property
    def noise_width(self) -> int:
        """See `SACPolicy.noise_width`."""
        return self.config.noise_width

    @property
    def matching_noise(self) -> int:
        """See `SACPolicy.matching_noise`: noise in place of the action, and a time."""
        return self.config.parameters + 1 if self.config.flow_steps else 0

    @property
    def stored_sizes(self) -> SoftActorConfig:
        """See `SACPolicy.stored_sizes`."""
        return self.config if self.view is None else self.view.stored_config(self.config)

    @property
    def base_files(self) -> dict[str, str]:
        """None, see `SACPolicy.base_files`."""
        return {}

    def new_critic(self, n_critics: int) -> SoftCritic:
        """See `SACPolicy.new_critic`."""
        config = self.config if self.view is None else self.view.critic_config(self.config)
        return SoftCritic(config, n_critics)

    def policy_proprio(self, proprio: Tensor) -> Tensor:
        """See `SACPolicy.policy_proprio`."""
        if self.view is None:
            return proprio
        return torch.cat([proprio[..., list(self.view.policy_indices)], proprio[..., self.view.proprio_dim :]], -1)

    def set_proprio_normalization(self, mean: Tensor, std: Tensor) -> None:
        """See `SACPolicy.set_proprio_normalization`."""
        self.encoder.set_normalization(self.policy_proprio(mean), self.policy_proprio(std))

    def critic_actions(self, parameters: Tensor, primitives: Tensor | None) -> Tensor:
        """See `SACPolicy.critic_actions`."""
        return parameters if primitives is None else critic_actions(primitives, parameters, self.parameter_mask)

    def sentences(self, instructions: Sequence[str]) -> Sentences | None:
        """See `SACPolicy.sentences`."""
        return self._sentences(instructions, self._device) if self.config.text_width else None

    @property
    def _device(self) -> torch.device:
        return self.parameter_mask.device

    def forward(
        self,
        proprio: Tensor | None,
        images: Tensor | None,
        sentences: Sentences | None,
        noise: Tensor,
        matching: MatchingBatch | None = None,
    ) -> SampledDecisions:
        """See `SACPolicy.__call__`."""
        features = self.encoder(proprio, images, sentences)
        sampled = SampledDecisions(*self.network(features, noise))
        if matching is None:
            return sampled
        assert isinstance(self.network, FlowActorNetwork)
        return sampled._replace(matching_losses=self.network.matching_losses(features, matching))

    @torch.inference_mode()
    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        noise: np.ndarray | None,
        temperature: float = 1.0,
        greedy: bool = False,
    ) -> Decision:
        """Choose actions for goal 0, the task itself; see `RolloutPolicy.act`. The temperature scales the noise."""
        state = None if proprio is None else torch.from_numpy(proprio).to(self._device)
        if state is not None and self.config.goals:
            task = torch.zeros(len(state), dtype=torch.long, device=state.device)
            state = with_goals(state, task, self.config.goals)
        pixels = torch.from_numpy(images).to(self._device) if self.config.num_images_in_input else None
        drawn = None if noise is None else torch.from_numpy(noise).float().to(self._device)
        action, log_probs = self.decide(state, pixels, self.sentences(instructions), drawn, temperature)
        stored = action.cpu().numpy()
        return Decision(self._environment_actions(stored), log_probs, {"action": stored})

    def decide(
        self,
        proprio: Tensor | None,
        images: Tensor | None,
        sentences: Sentences | None,
        drawn: Tensor | None,
        temperature: float,
    ) -> tuple[Tensor, np.ndarray]:
        """Decisions [B, E] and their log-probs [B, K], from `drawn` [B, *noise_shape]; None is greedy."""
        noise = torch.zeros(1, self.noise_width, device=self._device)
        noise = noise if drawn is None else drawn[:, None, 1 : 1 + self.noise_width]
        rows = next(len(observed) for observed in (proprio, images) if observed is not None)
        noise = noise.expand(rows, self.network.kinds, -1)
        values, densities, choice, _ = self(proprio, images, sentences, noise * temperature)
        log_probs = densities.sum(-1)
        if drawn is not None and self.random_actions:
            values = self._random_parameters(noise[..., : self.config.parameters])
            log_probs = torch.zeros_like(log_probs)
        if drawn is not None and choice is not None and (self.random_actions or self.random_primitives):
            choice = torch.zeros_like(choice).log_softmax(-1)
        primitives = None
        if choice is not None:
            primitives = choice.argmax(-1)
            if drawn is not None:
                primitives = sample_by_inverse_cdf(choice[:, None], torch.special.ndtr(drawn[:, :1]))[:, 0]
            log_probs = log_probs + choice
        picked = torch.zeros(rows, dtype=torch.long, device=values.device) if primitives is None else primitives
        row = torch.arange(rows, device=values.device)
        columns = np.zeros((rows, self.spec.columns), np.float32)
        columns[:, 0] = log_probs[row, picked].cpu().numpy()
        return self.critic_actions(values[row, picked], primitives), columns

    def _random_parameters(self, noise: Tensor) -> Tensor:
        """Parameters of random decisions, uniform in [-1, 1], from standard normal numbers of the same shape."""
        return 2.0 * torch.special.ndtr(noise) - 1.0

    def stored_observations(self, samples: Sequence[Sample]) -> list[dict[str, np.ndarray]]:
        """See `SACPolicy.stored_observations`."""
        episodes: list[dict[str, np.ndarray]] = [{} for _ in samples]
        for columns, sample in zip(episodes, samples):
            if self.config.proprio_dim:
                proprio = sample.observed_proprio
                if self.view is None:
                    assert sample.proprio is not None and sample.last_proprio is not None
                    proprio = torch.cat([sample.proprio, sample.last_proprio[None]])
                assert proprio is not None
                columns["proprio"] = proprio.numpy()
            if self.config.num_images_in_input:
                columns["images"] = torch.cat([sample.images, sample.last_images[None]]).numpy()
        return episodes

    def _environment_actions(self, action: np.ndarray) -> np.ndarray:
        """Actions [B, A, D] for the environment from stored decisions [B, E]; a primitive fills the first action."""
        if not self.config.primitives:
            return action.reshape(len(action), self.config.action_chunk_len, self.config.action_dim)
        chunks = np.zeros((len(action), self.config.action_chunk_len, self.config.action_dim), np.float32)
        chunks[:, 0] = action
        return chunks

    def encode_actions(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """`action` [..., E] of environment actions [..., A, D]."""
        if self.config.primitives:
            return {"action": actions[..., 0, :]}
        return {"action": actions.reshape(*actions.shape[:-2], -1)}

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Observations as they are, without proprio for critics only; see `RolloutPolicy.prepare`."""
        return images, proprio if self.view is None or proprio is None else proprio[..., list(self.view.policy_indices)]

    def entropies(self, log_probs: Tensor, choice: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `SACPolicy.entropies`."""
        if choice is None:
            return -log_probs.squeeze(-1), None
        return over_primitives(choice, -log_probs), over_primitives(choice, -choice)

    # ------------------------------------------------------------------------------ the rest of `Policy`
    def score(self, batch: Experience, temperature: float = 1.0) -> Any:
        """Not supported by soft actors."""
        raise NotImplementedError("soft actors are trained by train_sac_vla.py only")

    distribution = features = score

    @property
    def effective_columns(self) -> Tensor:
        """[K] bool: the first column."""
        return torch.arange(self.spec.columns) == 0

    @property
    def normalized_dims(self) -> list[bool]:
        """[D]: none, actions are in the units of the environment."""
        return [False] * self.config.action_dim

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """1 for each row."""
        return [1] * len(instructions)

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """FLOPs of a forward and backward pass over one decision, without convolutions."""
        return 6.0 * sum(p.numel() for p in model.parameters() if p.dim() == 2)

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """Not supported: there are no adapters."""
        raise ValueError("soft actors have no adapters")

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config.json and model.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = self.state_dict() if state_dict is None else state_dict
        kept = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        save_file(kept, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
        write_json(folder / CONFIG_FILE, self.config.to_json())
