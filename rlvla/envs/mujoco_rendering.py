"""Off-screen images of a MuJoCo model, as cheap as the policy's eyes allow."""

from __future__ import annotations

import atexit
import weakref
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from functools import partial
from typing import Any

import mujoco
import numpy as np

from rlvla.envs.gl import make_current, make_gl_context

# robosuite puts collision geometry into group 0 and what is to be seen into group 1.
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
_OUT_OF_VIEW_GROUP = 5  # MuJoCo's last one, never drawn here
_MAX_GEOMS = 1000


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


def in_view(model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> np.ndarray:
    """Which geoms may be seen in a square image of a camera: mask [ngeom] bool.

    A geom is left out when its bounding sphere lies on the outer side of one of the four planes through the camera and
    the borders of its image.
    """
    offsets = (data.geom_xpos - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)  # right, up, backwards
    half = np.radians(model.cam_fovy[camera]) / 2
    beyond = np.abs(offsets[:, :2]) * np.cos(half) + offsets[:, 2:] * np.sin(half)  # metres outside of pairs of planes
    # The radius of a geom without end (a plane) is 0.
    return (beyond.max(axis=1) <= model.geom_rbound) | (model.geom_rbound == 0)


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
        show_sites: draw MuJoCo's sites of the groups that it shows by default.

    Raises:
        ConfigError: no working GL.
    """

    _gl: Any = None  # until a context exists, there is nothing to close

    def __init__(self, model: mujoco.MjModel, image_size: int, quality: str, *, show_sites: bool = False):
        self._model, self._size = model, image_size
        model.vis.global_.offwidth = model.vis.global_.offheight = image_size
        if quality == "fast":
            simplify_visuals(model)
        self._gl = make_gl_context(image_size, image_size)
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
        self._option, self._perturb, self._camera = mujoco.MjvOption(), mujoco.MjvPerturb(), mujoco.MjvCamera()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[_VISUAL_GROUP] = 1
        self._option.geomgroup[_COLLISION_GROUP] = 0
        if not show_sites:
            self._option.sitegroup[:] = 0
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        if quality == "fast":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        # A shadow or a reflection may be seen of what is itself out of view.
        self._culls = quality == "fast"
        self._groups = model.geom_group.copy()
        self._viewport = mujoco.MjrRect(0, 0, image_size, image_size)
        self._pixels = np.empty((image_size, image_size, 3), dtype=np.uint8)
        # Contexts that outlive the GL library's own exit handler print errors; handlers run last in, first out.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    def render(self, data: mujoco.MjData, cameras: Sequence[int]) -> np.ndarray:
        """Images [N, H, W, 3] uint8, upright, of the cameras with these ids."""
        make_current(self._gl)
        images = np.empty((len(cameras), self._size, self._size, 3), dtype=np.uint8)
        for image, camera in zip(images, cameras, strict=True):
            self._camera.fixedcamid = camera
            if self._culls:  # most of the time would go into the robot's meshes, which a wrist camera does not see
                self._model.geom_group[:] = np.where(
                    in_view(self._model, data, camera), self._groups, _OUT_OF_VIEW_GROUP
                )
            mujoco.mjv_updateScene(
                self._model, data, self._option, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
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
