"""Resizing images as LeRobot's policies do: keep the aspect, pad to a square."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_with_padding(images: Tensor, height: int, width: int, *, center: bool = False, padding: float = 0) -> Tensor:
    """Resize (bilinear, no antialiasing) as far as the image fits, and pad the rest.

    Args:
        images: [..., 3, H, W] float.
        height: of the result.
        width: of the result.
        center: pad evenly; otherwise the image goes to the lower right corner, as in SmolVLA.
        padding: value of the rest.

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


def to_network_range(
    images: Tensor,
    height: int,
    width: int,
    *,
    center: bool = False,
    padding: float = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """uint8 [..., H, W, 3] of an environment -> [..., 3, height, width] in [-1, 1].

    Args:
        images: pixels.
        height: of the result.
        width: of the result.
        center: see `resize_with_padding`.
        padding: before the range is changed: 0 becomes -1.
        dtype: of the result.
    """
    pixels = images.movedim(-1, -3).to(dtype) / 255
    return resize_with_padding(pixels, height, width, center=center, padding=padding) * 2 - 1
