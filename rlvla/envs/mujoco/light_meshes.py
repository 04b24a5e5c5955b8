"""Simplified copies of a model's visual meshes, created once and stored in the user's cache folder.

A software renderer spends most of its time on the robot's triangles (160,000 for a Panda and its mount), most of which
are smaller than a pixel. Only meshes without collisions and mass are replaced, so that physics stays bit-identical.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mujoco
import numpy as np

from rlvla.utils.errors import require
from rlvla.utils.files import cache_dir, write_atomic

KEPT_FRACTION = 1 / 6
MIN_FACES = 700  # smaller meshes are kept as they are; larger ones are not reduced below this
# Part of the cache key, so that files of another method are not reused.
_RECIPE = f"quadric-{KEPT_FRACTION:.4f}-{MIN_FACES}-1"


def lighten_visual_meshes(xml: str, folder: Path | None = None, below: Path | None = None) -> str:
    """Replace the purely visual meshes of a MuJoCo model by simplified ones.

    Args:
        xml: a model whose meshes have absolute file names.
        folder: folder for the simplified meshes; by default in `cache_dir()`, or a temporary folder if that is not
            writable.
        below: replace only files inside this folder (simplification loses textures).
    """
    root = ET.fromstring(xml)
    folder = folder or writable_folder(cache_dir() / "meshes")
    for mesh in visual_meshes(root):
        file = Path(mesh.get("file", ""))
        if below is None or file.is_relative_to(below):
            mesh.set("file", str(reduced_mesh(file, folder)))
    return ET.tostring(root, encoding="unicode")


def visual_meshes(root: ET.Element) -> list[ET.Element]:
    """The meshes from files that are used, and by visual geoms only."""
    uses = defaultdict(list)
    for geom in root.iter("geom"):
        if geom.get("mesh") is not None:
            uses[geom.get("mesh")].append(geom)
    used = [mesh for mesh in root.iter("mesh") if mesh.get("file") is not None and uses[mesh.get("name")]]
    return [mesh for mesh in used if all(map(_is_visual, uses[mesh.get("name")]))]


def _is_visual(geom: ET.Element) -> bool:
    """Whether the geom has neither collisions nor, in robosuite's models (`inertiagrouprange="0 0"`), mass."""
    return geom.get("contype") == "0" and geom.get("conaffinity") == "0" and geom.get("group") == "1"


def writable_folder(folder: Path) -> Path:
    """The folder, created if needed, or a temporary one if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="rlvla-meshes-"))


def reduced_mesh(file: Path, folder: Path) -> Path:
    """Path of the simplified copy of mesh `file` in `folder`, created if needed, or `file` if it is small.

    Safe to call from concurrent processes: files are written atomically.
    """
    digest = hashlib.sha256(file.read_bytes() + _RECIPE.encode()).hexdigest()[:24]
    target, small = folder / f"{digest}.stl", folder / f"{digest}.small"
    if target.exists():
        return target
    if small.exists():
        return file
    vertices, faces = _read_mesh(file)
    if len(faces) <= MIN_FACES:
        write_atomic(small, b"")
        return file
    vertices, faces = _simplified(vertices, faces)
    write_atomic(target, _binary_stl(vertices[faces]))
    return target


_DRAWN = (
    *("mesh_vertnum", "mesh_normalnum", "mesh_facenum"),
    *("mesh_vert", "mesh_normal", "mesh_face", "mesh_facenormal"),
)


@contextmanager
def lightly_drawn(model: mujoco.MjModel) -> Iterator[None]:
    """Temporarily simplify the meshes without textures of a compiled model.

    For the creation of a drawing context, which copies them. Do not compute collisions inside the block: they use the
    same arrays.
    """
    saved = {name: getattr(model, name).copy() for name in _DRAWN}
    try:
        for mesh in np.flatnonzero((model.mesh_facenum > MIN_FACES) & (model.mesh_texcoordnum == 0)):
            _lighten(model, int(mesh))
        yield
    finally:
        for name, values in saved.items():
            getattr(model, name)[:] = values


def _lighten(model: mujoco.MjModel, mesh: int) -> None:
    """Replace a mesh of a compiled model by a simplified one with smooth normals."""
    first, face = model.mesh_vertadr[mesh], model.mesh_faceadr[mesh]
    number, faces = model.mesh_vertnum[mesh], model.mesh_facenum[mesh]
    points = model.mesh_vert[first : first + number]
    distinct, triangles = welded(points, model.mesh_face[face : face + faces])
    vertices, triangles = _simplified(points[distinct], triangles)
    if len(vertices) > min(number, model.mesh_normalnum[mesh]):
        return
    corners = vertices[triangles]
    weighted = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])  # by area
    normals = np.zeros_like(vertices)
    for corner in range(3):
        np.add.at(normals, triangles[:, corner], weighted)
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    model.mesh_vertnum[mesh] = model.mesh_normalnum[mesh] = len(vertices)
    model.mesh_facenum[mesh] = len(triangles)
    model.mesh_vert[first : first + len(vertices)] = vertices
    normal = model.mesh_normaladr[mesh]
    model.mesh_normal[normal : normal + len(vertices)] = normals
    model.mesh_face[face : face + len(triangles)] = model.mesh_facenormal[face : face + len(triangles)] = triangles


def _read_mesh(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Vertices [V, 3] float32 and faces [F, 3] int32 of a mesh in any format supported by MuJoCo."""
    model = mujoco.MjModel.from_xml_string(
        f'<mujoco><asset><mesh name="mesh" file="{file}" inertia="shell"/></asset>'
        '<worldbody><geom type="mesh" mesh="mesh"/></worldbody></mujoco>'
    )
    # MuJoCo transforms a mesh to its inertial frame and stores the transformation.
    rotation = np.empty(9)
    mujoco.mju_quat2Mat(rotation, model.mesh_quat[0])
    vertices = (model.mesh_vert @ rotation.reshape(3, 3).T + model.mesh_pos[0]).astype(np.float32)
    first, faces = welded(model.mesh_vert, model.mesh_face)
    return vertices[first], faces


def welded(vertices: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge equal vertices, so that faces are connected; returns the indices of distinct vertices and the faces."""
    _, first, welded = np.unique(vertices, axis=0, return_index=True, return_inverse=True)
    return first, welded.reshape(-1)[faces].astype(np.int32)


def _simplified(vertices: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    simplifier = require("fast_simplification", extra="robosuite")
    kept = max(MIN_FACES, int(len(faces) * KEPT_FRACTION))
    return simplifier.simplify(vertices, faces, target_reduction=1.0 - kept / len(faces))


def _binary_stl(triangles: np.ndarray) -> bytes:
    """Triangles [F, 3, 3] as a binary STL file without normals, which MuJoCo computes."""
    record = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])
    records = np.zeros(len(triangles), dtype=record)
    records["corners"] = triangles
    return bytes(80) + np.uint32(len(triangles)).tobytes() + records.tobytes()
