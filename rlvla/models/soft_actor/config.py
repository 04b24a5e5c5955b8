"""Sizes of a soft actor, as recorded in its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlvla.models.compact.config import CompactConfig
from rlvla.utils.data_files import read_dataclass
from rlvla.utils.errors import ConfigError

MODEL_TYPE = "soft_actor"
_MAX_SIZE, _MOST_LAYERS = 65_536, 64
_MOST_FLOW_STEPS = 16  # the gradient of the actor passes through all of them


@dataclass(frozen=True)
class CriticView:
    """Privileged observations of the critics: more proprio than the policy's, and no images.

    Attributes:
        proprio_dim: length of the critics' proprio: the environment's, and the state of a reward machine.
        policy_indices: indices of the numbers that the policy reads.
    """

    proprio_dim: int
    policy_indices: tuple[int, ...]

    def stored_config(self, config: SoftActorConfig) -> SoftActorConfig:
        """Sizes of stored observations, for a policy of sizes `config`."""
        return replace(config, proprio_dim=self.proprio_dim)

    def critic_config(self, config: SoftActorConfig) -> SoftActorConfig:
        """Sizes of the critics of a policy of sizes `config`."""
        return replace(self.stored_config(config), num_images_in_input=0)


@dataclass(frozen=True)
class SoftActorConfig:
    """The fields of config.json besides `model_type`.

    Attributes:
        action_dim: D, dimensions of an action of the environment.
        action_chunk_len: A, actions per decision; with primitives the maximum steps of one.
        proprio_dim: P, length of the proprio vector; 0: no proprio.
        num_images_in_input: N, cameras per observation; 0: no images.
        image_size: side of the square images in pixels; unused without images.
        hidden_sizes: widths of the hidden layers.
        text_width: width of the instruction's vector; 0: instructions are not read.
        primitives: names of the action primitives; (): plain actions.
        primitive_sizes: number of parameters of each primitive.
        goals: G, goals on which the networks are conditioned, the first is the task itself; 0: no conditioning.
        flow_steps: K, Euler steps of a flow over the actions, see `FlowActorNetwork`; 0: a tanh-normal distribution.
    """

    action_dim: int
    action_chunk_len: int
    proprio_dim: int = 0
    num_images_in_input: int = 0
    image_size: int = 0
    hidden_sizes: tuple[int, ...] = (256, 256)
    text_width: int = 0
    primitives: tuple[str, ...] = ()
    primitive_sizes: tuple[int, ...] = ()
    goals: int = 0
    flow_steps: int = 0

    @property
    def parameters(self) -> int:
        """D, numbers in [-1, 1] of the largest primitive, or of all actions of a chunk."""
        return max(self.primitive_sizes) if self.primitives else self.action_chunk_len * self.action_dim

    @property
    def action_width(self) -> int:
        """E, numbers of a stored decision: one-hot primitive, if any, and parameters."""
        return len(self.primitives) + self.parameters

    @property
    def noise_width(self) -> int:
        """W, standard normal numbers of a sampled decision; of a flow the initial noise and that of the last step."""
        return self.parameters * (2 if self.flow_steps else 1)

    @property
    def camera(self) -> CompactConfig:
        """The configuration of each camera's encoder."""
        return CompactConfig(self.image_size, 1, 0, 1, 1, text_width=max(4, self.text_width))

    @property
    def largest_activation(self) -> int:
        """See `Checkpoint.largest_activation`."""
        images = self.num_images_in_input * self.camera.largest_activation if self.num_images_in_input else 0
        return max(images, self.parameters, *self.hidden_sizes)

    def to_json(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"model_type": MODEL_TYPE, **asdict(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> SoftActorConfig:
        """Read config.json; unknown entries are ignored.

        Raises:
            ConfigError: missing entries, wrong types or values out of range, all at once.
        """
        config = read_dataclass(cls, raw, where)
        problems = config.problems()
        if problems:
            raise ConfigError.of(None, "invalid_file", f"{where}: {'; '.join(problems)}")
        return config

    def problems(self) -> list[str]:
        """Invalid sizes."""
        problems = []
        minima = {"action_dim": 1, "action_chunk_len": 1, "proprio_dim": 0, "text_width": 0, "goals": 0}
        for name, least in minima.items():
            if not least <= getattr(self, name) <= _MAX_SIZE:
                problems.append(f"{name} {getattr(self, name)} is not in {least}..{_MAX_SIZE}")
        if not 1 <= len(self.hidden_sizes) <= _MOST_LAYERS:
            problems.append(f"hidden_sizes has {len(self.hidden_sizes):,} layers; it must have 1..{_MOST_LAYERS}")
        elif not all(1 <= size <= _MAX_SIZE for size in self.hidden_sizes):
            problems.append(f"hidden_sizes {list(self.hidden_sizes)} must be 1..{_MAX_SIZE} each")
        if not 0 <= self.num_images_in_input <= 64:
            problems.append(f"num_images_in_input {self.num_images_in_input} is not in 0..64")
        elif self.num_images_in_input:
            problems += self.camera.problems()
        if not self.proprio_dim and not self.num_images_in_input:
            problems.append("the policy reads neither images nor proprio")
        if not 0 <= self.flow_steps <= _MOST_FLOW_STEPS:
            problems.append(f"flow_steps {self.flow_steps} is not in 0..{_MOST_FLOW_STEPS}")
        elif self.flow_steps and self.primitives:
            problems.append("a flow is over plain actions, but there are primitives")
        if self.goals and not self.proprio_dim:
            problems.append("goals are read with proprio, but proprio_dim is 0")
        if len(self.primitives) != len(self.primitive_sizes):
            problems.append(f"{len(self.primitives)} primitives, but {len(self.primitive_sizes)} primitive_sizes")
        elif not all(0 <= size <= _MAX_SIZE for size in self.primitive_sizes):
            problems.append(f"primitive_sizes must be 0..{_MAX_SIZE} each")
        elif self.primitives and not len(self.primitives) < self.action_dim == self.action_width:
            text = f"primitives of sizes {self.primitive_sizes} do not fit actions of {self.action_dim} numbers"
            problems.append(text)
        return problems
