"""Lighter copies of textured meshes and large textures, created once and stored in the user's cache folder.

Objects of LIBERO have up to 66,000 faces and textures of up to 4096 x 4096 pixels. Their purely visual meshes are
decimated, with texture coordinates and normals of the original surface, so that physics stays bit-identical.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mujoco
import numpy as np

from rlvla.envs.mujoco.light_meshes import visual_meshes, welded, writable_folder
from rlvla.utils.errors import require
from rlvla.utils.files import cache_dir, write_atomic
from rlvla.utils.terminal import log

Converter = Callable[[Path], bytes | None]  # content of the lighter copy; None: not needed
# Faces of meshes below and above SMALL meters, and of those that need more of them.
FACES_SMALL, FACES, MORE_FACES = 400, 800, (1600, 3200, 6400)
SMALL = 0.15  # length of the diagonal of the bounding box
# Distance of a copy from the original, relative to that diagonal, or in meters if that is more.
TOLERANCE, LEAST_TOLERANCE = 0.022, 0.003
# Vertices are merged on grids of these widths, relative to the diagonal, where details hinder decimation.
_GRIDS = (0.0, 0.001, 0.004)
_AGGRESSIVENESS = 5  # of the decimation; its default of 7 tears meshes of many parts
TEXTURE_SIZE = 256  # pixels
_SAMPLES = 20_000  # points of a surface
# Part of the cache key, so that files of another method are not reused.
_RECIPE = f"{FACES_SMALL}-{FACES}-{MORE_FACES}-{SMALL}-{TOLERANCE}-{LEAST_TOLERANCE}-{TEXTURE_SIZE}-1"
_ALIGNED = 0.3  # cosine; normals of the original that are turned away from a face of the copy are not used
_EXTRAPOLATION = 1.0  # barycentric coordinates are limited to [-1, 2]
_PNG_RGB = b"sRGB"  # chunk from which MuJoCo reads the color space


def lighten_assets(xml: str, folder: Path | None = None) -> str:
    """Replace purely visual meshes and textures of a MuJoCo model by lighter copies.

    Safe to call from concurrent processes. Copies are identified by the content of the original.

    Args:
        xml: a model whose files have absolute names.
        folder: folder for the copies; by default in `cache_dir()`, or a temporary folder if that is not writable.
    """
    root = ET.fromstring(xml)
    conversions: list[tuple[ET.Element, str, Converter]] = []
    for mesh in visual_meshes(root):
        scale = max(abs(float(factor)) for factor in mesh.get("scale", "1").split())
        conversions.append((mesh, f"-{scale:g}.msh", partial(light_mesh, scale=scale)))
    conversions += [(texture, ".png", light_texture) for texture in root.iter("texture") if _is_resizable(texture)]
    folder, digests = folder or writable_folder(cache_dir() / "assets"), dict[Path, str]()
    copies: dict[ET.Element, _Copy] = {}
    for element, suffix, convert in conversions:
        file = Path(element.get("file", ""))
        if file not in digests:
            digests[file] = hashlib.sha256(file.read_bytes() + _RECIPE.encode()).hexdigest()[:24]
        copies[element] = _Copy(file, folder / f"{digests[file]}{suffix}", convert)
    if not all(copy.is_done for copy in copies.values()):
        with _locked(folder):  # other processes wait instead of doing the same work
            missing = {copy.path: copy for copy in copies.values() if not copy.is_done}
            if missing:
                log.info(f"creating lighter copies of {len(missing)} meshes and textures in {folder}, once")
            for copy in missing.values():
                copy.create()
    for element, copy in copies.items():
        element.set("file", str(copy.path if copy.path.exists() else copy.original))
    return ET.tostring(root, encoding="unicode")


@dataclass(frozen=True)
class _Copy:
    """A lighter copy of a file, or a marker that none is needed."""

    original: Path
    path: Path
    convert: Converter

    @property
    def is_done(self) -> bool:
        return self.path.exists() or self._marker.exists()

    @property
    def _marker(self) -> Path:
        return self.path.with_name(f"{self.path.name}.none")

    def create(self) -> None:
        content = self.convert(self.original)
        write_atomic(self._marker if content is None else self.path, content or b"")


def _is_resizable(texture: ET.Element) -> bool:
    """Whether the texture is a PNG file that MuJoCo loads as three channels of one image."""
    ungridded = (
        texture.get("type") == "2d" or texture.get("gridsize") is None
    )  # a cube with the same image on each side
    return texture.get("file", "").lower().endswith(".png") and ungridded and texture.get("nchannel", "3") == "3"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: the work is done several times
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def light_texture(file: Path) -> bytes | None:
    """A PNG image of at most `TEXTURE_SIZE` pixels, in the color space of the original; None if that is small."""
    image_module = require("PIL.Image", extra="libero")
    with image_module.open(file) as image:
        scale = TEXTURE_SIZE / max(image.size)
        if scale >= 1:
            return None
        size = [max(1, round(length * scale)) for length in image.size]
        small = image.convert("RGB").resize(size, image_module.Resampling.BOX)
        chunks = require("PIL.PngImagePlugin", extra="libero").PngInfo()
        if "srgb" in image.info:
            chunks.add(_PNG_RGB, bytes([image.info["srgb"]]))
    output = io.BytesIO()
    small.save(output, "PNG", pnginfo=chunks)
    return output.getvalue()


@dataclass(frozen=True)
class _Corners:
    """A mesh as separate triangles.

    Attributes:
        points: [F, 3, 3] positions in meters.
        normals: [F, 3, 3] unit normals.
        uv: [F, 3, 2] texture coordinates; zeros if the mesh has none.
        has_uv: whether the mesh has texture coordinates.
    """

    points: np.ndarray
    normals: np.ndarray
    uv: np.ndarray
    has_uv: bool

    @classmethod
    def read(cls, file: Path) -> _Corners:
        """Read a mesh in any format supported by MuJoCo."""
        model = _compiled(file, 'inertia="shell"')
        # MuJoCo transforms a mesh to its inertial frame and stores the transformation.
        rotation = np.empty(9)
        mujoco.mju_quat2Mat(rotation, model.mesh_quat[0])
        turn = rotation.reshape(3, 3).T
        has_uv = bool(model.mesh_texcoordnum[0])
        uv = model.mesh_texcoord[model.mesh_facetexcoord] if has_uv else np.zeros((*model.mesh_face.shape, 2))
        points = model.mesh_vert[model.mesh_face] @ turn + model.mesh_pos[0]
        return cls(points, model.mesh_normal[model.mesh_facenormal] @ turn, uv, has_uv)

    def as_msh(self) -> bytes:
        """The mesh in MuJoCo's binary format."""
        corners = 3 * len(self.points)
        counts = np.array([corners, corners, corners if self.has_uv else 0, len(self.points)], dtype="<i4")
        arrays = [self.points, self.normals, *([self.uv] if self.has_uv else [])]
        faces = np.arange(corners, dtype="<i4")
        return b"".join([counts.tobytes(), *(a.astype("<f4").tobytes() for a in arrays), faces.tobytes()])


