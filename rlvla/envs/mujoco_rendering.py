"""Off-screen images of a MuJoCo model, as cheap as the policy's eyes allow."""

from __future__ import annotations

import atexit
import importlib
import os
import weakref
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from functools import partial
from typing import Any

import mujoco
import numpy as np

from rlvla.utils.errors import ConfigError

RENDER_QUALITIES = ("fast", "full")
# robosuite puts collision geometry into group 0 and what is to be seen into group 1.
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
_MAX_GEOMS = 1000

# The context that is current in this process (one thread renders), so that one renderer never switches.
_current: weakref.ref[Renderer] | None = None


def gl_backend() -> str:
    """`egl` or `osmesa`: what MUJOCO_GL asks for, `egl` where it is unset."""
    backend = os.environ.setdefault("MUJOCO_GL", "egl").strip().lower()
    if backend not in ("egl", "osmesa"):
        raise ConfigError(f"MUJOCO_GL={backend!r} cannot render without a screen; set MUJOCO_GL to egl or osmesa")
    return backend


def make_gl_context(width: int, height: int) -> Any:
    """An off-screen GL context, made current.

    Raises:
        ConfigError: GL does not work here; the message names the packages to install.
    """
    backend = gl_backend()
    try:
        context = importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
        context.make_current()
    except Exception as error:  # PyOpenGL reports a missing driver as ImportError, AttributeError, GLError, ...
        remedy = (
            "install the Debian packages libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0, "
            "or install libosmesa6 and set MUJOCO_GL=osmesa"
            if backend == "egl"
            else "install the Debian package libosmesa6, or set MUJOCO_GL=egl"
        )
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"no working GL for rendering (MUJOCO_GL={backend}: {reason}); {remedy}") from error
    return context


def add_camera(xml: str, name: str, position: Sequence[float], target: Sequence[float], fovy: float) -> str:
    """The same MuJoCo model with a fixed camera that looks from `position` at `target` (metres, world frame).

    Args:
        xml: the model.
        name: of the new camera.
        position: [3] where it stands.
        target: [3] what is in the middle of its image; not straight above or below `position`.
        fovy: vertical field of view in degrees.
    """
    root = ET.fromstring(xml)
    forward = np.subtract(target, position)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    up = np.cross(right, forward)
    axes = np.concatenate([right / np.linalg.norm(right), up / np.linalg.norm(up)])
    worldbody = root.find("worldbody")
    assert worldbody is not None, "a MuJoCo model has a worldbody"
    numbers = {"pos": position, "xyaxes": axes, "fovy": [fovy]}
    texts = {key: " ".join(repr(float(value)) for value in values) for key, values in numbers.items()}
    ET.SubElement(worldbody, "camera", {"name": name, "mode": "fixed", **texts})
    return ET.tostring(root, encoding="unicode")


def simplify_visuals(model: mujoco.MjModel) -> None:
    """Turn off shadows, reflections and multisampling; physics is untouched. Call before a GL context exists."""
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0


def _close_if_alive(reference: weakref.ref[Renderer]) -> None:
    renderer = reference()
    if renderer is not None:
        renderer.close()


class Renderer:
    """Renders cameras of one model into square images.

    Args:
        model: the compiled model; its off-screen buffer is set to `image_size`.
        image_size: height and width in pixels.
        quality: "fast" (no shadows, reflections, multisampling) or "full".

    Raises:
        ConfigError: no working GL.
    """

    def __init__(self, model: mujoco.MjModel, image_size: int, quality: str):
        self._model, self._size = model, image_size
        model.vis.global_.offwidth = model.vis.global_.offheight = image_size
        if quality == "fast":
            simplify_visuals(model)
        self._gl: Any = make_gl_context(image_size, image_size)
        self._set_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
        self._option, self._perturb, self._camera = mujoco.MjvOption(), mujoco.MjvPerturb(), mujoco.MjvCamera()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[_VISUAL_GROUP] = 1
        self._option.geomgroup[_COLLISION_GROUP] = 0
        self._option.sitegroup[:] = 0
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        if quality == "fast":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._viewport = mujoco.MjrRect(0, 0, image_size, image_size)
        self._pixels = np.empty((image_size, image_size, 3), dtype=np.uint8)
        # Contexts that outlive the GL library's own exit handler print errors; handlers run last in, first out.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    def _set_current(self) -> None:
        global _current
        if _current is None or _current() is not self:
            self._gl.make_current()
            _current = weakref.ref(self)

    def render(self, data: mujoco.MjData, cameras: Sequence[int]) -> np.ndarray:
        """Images [N, H, W, 3] uint8, upright, of the cameras with these ids."""
        self._set_current()
        images = np.empty((len(cameras), self._size, self._size, 3), dtype=np.uint8)
        for image, camera in zip(images, cameras, strict=True):
            self._camera.fixedcamid = camera
            mujoco.mjv_updateScene(
                self._model, data, self._option, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
            mujoco.mjr_render(self._viewport, self._scene, self._context)
            mujoco.mjr_readPixels(self._pixels, None, self._viewport, self._context)
            image[:] = self._pixels[::-1]  # GL's first row is the lowest
        return images

    def close(self) -> None:
        """Free the GL context. Safe to call twice."""
        global _current
        if self._gl is None:
            return
        self._set_current()
        self._context.free()
        self._gl.free()
        self._gl, _current = None, None
        atexit.unregister(self._at_exit)
