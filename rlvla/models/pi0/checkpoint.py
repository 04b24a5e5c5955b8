"""Policies of pi0 and pi0.5 in LeRobot's folders."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlvla.models.lerobot.files import LeRobotFiles, collected, network_shapes, read_tokenizer
from rlvla.models.lerobot.folder import CONFIG_FILE, WEIGHTS_FILE, LeRobotFolder, read_folder, tensor_problems
from rlvla.models.lerobot.images import to_network_range
from rlvla.models.lerobot.processors import NORMALIZER, OLD_PREFIXES, TOKENIZER_NAME, Processors, read_processors
from rlvla.models.lerobot.prompts import PromptTokenizer, inner_folders, with_new_line
from rlvla.models.pi0.config import PI0, PI05, Pi0Config
from rlvla.models.pi0.network import VLM, Pi0Network
from rlvla.models.pi0.prompts import PALIGEMMA, find_tokenizer, prompts_with_states
from rlvla.models.pi0.sizes import Sizes, read_sizes
from rlvla.utils.data_files import fits, read_json
from rlvla.utils.errors import ConfigError, Problem

TEXT_STEPS = {PI0: "pi0_new_line_processor", PI05: "pi05_prepare_state_tokenizer_processor_step"}
# LeRobot pads images with -1 before it maps [0, 1] to [-1, 1].
IMAGE_PADDING = -1.0
_EMBEDDING = f"{VLM}model.language_model.embed_tokens.weight"
# The heads for words: the first shares the weights of the embedding, the second belongs to nothing.
HEAD, EXPERT_HEAD = f"{VLM}lm_head.weight", "model.paligemma_with_expert.gemma_expert.lm_head.weight"
_EXPERT_NORMS = re.compile(r"model\.paligemma_with_expert\.gemma_expert\.model\..*norm\.weight")
_STATE_DIM = 32  # in the prompt of pi0.5, unless the pipeline says it


@dataclass(frozen=True, kw_only=True)
class Pi0Files(LeRobotFiles):
    """A folder of pi0 or pi0.5 whose files have been checked.

    Attributes:
        sizes: of the network.
        prompt_state_dim: numbers of the state in the prompt of pi0.5.
    """

    config: Pi0Config
    sizes: Sizes
    prompt_state_dim: int

    @property
    def text_step(self) -> str:
        """See `LeRobotFiles.text_step`."""
        return TEXT_STEPS[self.config.type]

    @property
    def tokenizer_name(self) -> str:
        """See `LeRobotFiles.tokenizer_name`."""
        return PALIGEMMA

    @property
    def state_in_prompt(self) -> bool:
        """See `LeRobotFiles.state_in_prompt`."""
        return self.config.state_in_prompt

    @property
    def image_size(self) -> int | None:
        """None: images are resized."""
        return None

    def image_tokens(self) -> tuple[int, int]:
        """See `LeRobotFiles.image_tokens`."""
        patches = (self.config.image_size // self.sizes.vision.patch_size) ** 2
        return patches, patches

    def pixels(self, images: Tensor) -> Tensor:
        """See `LeRobotFiles.pixels`; the padding is at -3."""
        side = self.config.image_size
        return to_network_range(images, side, side, center=True, padding=IMAGE_PADDING)

    def prompts(self, instructions: Sequence[str], state: Tensor) -> tuple[Tensor, Tensor]:
        """See `LeRobotFiles.prompts`."""
        tokens, mask = self.tokenizer(self._texts(instructions, state.detach().cpu().numpy()))
        if tokens.numel() and int(tokens.max()) >= self.sizes.vocabulary:
            row = int((tokens >= self.sizes.vocabulary).any(dim=1).nonzero()[0])
            text = f"the instruction {instructions[row]!r} has a token beyond the {self.sizes.vocabulary} of the policy"
            raise ConfigError.of(None, "mismatch", text)
        return tokens, mask

    def longest_texts(self, instructions: Sequence[str]) -> list[str]:
        """See `LeRobotFiles.longest_texts`: each number is written with three digits, the most."""
        return self._texts(instructions, np.zeros((len(instructions), 1), np.float32))

    def _texts(self, instructions: Sequence[str], states: np.ndarray) -> list[str]:
        """What is tokenized."""
        if not self.state_in_prompt:
            return list(instructions)
        return prompts_with_states(instructions, states, self.prompt_state_dim)

    def empty_network(self, **options: bool) -> Pi0Network:
        """See `LeRobotFiles.empty_network`."""
        return _on_meta(self.config, self.sizes)

    def file_tensors(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `LeRobotFiles.file_tensors`; the head for words equals the embedding."""
        tied = [name for name in self.extras if _network_name(name, self.config) in (HEAD, _EMBEDDING)]
        return super().file_tensors(state_dict) | {name: state_dict[_EMBEDDING].clone() for name in tied}


