"""The policy of a soft actor: it plays, and samples reparameterized decisions for its learner."""

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

from rlvla.algorithms.off_policy import over_primitives
from rlvla.experience import Experience, Sample
from rlvla.models.compact.text import SentenceCache, Sentences
from rlvla.models.distributions import sample_by_inverse_cdf
from rlvla.models.families import CONFIG_FILE
from rlvla.models.policy import QUANTITIES, Decision, PolicySpec
from rlvla.models.soft_actor.config import CriticView, SoftActorConfig
from rlvla.models.soft_actor.network import ObservationEncoder, SoftActorNetwork, stored_actions, with_goals
from rlvla.utils.files import write_json

WEIGHTS_FILE = "model.safetensors"
_MISSING = MappingProxyType(dict.fromkeys(QUANTITIES, "it is trained by train_sac_vla.py only"))


def soft_actor_spec(config: SoftActorConfig) -> PolicySpec:
    """The spec of an actor with this configuration; its one log-prob per decision is in the first column."""
    return PolicySpec(
        action_chunk_len=config.action_chunk_len,
        action_dim=config.action_dim,
        columns=config.action_chunk_len,
        noise_shape=(1 + config.parameters,),
        noise="normal",
        cameras=config.num_images_in_input or None,
        reads_images=bool(config.num_images_in_input),
        image_size=config.image_size or None,
        proprio_dim=config.proprio_dim,
        missing=_MISSING,
    )