def _compiled(file: Path, attributes: str = "") -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(
        f'<mujoco><asset><mesh name="mesh" file="{file}" {attributes}/></asset>'
        '<worldbody><geom type="mesh" mesh="mesh"/></worldbody></mujoco>'
    )


def light_mesh(file: Path, scale: float = 1.0) -> bytes | None:
    """A mesh with a few hundred faces within `TOLERANCE` as an MSH file; None if it is small or needs its faces.

    Args:
        file: a mesh in any format supported by MuJoCo.
        scale: meters per unit of the file.
    """
    original = _Corners.read(file)
    size = float(np.linalg.norm(np.ptp(original.points.reshape(-1, 3), axis=0)))
    for number in (FACES_SMALL if scale * size < SMALL else FACES, *MORE_FACES):
        if number >= 0.9 * len(original.points):
            return None
        for grid in _GRIDS:
            corners = _decimated(original.points, grid * size, number)
            if len(corners) > 2 * number:
                continue
            if _deviation(corners, original.points) <= max(TOLERANCE * size, LEAST_TOLERANCE / scale):
                return _transferred(original, corners).as_msh()
    return None


def _decimated(triangles: np.ndarray, grid: float, number: int) -> np.ndarray:
    """About `number` triangles [F, 3, 3] or more, from triangles whose vertices are merged on a grid; 0: if equal."""
    vertices = triangles.reshape(-1, 3).astype(np.float32)
    first, faces = welded(np.round(vertices / grid) if grid else vertices, np.arange(len(vertices)).reshape(-1, 3))
    faces = faces[(faces != np.roll(faces, 1, axis=1)).all(axis=1)]
    turns = (np.argmin(faces, axis=1)[:, None] + np.arange(3)) % 3  # equal faces begin with the same vertex
    points, faces = vertices[first], np.unique(np.take_along_axis(faces, turns, axis=1), axis=0)
    if len(faces) > number:
        simplify = require("fast_simplification", extra="libero").simplify
        points, faces = simplify(points, faces, target_reduction=1.0 - number / len(faces), agg=_AGGRESSIVENESS)
    corners = points[faces]
    return corners[_areas(corners) > 0]


def _deviation(copy: np.ndarray, surface: np.ndarray) -> float:
    """Distance of all but a thousandth of the points of a copy from the surface, both as triangles [F, 3, 3]."""
    distances, _ = require("scipy.spatial", extra="libero").cKDTree(_sampled(surface)[0]).query(_sampled(copy)[0])
    return float(np.quantile(distances, 0.999))


