"""Policies of pi0 and pi0.5 in LeRobot's folders, and their prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlvla.models.lerobot.files import LeRobotFiles, on_meta, read_parts, read_tokenizer, tensor_shapes
from rlvla.models.lerobot.folder import CONFIG_FILE, TRAIN_CONFIG_FILE, WEIGHTS_FILE, LeRobotFolder, tensor_problems
from rlvla.models.lerobot.images import to_network_range
from rlvla.models.lerobot.processors import NORMALIZER, OLD_PREFIXES, PREPROCESSOR, RELATIVE, Processors
from rlvla.models.lerobot.prompts import TOKENIZER_FILES, find_folder, with_new_line
from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.models.pi0.config import Pi0Config, Sizes, read_sizes
from rlvla.models.pi0.network import VLM, Pi0Network
from rlvla.utils.data_files import fits, read_json
from rlvla.utils.errors import ConfigError, Problem, collected

# LeRobot whose inputs a policy was trained on -> padding of its images before [0, 1] is mapped to [-1, 1].
# 0.5 and openpi pad with black; 0.4 also pads the state in the prompt of pi0.5.
IMAGE_PADDING = {"0.4": -1.0, "0.5": 0.0}
INPUTS = "lerobot_inputs"  # their key in `SETTINGS_FILE`
_EMBEDDING = f"{VLM}model.language_model.embed_tokens.weight"
# The heads for words, never used; in files of LeRobot 0.4 the first is the embedding, often the only name for it.
HEAD, EXPERT_HEAD = f"{VLM}lm_head.weight", "model.paligemma_with_expert.gemma_expert.lm_head.weight"
_EXPERT_NORMS = re.compile(r"model\.paligemma_with_expert\.gemma_expert\.model\..*norm\.weight")
_STATE_DIM = 32  # padded, in the prompt of pi0.5 in LeRobot 0.4: the default of the pipeline's step
BINS = 256


def state_in_bins(states: np.ndarray, size: int) -> np.ndarray:
    """Normalized states [B, P] -> bins [B, size] of equal width over [-1, 1], padded with the bin of 0.

    A number below -1 gives -1, one above 1 the last bin, as in LeRobot.
    """
    padded = np.pad(states, ((0, 0), (0, max(0, size - states.shape[1]))))
    return np.digitize(padded, np.linspace(-1, 1, BINS + 1)[:-1]) - 1


def prompts_with_states(instructions: Sequence[str], states: np.ndarray, size: int) -> list[str]:
    """The prompts of pi0.5, for normalized states [B, P] that are padded to `size` numbers."""
    texts = (instruction.strip().replace("_", " ").replace("\n", " ") for instruction in instructions)
    rows = (" ".join(map(str, row)) for row in state_in_bins(states, size).tolist())
    return [f"Task: {text}, State: {row};\nAction: " for text, row in zip(texts, rows, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Pi0Files(LeRobotFiles):
    """A folder of pi0 or pi0.5 whose files have been checked.

    Attributes:
        sizes: of the network.
        inputs: a key of `IMAGE_PADDING`.
        inputs_reason: of that choice.
        prompt_state_dim: numbers of the state in the prompt of pi0.5.
        tied_head: name in the file of the head for words, if it equals the embedding there.
    """

    config: Pi0Config
    sizes: Sizes
    inputs: str
    inputs_reason: str
    prompt_state_dim: int
    tied_head: str | None

    def image_tokens(self) -> tuple[int, int]:
        """See `LeRobotFiles.image_tokens`."""
        patches = (self.config.image_size // self.sizes.vision.patch_size) ** 2
        return patches, patches

    def pixels(self, images: Tensor) -> Tensor:
        """See `LeRobotFiles.pixels`."""
        return to_network_range(images, self.config.image_size, center=True, padding=IMAGE_PADDING[self.inputs])

    def facts(self) -> dict[str, str]:
        """See `LeRobotFiles.facts`."""
        text = f"as in LeRobot {self.inputs} ({self.inputs_reason}): "
        text += f"images padded with {IMAGE_PADDING[self.inputs] * 2 - 1:g}"
        if self.config.state_in_prompt:
            padded = f"padded to {self.prompt_state_dim} numbers" if self.inputs == "0.4" else "not padded"
            text += f", state in the prompt {padded}"
        return {"inputs": text}

    def recorded_settings(self) -> dict[str, str]:
        """See `LeRobotFiles.recorded_settings`."""
        return {INPUTS: self.inputs}

    def prompt_texts(self, instructions: Sequence[str], states: np.ndarray) -> list[str]:
        """See `LeRobotFiles.prompt_texts`."""
        if not self.config.state_in_prompt:
            return list(instructions)
        return prompts_with_states(instructions, states, self.prompt_state_dim)

    def prompts(self, instructions: Sequence[str], state: Tensor) -> tuple[Tensor, Tensor]:
        """See `LeRobotFiles.prompts`."""
        tokens, mask = super().prompts(instructions, state)
        if tokens.numel() and int(tokens.max()) >= self.sizes.vocabulary:
            row = int((tokens >= self.sizes.vocabulary).any(dim=1).nonzero()[0])
            text = f"the instruction {instructions[row]!r} has a token beyond the {self.sizes.vocabulary} of the policy"
            raise ConfigError.of(None, "mismatch", text)
        return tokens, mask

    def empty_network(self, **options: bool) -> Pi0Network:
        """See `LeRobotFiles.empty_network`."""
        return on_meta(Pi0Network, self.config, self.sizes)

    def file_tensors(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `LeRobotFiles.file_tensors`; a head for words that equalled the embedding stays equal to it."""
        tensors = super().file_tensors(state_dict)
        return tensors if self.tied_head is None else tensors | {self.tied_head: state_dict[_EMBEDDING].clone()}


