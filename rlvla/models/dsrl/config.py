"""The config.json of a DSRL actor, which selects the initial noise of a flow policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlvla.models.soft_actor.config import SoftActorConfig
from rlvla.utils.data_files import check_types, read_dataclass
from rlvla.utils.errors import ConfigError

MODEL_TYPE = "dsrl"
LARGEST_NOISE = 10.0
_MOST_PLACES = 16  # where the base may lie
# Settings of the training run for the base, with which it is loaded again.
BASE_SETTINGS: dict[str, Any] = {
    "cameras": list[str],
    "camera_map": list[str],
    "platform": str,
    "action_chunk_len": int,
    "flow_steps": int,
}


@dataclass(frozen=True)
class DSRLConfig:
    """The fields of config.json besides `model_type`.

    Attributes:
        base: candidate folders of the base policy, tried in order, relative to the folder of this file.
        base_files: SHA-256 of each file that the base's actions depend on, see `rlvla.models.dsrl.base.fingerprint`.
        unnorm_key: entry of the base's statistics.
        base_settings: of the base, see `BASE_SETTINGS`.
        action_dim: D, dimensions of an action.
        action_chunk_len: A, actions per decision.
        state_dim: size of the actor's observation: the base's summary of the observation, and its proprio.
        hidden_sizes: widths of the hidden layers.
        noise_range: b; noise lies in [-b, b].
        repeat_noise: all actions of a chunk share one noise vector [D].
    """

    base: tuple[str, ...]
    base_files: dict[str, str]
    unnorm_key: str
    action_dim: int
    action_chunk_len: int
    state_dim: int
    hidden_sizes: tuple[int, ...]
    noise_range: float = 1.0
    repeat_noise: bool = False
    base_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def actor(self) -> SoftActorConfig:
        """Sizes of the networks; `state_dim` takes the place of proprio."""
        length = 1 if self.repeat_noise else self.action_chunk_len
        return SoftActorConfig(self.action_dim, length, self.state_dim, hidden_sizes=self.hidden_sizes)

    def to_json(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"model_type": MODEL_TYPE, **asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> DSRLConfig:
        """Read config.json; unknown entries are ignored.

        Raises:
            ConfigError: missing entries, wrong types or values out of range, all at once.
        """
        config = read_dataclass(cls, raw, where)
        unknown = sorted(config.base_settings.keys() - BASE_SETTINGS.keys())
        if unknown:
            text = f"{where}: base_settings has {', '.join(unknown)}; known are {', '.join(BASE_SETTINGS)}"
            raise ConfigError.of(None, "invalid_file", text)
        check_types(config.base_settings, BASE_SETTINGS, where)
        problems = config.actor.problems()
        if not 1 <= len(config.base) <= _MOST_PLACES or not all(config.base):
            problems.append(f"base has {len(config.base):,} entries; it must name 1 to {_MOST_PLACES} folders")
        if not 0 < config.noise_range <= LARGEST_NOISE:
            problems.append(f"noise_range {config.noise_range} must be above 0 and at most {LARGEST_NOISE:g}")
        if problems:
            raise ConfigError.of(None, "invalid_file", f"{where}: {'; '.join(problems)}")
        return config