def _sampled(triangles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points [N, 3] spread evenly over triangles [F, 3, 3], and the triangle [N] of each."""
    areas, rng = _areas(triangles), np.random.default_rng(0)
    faces = rng.choice(len(areas), _SAMPLES, p=areas / areas.sum())
    root, share = np.sqrt(rng.random((_SAMPLES, 1))), rng.random((_SAMPLES, 1))
    a, b, c = triangles[faces].transpose(1, 0, 2)
    return (1 - root) * a + root * (1 - share) * b + root * share * c, faces


def _areas(triangles: np.ndarray) -> np.ndarray:
    return np.linalg.norm(np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0]), axis=1) / 2


def _transferred(original: _Corners, corners: np.ndarray) -> _Corners:
    """The triangles [F, 3, 3] with the texture coordinates and normals of an original surface.

    A triangle takes them from one chart of the texture, that of the original face closest in position and orientation;
    each corner from the closest face of this chart.
    """
    tree_of = require("scipy.spatial", extra="libero").cKDTree
    size = float(np.linalg.norm(np.ptp(original.points.reshape(-1, 3), axis=0)))
    samples, sampled = _sampled(original.points)
    inside = 0.9 * original.points + 0.1 * original.points.mean(axis=1, keepdims=True)  # not on an edge of two faces
    samples = np.concatenate([samples, inside.reshape(-1, 3)])
    sampled = np.concatenate([sampled, np.repeat(np.arange(len(original.points)), 3)])
    oriented = np.hstack([samples, size * _face_normals(original.points)[sampled]])
    normals = _face_normals(corners)
    _, closest = tree_of(oriented).query(np.hstack([corners.mean(axis=1), size * normals]))
    # Charts are as far apart in the last dimension as no two points of one are.
    apart = 10.0 * size * _charts(original)[sampled][:, None]
    turned, chart = np.repeat(size * normals[:, None], 3, axis=1), np.repeat(apart[closest][:, None], 3, axis=1)
    _, nearest = tree_of(np.hstack([oriented, apart])).query(np.concatenate([corners, turned, chart], axis=2))
    faces = sampled[nearest]  # [F, 3]
    weights = _barycentric(original.points[faces], corners)[..., None]  # [F, 3, 3, 1]
    blended = (original.normals[faces] * np.clip(weights, 0.0, 1.0)).sum(axis=2)
    blended /= np.maximum(np.linalg.norm(blended, axis=2, keepdims=True), 1e-12)
    aligned = (blended * normals[:, None]).sum(axis=2, keepdims=True) > _ALIGNED
    blended = np.where(aligned, blended, normals[:, None])
    return _Corners(corners, blended, (original.uv[faces] * weights).sum(axis=2), original.has_uv)


def _face_normals(points: np.ndarray) -> np.ndarray:
    normals = np.cross(points[:, 1] - points[:, 0], points[:, 2] - points[:, 0])
    return normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)


def _charts(mesh: _Corners) -> np.ndarray:
    """Chart of each face [F]: faces that are connected on the surface and in the texture."""
    sparse = require("scipy.sparse", extra="libero")
    corners = np.concatenate([mesh.points, mesh.uv], axis=2).reshape(-1, 5).astype(np.float32)
    _, ids = np.unique(corners, axis=0, return_inverse=True)
    ids, count = ids.reshape(-1, 3), len(mesh.points)
    incidence = sparse.coo_matrix(
        (np.ones(ids.size, bool), (np.repeat(np.arange(count), 3), ids.reshape(-1))), (count, ids.max() + 1)
    ).tocsr()
    graph = require("scipy.sparse.csgraph", extra="libero")
    return graph.connected_components(incidence @ incidence.T, directed=False)[1]


def _barycentric(triangles: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Barycentric coordinates [..., 3] of points [..., 3] projected to triangles [..., 3, 3], limited."""
    a, ab, ac = (
        triangles[..., 0, :],
        triangles[..., 1, :] - triangles[..., 0, :],
        triangles[..., 2, :] - triangles[..., 0, :],
    )
    ap = points - a
    bb, bc, cc = (ab * ab).sum(-1), (ab * ac).sum(-1), (ac * ac).sum(-1)
    pb, pc = (ap * ab).sum(-1), (ap * ac).sum(-1)
    determinant = np.maximum(bb * cc - bc * bc, 1e-20)
    beta, gamma = (cc * pb - bc * pc) / determinant, (bb * pc - bc * pb) / determinant
    low, high = -_EXTRAPOLATION, 1.0 + _EXTRAPOLATION
    beta, gamma = np.clip(beta, low, high), np.clip(gamma, low, high)
    return np.stack([1.0 - beta - gamma, beta, gamma], axis=-1)