def check_pi0(path: str | Path) -> Pi0Files:
    """Check every file of a folder of pi0 or pi0.5 without reading its weights.

    Raises:
        ConfigError: lists everything that is missing or inconsistent.
    """
    path = Path(path)
    config = Pi0Config.from_json(read_json(path / CONFIG_FILE), path / CONFIG_FILE)
    problems: list[Problem] = []
    processors, folder = read_parts(path, config, problems)
    sizes = collected(problems, lambda: read_sizes(path, config.paligemma_variant, config.action_expert_variant))
    names: dict[str, str] = {}
    texts = []
    if sizes is not None and config.image_size % sizes.vision.patch_size:
        unit = f"the {sizes.vision.patch_size} pixels of a patch"
        texts.append(f"{path / CONFIG_FILE}: image_resolution is {config.image_size}; it must be a multiple of {unit}")
    prompt = str if config.state_in_prompt else with_new_line

    def find(name: str) -> Path:
        setting = f"{PREPROCESSOR}: tokenizer_name"
        return find_folder(name, path, TOKENIZER_FILES[0], setting=setting, files=TOKENIZER_FILES)

    tokenizer = collected(
        problems,
        lambda: read_tokenizer(path, config, processors, padding="max_length", find=find, prompt=prompt),
    )
    if folder is not None and sizes is not None:
        names, wrong = _match(folder, config, sizes)
        problems += wrong
    inputs, reason = collected(problems, lambda: read_inputs(path, config, processors, folder)) or ("", "")
    prompt_state_dim = processors.steps.get(config.text_step, {}).get("max_state_dim", _STATE_DIM)
    if not fits(prompt_state_dim, int) or not 1 <= prompt_state_dim <= 2**16:
        texts.append(f"{path}: {config.text_step} has a max_state_dim that cannot be used")
    steps = list(processors.steps)
    if config.state_in_prompt and NORMALIZER in steps and config.text_step in steps[: steps.index(NORMALIZER)]:
        order = f"{NORMALIZER} comes after {config.text_step}, which needs normalized states"
        texts.append(f"{path}: {order}; save the policy again")
    problems += [Problem(None, "invalid_file", text) for text in texts]
    if problems or folder is None or sizes is None or tokenizer is None:
        raise ConfigError(problems)
    extras = folder.other_tensors(names.values())
    tied_head = _tied_head(folder, config, names[_EMBEDDING], extras)
    return Pi0Files(
        folder=folder,
        config=config,
        processors=processors,
        tokenizer=tokenizer,
        names=names,
        extras={name: tensor for name, tensor in extras.items() if name != tied_head},
        sizes=sizes,
        inputs=inputs,
        inputs_reason=reason,
        prompt_state_dim=prompt_state_dim if inputs == "0.4" else config.features.state_dim,
        tied_head=tied_head,
    )


