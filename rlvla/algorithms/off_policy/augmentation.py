"""Random shifts of images, which keep critics and actors from overfitting (DrQ, Kostrikov et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def random_shift(images: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Images shifted by whole pixels, each on its own; at the edges the outermost pixels are repeated.

    Args:
        images: [B, N, H, W, C].
        pixels: the largest shift in each direction; all up to it are equally likely.
        generator: on the CPU.
    """
    flat, (height, width) = images.flatten(0, 1), images.shape[2:4]
    shifts = torch.randint(-pixels, pixels + 1, (2, len(flat), 1), generator=generator).to(images.device)
    down = (torch.arange(height, device=images.device) + shifts[0]).clamp(0, height - 1)
    across = (torch.arange(width, device=images.device) + shifts[1]).clamp(0, width - 1)
    image = torch.arange(len(flat), device=images.device)[:, None, None]
    return flat[image, down[:, :, None], across[:, None, :]].view_as(images)
