"""The family of DSRL actors (`model_type: dsrl`): checking folders and loading them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlvla.models.config import ActorConfig
from rlvla.models.dsrl.base import fingerprint, not_steerable, read_base
from rlvla.models.dsrl.config import BASE_SETTINGS, MODEL_TYPE, DSRLConfig
from rlvla.models.dsrl.policy import DSRLPolicy, dsrl_spec
from rlvla.models.families import CONFIG_FILE, Checkpoint, PolicyFamily, register_policy_family, type_of
from rlvla.models.policy import Policy
from rlvla.models.soft_actor.policy import WEIGHTS_FILE, SoftActorPolicy
from rlvla.models.stored_tensors import check_tensors
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError


class DSRLCheckpoint(Checkpoint):
    """A folder whose files and base have been checked, or a new actor.

    Args:
        folder: its path; nothing is read from that of a new actor.
        config: its configuration.
        base: the checked flow policy.
        new: the actor gets random weights.
    """

    def __init__(self, folder: Path, config: DSRLConfig, base: Checkpoint, *, new: bool = False):
        self.folder, self.config, self.base, self._new = folder, config, base, new
        self.unnorm_key = config.unnorm_key
        self.spec = dsrl_spec(config, base.spec)

    def facts(self) -> dict[str, Any]:
        """See `Checkpoint.facts`."""
        config = self.config
        numbers = f"{config.action_dim}, the same for all actions" if config.repeat_noise else config.actor.parameters
        return {
            "base": f"{self.base.folder} ({type_of(self.base.folder)})",
            "noise": f"{numbers} numbers in +-{config.noise_range:g}",
            **{name: value for name, value in config.base_settings.items() if name != "cameras"},
        }

    def load_policy(self, config: ActorConfig | None = None, *, value_head: bool = False) -> Policy:
        """See `Checkpoint.load_policy`; new weights come from the global generator."""
        if value_head:
            raise ConfigError(f"{self.folder}: {MODEL_TYPE} policies have no value head")
        policy: Any = DSRLPolicy(self.config, self.base.load_policy(), self.base.folder)
        if not self._new:
            policy.load_state_dict(load_file(str(self.folder / WEIGHTS_FILE)))
        return policy


def new_dsrl(
    folder: Path,
    base: Checkpoint,
    *,
    hidden_sizes: tuple[int, ...],
    noise_range: float,
    repeat_noise: bool,
    base_settings: Mapping[str, Any],
) -> DSRLCheckpoint:
    """A new actor.

    Args:
        folder: where it will be written.
        base: the flow policy.
        hidden_sizes: see `DSRLConfig`.
        noise_range: see `DSRLConfig`.
        repeat_noise: see `DSRLConfig`.
        base_settings: settings of the run for the base; unset ones are left out.

    Raises:
        ConfigError: the base is not a flow policy.
    """
    spec, problem = base.spec, not_steerable(base.spec, base.folder)
    if problem:
        raise ConfigError.of("pretrain", "mismatch", problem)
    settings = {name: base_settings.get(name) for name in BASE_SETTINGS}
    config = DSRLConfig(
        base=(str(base.folder.resolve()),),
        base_files=fingerprint(base.folder),
        unnorm_key=base.unnorm_key,
        action_dim=spec.action_dim,
        action_chunk_len=spec.action_chunk_len,
        state_dim=spec.summary_dim + spec.proprio_dim,
        hidden_sizes=hidden_sizes,
        noise_range=noise_range,
        repeat_noise=repeat_noise,
        base_settings={name: value for name, value in settings.items() if value not in (None, (), [])},
    )
    return DSRLCheckpoint(folder, config, base, new=True)


class DSRLFamily(PolicyFamily):
    """Folders with config.json and model.safetensors, and the base policy in config.json."""

    def check(
        self, folder: Path, *, unnorm_key: str | None, suite: str | None, overrides: Mapping[str, Any]
    ) -> DSRLCheckpoint:
        """See `PolicyFamily.check`; dataset statistics come from the base."""
        config = DSRLConfig.from_json(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
        if unnorm_key not in (None, config.unnorm_key):
            text = f"--unnorm_key {unnorm_key}: {folder} was trained with {config.unnorm_key or 'none'}; leave it out"
            raise ConfigError.of("unnorm_key", "mismatch", text)
        with torch.device("meta"):
            expected = {name: tuple(value.shape) for name, value in SoftActorPolicy(config.actor).state_dict().items()}
        check_tensors(folder / WEIGHTS_FILE, expected, MODEL_TYPE)
        return DSRLCheckpoint(folder, config, read_base(folder, config, overrides.get("cameras", ())))

    def overrides(self, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `PolicyFamily.overrides`: the cameras, whose order in the base may differ."""
        super().overrides(folder, settings)
        return {"cameras": settings["cameras"]} if settings.get("cameras") else {}


register_policy_family(MODEL_TYPE, DSRLFamily())
