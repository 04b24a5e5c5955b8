"""The family of soft actors (`model_type: soft_actor`): checking folders and loading them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlvla.models.config import ActorConfig
from rlvla.models.families import CONFIG_FILE, Checkpoint, PolicyFamily, register_policy_family
from rlvla.models.soft_actor.config import MODEL_TYPE, CriticView, SoftActorConfig
from rlvla.models.soft_actor.policy import WEIGHTS_FILE, SoftActorPolicy, soft_actor_spec
from rlvla.models.stored_tensors import check_tensors
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError


class SoftActorCheckpoint(Checkpoint):
    """A folder whose files have been checked, or a new actor.

    Args:
        folder: its path; not read for a new actor.
        config: its configuration.
        new: the weights are random.
        view: observations of the critics, see `SoftActorPolicy`.
    """

    unnorm_key = ""

    def __init__(self, folder: Path, config: SoftActorConfig, *, new: bool = False, view: CriticView | None = None):
        self.folder, self.config, self.spec, self._new, self._view = folder, config, soft_actor_spec(config), new, view

    @property
    def largest_activation(self) -> int:
        """See `Checkpoint.largest_activation`."""
        return self.config.largest_activation

    def load_policy(  # type: ignore[override]  # its `forward` is that of `SACPolicy`
        self, config: ActorConfig | None = None, *, value_head: bool = False
    ) -> SoftActorPolicy:
        """See `Checkpoint.load_policy`; new weights come from the global generator."""
        policy = SoftActorPolicy(self.config, self._view)
        if value_head:
            raise ConfigError(f"{self.folder}: soft actors have no value head")
        if not self._new:
            policy.load_state_dict(load_file(str(self.folder / WEIGHTS_FILE)))
        return policy


class SoftActorFamily(PolicyFamily):
    """Checks folders with config.json and model.safetensors."""

    def check(
        self, folder: Path, *, unnorm_key: str | None, suite: str | None, overrides: Mapping[str, Any]
    ) -> SoftActorCheckpoint:
        """See `PolicyFamily.check`."""
        config = SoftActorConfig.from_json(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
        with torch.device("meta"):
            expected = {name: tuple(value.shape) for name, value in SoftActorPolicy(config).state_dict().items()}
        check_tensors(folder / WEIGHTS_FILE, expected, MODEL_TYPE)
        return SoftActorCheckpoint(folder, config)


register_policy_family(MODEL_TYPE, SoftActorFamily())
