"""SmolVLA policies in LeRobot's folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlvla.models.lerobot.files import LeRobotFiles, collected, network_shapes, read_tokenizer
from rlvla.models.lerobot.folder import CONFIG_FILE, WEIGHTS_FILE, LeRobotFolder, read_folder, tensor_problems
from rlvla.models.lerobot.images import to_network_range
from rlvla.models.lerobot.processors import OLD_PREFIXES, TOKENIZER_NAME, Processors, read_processors
from rlvla.models.lerobot.prompts import PromptTokenizer, inner_folders, lasting_name
from rlvla.models.smolvla.config import SmolVLAConfig
from rlvla.models.smolvla.network import SmolVLANetwork
from rlvla.models.smolvla.vlm import VlmConfig, find_vlm, read_vlm
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem

TEXT_STEP = "smolvla_new_line_processor"
_HEAD, _EMBEDDING = (
    "model.vlm_with_expert.vlm.lm_head.weight",
    "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight",
)


@dataclass(frozen=True, kw_only=True)
class SmolVLAFiles(LeRobotFiles):
    """A folder of SmolVLA whose files have been checked.

    Attributes:
        vlm_folder: where the configuration and tokenizer of its vision-language model are.
        vlm: sizes of that model.
    """

    config: SmolVLAConfig
    vlm_folder: Path
    vlm: VlmConfig

    @property
    def text_step(self) -> str:
        """See `LeRobotFiles.text_step`."""
        return TEXT_STEP

    @property
    def tokenizer_name(self) -> str:
        """See `LeRobotFiles.tokenizer_name`."""
        return self.config.vlm_model_name

    @property
    def image_size(self) -> int | None:
        """See `LeRobotFiles.image_size`."""
        return None if self.config.image_size else self._side

    @property
    def _side(self) -> int:
        """Of the images that the network sees."""
        features = self.config.features
        return self.config.image_size or features.inputs[features.cameras[0]].shape[-1]

    def image_tokens(self) -> tuple[int, int]:
        """See `LeRobotFiles.image_tokens`."""
        patches = (self._side // self.vlm.vision.patch_size) ** 2
        return patches, patches // self.vlm.scale_factor**2

    def pixels(self, images: Tensor) -> Tensor:
        """See `LeRobotFiles.pixels`."""
        return to_network_range(images, self._side, self._side)

    def prompts(self, instructions: Sequence[str], state: Tensor) -> tuple[Tensor, Tensor]:
        """See `LeRobotFiles.prompts`; the state is no part of the prompt."""
        return self.tokenizer(instructions)

    def empty_network(self, **options: bool) -> SmolVLANetwork:
        """See `LeRobotFiles.empty_network`."""
        return _on_meta(self.config, self.vlm, **options)

    def file_tensors(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `LeRobotFiles.file_tensors`; a head that was left out stays so while it equals the embedding."""
        tensors = dict(state_dict)
        if _HEAD not in self.folder.shapes and torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
            tensors.pop(_HEAD)
        return tensors


def check_smolvla(path: str | Path) -> SmolVLAFiles:
    """Check every file of a folder without reading its weights.

    Raises:
        ConfigError: lists everything that is missing or inconsistent.
    """
    path = Path(path)
    config = SmolVLAConfig.from_json(read_json(path / CONFIG_FILE), path / CONFIG_FILE)
    config = replace(config, vlm_model_name=lasting_name(config.vlm_model_name, path))
    problems: list[Problem] = []
    vlm_folder = vlm = tokenizer = None
    processors, wrong = read_processors(path, config.features, config.normalization_mapping, text_steps={TEXT_STEP})
    problems += wrong
    inner = inner_folders([config.vlm_model_name, processors.text.get(TOKENIZER_NAME)], path)
    folder = collected(problems, lambda: read_folder(path, state_files=processors.state_files, subfolders=inner))
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
    names = {name: name for name in network_shapes(_on_meta(config, vlm))}
    names[_HEAD] = _HEAD if _HEAD in folder.shapes else _EMBEDDING
    return SmolVLAFiles(
        folder=folder,
        config=config,
        processors=processors,
        tokenizer=tokenizer,
        names=names,
        extras=extras,
        vlm_folder=vlm_folder,
        vlm=vlm,
    )


def _tokenizer(path: Path, vlm_folder: Path, config: SmolVLAConfig, processors: Processors) -> PromptTokenizer:
    """The tokenizer of the pipeline; that of the vision-language model if none is named."""
    return read_tokenizer(
        path,
        processors.text,
        name=config.vlm_model_name,
        max_length=config.tokenizer_max_length,
        padding=config.pad_language_to,
        find=lambda name: vlm_folder if name == config.vlm_model_name else find_vlm(name, path),
    )


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
        wanted = network_shapes(_on_meta(config, vlm))
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
