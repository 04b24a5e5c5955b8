"""pi0 and pi0.5 policies in LeRobot's folders: checked, loaded and written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
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
from rlvla.models.lerobot.processors import NORMALIZER, OLD_PREFIXES, Processors, read_processors
from rlvla.models.lerobot.prompts import PromptTokenizer, inner_folders, with_new_line
from rlvla.models.lerobot.refit import refit_folder
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


@dataclass(frozen=True)
class Pi0Checkpoint:
    """A folder whose files have been checked.

    Attributes:
        folder: its files.
        config: its configuration.
        sizes: of the network.
        processors: normalization of states and actions.
        tokenizer: turns prompts into tokens.
        prompt_state_dim: numbers of the state in the prompt of pi0.5.
        names: tensor of the network -> its name in the file.
        extras: tensors of the file that the network does not have.
    """

    folder: LeRobotFolder
    config: Pi0Config
    sizes: Sizes
    processors: Processors
    tokenizer: PromptTokenizer
    prompt_state_dim: int
    names: Mapping[str, str]
    extras: Mapping[str, Tensor]

    def load_network(self, dtype: torch.dtype = torch.float32) -> Pi0Network:
        """The network with its weights, on the host, in `dtype`.

        Raises:
            ConfigError: weights that cannot be read, or are not finite.
        """
        network = _on_meta(self.config, self.sizes)
        stored = self.folder.read_tensors(set(self.names.values()))
        values = {name: stored[self.names[name]] for name in network.state_dict()}
        bad = [self.names[name] for name, value in values.items() if not torch.isfinite(value).all()]
        if bad:
            where = self.folder.path / WEIGHTS_FILE
            text = f"{where}: tensor {bad[0]} ({len(bad)} in all): NaN or infinity; use an earlier checkpoint"
            raise ConfigError.of(None, "invalid_file", text)
        network.load_state_dict({name: value.to(dtype) for name, value in values.items()}, assign=True)
        return network

    def empty_network(self) -> Pi0Network:
        """The network on the meta device, without weights."""
        return _on_meta(self.config, self.sizes)

    @property
    def steps(self) -> int:
        """Denoising steps."""
        return self.config.num_inference_steps

    def with_sampling(self, n_action_steps: int, steps: int) -> Pi0Checkpoint:
        """The same with other settings in config.json."""
        return replace(self, config=replace(self.config, n_action_steps=n_action_steps, num_inference_steps=steps))

    @property
    def image_size(self) -> int | None:
        """None: images are resized."""
        return None

    def pixels(self, images: Tensor) -> Tensor:
        """Images [B, N, H, W, 3] uint8 -> [B, N, 3, side, side] float32 in [-1, 1], their padding at -3."""
        side = self.config.image_size
        return to_network_range(images, side, side, center=True, padding=IMAGE_PADDING)

    def prompts(self, instructions: Sequence[str], state: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [B, L] int64 and mask [B, L] bool on the host, for normalized states [B, P].

        Raises:
            ConfigError: an instruction with a token that the network does not know.
        """
        tokens, mask = self.tokenizer(self._texts(instructions, state.detach().cpu().numpy()))
        if tokens.numel() and int(tokens.max()) >= self.sizes.vocabulary:
            row = int((tokens >= self.sizes.vocabulary).any(dim=1).nonzero()[0])
            text = f"the instruction {instructions[row]!r} has a token beyond the {self.sizes.vocabulary} of the policy"
            raise ConfigError.of(None, "mismatch", text)
        return tokens, mask

    def _texts(self, instructions: Sequence[str], states: np.ndarray) -> list[str]:
        """What is tokenized."""
        if not self.config.state_in_prompt:
            return list(instructions)
        return prompts_with_states(instructions, states, self.prompt_state_dim)

    def image_tokens(self) -> tuple[int, int]:
        """(patches that the vision tower reads, tokens that the decoder reads) of one image."""
        patches = (self.config.image_size // self.sizes.vision.patch_size) ** 2
        return patches, patches

    def prefix_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """Length of each row's prefix: images, padded words, and for pi0 the state."""
        blank = np.zeros((len(instructions), 1), np.float32)  # each number is written with three digits, the most
        lengths = [len(self.tokenizer.ids(text)) for text in set(self._texts(instructions, blank))]
        longest = max(lengths, default=0) if self.tokenizer.padding == "longest" else self.tokenizer.max_length
        words = longest + (0 if self.config.state_in_prompt else 1)
        return [num_images * self.image_tokens()[1] + words] * len(instructions)

    def refit(self, target: Path, facts: NewPolicyFacts) -> None:
        """Write the weights with features, pipelines and statistics of other data; see `refit_folder`."""
        text = {"tokenizer_name": PALIGEMMA, "max_length": self.tokenizer.max_length, "padding": self.tokenizer.padding}
        text |= {"task_key": "task", "padding_side": "right", "truncation": True}
        refit_folder(
            self.folder,
            target,
            facts,
            processors=self.processors,
            modes=self.config.normalization_mapping,
            tokenizer={**text, **self.processors.text},
            text_step=TEXT_STEPS[self.config.type],
            normalize_first=self.config.state_in_prompt,
        )

    def save(self, target: str | Path, state_dict: Mapping[str, Tensor]) -> None:
        """Write a folder like the one that was read, with other weights.

        A tensor keeps the dtype that it had in the file unless that would lose digits.

        Raises:
            ConfigError: `state_dict` has other tensors than the network.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        problems = tensor_problems(Path(target), _shapes(_on_meta(self.config, self.sizes)), shapes)
        if problems:
            raise ConfigError(problems)
        tensors = {self.names[name]: tensor for name, tensor in state_dict.items()}
        tied = [name for name in self.extras if _network_name(name, self.config) in (HEAD, _EMBEDDING)]
        tensors |= {**self.extras, **{name: state_dict[_EMBEDDING].clone() for name in tied}}
        write_folder(
            Path(target),
            {name: lossless(tensor, self.folder.dtypes[name]) for name, tensor in tensors.items()},
            companions=self.folder.companions,
            contents={CONFIG_FILE: self.config.to_json(), **self.processors.preprocessor(self.folder.companions)},
            metadata=self.folder.metadata,
        )


def check_pi0(path: str | Path) -> Pi0Checkpoint:
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
    name = processors.text.get("tokenizer_name", PALIGEMMA)
    folder = sizes = tokenizer = None
    try:
        folder = read_folder(path, state_files=processors.state_files, subfolders=inner_folders([name], path))
    except ConfigError as error:
        problems += error.problems
    try:
        sizes = read_sizes(path, config.paligemma_variant, config.action_expert_variant)
        problems += _patch_problems(path, config, sizes)
    except ConfigError as error:
        problems += error.problems
    try:
        tokenizer = _tokenizer(path, name, config, processors)
    except ConfigError as error:
        problems += error.problems
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
    return Pi0Checkpoint(folder, config, sizes, processors, tokenizer, prompt_state_dim, names, extras)


def _tokenizer(path: Path, name: object, config: Pi0Config, processors: Processors) -> PromptTokenizer:
    """The tokenizer of the pipeline; PaliGemma's if none is named."""
    text = processors.text
    length, padding = text.get("max_length", config.tokenizer_max_length), text.get("padding", "max_length")
    if not isinstance(name, str) or not fits(length, int) or length < 1 or padding not in ("longest", "max_length"):
        where = f"{path}: tokenizer_processor"
        raise ConfigError.of(None, "invalid_file", f"{where} has a name, length or padding that cannot be used")
    prompt = str if config.state_in_prompt else with_new_line
    return PromptTokenizer(find_tokenizer(name, path), max_length=length, padding=padding, prompt=prompt)


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


def _shapes(network: Pi0Network) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def file_shapes(config: Pi0Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that LeRobot's class has; `HEAD` shares its weights with the embedding."""
    heads = {HEAD: (sizes.vocabulary, sizes.vlm.width), EXPERT_HEAD: (sizes.vocabulary, sizes.expert.width)}
    return {**_shapes(_on_meta(config, sizes)), **heads}