def check_pi0(path: str | Path) -> Pi0Files:
    """Check every file of a folder of pi0 or pi0.5 without reading its weights.

    Raises:
        ConfigError: lists everything that is missing or inconsistent.
    """
    path = Path(path)
    config = Pi0Config.from_json(read_json(path / CONFIG_FILE), path / CONFIG_FILE)
    problems: list[Problem] = []
    text_step = TEXT_STEPS[config.type]
    processors, wrong = read_processors(path, config.features, config.normalization_mapping, text_steps={text_step})
    problems += wrong
    inner = inner_folders([processors.text.get(TOKENIZER_NAME, PALIGEMMA)], path)
    folder = collected(problems, lambda: read_folder(path, state_files=processors.state_files, subfolders=inner))
    sizes = collected(problems, lambda: read_sizes(path, config.paligemma_variant, config.action_expert_variant))
    if sizes is not None:
        problems += _patch_problems(path, config, sizes)
    tokenizer = collected(problems, lambda: _tokenizer(path, config, processors))
    names: dict[str, str] = {}
    if folder is not None and sizes is not None:
        names, wrong = _match(folder, config, sizes)
        problems += wrong
    step = processors.steps.get(text_step, {})
    prompt_state_dim = step.get("max_state_dim", _STATE_DIM)
    if not fits(prompt_state_dim, int) or not 1 <= prompt_state_dim <= 2**16:
        text = f"{path}: {text_step} has a max_state_dim that cannot be used"
        problems.append(Problem(None, "invalid_file", text))
    order = list(processors.steps)
    if config.state_in_prompt and NORMALIZER in order and text_step in order[: order.index(NORMALIZER)]:
        text = f"{path}: {NORMALIZER} comes after {text_step}, which needs normalized states; save the policy again"
        problems.append(Problem(None, "invalid_file", text))
    if problems or folder is None or sizes is None or tokenizer is None:
        raise ConfigError(problems)
    used = set(names.values())
    extras = folder.read_tensors([name for name in folder.shapes if name not in used])
    return Pi0Files(
        folder=folder,
        config=config,
        processors=processors,
        tokenizer=tokenizer,
        names=names,
        extras=extras,
        sizes=sizes,
        prompt_state_dim=prompt_state_dim,
    )


def _tokenizer(path: Path, config: Pi0Config, processors: Processors) -> PromptTokenizer:
    """The tokenizer of the pipeline; PaliGemma's if none is named."""
    return read_tokenizer(
        path,
        processors.text,
        name=PALIGEMMA,
        max_length=config.tokenizer_max_length,
        padding="max_length",
        find=lambda name: find_tokenizer(name, path),
        prompt=str if config.state_in_prompt else with_new_line,
    )


def _patch_problems(path: Path, config: Pi0Config, sizes: Sizes) -> list[Problem]:
    size, patch = config.image_size, sizes.vision.patch_size
    if size % patch == 0:
        return []
    text = f"{path / CONFIG_FILE}: image_resolution is {size}; it must be a multiple of the {patch} pixels of a patch"
    return [Problem(None, "invalid_file", text)]


def _network_name(name: str, config: Pi0Config) -> str:
    """What LeRobot calls a tensor of a file; converted files lack `model.`, and may name the time's MLP differently."""
    if name.startswith("model."):
        return name
    old, new = ("action_time_mlp_", "time_mlp_") if config.state_in_prompt else ("time_mlp_", "action_time_mlp_")
    return f"model.{new}{name.removeprefix(old)}" if name.startswith(old) else f"model.{name}"


def _match(folder: LeRobotFolder, config: Pi0Config, sizes: Sizes) -> tuple[dict[str, str], list[Problem]]:
    """Tensor of the network -> its name in the file, and what is wrong with the tensors of the file."""
    stored, names = {}, {}
    for name, shape in folder.shapes.items():
        known = _network_name(name, config)
        if name.startswith(OLD_PREFIXES) or (name != known and _left_over(known, config)):
            continue
        stored[known], names[known] = shape, name
    wanted = file_shapes(config, sizes)
    if EXPERT_HEAD not in stored:
        wanted.pop(EXPERT_HEAD)
    if HEAD not in stored or _EMBEDDING not in stored:
        wanted.pop(HEAD if HEAD not in stored else _EMBEDDING)
    problems = tensor_problems(folder.path / WEIGHTS_FILE, wanted, stored)
    names.pop(EXPERT_HEAD, None)
    # With both, LeRobot reads the embedding first and overwrites it.
    head = names.pop(HEAD, None)
    if head is not None:
        names[_EMBEDDING] = head
    return names, problems


def _left_over(name: str, config: Pi0Config) -> bool:
    """Tensors of converted files that LeRobot ignores."""
    return config.state_in_prompt and (name.startswith("model.state_proj.") or bool(_EXPERT_NORMS.fullmatch(name)))


def _on_meta(config: Pi0Config, sizes: Sizes) -> Pi0Network:
    with torch.device("meta"):
        return Pi0Network(config, sizes)


def file_shapes(config: Pi0Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that LeRobot's class has; `HEAD` shares its weights with the embedding."""
    heads = {HEAD: (sizes.vocabulary, sizes.vlm.width), EXPERT_HEAD: (sizes.vocabulary, sizes.expert.width)}
    return {**network_shapes(_on_meta(config, sizes)), **heads}
