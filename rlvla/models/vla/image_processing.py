"""Camera images to model input: LIBERO's training-time preprocessing, center crop, normalization for both towers."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from rlvla.models.vla.configuration_openvla import OpenVLAConfig

DINO_MEAN, DINO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIGLIP_MEAN, SIGLIP_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
JPEG_QUALITY = 95
JPEG_SUBSAMPLING_420 = 2
LANCZOS_RADIUS = 3.0
ArrayOrTensor = TypeVar("ArrayOrTensor", np.ndarray, Tensor)


def to_pixel_values(images: np.ndarray | Tensor, config: OpenVLAConfig) -> Tensor:
    """Normalized model input from camera images, on the device of the images.

    Args:
        images: uint8 [..., N, H, W, 3], cameras ordered full, wrist(s); H and W must equal the model's image size.
        config: configuration of the model; sets image size and number of images.

    Returns:
        float32 [..., 6N, H, W]; per image three channels normalized for DINOv2, then three for SigLIP.

    Raises:
        ValueError: the images have the wrong dtype, size or number.
    """
    images = torch.as_tensor(images)
    size = config.image_size
    if images.dtype != torch.uint8 or images.ndim < 4 or tuple(images.shape[-3:]) != (size, size, 3):
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}; this model takes uint8 [..., N, {size}, {size}, 3]"
        )
    if config.num_images_in_input not in (None, images.shape[-4]):
        raise ValueError(f"{images.shape[-4]} images per decision, but the model takes {config.num_images_in_input}")
    scale, shift = _normalization(images.device)
    # [..., N, 1, 3, H, W] against [2, 3, 1, 1]: both normalizations in one pass.
    pixels = images.movedim(-1, -3).unsqueeze(-4).to(torch.float32)
    normalized = torch.addcmul(shift, pixels, scale)
    return normalized.reshape(*images.shape[:-4], 6 * images.shape[-4], size, size)


@lru_cache(maxsize=8)
def _normalization(device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        mean = torch.tensor([DINO_MEAN, SIGLIP_MEAN], dtype=torch.float64)
        std = torch.tensor([DINO_STD, SIGLIP_STD], dtype=torch.float64)
        scale, shift = 1.0 / (255.0 * std), -mean / std
        scale, shift = (t.to(device=device, dtype=torch.float32)[..., None, None] for t in (scale, shift))
        return scale, shift


def center_crop(image_uint8: ArrayOrTensor, scale: float = 0.9, size: int = 224) -> ArrayOrTensor:
    """Crop the center to `scale` times the area and resize it bilinearly with corner-aligned sampling.

    Matches TensorFlow's `crop_and_resize` on [0, 1] floats and its saturating conversion to uint8, trunc(x * 255.5).

    Args:
        image_uint8: uint8 [..., H, W, 3], array or tensor.
        scale: fraction of the area to keep.
        size: side of the result in pixels.

    Returns:
        uint8 [..., size, size, 3], an array or tensor like the input.
    """
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"scale is {scale}; it must be in (0, 1]")
    images = torch.as_tensor(image_uint8)
    if images.dtype != torch.uint8:
        raise ValueError(f"image is {images.dtype}; uint8 is needed")
    side = np.sqrt(np.float32(scale))
    low_y, high_y, weight_y = _crop_samples(images.shape[-3], side, size, images.device)
    low_x, high_x, weight_x = _crop_samples(images.shape[-2], side, size, images.device)
    pixels = images.to(torch.float32) * (1.0 / 255.0)
    weight_x, weight_y = weight_x[:, None], weight_y[:, None, None]
    rows_low, rows_high = pixels.index_select(-3, low_y), pixels.index_select(-3, high_y)
    top_left, bottom_left = rows_low.index_select(-2, low_x), rows_high.index_select(-2, low_x)
    top = top_left + (rows_low.index_select(-2, high_x) - top_left) * weight_x
    bottom = bottom_left + (rows_high.index_select(-2, high_x) - bottom_left) * weight_x
    blended = (top + (bottom - top) * weight_y).clamp(0.0, 1.0)
    cropped = (blended * 255.5).clamp(max=255.0).to(torch.uint8)
    return cropped if isinstance(image_uint8, Tensor) else cropped.numpy()


def _crop_samples(length: int, side: np.float32, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lower and upper source index and weight of the upper one, for `size` samples along one axis.

    In float32 as in TensorFlow: in float64 some samples fall on the other side of a pixel center.
    """
    offset = (np.float32(1) - side) / np.float32(2)
    end = offset + side
    step = (end - offset) * np.float32(length - 1) / np.float32(max(size - 1, 1))
    position = offset * np.float32(length - 1) + np.arange(size, dtype=np.float32) * step
    position = np.clip(position, 0.0, length - 1)
    low, high = np.floor(position), np.ceil(position)
    lower, upper = (torch.as_tensor(x.astype(np.int64), device=device) for x in (low, high))
    return lower, upper, torch.as_tensor((position - low).astype(np.float32), device=device)


def libero_image(image_uint8: np.ndarray, size: int = 224) -> np.ndarray:
    """Process a LIBERO camera image as in the training data: 180-degree rotation, JPEG, Lanczos resize to `size`.

    Apply it before the center crop.

    Args:
        image_uint8: uint8 [H, W, 3], 256 x 256 in LIBERO.
        size: side of the result in pixels.

    Returns:
        uint8 [size, size, 3].
    """
    image_uint8 = np.asarray(image_uint8)
    if image_uint8.dtype != np.uint8 or image_uint8.ndim != 3 or image_uint8.shape[-1] != 3:
        raise ValueError(f"image is {image_uint8.dtype} {list(image_uint8.shape)}; uint8 [H, W, 3] is needed")
    return lanczos_resize(jpeg_round_trip(np.ascontiguousarray(image_uint8[::-1, ::-1])), size)


def jpeg_round_trip(image_uint8: np.ndarray) -> np.ndarray:
    """The image after JPEG encoding (quality 95, 4:2:0) and decoding, uint8 [H, W, 3]."""
    buffer = io.BytesIO()
    Image.fromarray(image_uint8).save(buffer, format="JPEG", quality=JPEG_QUALITY, subsampling=JPEG_SUBSAMPLING_420)
    return np.asarray(Image.open(buffer))


def lanczos_resize(image_uint8: np.ndarray, size: int) -> np.ndarray:
    """Lanczos-3 resize with antialiasing to [size, size, 3], computed in float32 and rounded once."""
    rows = _lanczos_matrix(image_uint8.shape[0], size)
    columns = _lanczos_matrix(image_uint8.shape[1], size)
    resized = np.einsum("yh,hwc->ywc", rows, image_uint8.astype(np.float32), optimize=True)
    resized = np.einsum("xw,ywc->yxc", columns, resized, optimize=True)
    return np.clip(np.rint(resized), 0, 255).astype(np.uint8)


@lru_cache(maxsize=16)
def _lanczos_matrix(length: int, size: int) -> np.ndarray:
    """Interpolation weights [size, length] with half-pixel centers; the kernel widens when downscaling."""
    ratio = length / size
    width = max(ratio, 1.0)
    centers = (np.arange(size) + 0.5) * ratio
    distance = (np.arange(length)[None, :] + 0.5 - centers[:, None]) / width
    weights = np.where(np.abs(distance) < LANCZOS_RADIUS, np.sinc(distance) * np.sinc(distance / LANCZOS_RADIUS), 0.0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
