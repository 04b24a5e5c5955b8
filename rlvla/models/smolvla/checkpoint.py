"""SmolVLA policies in LeRobot's folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlvla.models.lerobot.files import LeRobotFiles, on_meta, read_parts, read_tokenizer, tensor_shapes
from rlvla.models.lerobot.folder import CONFIG_FILE, WEIGHTS_FILE, LeRobotFolder, tensor_problems
from rlvla.models.lerobot.images import to_network_range
from rlvla.models.lerobot.processors import OLD_PREFIXES
from rlvla.models.lerobot.prompts import lasting_name
from rlvla.models.smolvla.config import SmolVLAConfig
from rlvla.models.smolvla.network import VLM, SmolVLANetwork
from rlvla.models.smolvla.vlm import VlmConfig, find_vlm, read_vlm
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem

_HEAD, _EMBEDDING = f"{VLM}lm_head.weight", f"{VLM}model.text_model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class SmolVLAFiles(LeRobotFiles):
    """A folder of SmolVLA whose files have been checked.

    Attributes:
        vlm_folder: with the configuration and tokenizer of its vision-language model.
        vlm: sizes of that model.
    """

    config: SmolVLAConfig
    vlm_folder: Path
    vlm: VlmConfig

    @property
    def image_size(self) -> int | None:
        """See `LeRobotFiles.image_size`."""
        return None if self.config.image_size else self._side

    @property
    def _side(self) -> int:
        """Of the network's images."""
        features = self.config.features
        return self.config.image_size or features.inputs[features.cameras[0]].shape[-1]

    def image_tokens(self) -> tuple[int, int]:
        """See `LeRobotFiles.image_tokens`."""
        patches = (self._side // self.vlm.vision.patch_size) ** 2
        return patches, patches // self.vlm.scale_factor**2

    def pixels(self, images: Tensor) -> Tensor:
        """See `LeRobotFiles.pixels`."""
        return to_network_range(images, self._side)

    def empty_network(self, **options: bool) -> SmolVLANetwork:
        """See `LeRobotFiles.empty_network`."""
        return on_meta(SmolVLANetwork, self.config, self.vlm, **options)

    def file_tensors(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `LeRobotFiles.file_tensors`; a head missing in the file is left out while it equals the embedding."""
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
    processors, folder = read_parts(path, config, problems, models=[config.vlm_model_name])
    vlm_folder = vlm = tokenizer = None
    try:
        vlm_folder = find_vlm(config.vlm_model_name, path)
        vlm = read_vlm(vlm_folder)
        padding = config.pad_language_to
        tokenizer = read_tokenizer(path, config, processors, padding=padding, find=lambda model: find_vlm(model, path))
        if tokenizer.size > vlm.vocabulary:
            sizes = f"the tokenizer has {tokenizer.size} ids, the model {vlm.vocabulary}"
            problems.append(Problem(None, "mismatch", f"{vlm_folder}: {sizes}; they do not belong together"))
    except ConfigError as error:
        problems += error.problems
    if vlm is not None:
        problems += _size_problems(path, config, vlm, folder)
    if problems or folder is None or vlm is None or tokenizer is None or vlm_folder is None:
        raise ConfigError(problems)
    names = {name: name for name in tensor_shapes(on_meta(SmolVLANetwork, config, vlm))}
    names[_HEAD] = _HEAD if _HEAD in folder.shapes else _EMBEDDING
    return SmolVLAFiles(
        folder=folder,
        config=config,
        processors=processors,
        tokenizer=tokenizer,
        names=names,
        extras=folder.other_tensors(names.values()),
        vlm_folder=vlm_folder,
        vlm=vlm,
    )


def _size_problems(path: Path, config: SmolVLAConfig, vlm: VlmConfig, folder: LeRobotFolder | None) -> list[Problem]:
    """Sizes in config.json that contradict the vision-language model, or the tensors of the folder."""
    image = vlm.image_problem(config.image_size)
    texts = [image] if image else []
    if int(vlm.text.width * config.expert_width_multiplier) % 2:
        text = f"expert_width_multiplier {config.expert_width_multiplier:g} of {vlm.text.width} gives an odd width"
        texts.append(f"{text}; the time embedding needs an even one")
    problems = [Problem(None, "invalid_file", f"{path / CONFIG_FILE}: {text}") for text in texts]
    try:
        expected = tensor_shapes(on_meta(SmolVLANetwork, config, vlm))
    except ConfigError as error:
        return [*problems, *(problem.prefixed(f"{path / CONFIG_FILE}: ") for problem in error.problems)]
    if folder is not None:
        stored = {name: shape for name, shape in folder.shapes.items() if not name.startswith(OLD_PREFIXES)}
        if vlm.tied and _HEAD not in stored:
            expected.pop(_HEAD)
        problems += tensor_problems(path / WEIGHTS_FILE, expected, stored)
    return problems
