"""Off-screen rendering of MuJoCo models at low cost."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import mujoco
import numpy as np

from rlvla.envs.mujoco.gl import make_current, make_gl_context
from rlvla.envs.mujoco.light_meshes import lightly_drawn

_VISUAL_GROUP = 1  # of robosuite, whose collision geometry is in group 0
_OUT_OF_VIEW_GROUP = 5  # MuJoCo's last group, never drawn here
_MAX_GEOMS = 1000


def simplify_visuals(model: mujoco.MjModel) -> None:
    """Turn off shadows, reflections and multisampling; physics is unaffected. Call before creating a GL context."""
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0


def in_view(model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> np.ndarray:
    """Mask [ngeom] bool of the geoms that may be visible in a camera's square image.

    A geom is culled if its bounding sphere lies entirely outside one of the four side planes of the view frustum.
    """
    offsets = (data.geom_xpos - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)  # right, up, backwards
    half = np.radians(model.cam_fovy[camera]) / 2
    beyond = np.abs(offsets[:, :2]) * np.cos(half) + offsets[:, 2:] * np.sin(half)  # meters outside each pair of planes
    # An infinite geom (a plane) has radius 0.
    return (beyond.max(axis=1) <= model.geom_rbound) | (model.geom_rbound == 0)


def _close_if_alive(reference: weakref.ref[Renderer]) -> None:
    renderer = reference()
    if renderer is not None:
        renderer.close()


class Renderer:
    """Renders square images from the cameras of a model.

    Args:
        model: the compiled model; its off-screen buffer is set to `image_size`.
        image_size: height and width in pixels.
        quality: "fast" (no shadows, reflections, multisampling) or "full".
        show_sites: whether to draw the sites of the groups that MuJoCo shows by default.
        groups: the geom groups to draw; by default robosuite's visual group.
        show_sky: whether "fast" draws skybox and haze.
        light_meshes: whether "fast" draws simplified meshes; the model keeps its own.

    Attributes:
        decorate: adds geoms to each scene before it is drawn.

    Raises:
        ConfigError: no working GL.
    """

    _gl: Any = None  # nothing to close before a context exists

    def __init__(
        self,
        model: mujoco.MjModel,
        image_size: int,
        quality: str,
        *,
        show_sites: bool = False,
        groups: Sequence[int] = (_VISUAL_GROUP,),
        show_sky: bool = True,
        light_meshes: bool = False,
    ):
        self._model, self._size = model, image_size
        model.vis.global_.offwidth = model.vis.global_.offheight = image_size
        if quality == "fast":
            simplify_visuals(model)
        self._gl = make_gl_context(image_size, image_size)
        with lightly_drawn(model) if light_meshes and quality == "fast" else nullcontext():
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
        self._option, self._perturb, self._camera = mujoco.MjvOption(), mujoco.MjvPerturb(), mujoco.MjvCamera()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[list(groups)] = 1
        if not show_sites:
            self._option.sitegroup[:] = 0
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        if quality == "fast":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            if not show_sky:
                self._scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = 0
                self._scene.flags[mujoco.mjtRndFlag.mjRND_HAZE] = 0
        # Geoms out of view may still cast visible shadows or reflections.
        self._culls = quality == "fast"
        self._groups = model.geom_group.copy()
        self.decorate: Callable[[mujoco.MjvScene], None] | None = None
        self._viewport = mujoco.MjrRect(0, 0, image_size, image_size)
        self._pixels = np.empty((image_size, image_size, 3), dtype=np.uint8)
        # Contexts that outlive the GL library's exit handler print errors; handlers run in reverse order.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    def render(self, data: mujoco.MjData, cameras: Sequence[int]) -> np.ndarray:
        """Images [N, H, W, 3] uint8, upright, of the cameras with these ids."""
        make_current(self._gl)
        images = np.empty((len(cameras), self._size, self._size, 3), dtype=np.uint8)
        for image, camera in zip(images, cameras, strict=True):
            self._camera.fixedcamid = camera
            if self._culls:  # saves most of the time for a wrist camera, which does not see the robot's meshes
                self._model.geom_group[:] = np.where(
                    in_view(self._model, data, camera), self._groups, _OUT_OF_VIEW_GROUP
                )
            mujoco.mjv_updateScene(
                self._model, data, self._option, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
            if self.decorate is not None:
                self.decorate(self._scene)
            mujoco.mjr_render(self._viewport, self._scene, self._context)
            mujoco.mjr_readPixels(self._pixels, None, self._viewport, self._context)
            image[:] = self._pixels[::-1]  # GL's first row is the lowest
        self._model.geom_group[:] = self._groups
        return images

    def close(self) -> None:
        """Free the GL context. Safe to call twice."""
        if self._gl is None:
            return
        make_current(self._gl)
        self._context.free()
        self._gl.free()
        self._gl = None
        atexit.unregister(self._at_exit)

    def __del__(self):
        self.close()
