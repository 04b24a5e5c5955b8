"""Random shifts of images, which keep critics and actors from overfitting (DrQ, Kostrikov et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def random_shift(images: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Images [B, N, H, W, C] shifted by whole pixels, each on its own; see `random_shifts` and `shifted`."""
    rows, cameras = images.shape[:2]
    return shifted(images, random_shifts(rows, cameras, pixels, generator))


def random_shifts(rows: int, cameras: int, pixels: int, generator: torch.Generator) -> Tensor:
    """[2, B, N] int64: shifts down and across, all of up to `pixels` in each direction equally likely."""
    return torch.randint(-pixels, pixels + 1, (2, rows, cameras), generator=generator)


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Images [B, N, H, W, C] shifted by [2, B, N] pixels; at the edges the outermost pixels are repeated."""
    flat, (height, width) = images.flatten(0, 1), images.shape[2:4]
    moves = shifts.flatten(1)[:, :, None].to(images.device)
    down = (torch.arange(height, device=images.device) + moves[0]).clamp(0, height - 1)
    across = (torch.arange(width, device=images.device) + moves[1]).clamp(0, width - 1)
    image = torch.arange(len(flat), device=images.device)[:, None, None]
    return flat[image, down[:, :, None], across[:, None, :]].view_as(images)
