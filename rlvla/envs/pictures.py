"""Fitting camera images to the square that a policy reads, in data sets and environments alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IMAGE_FITS = ("crop", "pad", "stretch")
NATIVE = "native"  # images as the camera gives them, for policies that pad them
IMAGE_FIT_HELP = (
    "how images that are not square become so: crop the center, pad with black, or stretch; the policy records it, and "
    "environments whose images have another shape do the same"
)


@dataclass(frozen=True)
class ImageFit:
    """Resizing of images to squares (bilinear with antialiasing); images of that size stay as they are.

    Attributes:
        size: side of the result in pixels.
        how: one of `IMAGE_FITS`: the largest centered square; all of the image, centered on black; or both sides
            scaled independently.
    """

    size: int
    how: str

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Images [..., H, W, 3] uint8 -> [..., size, size, 3] uint8."""
        height, width = images.shape[-3:-1]
        if height == width == self.size:
            return images
        from PIL import Image

        box, inner = (0.0, 0.0, float(width), float(height)), (self.size, self.size)
        if self.how == "crop":
            left, top, side = max(0, width - height) / 2, max(0, height - width) / 2, min(height, width)
            box = left, top, left + side, top + side
        elif self.how == "pad":
            longest = max(height, width)
            inner = max(1, round(self.size * width / longest)), max(1, round(self.size * height / longest))
        left, top = (self.size - inner[0]) // 2, (self.size - inner[1]) // 2
        fitted = np.zeros((*images.shape[:-3], self.size, self.size, 3), np.uint8)
        for index in np.ndindex(images.shape[:-3]):
            picture = Image.fromarray(np.ascontiguousarray(images[index]))
            pixels = np.asarray(picture.resize(inner, Image.Resampling.BILINEAR, box))
            fitted[index][top : top + inner[1], left : left + inner[0]] = pixels
        return fitted


def image_record(height: int, width: int, fit: ImageFit | None) -> dict[str, int | str | None]:
    """Settings of the environment that record the shape of the images."""
    if fit is not None:
        return {"image_size": fit.size, "image_fit": fit.how}
    return {"image_size": height} if height == width else {"image_size": None, "image_fit": NATIVE}


class FittedEnv:
    """An environment whose images are fitted to squares; the rest is that of the inner one.

    Args:
        env: an `Env` whose images may have any shape.
        fit: applied to observations and recorded frames.
    """

    def __init__(self, env, fit: ImageFit):
        self._env, self._fit = env, fit

    def __getattr__(self, name: str):
        return getattr(self._env, name)

    def reset(self, init_state_id: int, seed: int):
        """See `Env.reset`."""
        return self._fitted(self._env.reset(init_state_id, seed))

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False):
        """See `Env.step_chunk`."""
        result = self._env.step_chunk(actions, record_frames=record_frames)
        self._fitted(result.observation)
        if result.frames is not None:
            result.frames = self._fit(result.frames)
        return result

    def _fitted(self, observation):
        if isinstance(observation.images, np.ndarray) and observation.images.ndim == 4:  # else refused as an answer
            observation.images = self._fit(observation.images)
        return observation
