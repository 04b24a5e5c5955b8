"""Geometry and articulations of a LIBERO scene, as the privileged state that scripted experts read."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

PITCH = 0.006  # meters between points on a collision surface
_MOST_POINTS = 60  # per edge of a geom


class SceneGeometry:
    """Rigid bodies, joints and regions of a scene.

    Points lie on the surfaces of collision geoms, in the frame of the body that carries them; they are constant, and
    the same arrays in every state.

    Args:
        sim: `RobosuiteSim` of a LIBERO task.
    """

    def __init__(self, sim: Any):
        model, env = sim.model, sim.env
        self._model, self._data, self._env = model, sim.data, env
        self._bodies: dict[str, int] = {}  # rigid bodies: objects, fixtures and their moving parts
        self._joints: dict[str, int] = {}
        self._sites: dict[str, int] = {}
        self._constant: dict[str, np.ndarray] = {}
        self._switches: list[str] = []
        for name, body in env.obj_body_id.items():
            self._add_body(name, body)
            self._constant[f"{name}_com"] = model.body_ipos[body].copy()
        for name, region in env.object_sites_dict.items():
            site = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, name)
            if site < 0 or region.size is None:
                continue
            self._sites[name] = site
            self._constant[f"{name}_size"] = np.array(region.size, dtype=np.float64)
            self._add_joints(name, getattr(region, "joints", None) or ())
        for name, fixture in env.fixtures_dict.items():
            taken = set(self._joints.values())
            self._add_joints(name, [joint for joint in fixture.joints if model.joint(joint).id not in taken])

        for array in self._constant.values():
            array.flags.writeable = False

    def read(self) -> dict[str, np.ndarray]:
        """The current state; for its keys see `LiberoEnv`."""
        data = self._data
        state = dict(self._constant)
        for name, body in self._bodies.items():
            state[f"{name}_pos"], state[f"{name}_quat"] = data.xpos[body].copy(), data.xquat[body].copy()
        for name, site in self._sites.items():
            state[f"{name}_pos"], state[f"{name}_quat"] = data.site_xpos[site].copy(), quat_of(data.site_xmat[site])
        for name, joint in self._joints.items():
            state[f"{name}_joint"] = np.array(data.qpos[self._model.jnt_qposadr[joint]])
            state[f"{name}_axis"], state[f"{name}_anchor"] = data.xaxis[joint].copy(), data.xanchor[joint].copy()
            switch = self._env.object_states_dict[name]
            for key in ("is_open", "is_close"):
                state[f"{name}_{key}"] = np.array(_holds(switch, key))
        return state

    def _add_body(self, name: str, root: int) -> None:
        self._bodies[name] = root
        self._constant[f"{name}_points"] = self._points(root)

    def _add_joints(self, name: str, joints: Any) -> None:
        """Take the first joint, which moves the part that predicates about `name` speak of."""
        for joint in list(joints)[:1]:
            index = self._model.joint(joint).id
            if self._model.jnt_type[index] == mujoco.mjtJoint.mjJNT_FREE:
                continue
            self._joints[name] = index
            self._constant[f"{name}_range"] = self._model.jnt_range[index].copy()
            slides = self._model.jnt_type[index] == mujoco.mjtJoint.mjJNT_SLIDE
            self._constant[f"{name}_slides"] = np.array(slides)
            self._add_body(f"{name}_part", int(self._model.jnt_bodyid[index]))

    def _points(self, root: int) -> np.ndarray:
        """Surface points [N, 3] of a body and those fixed to it, in its frame."""
        model = self._model
        # Positions relative to the root in the model's reference configuration, in which no other joint lies between.
        poses = {root: (np.zeros(3), np.eye(3))}
        for body in range(root + 1, model.nbody):
            parent = model.body_parentid[body]
            if parent in poses and model.body_jntnum[body] == 0:
                position, mat = poses[parent]
                poses[body] = (position + mat @ model.body_pos[body], mat @ _matrix(model.body_quat[body]))
        points = [np.zeros((0, 3))]
        for geom in range(model.ngeom):
            body = model.geom_bodyid[geom]
            if body in poses and (model.geom_contype[geom] or model.geom_conaffinity[geom]):
                position, mat = poses[body]
                local = _surface(model, geom) @ _matrix(model.geom_quat[geom]).T + model.geom_pos[geom]
                points.append(local @ mat.T + position)
        together = np.concatenate(points)
        _, first = np.unique(np.round(together / (0.7 * PITCH)), axis=0, return_index=True)
        return together[np.sort(first)]


def _holds(state: Any, predicate: str) -> bool:
    """LIBERO's `is_open` or `is_close`, which not every fixture implements."""
    try:
        return bool(getattr(state, predicate)())
    except (NotImplementedError, AttributeError):
        return False


def quat_of(mat: np.ndarray) -> np.ndarray:
    """Quaternion [4] (w first) of a rotation matrix."""
    out = np.empty(4)
    mujoco.mju_mat2Quat(out, mat.ravel())
    return out


def _matrix(quat: np.ndarray) -> np.ndarray:
    out = np.empty(9)
    mujoco.mju_quat2Mat(out, quat)
    return out.reshape(3, 3)


def _surface(model: mujoco.MjModel, geom: int) -> np.ndarray:
    """Points [N, 3] on a geom's surface in its frame; the vertices of a mesh."""
    kind, size = model.geom_type[geom], model.geom_size[geom]
    shapes = mujoco.mjtGeom
    if kind == shapes.mjGEOM_MESH:
        mesh = model.geom_dataid[geom]
        start = model.mesh_vertadr[mesh]
        return model.mesh_vert[start : start + model.mesh_vertnum[mesh]].astype(np.float64)
    halves = {
        shapes.mjGEOM_BOX: size,
        shapes.mjGEOM_SPHERE: np.full(3, size[0]),
        shapes.mjGEOM_CYLINDER: np.array([size[0], size[0], size[1]]),
        shapes.mjGEOM_CAPSULE: np.array([size[0], size[0], size[0] + size[1]]),
    }
    if kind not in halves:
        return np.zeros((0, 3))
    half = halves[kind]
    axes = [np.linspace(-h, h, min(_MOST_POINTS, max(2, int(2 * h / PITCH) + 2))) for h in half]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
    grid = grid[(np.abs(np.abs(grid) - half) < 1e-9).any(axis=1)]
    if kind != shapes.mjGEOM_BOX:
        grid = grid[np.hypot(grid[:, 0], grid[:, 1]) <= 1.02 * size[0]]
    return grid
