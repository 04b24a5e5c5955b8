"""Observations to inputs of OpenVLA networks, prompts, and tokens to actions.

Images are prepared once on the host and stay uint8 until they are on the device; pixels are normalized in the forward
pass, so that SFT, rollout, evaluation and updates see the same pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlvla.experience import Experience
from rlvla.models.codec import StatisticsCodec
from rlvla.models.dataset_statistics import resolve_statistics_key
from rlvla.models.vla.action_tokenizer import ActionTokenizer
from rlvla.models.vla.checkpoint import complete_config, read_config, read_statistics
from rlvla.models.vla.checkpoint_files import find_file, find_tensors
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.image_processing import center_crop, libero_image, to_pixel_values
from rlvla.models.vla.normalization import RANGE_EPS
from rlvla.utils.errors import ConfigError

CENTER_CROP_SCALE = 0.9


def row_tokens(inputs: VLAInputs, instructions: Sequence[str], num_images: int) -> list[int]:
    """Sequence length of each row: image patches, proprio, prompt (padded to the longest), action tokens, end token."""
    if not instructions:
        return []
    config = inputs.config
    prompt = inputs.prompt(instructions, torch.device("cpu"))[0].shape[1]
    patches = num_images * config.tower_configs()[0].num_patches
    return [patches + int(bool(config.use_proprio)) + prompt + config.num_action_tokens + 1] * len(instructions)


class VLAInputs(StatisticsCodec):
    """Preprocessing of observations and actions.

    Args:
        config: configuration of the model.
        tokenizer: the checkpoint's text tokenizer.
        statistics: see `StatisticsCodec`.
    """

    def __init__(
        self, config: OpenVLAConfig, tokenizer: PreTrainedTokenizerBase, statistics: dict[str, Any] | None = None
    ):
        super().__init__(
            statistics,
            chunk=(config.action_chunk_len, config.action_dim),
            proprio_dim=config.proprio_width,
            bins=ActionTokenizer(config.base_vocab_size, config.n_action_bins),
            normalization=config.action_normalization,
            range_eps=0.0 if config.is_autoregressive else RANGE_EPS,
            gripper_convention=config.gripper_convention,
        )
        self.config, self.tokenizer = config, tokenizer
        self._encoded: dict[str, list[int]] = {}
        self._prompts: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor | None]] = {}

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, config: OpenVLAConfig | None = None, unnorm_key: str | None = None
    ) -> VLAInputs:
        """Load from a checkpoint folder.

        Args:
            path: the folder.
            config: configuration of the loaded model, if it differs from that of the folder.
            unnorm_key: key of the action statistics, see `resolve_statistics_key`.

        Raises:
            ConfigError: tokenizer.json or the statistics are missing.
        """
        folder = Path(path)
        raw = read_config(folder)
        if config is None:
            config, _ = complete_config(folder, raw, find_tensors(folder), {})
        statistics = read_statistics(folder, raw)
        return cls(config, load_tokenizer(folder), statistics[resolve_statistics_key(statistics, unnorm_key)])

    def encode_prompt(self, instruction: str) -> list[int]:
        """Token ids of the prompt, starting with BOS and ending with the prompt-end token; cached."""
        ids = self._encoded.get(instruction)
        if ids is None:
            ids = list(self.tokenizer(build_prompt(instruction, self.config.prompt_style))["input_ids"])
            bos: Any = self.config.text_config.bos_token_id
            if not ids or ids[0] != bos:
                ids.insert(0, bos)
            if ids[-1] != self.config.prompt_end_token_id:
                ids.append(self.config.prompt_end_token_id)
            self._encoded[instruction] = ids
        return ids

    def collate_prompts(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """`input_ids` [B, L] (int64, left-padded) and `attention_mask` [B, L] (int64) for instructions."""
        rows = [self.encode_prompt(instruction) for instruction in instructions]
        length = max(map(len, rows))
        input_ids = torch.full((len(rows), length), self.config.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
        for i, row in enumerate(rows):
            input_ids[i, length - len(row) :] = torch.tensor(row)
            attention_mask[i, length - len(row) :] = 1
        return input_ids, attention_mask

    def prompt(self, instructions: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Left-padded `input_ids` [B, L] and `attention_mask` [B, L] of the prompts; no mask if none is padded."""
        distinct = {text: row for row, text in enumerate(dict.fromkeys(instructions))}
        key = (tuple(distinct), device)
        if key not in self._prompts:
            if len(self._prompts) >= 256:  # combinations of instructions; cheap to recompute
                self._prompts.clear()
            ids, mask = self.collate_prompts(list(distinct))
            self._prompts[key] = ids.to(device), None if bool(mask.all()) else mask.to(device)
        ids, padding = self._prompts[key]
        if len(distinct) == 1:
            return ids.expand(len(instructions), -1), None
        rows = torch.tensor([distinct[text] for text in instructions], device=device)
        return ids[rows], None if padding is None else padding[rows]

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RolloutPolicy.prepare`."""
        config, size = self.config, self.config.image_size
        if config.image_preprocessing == "libero" or config.center_crop:
            # Image by image: the crop computes in float32, and `images` may be all frames of a data set.
            prepared = np.empty((*images.shape[:-3], size, size, 3), np.uint8)
            for index in np.ndindex(images.shape[:-3]):
                image = libero_image(images[index], size) if config.image_preprocessing == "libero" else images[index]
                prepared[index] = center_crop(image, CENTER_CROP_SCALE, size) if config.center_crop else image
            images = prepared
        if proprio is None or not config.use_proprio:
            return images, proprio
        return images, self.normalize_proprio(proprio)

    def pixel_values(self, images: np.ndarray | Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Prepared images [..., N, H, W, 3] uint8 -> [..., 6N, H, W] normalized for both towers."""
        pixels = to_pixel_values(images, self.config)
        return pixels if dtype is None else pixels.to(dtype)

    def observations(
        self, images: Tensor, proprio: Tensor | None, instructions: Sequence[str], device: torch.device
    ) -> dict[str, Any]:
        """Prepared observations as keyword arguments of the networks' `forward`."""
        ids, mask = self.prompt(instructions, device)
        state = None if proprio is None else proprio.to(device)
        return {"input_ids": ids, "attention_mask": mask, "images": images.to(device), "proprio": state}

    def to_device(self, batch: Experience, device: torch.device) -> dict[str, Any]:
        """`observations` and `trace` of a batch."""
        trace = {name: value.to(device) for name, value in (batch.trace or {}).items()}
        return {**self.observations(batch.images, batch.proprio, batch.instructions, device), "trace": trace}


PROMPT_TEMPLATE = "In: What action should the robot take to {instruction}?\nOut:"
# OpenVLA v0.1 was built on a chat model and keeps its system prompt (Vicuna v1.5).
VICUNA_TEMPLATE = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "USER: What action should the robot take to {instruction}? ASSISTANT:"
)
PROMPT_TEMPLATES = {"openvla": PROMPT_TEMPLATE, "vicuna": VICUNA_TEMPLATE}


def build_prompt(instruction: str, style: str = "openvla") -> str:
    """The prompt for an instruction, which is lowercased; `style` is a key of `PROMPT_TEMPLATES`."""
    return PROMPT_TEMPLATES[style].format(instruction=instruction.lower())


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The text tokenizer of a checkpoint folder, read from tokenizer.json without running code from the folder.

    Raises:
        ConfigError: the file is missing or not a tokenizer.
    """
    path = find_file(Path(folder), "tokenizer.json")
    if not path.is_file():
        raise ConfigError(f"{path} is missing; a checkpoint folder needs its tokenizer")
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{path} is not a readable tokenizer ({error}); copy the checkpoint again") from error
