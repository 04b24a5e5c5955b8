"""From observations to model inputs and from tokens to actions, for every model of a run.

Images stay uint8 until they are on the device; cropping and normalisation happen inside the models' forward passes, so
that SFT, rollout, evaluation and update see the same pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvla.experience import Experience
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.image_processing import center_crop
from rlvla.models.vla.processing_openvla import CENTER_CROP_SCALE, OpenVLAProcessor

# Actions that differ by less than this over all tokens are the same to any controller (they live in [-1, 1]).
CONSTANT_ACTION_RANGE = 1e-6


class VLAInputs:
    """The processor of a checkpoint, on batches of tensors.

    Args:
        processor: prompts, images, proprio and actions of the checkpoint.
    """

    def __init__(self, processor: OpenVLAProcessor):
        self.processor = processor
        self._prompts: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor]] = {}

    @classmethod
    def from_pretrained(cls, path: str | Path, *, config: OpenVLAConfig, unnorm_key: str | None = None) -> VLAInputs:
        """Of a checkpoint folder; ConfigError without a tokenizer or if the statistics key is not found."""
        return cls(OpenVLAProcessor.from_pretrained(path, config=config, suite=unnorm_key))

    @property
    def config(self) -> OpenVLAConfig:
        """Of the model."""
        return self.processor.config

    def prompt(self, instructions: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Left-padded `input_ids` [B, L] and `attention_mask` [B, L] of the prompts."""
        distinct = {text: row for row, text in enumerate(dict.fromkeys(instructions))}
        key = (tuple(distinct), device)
        if key not in self._prompts:
            if len(self._prompts) >= 256:  # combinations of instructions; each is cheap to make again
                self._prompts.clear()
            ids, mask = self.processor.collate_prompts(list(distinct))
            self._prompts[key] = ids.to(device), mask.to(device)
        ids, mask = self._prompts[key]
        if len(distinct) == 1:
            return ids.expand(len(instructions), -1), mask.expand(len(instructions), -1)
        rows = torch.tensor([distinct[text] for text in instructions], device=device)
        return ids[rows], mask[rows]

    def pixel_values(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, N, H, W, 3] uint8 -> [B, 6N, h, w] normalised for both towers."""
        if self.config.image_preprocessing != "none":
            prepared = np.stack([self.processor.prepare_images(image) for image in images.cpu().numpy()])
            images = torch.from_numpy(prepared).to(images.device)
        elif self.config.center_crop:
            images = center_crop(images, CENTER_CROP_SCALE, self.config.image_size)
        return self.processor.pixel_values(images).to(dtype)

    def normalize_proprio(self, proprio: Tensor) -> Tensor:
        """[B, P] of the environment -> [B, P] in [-1, 1], float32."""
        return torch.from_numpy(self.processor.normalize_proprio(proprio.cpu().numpy())).to(proprio.device)

    def pixels_and_proprio(
        self, images: Tensor, proprio: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """What a network sees of observations: `pixel_values` and the normalised proprio, in its own type."""
        state = None if proprio is None else self.normalize_proprio(proprio).to(dtype)
        return self.pixel_values(images, dtype), state

    def to_device(self, batch: Experience, device: torch.device) -> dict[str, Any]:
        """A batch of decisions as the keyword arguments that `forward` of all models here have in common."""
        ids, mask = self.prompt(batch.instructions, device)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "images": batch.images.to(device),
            "proprio": None if batch.proprio is None else batch.proprio.to(device),
            "action_tokens": None if batch.action_tokens is None else batch.action_tokens.to(device),
        }

    def encode_actions(self, actions: np.ndarray) -> np.ndarray:
        """Environment actions [..., A, D] -> columns 0..255 of the action vocabulary [..., T] int64."""
        return self.processor.action_tokenizer.ids_to_columns(self.processor.encode_actions(actions))

    @property
    def effective_tokens(self) -> Tensor:
        """[T] bool: tokens that can change the action.

        A dimension that never moved in the data set (its statistics have no range) decodes to the same value whatever
        its token is; sampling it is noise, and so would be its policy gradient.
        """
        every = np.arange(self.config.n_action_bins)[:, None].repeat(self.config.num_action_tokens, axis=1)
        actions = self.decode_actions(every).reshape(len(every), -1)
        return torch.from_numpy(np.ptp(actions, axis=0) > CONSTANT_ACTION_RANGE)

    @property
    def action_mask(self) -> list[bool]:
        """[D] whether a dimension of the actions is normalised by the data set's statistics."""
        statistics = self.processor.action_statistics
        return [bool(kept) for kept in statistics.get("mask", [True] * self.config.action_dim)]

    def decode_actions(self, columns: np.ndarray) -> np.ndarray:
        """Columns [..., T] -> environment actions [..., A, D] float32."""
        ids = self.processor.action_tokenizer.columns_to_ids(columns)
        return self.processor.decode_actions(ids).astype(np.float32)