class SoftActorPolicy(nn.Module):
    """A policy with bounded continuous decisions.

    The trace of a decision is `action` [E], see `SoftActorConfig.action_width`.

    Args:
        config: sizes.
        view: what its critics see; None: what it sees itself.

    Attributes:
        at_random: sampled decisions are uniform over all that are possible, whatever the weights are.
        choice_at_random: the primitives of sampled decisions are, their parameters are the policy's.
    """

    def __init__(self, config: SoftActorConfig, view: CriticView | None = None):
        super().__init__()
        self.config, self.view, self.spec = config, view, soft_actor_spec(config)
        self.encoder = ObservationEncoder(config)
        self.network = SoftActorNetwork(config, self.encoder.features)
        self.at_random = self.choice_at_random = False
        self._sentences = SentenceCache(config.camera.text_buckets)

    @property
    def critic_config(self) -> SoftActorConfig:
        """Sizes of its critics."""
        return self.config if self.view is None else self.view.of_critics(self.config)

    @property
    def stored_config(self) -> SoftActorConfig:
        """Sizes of what is stored, which policy and critics are shown."""
        return self.config if self.view is None else self.view.stored(self.config)

    def own(self, proprio: Tensor) -> Tensor:
        """[..., P] of stored proprio: what the policy reads; goals that follow stay."""
        if self.view is None:
            return proprio
        return torch.cat([proprio[..., list(self.view.own)], proprio[..., self.view.proprio_dim :]], -1)

    @property
    def base_files(self) -> dict[str, str]:
        """Name -> SHA-256 of files that decisions and what is stored of them depend on, besides the weights."""
        return {}

    @property
    def mask(self) -> Tensor:
        """[n, D] bool: the parameters that each primitive has."""
        return self.network.mask

    def sentences(self, instructions: Sequence[str]) -> Sentences | None:
        """Instructions as the encoders read them; None if none does."""
        return self._sentences(instructions, self.mask.device) if self.config.text_width else None

    def forward(
        self, proprio: Tensor | None, images: Tensor | None, sentences: Sentences | None, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A reparameterized decision for every primitive, see `SoftActorNetwork.forward`.

        Args:
            proprio: as in `ObservationEncoder.forward`.
            images: [B, N, H, W, 3] uint8.
            sentences: from `sentences`.
            noise: [B, n, D] standard normal.
        """
        return self.network(self.encoder(proprio, images, sentences), noise)

    @torch.inference_mode()
    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        noise: np.ndarray | None,
        temperature: float = 1.0,
    ) -> Decision:
        """Choose actions for the task itself, see `RolloutPolicy.act`; the temperature scales their noise."""
        state = None if proprio is None else torch.from_numpy(proprio).to(self.mask.device)
        if state is not None and self.config.goals:
            task = torch.zeros(len(state), dtype=torch.long, device=state.device)
            state = with_goals(state, task, self.config.goals)
        pixels = torch.from_numpy(images).to(self.mask.device) if self.config.num_images_in_input else None
        drawn = None if noise is None else torch.from_numpy(noise).float().to(self.mask.device)
        action, log_probs = self.decide(state, pixels, self.sentences(instructions), drawn, temperature)
        stored = action.cpu().numpy()
        return Decision(self.environment_actions(stored), log_probs, {"action": stored})

    def decide(
        self,
        proprio: Tensor | None,
        images: Tensor | None,
        sentences: Sentences | None,
        drawn: Tensor | None,
        temperature: float,
    ) -> tuple[Tensor, np.ndarray]:
        """Decisions [B, E] and their log-probs [B, K], from `drawn` [B, *noise_shape]; None is greedy."""
        parameters = torch.zeros(1, self.config.parameters, device=self.mask.device)
        parameters = parameters if drawn is None else drawn[:, None, 1 : 1 + self.config.parameters]
        rows = next(len(seen) for seen in (proprio, images) if seen is not None)
        parameters = parameters.expand(rows, self.network.kinds, -1)
        values, densities, choice = self(proprio, images, sentences, parameters * temperature)
        log_probs = densities.sum(-1)
        if drawn is not None and self.at_random:
            values, log_probs = self.random_values(parameters), torch.zeros_like(log_probs)
        if drawn is not None and choice is not None and (self.at_random or self.choice_at_random):
            choice = torch.zeros_like(choice).log_softmax(-1)
        kinds = None
        if choice is not None:
            kinds = choice.argmax(-1)
            if drawn is not None:
                kinds = sample_by_inverse_cdf(choice[:, None], torch.special.ndtr(drawn[:, :1]))[:, 0]
            log_probs = log_probs + choice
        picked = torch.zeros(rows, dtype=torch.long, device=values.device) if kinds is None else kinds
        row = torch.arange(rows, device=values.device)
        columns = np.zeros((rows, self.spec.columns), np.float32)
        columns[:, 0] = log_probs[row, picked].cpu().numpy()
        return stored_actions(values[row, picked], self.mask, kinds), columns

    def random_values(self, noise: Tensor) -> Tensor:
        """Parameters of random decisions, uniform in [-1, 1], from standard normal numbers of the same shape."""
        return 2.0 * torch.special.ndtr(noise) - 1.0

    def observed(self, samples: Sequence[Sample]) -> list[dict[str, np.ndarray]]:
        """What is stored of the observations of each episode, the last one included: name -> [S + 1, ...].

        The names are those of arguments of `forward`; instructions are left out.
        """
        found: list[dict[str, np.ndarray]] = [{} for _ in samples]
        for columns, sample in zip(found, samples):
            if self.config.proprio_dim:
                assert sample.proprio is not None and sample.last_proprio is not None
                seen = torch.cat([sample.proprio, sample.last_proprio[None]])
                columns["proprio"] = (seen if self.view is None else sample.observed_proprio).numpy()
            if self.config.num_images_in_input:
                columns["images"] = torch.cat([sample.images, sample.last_images[None]]).numpy()
        return found

    def environment_actions(self, action: np.ndarray) -> np.ndarray:
        """Actions [B, A, D] for the environment from stored decisions [B, E]."""
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
        """Observations are read as they are, without what is only shown to critics; see `RolloutPolicy.prepare`."""
        return images, proprio if self.view is None or proprio is None else proprio[..., list(self.view.own)]

    def entropies(self, log_probs: Tensor, choice: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Estimates [B] of the entropy of the parameters, [B] of the choice, from log-probs [B, n] (summed over D)."""
        if choice is None:
            return -log_probs.squeeze(-1), None
        return over_primitives(choice, -log_probs), over_primitives(choice, -choice)

    # ------------------------------------------------------------------------------ what every policy must answer
    def score(self, batch: Experience, temperature: float) -> dict[str, Any]:
        """Not for soft actors."""
        raise NotImplementedError("soft actors are trained by train_sac_vla.py only")

    distribution = features = score

    @property
    def effective_columns(self) -> Tensor:
        """[K] bool: the first column."""
        return torch.arange(self.spec.columns) == 0

    @property
    def normalized_dims(self) -> list[bool]:
        """[D]: actions are those of the environment."""
        return [False] * self.config.action_dim

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """1 for each row: all have the same size."""
        return [1] * len(instructions)

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """FLOPs of a forward and backward pass over one decision, without convolutions."""
        return 6.0 * sum(p.numel() for p in model.parameters() if p.dim() == 2)

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """There are none."""
        raise ValueError("soft actors have no adapters")

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config.json and model.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = self.state_dict() if state_dict is None else state_dict
        kept = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        save_file(kept, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
        write_json(folder / CONFIG_FILE, self.config.to_json())
