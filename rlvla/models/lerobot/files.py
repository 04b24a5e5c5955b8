"""The checked files of a LeRobot policy: its network is loaded from them and written back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rlvla.models.lerobot.config import LeRobotConfig, features_json
from rlvla.models.lerobot.folder import (
    CONFIG_FILE,
    TRAIN_CONFIG_FILE,
    WEIGHTS_FILE,
    LeRobotFolder,
    lossless,
    read_folder,
    tensor_problems,
    write_folder,
)
from rlvla.models.lerobot.network import FlowNetwork
from rlvla.models.lerobot.new import NewPolicyFacts
from rlvla.models.lerobot.processors import (
    OLD_PREFIXES,
    POSTPROCESSOR,
    PREPROCESSOR,
    RELATIVE,
    TOKENIZER_NAME,
    Processors,
    new_pipelines,
    read_processors,
    state_files,
    statistics_tensors,
    tokenizer_settings,
)
from rlvla.models.lerobot.prompts import PADDINGS, PromptTokenizer, inner_folders, with_new_line
from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.models.sizes import LARGEST
from rlvla.models.stored_tensors import all_finite
from rlvla.utils.data_files import fits
from rlvla.utils.errors import ConfigError, Problem, collected

_Network = TypeVar("_Network", bound=nn.Module)
# Files that depend on the data of a policy, not written by `LeRobotFiles.refit`.
_OF_OTHER_DATA = {PREPROCESSOR, POSTPROCESSOR, SETTINGS_FILE, TRAIN_CONFIG_FILE, "README.md"}


@dataclass(frozen=True, kw_only=True)
class LeRobotFiles(ABC):
    """A policy folder whose files have been checked.

    Attributes:
        folder: its files.
        config: its configuration.
        processors: normalization of states and actions.
        tokenizer: of prompts.
        names: tensor of the network -> its name in model.safetensors.
        extras: tensors of that file that the network does not have.
    """

    folder: LeRobotFolder
    config: LeRobotConfig
    processors: Processors
    tokenizer: PromptTokenizer
    names: Mapping[str, str]
    extras: Mapping[str, Tensor] = field(repr=False)

    @abstractmethod
    def empty_network(self, **options: bool) -> FlowNetwork:
        """The network on the meta device, without weights; `options` of its class."""

    @abstractmethod
    def pixels(self, images: Tensor) -> Tensor:
        """Images [B, N, H, W, 3] uint8 -> [B, N, 3, height, width] float32 in [-1, 1]."""

    @abstractmethod
    def image_tokens(self) -> tuple[int, int]:
        """(patches that the vision tower reads, tokens that the decoder reads) of one image."""

    @property
    def image_size(self) -> int | None:
        """Side of the images that the network needs; None: any, they are resized."""
        return None

    def facts(self) -> dict[str, str]:
        """Further facts of the family, see `Checkpoint.facts`."""
        return {}

    def recorded_settings(self) -> dict[str, str]:
        """Further entries of `SETTINGS_FILE`."""
        return {}

    def prompt_texts(self, instructions: Sequence[str], states: np.ndarray) -> list[str]:
        """Texts to tokenize, for normalized states [B, P]."""
        return list(instructions)

    def prompts(self, instructions: Sequence[str], state: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [B, L] int64 and mask [B, L] bool on the host, for normalized states [B, P].

        Raises:
            ConfigError: an instruction with a token outside the network's vocabulary.
        """
        return self.tokenizer(self.prompt_texts(instructions, state.detach().cpu().numpy()))

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """Length of each row: images, padded text, the state unless the prompt contains it, and the chunk."""
        # A number of a state in a prompt takes at most three digits, as the bin of 0 does.
        texts = self.prompt_texts(list(set(instructions)), np.zeros((len(set(instructions)), 1), np.float32))
        longest = max((len(self.tokenizer.ids(text)) for text in texts), default=0)
        text_tokens = longest if self.tokenizer.padding == "longest" else self.tokenizer.max_length
        state_tokens = 0 if self.config.state_in_prompt else 1
        prefix = num_images * self.image_tokens()[1] + text_tokens + state_tokens
        return [prefix + self.config.chunk_size] * len(instructions)

    def with_sampling(self, n_action_steps: int, steps: int) -> Self:
        """The same with other settings in config.json."""
        changed: dict[str, Any] = {"n_action_steps": n_action_steps, self.config.steps_name: steps}
        return replace(self, config=replace(self.config, **changed))

    def load_network(self, dtype: torch.dtype = torch.float32, **options: bool) -> FlowNetwork:
        """The network with its weights, on the host.

        Args:
            dtype: of the weights.
            **options: of `empty_network`.

        Raises:
            ConfigError: weights that cannot be read, or are not finite.
        """
        network = self.empty_network(**options)
        sources = {name: self.names[name] for name in network.state_dict()}
        stored = self.folder.read_tensors(set(self.names.values()))
        bad = [source for source in dict.fromkeys(sources.values()) if not all_finite(stored[source])]
        if bad:
            where = self.folder.path / WEIGHTS_FILE
            text = f"{where}: tensor {bad[0]} ({len(bad)} in all): NaN or infinity; use an earlier checkpoint"
            raise ConfigError.of(None, "invalid_file", text)
        values: dict[str, Tensor] = {}
        used: set[str] = set()
        for name, source in sources.items():
            values[name] = stored[source].to(dtype, copy=source in used)
            used.add(source)
        network.load_state_dict(values, assign=True)
        return network

    def file_tensors(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The network's tensors under their names in the file."""
        return {self.names[name]: tensor for name, tensor in state_dict.items()}

    def save(self, target: str | Path, state_dict: Mapping[str, Tensor]) -> None:
        """Write a copy of the folder with other weights.

        A tensor keeps the dtype that it had in the file unless that would lose digits.

        Raises:
            ConfigError: `state_dict` has other tensors than the network.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        problems = tensor_problems(Path(target), tensor_shapes(self.empty_network()), shapes)
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
        """Write the weights with features named like the cameras, and the statistics of other data.

        Raises:
            ConfigError: statistics that a normalization mode needs are missing.
        """
        config = replace(self.config, features=facts.features())
        text = tokenizer_settings(config.tokenizer_name, self.tokenizer.max_length, self.tokenizer.padding)
        inputs, outputs = features_json(config.features.inputs), features_json(config.features.outputs)
        raw = {**self.config.to_json(), "input_features": inputs, "output_features": outputs, "empty_cameras": 0}
        relative = self.processors.steps.get(RELATIVE)
        if relative is not None:  # the names are of the other data's actions
            relative = {**relative, "action_names": None}
            raw |= {"action_feature_names": None}
        pipelines = new_pipelines(config, {**text, **self.processors.text}, relative=relative)
        left_out = _OF_OTHER_DATA | set(self.processors.state_files)
        tensors = self.folder.read_tensors()
        write_folder(
            target,
            {name: tensor for name, tensor in tensors.items() if not name.startswith(OLD_PREFIXES)},
            companions={name: data for name, data in self.folder.companions.items() if name not in left_out},
            contents={CONFIG_FILE: raw, **pipelines},
            states=dict.fromkeys(state_files(pipelines), self.new_statistics(facts)),
            metadata=self.folder.metadata,
        )

    def new_statistics(self, facts: NewPolicyFacts) -> dict[str, Tensor]:
        """The content of the state files that `refit` writes; errors as there."""
        statistics: dict[str, Tensor] = {}
        for mode in {self.config.normalization_mapping.get(kind, "IDENTITY") for kind in ("STATE", "ACTION")}:
            statistics |= statistics_tensors(facts.lerobot_statistics(), mode)
        return statistics


def on_meta(network: Callable[..., _Network], *args: Any, **options: Any) -> _Network:
    """A network without storage, from the arguments of its class."""
    with torch.device("meta"):
        return network(*args, **options)


def tensor_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by name."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def read_parts(
    path: Path, config: LeRobotConfig, problems: list[Problem], *, models: Sequence[str] = ()
) -> tuple[Processors, LeRobotFolder | None]:
    """Pipelines and files of a folder, including the folders of its models and its tokenizer.

    Args:
        path: the policy's folder.
        config: its config.json.
        problems: list that is extended by the problems of both.
        models: names of models besides the tokenizer.
    """
    processors, wrong = read_processors(path, config)
    problems += wrong
    tokenizer = processors.text.get(TOKENIZER_NAME, config.tokenizer_name)
    inner = inner_folders([*models, tokenizer], path)
    folder = collected(problems, lambda: read_folder(path, state_files=processors.state_files, subfolders=inner))
    return processors, folder


def read_tokenizer(
    path: Path,
    config: LeRobotConfig,
    processors: Processors,
    *,
    padding: str,
    find: Callable[[str], Path],
    prompt: Callable[[str], str] = with_new_line,
) -> PromptTokenizer:
    """The tokenizer of a policy, with the settings of its pipeline or else of its config.json.

    Args:
        path: the policy's folder.
        config: its config.json.
        processors: its pipelines.
        padding: one of `PADDINGS`, unless the pipeline has another.
        find: local folder of a tokenizer with a given name.
        prompt: text to tokenize for an instruction.

    Raises:
        ConfigError: impossible settings, or a tokenizer that is missing or cannot be read.
    """
    defaults = {TOKENIZER_NAME: config.tokenizer_name, "max_length": config.tokenizer_max_length, "padding": padding}
    settings: dict[str, Any] = {**defaults, **processors.text}
    name, length, padding = settings[TOKENIZER_NAME], settings["max_length"], settings["padding"]
    if not isinstance(name, str) or not fits(length, int) or not 1 <= length <= LARGEST or padding not in PADDINGS:
        where = f"{path}: tokenizer_processor"
        raise ConfigError.of(None, "invalid_file", f"{where} has a name, length or padding that cannot be used")
    return PromptTokenizer(find(name), max_length=length, padding=padding, prompt=prompt)
