"""Defects in the pictures of demonstrations: blank, frozen, upside down, colours swapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_BLANK = 4  # gray levels between the darkest and the brightest value of a blank picture
_SIDE = 16  # pixels; pictures are compared at about this size
_FEW = 64  # episodes inspected in the quick check
_SAMPLES = 4  # pictures of an episode in the quick check
_ROUNDS = 3
_POWERS, _SHIFT = 50, 0.1
_SURE = 0.5  # of the mean support; pictures with less look much the same both ways
_SPREADS = 3.0  # standard deviations between the groups' means and their middle
_FEW_PICTURES, _ALIKE_OF_FEW = 8, 0.5  # below this number there is no spread; minimum similarity, of 1
_VISIBLE = 2.0  # gray levels
_BETTER = 0.9  # residual variance of a turn relative to that of a simpler one
_PART = 0.15  # of the picture; objects in different places or colours cover less
# Orientation or channel order that differs from other pictures of the scene -> its inverse, on [..., H, W, 3].
TURNS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "upside down": lambda images: images[..., ::-1, :, :],
    "turned by 180 degrees": lambda images: images[..., ::-1, ::-1, :],
    "with red and blue swapped": lambda images: images[..., ::-1],
}


@dataclass
class PictureFindings:
    """Episodes with suspicious pictures.

    Attributes:
        inspected: the inspected episodes.
        blank: camera -> episodes with a picture of a single colour.
        frozen: camera -> episodes in which all pictures are the same.
        turned: orientation (`TURNS`) -> episodes that differ from the others in this way.
        same_start: whether all episodes start from the same pictures.
    """

    inspected: list[int]
    blank: dict[str, list[int]] = field(default_factory=dict)
    frozen: dict[str, list[int]] = field(default_factory=dict)
    turned: dict[str, list[int]] = field(default_factory=dict)
    same_start: bool = False


def inspect_pictures(images: Sequence[np.ndarray], cameras: Sequence[str], *, every: bool = True) -> PictureFindings:
    """Inspect the pictures of all episodes, or some pictures of some episodes.

    Args:
        images: per episode [S, N, H, W, 3] uint8.
        cameras: the N names.
        every: inspect all pictures; otherwise a few of some episodes, in a fraction of a second.
    """
    episodes = list(range(len(images)))
    if not every and len(images) > _FEW:
        episodes = np.linspace(0, len(images) - 1, _FEW).astype(int).tolist()
    findings = PictureFindings(episodes)
    turns: dict[str, set[int]] = {}
    for index, camera in enumerate(cameras):
        pictures = [images[i][:, index] for i in episodes]
        samples = pictures
        if not every:
            samples = [p[np.unique(np.linspace(0, len(p) - 1, _SAMPLES).astype(int))] for p in pictures]
        findings.blank[camera] = [i for i, p in zip(episodes, samples) if _any_blank(p)]
        findings.frozen[camera] = [i for i, p in zip(episodes, samples) if len(p) > 2 and (p == p[:1]).all()]
        for how, rows in turned(np.stack([small(p[0]) for p in pictures])).items():
            turns.setdefault(how, set()).update(episodes[row] for row in rows)
    findings.turned = {how: sorted(numbers) for how, numbers in turns.items()}
    starts = [images[i][0] for i in episodes]
    findings.same_start = len(starts) > 1 and all(np.array_equal(start, starts[0]) for start in starts[1:])
    return findings


def _any_blank(pictures: np.ndarray) -> bool:
    flat = pictures.reshape(len(pictures), -1)
    return bool(((flat.max(1).astype(int) - flat.min(1)) <= _BLANK).any())


def small(picture: np.ndarray) -> np.ndarray:
    """A picture [H, W, 3] reduced to about 16 pixels, float32."""
    step = max(1, picture.shape[0] // _SIDE)
    side = picture.shape[0] // step
    cut = picture[: side * step, : side * step].astype(np.float32)
    return cut.reshape(side, step, side, step, 3).mean((1, 3))


def mean_start(images: Sequence[np.ndarray], camera: int) -> np.ndarray:
    """The mean of the first pictures of one camera in all episodes, reduced, for the comparison of files."""
    return np.mean([small(episode[0, camera]) for episode in images], axis=0)


def turned(pictures: np.ndarray) -> dict[str, list[int]]:
    """Detect pictures [G, h, w, 3] turned against the majority: orientation (`TURNS`) -> rows; at most one entry.

    The change that a turn makes to each picture is compared with the changes to the others. If the pictures fall into
    two groups with opposite signs, far apart for their spread and in a good part of the picture, the smaller group is
    turned. Scenes that look much the same both ways, or differ in where or which an object is, have no such groups.
    """
    best: tuple[float, dict[str, list[int]]] = (np.inf, {})
    for how, turn in TURNS.items() if len(pictures) > 1 else ():
        other = turn(pictures)
        signs = _signs((pictures - other).reshape(len(pictures), -1) / 2)
        if (signs == signs[0]).all():
            continue
        aligned = np.where((signs > 0)[:, None, None, None], pictures, other)
        if aligned.var(0).mean() < _BETTER * best[0]:
            best = float(aligned.var(0).mean()), {how: np.flatnonzero(signs < 0).tolist()}
    return best[1]


def _signs(changes: np.ndarray) -> np.ndarray:
    """[G] of 1 and -1, the latter for rows of the changes [G, C] with the opposite sign; 1 in doubt."""
    count = len(changes)
    signs, weights = np.ones(count), np.ones(changes.shape[1])
    for _ in range(_ROUNDS):
        alike = (changes * weights) @ changes.T
        norm = np.diag(alike).mean()
        np.fill_diagonal(alike, 0.0)
        signs = np.where(_main_direction(alike) >= 0, 1.0, -1.0)
        aligned = changes * signs[:, None]
        if count >= _FEW_PICTURES:  # down-weight the parts that vary from scene to scene
            weights = 1 / (aligned.var(0) + aligned.var() + 1e-6)
    support = signs * (alike @ signs) / (count - 1)  # of each sign by the other rows
    if count < _FEW_PICTURES:
        certain = support.mean() > _ALIKE_OF_FEW * norm
    else:
        certain = support.mean() > _SPREADS * support.std()
    mean = np.abs(aligned.mean(0))
    everywhere = np.mean((mean > _VISIBLE) & (mean > aligned.std(0))) > _PART
    if not (certain and everywhere):
        return np.ones(count)
    majority = np.sign(signs.sum()) or signs[0]  # the first of two is right
    return np.where(support > _SURE * support.mean(), signs * majority, 1.0)


def _main_direction(matrix: np.ndarray) -> np.ndarray:
    """The eigenvector [G] of the largest eigenvalue of a symmetric matrix [G, G], approximately (power iteration)."""
    sizes = np.abs(matrix).sum(1)
    direction, shift = matrix[sizes.argmax()], _SHIFT * sizes.max()  # negative eigenvalues become smaller
    for _ in range(_POWERS):
        direction = matrix @ direction + shift * direction
        direction = direction / max(np.linalg.norm(direction), 1e-30)
    return direction
