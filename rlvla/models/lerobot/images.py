"""Resizing of images with padding, as in LeRobot's policies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_with_padding(images: Tensor, height: int, width: int, *, center: bool = False, padding: float = 0) -> Tensor:
    """Resize (bilinear, no antialiasing) with the aspect ratio kept, and pad.

    Args:
        images: [..., 3, H, W] float.
        height: of the result.
        width: of the result.
        center: pad evenly; otherwise on top and left alone, as in SmolVLA.
        padding: value.

    Returns:
        [..., 3, height, width].
    """
    rows, columns = images.shape[-2:]
    if (rows, columns) == (height, width):
        return images
    ratio = max(columns / width, rows / height)
    inner = (max(1, int(rows / ratio)), max(1, int(columns / ratio)))
    flat = images.reshape(-1, *images.shape[-3:])
    if inner != (rows, columns):
        flat = F.interpolate(flat, size=inner, mode="bilinear", align_corners=False)
    top, left = height - inner[0], width - inner[1]
    if center:  # the smaller half of an odd margin comes first
        top, left = top // 2, left // 2
    flat = F.pad(flat, (left, width - inner[1] - left, top, height - inner[0] - top), value=padding)
    return flat.reshape(*images.shape[:-2], height, width)


def to_network_range(images: Tensor, size: int, *, center: bool = False, padding: float = 0) -> Tensor:
    """Camera images [..., H, W, 3] uint8 -> [..., 3, size, size] float32 in [-1, 1].

    Args:
        images: pixels.
        size: side of the result.
        center: see `resize_with_padding`.
        padding: value in [0, 1] before the mapping to [-1, 1].
    """
    pixels = images.movedim(-1, -3).to(torch.float32) / 255
    return resize_with_padding(pixels, size, size, center=center, padding=padding) * 2 - 1
