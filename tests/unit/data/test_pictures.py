"""Pictures that are turned against the others are found; scenes that look alike both ways are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.data.pictures import TURNS, inspect_pictures, mean_start, small, turned


def scenes(count: int, seed: int = 0) -> np.ndarray:
    """Pictures [G, 16, 16, 3] of a lit corner and something that lies anywhere."""
    rng = np.random.default_rng(seed)
    pictures = np.full((count, 16, 16, 3), (60.0, 70.0, 90.0)) + rng.normal(0, 4, (count, 16, 16, 3))
    pictures[:, :5, :7] += (120, 90, 20)
    for picture in pictures:
        row, column = rng.integers(0, 13, 2)
        picture[row : row + 3, column : column + 3] = (200, 40, 40)
    return pictures.clip(0, 255)


@pytest.mark.parametrize("how", TURNS)
@pytest.mark.parametrize("every", [2, 3, 10])
def test_turned_pictures(how: str, every: int) -> None:
    pictures = scenes(30)
    rows = list(range(1, 30, every))
    pictures[rows] = TURNS[how](pictures[rows])
    assert turned(pictures) == {how: rows}


def test_a_picture_that_looks_much_the_same_both_ways_is_not_turned() -> None:
    """A wrist camera looks from elsewhere at every start; some see nothing that tells up from down."""
    pictures = scenes(60)
    for row, share in ((7, 0.1), (30, 0.2)):  # a little more like the others when upside down
        even = (pictures[row] + pictures[row, ::-1]) / 2
        pictures[row] = (1 - share) * even + share * pictures[row, ::-1]
    assert turned(pictures) == {}
    pictures[20] = pictures[20, ::-1]
    assert turned(pictures) == {"upside down": [20]}


@pytest.mark.parametrize("how", TURNS)
def test_the_second_of_two_files(how: str) -> None:
    first, second = scenes(200, seed=1).mean(0), scenes(200, seed=2).mean(0)
    assert turned(np.stack([first, second])) == {}
    assert turned(np.stack([first, TURNS[how](second)])) == {how: [1]}


def test_symmetric_scenes_are_not_turned() -> None:
    for seed in range(20):
        for count in (2, 5, 40):
            rng = np.random.default_rng(seed)
            assert turned(rng.uniform(0, 255, (count, 16, 16, 3))) == {}
    assert turned(scenes(40)) == {} and turned(scenes(1)) == {}
    above_or_below, red_or_blue = np.full((2, 40, 16, 16, 3), 90.0)
    above_or_below[::2, 2:6, 4:8] = above_or_below[1::2, 10:14, 4:8] = (200, 30, 30)
    red_or_blue[::2, 2:6, 4:8], red_or_blue[1::2, 2:6, 4:8] = (200, 30, 30), (30, 30, 200)
    assert turned(above_or_below) == turned(red_or_blue) == {}, "that is where or which the object is"
    assert turned(np.full((12, 16, 16, 3), 7.0)) == {}


def test_blank_and_frozen_pictures_by_camera() -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (6, 2, 16, 16, 3), dtype=np.uint8) for _ in range(100)]
    images[3][2, 1] = 17
    images[7][:, 0] = images[7][0, 0]
    findings = inspect_pictures(images, ["left", "right"])
    assert findings.blank == {"left": [], "right": [3]} and findings.frozen == {"left": [7], "right": []}
    quick = inspect_pictures(images, ["left", "right"], every=False)
    assert len(quick.inspected) < 100 and not quick.same_start


def test_pictures_are_compared_small() -> None:
    picture = np.arange(70 * 70 * 3, dtype=np.float32).reshape(70, 70, 3)
    assert small(picture).shape == (17, 17, 3) and small(picture[:8, :8]).shape == (8, 8, 3)
    episode = np.stack([np.stack([picture, picture + 2])])
    np.testing.assert_allclose(mean_start([episode, episode + 4], 1), small(picture + 4), rtol=1e-5)