def read_inputs(path: Path, config: Pi0Config, processors: Processors, folder: LeRobotFolder | None) -> tuple[str, str]:
    """The LeRobot whose inputs a policy was trained on, a key of `IMAGE_PADDING`, and how that is known.

    Args:
        path: of the folder.
        config: its config.json.
        processors: its pipelines.
        folder: its files; None: unreadable.

    Raises:
        ConfigError: the file in the folder cannot be read, or holds an unknown value.
    """
    file = path / SETTINGS_FILE
    recorded = read_json(file) if file.is_file() else {}
    if INPUTS in recorded:
        value = recorded[INPUTS]
        if not isinstance(value, str) or value not in IMAGE_PADDING:
            text = f"{file}: {INPUTS} is {value!r}; it must be one of {', '.join(IMAGE_PADDING)}"
            raise ConfigError.of(None, "invalid_file", text)
        return value, f"recorded in {SETTINGS_FILE}"
    if RELATIVE in processors.steps:
        return "0.5", f"the folder has {RELATIVE}"
    if "critic_features" in recorded:
        return "0.4", f"{SETTINGS_FILE} was written before {INPUTS} was recorded"
    names = {_network_name(name, config) for name in folder.shapes} if folder is not None else set()
    if len(names & {_EMBEDDING, HEAD}) == 1 and (path / TRAIN_CONFIG_FILE).is_file():
        return "0.4", "trained by LeRobot 0.4, which stores embedding and head as one tensor"
    return "0.5", f"assumed; if LeRobot 0.4 trained it, put {json.dumps({INPUTS: '0.4'})} into its {SETTINGS_FILE}"


def _network_name(name: str, config: Pi0Config) -> str:
    """LeRobot's name of a tensor in a file; converted files lack `model.`, and may name the time's MLP differently."""
    if name.startswith("model."):
        return name
    old, new = ("action_time_mlp_", "time_mlp_") if config.state_in_prompt else ("time_mlp_", "action_time_mlp_")
    return f"model.{new}{name.removeprefix(old)}" if name.startswith(old) else f"model.{name}"


def _match(folder: LeRobotFolder, config: Pi0Config, sizes: Sizes) -> tuple[dict[str, str], list[Problem]]:
    """Tensor of the network -> its name in the file, and the problems with the tensors of the file."""
    stored, names = {}, {}
    for name, shape in folder.shapes.items():
        target = _network_name(name, config)
        # LeRobot ignores these tensors of converted files of pi0.5.
        ignored = config.state_in_prompt and (target.startswith("model.state_proj.") or _EXPERT_NORMS.fullmatch(target))
        if name.startswith(OLD_PREFIXES) or (name != target and ignored):
            continue
        stored[target], names[target] = shape, name
    expected = file_shapes(config, sizes)
    if EXPERT_HEAD not in stored:
        expected.pop(EXPERT_HEAD)
    if HEAD not in stored or _EMBEDDING not in stored:
        expected.pop(HEAD if HEAD not in stored else _EMBEDDING)
    problems = tensor_problems(folder.path / WEIGHTS_FILE, expected, stored)
    names.pop(EXPERT_HEAD, None)
    # With both, LeRobot >= 0.5 reads the embedding; full fine-tuning leaves the head behind.
    head = names.pop(HEAD, None)
    if head is not None:
        names.setdefault(_EMBEDDING, head)
    return names, problems


def _tied_head(folder: LeRobotFolder, config: Pi0Config, embedding: str, extras: Mapping[str, Tensor]) -> str | None:
    """Name of the head for words among the further tensors of a file if it equals the tensor `embedding`."""
    head = next((name for name in extras if _network_name(name, config) == HEAD), None)
    if head is None or folder.dtypes[head] != folder.dtypes[embedding]:
        return None
    return head if torch.equal(extras[head], folder.read_tensors([embedding])[embedding]) else None


def file_shapes(config: Pi0Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of LeRobot's class; before 0.5, `HEAD` shares its weights with the embedding."""
    heads = {HEAD: (sizes.vocabulary, sizes.vlm.width), EXPERT_HEAD: (sizes.vocabulary, sizes.expert.width)}
    return {**tensor_shapes(on_meta(Pi0Network, config, sizes)), **heads}
