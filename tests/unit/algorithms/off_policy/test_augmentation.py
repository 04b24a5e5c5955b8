"""Random shifts of images against numpy's padding."""

import numpy as np
import torch

from rlvla.algorithms.off_policy import random_shift


def test_each_image_is_a_window_of_itself_with_repeated_edges() -> None:
    images = torch.randint(0, 256, (40, 2, 6, 5, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    shifted = random_shift(images, 2, torch.Generator().manual_seed(1))
    assert shifted.dtype == torch.uint8 and shifted.shape == images.shape
    found = set()
    for before, after in zip(images.flatten(0, 1).numpy(), shifted.flatten(0, 1).numpy()):
        padded = np.pad(before, ((2, 2), (2, 2), (0, 0)), mode="edge")
        windows = {(y, x): padded[y : y + 6, x : x + 5] for y in range(5) for x in range(5)}
        (at,) = [place for place, window in windows.items() if np.array_equal(window, after)]
        found.add(at)
    assert len(found) > 20, "of the 25 shifts that there are"


def test_the_generator_decides() -> None:
    images = torch.arange(4 * 8 * 8 * 3).view(4, 1, 8, 8, 3)
    first, again = (random_shift(images, 3, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again) and not torch.equal(first, images)
    assert not torch.equal(first, random_shift(images, 3, torch.Generator().manual_seed(6)))
    assert torch.equal(random_shift(images, 0, torch.Generator()), images)
