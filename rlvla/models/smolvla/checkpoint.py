"""SmolVLA policies in LeRobot's folders: checked, loaded and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlvla.models.lerobot.folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LeRobotFolder,
    lossless,
    read_folder,
    tensor_problems,
    write_folder,
)
from rlvla.models.lerobot.images import to_network_range
from rlvla.models.lerobot.new import NewPolicyFacts
from rlvla.models.lerobot.processors import OLD_PREFIXES, Processors, read_processors
from rlvla.models.lerobot.prompts import PromptTokenizer, inner_folders, lasting_name
from rlvla.models.lerobot.refit import refit_folder
from rlvla.models.smolvla.config import SmolVLAConfig
from rlvla.models.smolvla.network import SmolVLANetwork
from rlvla.models.smolvla.vlm import VlmConfig, find_vlm, read_vlm
from rlvla.utils.data_files import fits, read_json
from rlvla.utils.errors import ConfigError, Problem

TEXT_STEP = "smolvla_new_line_processor"
_HEAD, _EMBEDDING = (
    "model.vlm_with_expert.vlm.lm_head.weight",
    "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight",
)


@dataclass(frozen=True)
class SmolVLACheckpoint:
    """A folder whose files have been checked.

    Attributes:
        folder: its files.
        config: its configuration.
        vlm_folder: where the configuration and tokenizer of its vision-language model are.
        vlm: sizes of that model.
        processors: normalization of states and actions.
        tokenizer: turns instructions into tokens.
        extras: tensors of an older folder that are no weights.
    """

    folder: LeRobotFolder
    config: SmolVLAConfig
    vlm_folder: Path
    vlm: VlmConfig
    processors: Processors
    tokenizer: PromptTokenizer
    extras: Mapping[str, Tensor]

    @property
    def steps(self) -> int:
        """Denoising steps."""
        return self.config.num_steps

    def with_sampling(self, n_action_steps: int, steps: int) -> SmolVLACheckpoint:
        """The same with other settings in config.json."""
        return replace(self, config=replace(self.config, n_action_steps=n_action_steps, num_steps=steps))

    @property
    def image_size(self) -> int | None:
        """Side of the images that the network needs; None: any, they are resized."""
        return None if self.config.image_size else self._side

    @property
    def _side(self) -> int:
        """Of the images that the network sees."""
        features = self.config.features
        return self.config.image_size or features.inputs[features.cameras[0]].shape[-1]

    def image_tokens(self) -> tuple[int, int]:
        """(patches that the vision tower reads, tokens that the decoder reads) of one image."""
        patches = (self._side // self.vlm.vision.patch_size) ** 2
        return patches, patches // self.vlm.scale_factor**2

    def prefix_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """Length of each row's prefix: images, padded words, state."""
        lengths = [len(self.tokenizer.ids(text)) for text in set(instructions)]
        longest = max(lengths, default=0) if self.tokenizer.padding == "longest" else self.tokenizer.max_length
        return [num_images * self.image_tokens()[1] + longest + 1] * len(instructions)

    def pixels(self, images: Tensor) -> Tensor:
        """Images [B, N, H, W, 3] uint8 -> [B, N, 3, side, side] float32 in [-1, 1]."""
        return to_network_range(images, self._side, self._side)

    def prompts(self, instructions: Sequence[str], state: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [B, L] int64 and mask [B, L] bool; the state is no part of the prompt."""
        return self.tokenizer(instructions)

    def empty_network(self) -> SmolVLANetwork:
        """The network on the meta device, without weights."""
        return _on_meta(self.config, self.vlm)

    def load_network(self, dtype: torch.dtype = torch.float32, *, shifted_positions: bool = False) -> SmolVLANetwork:
        """The network with its weights, on the host.

        Args:
            dtype: of the weights.
            shifted_positions: see `SmolVLANetwork`.

        Raises:
            ConfigError: weights that cannot be read, or are not finite.
        """
        network = _on_meta(self.config, self.vlm, shifted_positions=shifted_positions)
        stored = self.folder.read_tensors()
        if _HEAD not in stored:
            stored[_HEAD] = stored[_EMBEDDING].clone()
        bad = [name for name in network.state_dict() if not torch.isfinite(stored[name]).all()]
        if bad:
            where = self.folder.path / WEIGHTS_FILE
            text = f"{where}: tensor {bad[0]} ({len(bad)} in all): NaN or infinity; use an earlier checkpoint"
            raise ConfigError.of(None, "invalid_file", text)
        values = {name: stored[name].to(dtype) for name in network.state_dict()}
        network.load_state_dict(values, assign=True)
        return network

    def refit(self, target: Path, facts: NewPolicyFacts) -> None:
        """Write the weights with features, pipelines and statistics of other data; see `refit_folder`."""
        config = self.config
        text = {"max_length": config.tokenizer_max_length, "padding": config.pad_language_to, "task_key": "task"}
        text |= {"padding_side": "right", "truncation": True, "tokenizer_name": config.vlm_model_name}
        refit_folder(
            replace(self.folder, config=self.config.to_json()),
            target,
            facts,
            processors=self.processors,
            modes=config.normalization_mapping,
            tokenizer={**text, **self.processors.text},
            text_step=TEXT_STEP,
        )

    def save(self, target: str | Path, state_dict: Mapping[str, Tensor]) -> None:
        """Write a folder like the one that was read, with other weights.

        A tensor keeps the dtype that it had in the file unless that would lose digits.

        Raises:
            ConfigError: `state_dict` has other tensors than the network.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        problems = tensor_problems(Path(target), _shapes(_on_meta(self.config, self.vlm)), shapes)
        if problems:
            raise ConfigError(problems)
        tensors = {name: lossless(tensor, self.folder.dtypes.get(name)) for name, tensor in state_dict.items()}
        if _HEAD not in self.folder.shapes and torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
            tensors.pop(_HEAD)
        write_folder(
            Path(target),
            {**tensors, **self.extras},
            companions=self.folder.companions,
            contents={CONFIG_FILE: self.config.to_json(), **self.processors.preprocessor(self.folder.companions)},
            metadata=self.folder.metadata,
        )


def check_smolvla(path: str | Path) -> SmolVLACheckpoint:
    """Check every file of a folder without reading its weights.

    Raises:
        ConfigError: lists everything that is missing or inconsistent.
    """
    path = Path(path)
    config = SmolVLAConfig.from_json(read_json(path / CONFIG_FILE), path / CONFIG_FILE)
    config = replace(config, vlm_model_name=lasting_name(config.vlm_model_name, path))
    problems: list[Problem] = []
    folder = vlm_folder = vlm = tokenizer = None
    processors, wrong = read_processors(path, config.features, config.normalization_mapping, text_steps={TEXT_STEP})
    problems += wrong
    try:
        inner = inner_folders([config.vlm_model_name, processors.text.get("tokenizer_name")], path)
        folder = read_folder(path, state_files=processors.state_files, subfolders=inner)
    except ConfigError as error:
        problems += error.problems
    try:
        vlm_folder = find_vlm(config.vlm_model_name, path)
        vlm = read_vlm(vlm_folder)
        tokenizer = _tokenizer(path, vlm_folder, config, processors)
        if tokenizer.size > vlm.vocabulary:
            sizes = f"the tokenizer has {tokenizer.size} ids, the model {vlm.vocabulary}"
            problems.append(Problem(None, "mismatch", f"{vlm_folder}: {sizes}; they do not belong together"))
    except ConfigError as error:
        problems += error.problems
    if vlm is not None:
        problems += _size_problems(path, config, vlm, folder)
    if problems or folder is None or vlm is None or tokenizer is None or vlm_folder is None:
        raise ConfigError(problems)
    extras = folder.read_tensors([name for name in folder.shapes if name.startswith(OLD_PREFIXES)])
    return SmolVLACheckpoint(folder, config, vlm_folder, vlm, processors, tokenizer, extras)


def _tokenizer(path: Path, vlm_folder: Path, config: SmolVLAConfig, processors: Processors) -> PromptTokenizer:
    """The tokenizer of the pipeline; that of the vision-language model if none is named."""
    text = processors.text
    name = text.get("tokenizer_name", config.vlm_model_name)
    length, padding = text.get("max_length", config.tokenizer_max_length), text.get("padding", config.pad_language_to)
    if not isinstance(name, str) or not fits(length, int) or length < 1 or padding not in ("longest", "max_length"):
        where = f"{path}: tokenizer_processor"
        raise ConfigError.of(None, "invalid_file", f"{where} has a name, length or padding that cannot be used")
    folder = vlm_folder if name == config.vlm_model_name else find_vlm(name, path)
    return PromptTokenizer(folder, max_length=length, padding=padding)


def _size_problems(path: Path, config: SmolVLAConfig, vlm: VlmConfig, folder: LeRobotFolder | None) -> list[Problem]:
    """Sizes that contradict the vision-language model, or the tensors of the folder."""
    problems = []
    image = vlm.image_problem(config.image_size)
    if image:
        problems.append(Problem(None, "invalid_file", f"{path / CONFIG_FILE}: {image}"))
    if int(vlm.text.width * config.expert_width_multiplier) % 2:
        text = f"expert_width_multiplier {config.expert_width_multiplier:g} of {vlm.text.width} gives an odd width"
        problems.append(
            Problem(None, "invalid_file", f"{path / CONFIG_FILE}: {text}; the time embedding needs an even one")
        )
    try:
        wanted = _shapes(_on_meta(config, vlm))
    except ConfigError as error:
        return [*problems, *(problem.prefixed(f"{path / CONFIG_FILE}: ") for problem in error.problems)]
    if folder is not None:
        stored = {name: shape for name, shape in folder.shapes.items() if not name.startswith(OLD_PREFIXES)}
        if vlm.tied and _HEAD not in stored:
            wanted.pop(_HEAD)
        problems += tensor_problems(path / WEIGHTS_FILE, wanted, stored)
    return problems


def _on_meta(config: SmolVLAConfig, vlm: VlmConfig, *, shifted_positions: bool = False) -> SmolVLANetwork:
    with torch.device("meta"):
        return SmolVLANetwork(config, vlm, shifted_positions=shifted_positions)


def _shapes(network: SmolVLANetwork) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
