"""The checked files of a LeRobot policy: its network is loaded from them and written back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from rlvla.models.lerobot.config import LeRobotConfig
from rlvla.models.lerobot.folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LeRobotFolder,
    lossless,
    tensor_problems,
    write_folder,
)
from rlvla.models.lerobot.new import NewPolicyFacts
from rlvla.models.lerobot.processors import Processors, tokenizer_settings
from rlvla.models.lerobot.prompts import PADDINGS, PromptTokenizer, with_new_line
from rlvla.models.lerobot.refit import refit_folder
from rlvla.models.stored_tensors import all_finite
from rlvla.utils.data_files import fits
from rlvla.utils.errors import ConfigError, Problem

_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True)
class LeRobotFiles(ABC):
    """A policy folder whose files have been checked.

    Attributes:
        folder: its files.
        config: its configuration.
        processors: normalization of states and actions.
        tokenizer: turns prompts into tokens.
        names: tensor of the network -> its name in model.safetensors.
        extras: tensors of the file that the network does not have.
    """

    folder: LeRobotFolder
    config: LeRobotConfig
    processors: Processors
    tokenizer: PromptTokenizer
    names: Mapping[str, str]
    extras: Mapping[str, Tensor]

    @property
    @abstractmethod
    def text_step(self) -> str:
        """Name of the step that prepares the prompt."""

    @property
    @abstractmethod
    def tokenizer_name(self) -> str:
        """Folder or public name of the tokenizer if the pipeline names none."""

    @property
    @abstractmethod
    def image_size(self) -> int | None:
        """Side of the images that the network needs; None: any, they are resized."""

    @abstractmethod
    def empty_network(self, **options: bool) -> Any:
        """The `FlowNetwork` on the meta device, without weights; `options` of its class."""

    @abstractmethod
    def pixels(self, images: Tensor) -> Tensor:
        """Images [B, N, H, W, 3] uint8 -> [B, N, 3, height, width] float32 in [-1, 1]."""

    @abstractmethod
    def prompts(self, instructions: Sequence[str], state: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [B, L] int64 and mask [B, L] bool on the host, for normalized states [B, P].

        Raises:
            ConfigError: an instruction with a token that the network does not know.
        """

    @abstractmethod
    def image_tokens(self) -> tuple[int, int]:
        """(patches that the vision tower reads, tokens that the decoder reads) of one image."""

    def longest_texts(self, instructions: Sequence[str]) -> Sequence[str]:
        """What is tokenized, with a state that takes the most tokens."""
        return instructions

    @property
    def state_in_prompt(self) -> bool:
        """Whether the prompt has the normalized state, which otherwise is a token of its own."""
        return False

    def with_sampling(self, n_action_steps: int, steps: int) -> Self:
        """The same with other settings in config.json."""
        changed: dict[str, Any] = {"n_action_steps": n_action_steps, self.config.steps_name: steps}
        return replace(self, config=replace(self.config, **changed))

    def prefix_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """Length of each row's prefix: images, padded words, and the state unless the prompt has it."""
        lengths = [len(self.tokenizer.ids(text)) for text in set(self.longest_texts(instructions))]
        longest = max(lengths, default=0) if self.tokenizer.padding == "longest" else self.tokenizer.max_length
        words = longest + (0 if self.state_in_prompt else 1)
        return [num_images * self.image_tokens()[1] + words] * len(instructions)

    def load_network(self, dtype: torch.dtype = torch.float32, **options: bool) -> Any:
        """The `FlowNetwork` with its weights, on the host.

        Args:
            dtype: of the weights.
            **options: of `empty_network`.

        Raises:
            ConfigError: weights that cannot be read, or are not finite.
        """
        network = self.empty_network(**options)
        stored = self.folder.read_tensors(set(self.names.values()))
        bad = [name for name in self._read_names(network) if not all_finite(stored[name])]
        if bad:
            where = self.folder.path / WEIGHTS_FILE
            text = f"{where}: tensor {bad[0]} ({len(bad)} in all): NaN or infinity; use an earlier checkpoint"
            raise ConfigError.of(None, "invalid_file", text)
        values: dict[str, Tensor] = {}
        used: set[str] = set()
        for name in network.state_dict():
            source = self.names[name]
            values[name] = stored[source].to(dtype, copy=source in used)
            used.add(source)
        network.load_state_dict(values, assign=True)
        return network

    def _read_names(self, network: nn.Module) -> list[str]:
        """Tensors of the file in the order of the network."""
        return list(dict.fromkeys(self.names[name] for name in network.state_dict()))

    def file_tensors(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their names in the file, for those of the network."""
        return {self.names[name]: tensor for name, tensor in state_dict.items()}

    def save(self, target: str | Path, state_dict: Mapping[str, Tensor]) -> None:
        """Write a folder like the one that was read, with other weights.

        A tensor keeps the dtype that it had in the file unless that would lose digits.

        Raises:
            ConfigError: `state_dict` has other tensors than the network.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        problems = tensor_problems(Path(target), network_shapes(self.empty_network()), shapes)
        if problems:
            raise ConfigError(problems)
        tensors = {**self.extras, **self.file_tensors(state_dict)}
        write_folder(
            Path(target),
            {name: lossless(tensor, self.folder.dtypes.get(name)) for name, tensor in tensors.items()},
            companions=self.folder.companions,
            contents={CONFIG_FILE: self.config.to_json(), **self.processors.preprocessor(self.folder.companions)},
            metadata=self.folder.metadata,
        )

    def refit(self, target: Path, facts: NewPolicyFacts) -> None:
        """Write the weights with features, pipelines and statistics of other data; see `refit_folder`."""
        text = tokenizer_settings(self.tokenizer_name, self.tokenizer.max_length, self.tokenizer.padding)
        refit_folder(
            replace(self.folder, config=self.config.to_json()),
            target,
            facts,
            processors=self.processors,
            modes=self.config.normalization_mapping,
            tokenizer={**text, **self.processors.text},
            text_step=self.text_step,
            normalize_first=self.state_in_prompt,
        )


def network_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def collected(problems: list[Problem], read: Callable[[], _Read]) -> _Read | None:
    """What `read` returns; None if it raises a ConfigError, whose problems are added."""
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None


def read_tokenizer(
    path: Path,
    text: Mapping[str, Any],
    *,
    name: str,
    max_length: int,
    padding: str,
    find: Callable[[str], Path],
    prompt: Callable[[str], str] = with_new_line,
) -> PromptTokenizer:
    """The tokenizer of a policy.

    Args:
        path: the policy's folder.
        text: settings of the pipeline's tokenizer step, which go before those that follow.
        name: folder or public name of the tokenizer.
        max_length: longest prompt in tokens.
        padding: one of `PADDINGS`.
        find: local folder of a tokenizer with a given name.
        prompt: what is tokenized of an instruction.

    Raises:
        ConfigError: impossible settings, or a tokenizer that is missing or cannot be read.
    """
    given = {"tokenizer_name": name, "max_length": max_length, "padding": padding, **text}
    named, length, padded = given["tokenizer_name"], given["max_length"], given["padding"]
    if not isinstance(named, str) or not fits(length, int) or length < 1 or padded not in PADDINGS:
        where = f"{path}: tokenizer_processor"
        raise ConfigError.of(None, "invalid_file", f"{where} has a name, length or padding that cannot be used")
    return PromptTokenizer(find(named), max_length=length, padding=padded, prompt=prompt)
