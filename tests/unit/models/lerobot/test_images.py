"""Resizing with padding."""

from __future__ import annotations

import torch

from rlvla.models.lerobot.images import resize_with_padding, to_network_range


def test_the_image_goes_to_the_lower_right() -> None:
    image = to_network_range(torch.full((2, 20, 10, 3), 255, dtype=torch.uint8), 8)
    assert image.shape == (2, 3, 8, 8)
    assert (image[..., :4] == -1).all()
    assert (image[..., 4:] == 1).all()


def test_or_to_the_center() -> None:
    image = resize_with_padding(torch.ones(3, 4, 9), 6, 9, center=True)
    assert image[0, :, 0].tolist() == [0, 1, 1, 1, 1, 0]
    odd = resize_with_padding(torch.ones(3, 4, 9), 7, 9, center=True)
    assert odd[0, :, 0].tolist() == [0, 1, 1, 1, 1, 0, 0]


def test_the_right_size_is_left_alone() -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8, 3), dtype=torch.uint8)
    result = to_network_range(images, 8)
    assert torch.equal(result, images.movedim(-1, -3) / 255 * 2 - 1)


def test_leading_dimensions() -> None:
    images = torch.rand(2, 3, 3, 5, 7)
    assert torch.equal(resize_with_padding(images, 9, 9)[1, 2], resize_with_padding(images[1, 2], 9, 9))
