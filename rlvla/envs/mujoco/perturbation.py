"""Visual perturbations of MuJoCo models: cameras, lights, colors of static geometry, and visual distractors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mujoco
import numpy as np

from rlvla.envs.perturbations import Surface
from rlvla.utils.seeding import derive_rng

_FAR, _NEAR_HAND, _TURN = 0.10, 0.02, 10.0  # meters, meters for a camera on a moving body, degrees
_BRIGHTNESS, _TINT = 0.7, 0.3
# Distractors; lengths in meters.
_FREE = 0.08  # minimum distance from moving bodies and from each other
_TRIES = 50  # candidate positions per distractor
_CORNER = 0.04  # half side of the square of ground that must be level
_ACROSS = 5  # rays along a side of that square
_LEVEL = 0.002  # tolerance of its height
_OFF = 0.12  # maximum height difference from the surface
_ABOVE, _ROOM = 0.6, 0.07  # height of the ray origin, and minimum height of moving geometry above a distractor
_SHAPES = (mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_CYLINDER)
# Neither red nor green, which instructions use to name objects.
_COLORS = ((0.1, 0.2, 0.8), (0.9, 0.8, 0.1), (0.5, 0.1, 0.6), (0.1, 0.7, 0.8), (0.05, 0.05, 0.05), (0.85, 0.85, 0.85))
# The fields of a model that are changed.
_FIELDS = ("cam_pos", "cam_quat", "light_diffuse", "light_ambient", "geom_rgba")


class Perturbation:
    """Perturbs the appearance of a model, with a new draw for each initial state.

    Args:
        model: the compiled model.
        levels: kind -> level, see `rlvla.envs.perturbations`; non-visual kinds are left to the environment.
        cameras: ids of the cameras in use.
        surface: the surface for distractors.
        task: name of the task, part of the random seed.
    """

    def __init__(
        self, model: mujoco.MjModel, levels: Mapping[str, float], cameras: Sequence[int], surface: Surface, task: str
    ):
        self._model, self._levels, self._cameras, self._surface, self._task = model, levels, cameras, surface, task
        self._original = {name: getattr(model, name).copy() for name in _FIELDS}
        self._headlight = model.vis.headlight.diffuse.copy(), model.vis.headlight.ambient.copy()
        self._static = np.flatnonzero(model.body_weldid[model.geom_bodyid] == 0)
        self._objects: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []

    def begin(self, data: mujoco.MjData, init_state_id: int) -> None:
        """Sample for an initial state; its objects must be placed."""
        for name, values in self._original.items():
            getattr(self._model, name)[:] = values
        self._model.vis.headlight.diffuse[:], self._model.vis.headlight.ambient[:] = self._headlight
        self._objects = []

        def rng(kind: str, *of: str) -> np.random.Generator:
            return derive_rng(f"perturbation {kind}", self._task, init_state_id, *of)

        for kind, level in self._levels.items():
            if kind == "camera":
                for camera in self._cameras:  # independent of the other cameras
                    self._move_camera(camera, level, rng(kind, self._model.camera(camera).name))
            elif kind == "light":
                self._change_lights(level, rng(kind))
            elif kind == "texture":
                self._color(level, rng(kind))
            elif kind == "distractor":
                self._place(round(level), rng(kind), data)
        mujoco.mj_camlight(self._model, data)

    def decorate(self, scene: mujoco.MjvScene) -> None:
        """Add the distractors to a scene."""
        for shape, size, position, color in self._objects:
            if scene.ngeom < scene.maxgeom:
                mujoco.mjv_initGeom(scene.geoms[scene.ngeom], shape, size, position, np.eye(3).ravel(), color)
                scene.ngeom += 1

    def _move_camera(self, camera: int, level: float, rng: np.random.Generator) -> None:
        moves = self._model.body_weldid[self._model.cam_bodyid[camera]] != 0
        step, axis = rng.standard_normal((2, 3))
        length, angle = rng.random(2)
        distance = level * (_NEAR_HAND if moves else _FAR) * length
        self._model.cam_pos[camera] += distance * step / np.linalg.norm(step)
        turn, turned = np.empty(4), np.empty(4)
        mujoco.mju_axisAngle2Quat(turn, axis / np.linalg.norm(axis), np.radians(level * _TURN * angle))
        mujoco.mju_mulQuat(turned, self._model.cam_quat[camera], turn)
        self._model.cam_quat[camera] = turned

    def _change_lights(self, level: float, rng: np.random.Generator) -> None:
        brightness = 1.0 + level * _BRIGHTNESS * rng.uniform(-1.0, 1.0)
        factor = brightness * (1.0 + level * _TINT * rng.uniform(-1.0, 1.0, 3))
        lights = [self._model.light_diffuse, self._model.light_ambient]
        for values in [*lights, self._model.vis.headlight.diffuse, self._model.vis.headlight.ambient]:
            values[:] = np.clip(values * factor, 0.0, 1.0)

    def _color(self, level: float, rng: np.random.Generator) -> None:
        """Mix a random color into each static material, or each geom without a material."""
        model, of_material = self._model, dict[int, np.ndarray]()
        for geom in self._static:
            material = int(model.geom_matid[geom])
            own = model.geom_rgba[geom].copy()
            if material >= 0 and (own == 0.5 + 0.5 * (np.arange(4) == 3)).all():  # MuJoCo takes the material's
                own = model.mat_rgba[material].copy()
            color = of_material.setdefault(material, rng.random(3)) if material >= 0 else rng.random(3)
            model.geom_rgba[geom] = [*((1.0 - level) * own[:3] + level * color), own[3]]

    def _place(self, count: int, rng: np.random.Generator, data: mujoco.MjData) -> None:
        low, high = np.array(self._surface.low), np.array(self._surface.high)
        taken = [position[:2] for position in data.xpos[1:][self._model.body_weldid[1:] != 0]]
        for _ in range(count):
            shape, (width, depth, height) = _SHAPES[int(rng.integers(len(_SHAPES)))], rng.uniform(0.015, 0.03, 3)
            spots = rng.uniform(low, high, (_TRIES, 2))
            color = np.array([*_COLORS[int(rng.integers(len(_COLORS)))], 1.0], dtype=np.float32)
            place = self._free_place(data, spots, taken)
            if place is None:
                continue
            taken.append(place[:2])
            size = [width, depth, height]
            if shape == mujoco.mjtGeom.mjGEOM_SPHERE:
                height = width
            elif shape == mujoco.mjtGeom.mjGEOM_CYLINDER:
                size = [width, height, 0.0]
            self._objects.append((int(shape), np.array(size), place + [0.0, 0.0, height], color))

    def _free_place(self, data: mujoco.MjData, spots: np.ndarray, taken: Sequence[np.ndarray]) -> np.ndarray | None:
        """The first free spot of [n, 2], with the height of its ground, [3]; None if there is none."""
        for spot in spots:
            if all(np.linalg.norm(spot - other) > _FREE for other in taken):
                ground = self._ground(data, spot)
                if ground is not None:
                    return np.array([*spot, ground])
        return None

    def _ground(self, data: mujoco.MjData, spot: np.ndarray) -> float | None:
        """Height of the ground below a distractor; None if it is not level or is occupied."""
        along = np.linspace(-_CORNER, _CORNER, _ACROSS)
        heights = [self._look_down(data, spot + [x, y]) for x in along for y in along]
        ground = [height for height in heights if height is not None]
        if len(ground) < len(heights) or max(ground) - min(ground) > _LEVEL:
            return None
        off = ground[0] - self._surface.height
        return self._surface.height if abs(off) < _LEVEL else ground[0] if abs(off) < _OFF else None

    def _look_down(self, data: mujoco.MjData, at: np.ndarray) -> float | None:
        """Height of static geometry under a point; None if moving geometry is on or closely above it."""
        hit, down = np.zeros(1, dtype=np.int32), np.array([0.0, 0.0, -1.0])
        height = self._surface.height + _ABOVE
        while True:
            distance = mujoco.mj_ray(self._model, data, np.array([*at, height]), down, None, 1, -1, hit)
            if hit[0] < 0:
                return None
            height -= distance
            if self._model.body_weldid[self._model.geom_bodyid[hit[0]]] == 0:
                return height
            if height < self._surface.height + _ROOM:
                return None
            height -= 1e-6  # below the surface that was hit
