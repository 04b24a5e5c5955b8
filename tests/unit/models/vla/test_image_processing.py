from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.image_processing import (
    center_crop,
    jpeg_round_trip,
    lanczos_resize,
    libero_image,
    to_pixel_values,
)

DATA = Path(__file__).resolve().parents[3] / "data" / "simplevla"


@pytest.fixture(scope="module")
def config():
    tower = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return OpenVLAConfig(
        image_sizes=[16, 16], timm_model_ids=["a", "b"], timm_model_kwargs=[tower, tower], num_images_in_input=2
    )


def random_images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("name", ["a", "b", "rt"])
def test_center_crop_equals_tensorflow(name):
    table = np.load(DATA / "center_crop_tf.npz")
    cropped = center_crop(table[f"crop_in_{name}"])
    error = np.abs(cropped.astype(int) - table[f"crop_out_{name}"])
    assert error.max() <= 1 and (error > 0).mean() <= 2e-5


def test_center_crop_of_batches_and_tensors_is_the_same():
    images = random_images(2, 3, 40, 60, 3)
    cropped = center_crop(images, size=24)
    assert cropped.shape == (2, 3, 24, 24, 3)
    assert np.array_equal(cropped[1, 2], center_crop(images[1, 2], size=24))
    assert np.array_equal(center_crop(torch.from_numpy(images), size=24).numpy(), cropped)
    assert np.array_equal(center_crop(images[0, 0, :40, :40], scale=1.0, size=40), images[0, 0, :40, :40])
    with pytest.raises(ValueError, match="scale is 0"):
        center_crop(images, scale=0.0)
    with pytest.raises(ValueError, match="uint8"):
        center_crop(images.astype(np.float32))


def test_pixel_values_are_dino_then_siglip_per_image(config):
    images = random_images(2, 16, 16, 3)
    values = to_pixel_values(torch.from_numpy(images), config)
    assert values.shape == (12, 16, 16) and values.dtype == torch.float32
    unit = images.transpose(0, 3, 1, 2) / 255.0
    for i in (0, 1):
        dino = (unit[i] - np.array([0.485, 0.456, 0.406])[:, None, None]) / np.array([0.229, 0.224, 0.225])[
            :, None, None
        ]
        assert np.allclose(values[6 * i : 6 * i + 3], dino, atol=1e-5)
        assert np.allclose(values[6 * i + 3 : 6 * i + 6], (unit[i] - 0.5) / 0.5, atol=1e-5)


def test_pixel_values_of_batches_equal_single_calls(config):
    images = torch.from_numpy(random_images(4, 3, 2, 16, 16, 3))
    values = to_pixel_values(images, config)
    assert values.shape == (4, 3, 12, 16, 16)
    assert torch.equal(values[2, 1], to_pixel_values(images[2, 1], config))
    assert torch.equal(values, to_pixel_values(images.numpy(), config))


def test_pixel_values_made_in_inference_mode_first_can_be_trained_on(config):
    from rlvla.models.vla import image_processing

    image_processing._normalization.cache_clear()
    images = torch.from_numpy(random_images(2, 16, 16, 3))
    with torch.inference_mode():
        to_pixel_values(images, config)
    weight = torch.ones(1, requires_grad=True)
    (to_pixel_values(images, config) * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 16, 16, 3), np.float32), "float32"),
        (np.zeros((2, 20, 16, 3), np.uint8), r"\[2, 20, 16, 3\]"),
        (np.zeros((1, 16, 16, 3), np.uint8), "1 images per decision, but the model takes 2"),
    ],
)
def test_pixel_values_of_wrong_images_are_refused(config, images, message):
    with pytest.raises(ValueError, match=message):
        to_pixel_values(images, config)


def test_libero_image_rotates_compresses_and_shrinks():
    ramp = np.linspace(0, 255, 256)
    image = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], 128.0), -1).astype(np.uint8)
    result = libero_image(image)
    assert result.shape == (224, 224, 3) and result.dtype == np.uint8
    middle = (np.arange(224) + 0.5) * 256 / 224 - 0.5
    expected = 255 - middle[5:-5]
    assert np.abs(result[5:-5, 112, 0] - expected).max() <= 3, "rows are rotated"
    assert np.abs(result[112, 5:-5, 1] - expected).max() <= 3, "columns are rotated"
    assert not np.array_equal(result, lanczos_resize(image[::-1, ::-1], 224)), "JPEG leaves traces"


def test_jpeg_halves_the_chroma_only():
    image = np.zeros((32, 32, 3), np.uint8)
    image[:, ::2] = (255, 0, 0)
    image[:, 1::2] = (0, 0, 255)
    result = jpeg_round_trip(image)
    assert np.abs(result.astype(int) - image).max() > 50, "alternating colours do not survive 4:2:0"
    gray = np.repeat(random_images(32, 32, 1), 3, -1)
    assert np.abs(jpeg_round_trip(gray).astype(int) - gray).max() < 20
    buffer = io.BytesIO()
    Image.fromarray(gray).save(buffer, format="JPEG", quality=95)
    assert np.array_equal(jpeg_round_trip(gray), np.asarray(Image.open(buffer)))


@pytest.mark.parametrize(("length", "size"), [(256, 224), (64, 224), (48, 20)])
def test_lanczos_is_close_to_pillow(length, size):
    # Moderate contrast: Pillow clips overshoots between its two passes, here they are clipped once at the end.
    image = random_images(length, length, 3) // 2 + 64
    pillow = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS))
    error = np.abs(lanczos_resize(image, size).astype(int) - pillow)
    assert error.max() <= 2 and (error > 1).mean() < 1e-3
