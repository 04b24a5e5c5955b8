"""DSRL policy: a small actor selects the noise from which a frozen flow policy denoises its actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlvla.experience import Sample
from rlvla.models.dsrl.base import places_of
from rlvla.models.dsrl.config import DSRLConfig
from rlvla.models.families import CONFIG_FILE
from rlvla.models.policy import Decision, PolicySpec
from rlvla.models.soft_actor.policy import SoftActorPolicy, soft_actor_spec
from rlvla.utils.files import write_json

_ROWS = 64  # observations in a pass of the base after a rollout
STATE = "state"  # entry of the trace: the actor's observation


def dsrl_spec(config: DSRLConfig, base: PolicySpec) -> PolicySpec:
    """The spec of an actor over the noise of a policy with spec `base`."""
    return replace(
        soft_actor_spec(config.actor),
        action_chunk_len=config.action_chunk_len,
        columns=config.action_chunk_len,
        cameras=base.cameras,
        reads_images=base.reads_images,
        image_size=base.image_size,
        proprio_dim=base.proprio_dim,
    )


class DSRLPolicy(SoftActorPolicy):
    """A soft actor whose decision is the initial noise of a frozen flow policy.

    The trace of a decision is `action` [E], the noise divided by its range, and `state`, the actor's observation: the
    base's summary and its proprio. Random decisions are standard normal noise.

    Args:
        settings: sizes, and the base's folder and files.
        base: the flow policy, see `NetworkPolicy.denoise`; it is frozen and not saved.
        base_folder: its folder.
    """

    def __init__(self, settings: DSRLConfig, base: Any, base_folder: Path):
        super().__init__(settings.actor)
        self.settings, self.base_folder = settings, base_folder
        self.spec = dsrl_spec(settings, base.spec)
        self._held = (base.requires_grad_(False).eval(),)  # in a tuple: not among the weights of this module

    @property
    def base(self) -> Any:
        """The flow policy."""
        return self._held[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DSRLPolicy:
        """Move the base as well."""
        self.base._apply(fn)
        super()._apply(fn, recurse)
        return self

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `NetworkPolicy.prepare` of the base."""
        return self.base.prepare(images, proprio)

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
        """Choose noise and denoise it, see `RolloutPolicy.act`; the temperature scales the randomness of the choice."""
        hidden = self.base.encode(images, proprio, instructions)
        state = self._state(hidden, proprio)
        numbers = None if noise is None else torch.from_numpy(noise).float().to(state.device)
        action, log_probs = self.decide(state, None, None, numbers, temperature)
        trace = {"action": action.cpu().numpy(), STATE: state.cpu().numpy()}
        return Decision(self.base.denoise(hidden, self.start(action)), log_probs, trace)

    def _random_parameters(self, noise: Tensor) -> Tensor:
        """The noise itself, which gives the base's sampling distribution."""
        return noise / self.settings.noise_range

    def start(self, action: Tensor) -> Tensor:
        """Initial noise [B, C, M] from decisions [B, E].

        Actions that are not executed start like the last executed one, padding of actions at 0.
        """
        length, width = self.base.spec.start_shape
        noise = self.settings.noise_range * action.unflatten(1, (-1, self.settings.action_dim))
        noise = torch.cat([noise, noise[:, -1:].expand(-1, length - noise.shape[1], -1)], 1)
        return functional.pad(noise, (0, width - noise.shape[2]))

    def _state(self, hidden: Any, proprio: np.ndarray | None) -> Tensor:
        summary = self.base.summary(hidden)
        if not self.base.spec.proprio_dim:
            return summary
        assert proprio is not None
        return torch.cat([summary, torch.from_numpy(proprio).to(summary)], 1)

    @torch.inference_mode()
    def stored_observations(self, samples: Sequence[Sample]) -> list[dict[str, np.ndarray]]:
        """See `SACPolicy.stored_observations`; the base encodes only final observations, the trace has the rest."""
        last: list[Tensor] = []
        for first in range(0, len(samples), _ROWS):
            rows = samples[first : first + _ROWS]
            images = torch.stack([sample.last_images for sample in rows]).numpy()
            proprio = [sample.last_proprio for sample in rows if sample.last_proprio is not None]
            state = torch.stack(proprio).numpy() if proprio else None
            last += self._state(self.base.encode(images, state, [sample.last_instruction for sample in rows]), state)
        states = (torch.cat([sample.trace[STATE], state[None].cpu()]) for sample, state in zip(samples, last))
        return [{"proprio": state.numpy()} for state in states]

    @property
    def base_files(self) -> dict[str, str]:
        """See `DSRLConfig.base_files`."""
        return self.settings.base_files

    @property
    def normalized_dims(self) -> list[bool]:
        """See `NetworkPolicy.normalized_dims` of the base."""
        return self.base.normalized_dims

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config.json and the actor's weights; the base stays where it is."""
        super().save_pretrained(folder, state_dict)
        settings = replace(self.settings, base=places_of(self.base_folder, Path(folder)))
        write_json(Path(folder) / CONFIG_FILE, settings.to_json())
