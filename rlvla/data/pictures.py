"""What is wrong with the pictures of demonstrations: nothing to see, no motion, upside down, colours swapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_BLANK = 4  # gray levels between the darkest and the brightest value of a picture that shows nothing
_SIDE = 16  # pixels; pictures are compared at about this size
_FEW = 64  # episodes looked at in the quick check
_LOOKS = 4  # pictures of an episode in the quick check
_ROUNDS = 3
_POWERS, _SHIFT = 50, 0.1
_SURE = 0.5  # of the mean support; a picture with less looks much the same both ways
_SPREADS = 3.0  # standard deviations between the groups' means and their middle
_FEW_PICTURES, _ALIKE_OF_FEW = 8, 0.5  # so few pictures have no spread; they must be this much alike, of 1
_VISIBLE = 2.0  # gray levels
_BETTER = 0.9  # variance that is left by a turn, against that left by a simpler one
_PART = 0.15  # of the picture; objects that are here or there, or red or blue, cover less
# How pictures can differ from others of the same scene -> what undoes it, on [..., H, W, 3].
TURNS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "upside down": lambda images: images[..., ::-1, :, :],
    "turned by 180 degrees": lambda images: images[..., ::-1, ::-1, :],
    "with red and blue swapped": lambda images: images[..., ::-1],
}


@dataclass
class PictureFindings:
    """Episodes whose pictures look wrong.

    Attributes:
        looked_at: the episodes that were looked at.
        blank: camera -> episodes in which a picture has a single colour.
        frozen: camera -> episodes in which all pictures are the same.
        turned: how (`TURNS`) -> episodes that differ from the others in this way.
        same_start: whether all episodes start from the same pictures.
    """

    looked_at: list[int]
    blank: dict[str, list[int]] = field(default_factory=dict)
    frozen: dict[str, list[int]] = field(default_factory=dict)
    turned: dict[str, list[int]] = field(default_factory=dict)
    same_start: bool = False


def look_at(images: Sequence[np.ndarray], cameras: Sequence[str], *, every: bool = True) -> PictureFindings:
    """Look at the pictures of all episodes, or at some pictures of some episodes.

    Args:
        images: per episode [S, N, H, W, 3] uint8.
        cameras: the N names.
        every: look at all pictures; otherwise at a few of some episodes, in a fraction of a second.
    """
    chosen = np.arange(len(images))
    if not every and len(images) > _FEW:
        chosen = np.linspace(0, len(images) - 1, _FEW).astype(int)
    seen = PictureFindings(chosen.tolist())
    for index, camera in enumerate(cameras):
        own = [images[i][:, index] for i in chosen]
        few = [pictures if every else pictures[_some(len(pictures))] for pictures in own]
        seen.blank[camera] = [i for i, pictures in zip(seen.looked_at, few) if _any_blank(pictures)]
        seen.frozen[camera] = [
            i for i, pictures in zip(seen.looked_at, few) if len(pictures) > 2 and (pictures == pictures[:1]).all()
        ]
        for how, rows in turned(np.stack([small(pictures[0]) for pictures in own])).items():
            seen.turned.setdefault(how, []).extend(seen.looked_at[row] for row in rows)
    seen.turned = {how: sorted(set(episodes)) for how, episodes in seen.turned.items()}
    starts = [images[i][0] for i in chosen]
    seen.same_start = len(starts) > 1 and all(np.array_equal(start, starts[0]) for start in starts[1:])
    return seen


def _some(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, _LOOKS).astype(int))


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
    """The mean of the first pictures of one camera in all episodes, reduced; what files are compared by."""
    return np.mean([small(episode[0, camera]) for episode in images], axis=0)


def turned(pictures: np.ndarray) -> dict[str, list[int]]:
    """Which pictures [G, h, w, 3] are turned against the majority: how (`TURNS`) -> their rows; at most one entry.

    What a turn changes about each picture is compared with that of the others. If the pictures fall into two groups
    with opposite signs, far apart for their spread and in a good part of the picture, the smaller group is turned.
    Scenes that look much the same both ways, or differ in where or which an object is, have no such groups.
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
    """[G] of 1 and -1, the latter for rows of the changes [G, C] with the opposite sign; 1 if in doubt."""
    count = len(changes)
    signs, weights = np.ones(count), np.ones(changes.shape[1])
    for _ in range(_ROUNDS):
        alike = (changes * weights) @ changes.T
        own = np.diag(alike).mean()
        np.fill_diagonal(alike, 0.0)
        signs = np.where(_main_direction(alike) >= 0, 1.0, -1.0)
        aligned = changes * signs[:, None]
        if count >= _FEW_PICTURES:  # what varies from scene to scene counts less
            weights = 1 / (aligned.var(0) + aligned.var() + 1e-6)
    support = signs * (alike @ signs) / (count - 1)  # of each sign by the other rows
    if count < _FEW_PICTURES:
        certain = support.mean() > _ALIKE_OF_FEW * own
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
