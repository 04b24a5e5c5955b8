"""Simplified visual meshes: selection of meshes, and concurrent creation."""

import os
from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np
import pytest

from rlvla.utils.files import cache_dir

mesh_cache = pytest.importorskip("rlvla.envs.mujoco.light_meshes", exc_type=ImportError)
pytest.importorskip("fast_simplification")


def sphere(path, rings):
    """A unit sphere about (2, 0, 0) as a file of triangles that share no vertices; returns their number."""
    theta, phi = np.meshgrid(np.linspace(0, np.pi, rings), np.linspace(0, 2 * np.pi, 2 * rings), indexing="ij")
    points = np.stack([np.sin(theta) * np.cos(phi) + 2, np.sin(theta) * np.sin(phi), np.cos(theta)], axis=-1)
    a, b, c, d = points[:-1, :-1], points[1:, :-1], points[1:, 1:], points[:-1, 1:]
    triangles = np.concatenate([np.stack(t, axis=2).reshape(-1, 3, 3) for t in ((a, b, c), (a, c, d))])
    areas = np.linalg.norm(np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0]), axis=1)
    triangles = triangles[areas > 1e-9]
    if path.suffix == ".stl":
        path.write_bytes(mesh_cache._binary_stl(triangles))
    else:  # MuJoCo merges the vertices of an STL file by itself, but not those of an OBJ file
        corners = [f"v {x:.6f} {y:.6f} {z:.6f}" for x, y, z in triangles.reshape(-1, 3)]
        path.write_text("\n".join(corners + [f"f {i} {i + 1} {i + 2}" for i in range(1, 3 * len(triangles), 3)]))
    return len(triangles)


@pytest.mark.parametrize("name", ["sphere.stl", "sphere.obj"])
def test_large_mesh_is_reduced_and_keeps_its_place_and_shape(tmp_path, name):
    before = sphere(tmp_path / name, 60)
    reduced = mesh_cache.reduced_mesh(tmp_path / name, tmp_path)
    vertices, faces = mesh_cache._read_mesh(reduced)
    assert mesh_cache.MIN_FACES <= len(faces) <= before * mesh_cache.KEPT_FRACTION * 1.1
    radii = np.linalg.norm(vertices - [2, 0, 0], axis=1)
    assert radii.min() > 0.95 and radii.max() < 1.05
    edges = np.sort(np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]), axis=1)
    shared = np.unique(edges, axis=0, return_counts=True)[1]
    assert (shared == 2).mean() > 0.95, "the surface fell to pieces"


def test_small_mesh_is_left_alone(tmp_path):
    sphere(tmp_path / "small.stl", 10)
    for _ in range(2):
        assert mesh_cache.reduced_mesh(tmp_path / "small.stl", tmp_path) == tmp_path / "small.stl"


def test_cached_file_is_used_again_and_changed_content_is_not(tmp_path):
    file, cache = tmp_path / "sphere.stl", tmp_path / "cache"
    cache.mkdir()
    sphere(file, 40)
    first = mesh_cache.reduced_mesh(file, cache)
    made = first.stat().st_mtime_ns
    assert mesh_cache.reduced_mesh(file, cache) == first and first.stat().st_mtime_ns == made
    sphere(file, 50)
    assert mesh_cache.reduced_mesh(file, cache) != first


def test_several_at_once_get_the_same_complete_file(tmp_path):
    file, cache = tmp_path / "sphere.stl", tmp_path / "cache"
    cache.mkdir()
    sphere(file, 40)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: mesh_cache.reduced_mesh(file, cache).read_bytes(), range(4)))
    assert len(set(results)) == 1 and len(results[0]) > 84
    assert len(list(cache.iterdir())) == 1, "temporary files were left behind"


def test_only_visual_meshes_are_replaced(tmp_path):
    for name in ("shown", "solid", "both"):
        sphere(tmp_path / f"{name}.stl", 40 + len(name))
    visual = 'contype="0" conaffinity="0" group="1"'
    xml = f"""<mujoco><asset>
      <mesh name="shown" file="{tmp_path}/shown.stl" scale="2 2 2"/>
      <mesh name="solid" file="{tmp_path}/solid.stl"/>
      <mesh name="both" file="{tmp_path}/both.stl"/>
    </asset><worldbody>
      <geom type="mesh" mesh="shown" {visual}/><geom type="mesh" mesh="solid" group="0"/>
      <geom type="mesh" mesh="both" {visual}/><geom type="mesh" mesh="both" group="0"/>
    </worldbody></mujoco>"""
    cache = tmp_path / "cache"
    cache.mkdir()
    light = mesh_cache.lighten_visual_meshes(xml, cache)
    assert "shown.stl" not in light and str(cache) in light and 'scale="2 2 2"' in light
    assert "solid.stl" in light and "both.stl" in light


def test_unwritable_cache_falls_back(tmp_path):
    (tmp_path / "file").touch()
    folder = mesh_cache.writable_folder(tmp_path / "file" / "meshes")  # a folder inside a file cannot be made
    assert os.access(folder, os.W_OK)
    folder.rmdir()


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RLVLA_CACHE_DIR", raising=False)
    assert cache_dir() == tmp_path / "rlvla"
    monkeypatch.setenv("RLVLA_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"


@pytest.mark.parametrize("name", ["sphere.stl", "sphere.obj"])
def test_a_compiled_model_is_lighter_while_it_is_copied_and_then_itself(tmp_path, name):
    faces = sphere(tmp_path / name, 60)
    sphere(tmp_path / "small.stl", 10)
    model = mujoco.MjModel.from_xml_string(
        f"""<mujoco><asset><mesh name="large" file="{tmp_path / name}"/><mesh name="small" file="{tmp_path}/small.stl"/>
        </asset><worldbody><geom type="mesh" mesh="large"/><geom type="mesh" mesh="small"/></worldbody></mujoco>"""
    )
    before = {field: getattr(model, field).copy() for field in mesh_cache._DRAWN}
    with mesh_cache.lightly_drawn(model):
        assert mesh_cache.MIN_FACES <= model.mesh_facenum[0] <= faces * mesh_cache.KEPT_FRACTION * 1.1
        assert model.mesh_facenum[1] == before["mesh_facenum"][1]
        points, normals = model.mesh_vert[: model.mesh_vertnum[0]], model.mesh_normal[: model.mesh_normalnum[0]]
        corners = model.mesh_face[: model.mesh_facenum[0]]
        assert corners.max() < len(points) == len(normals)
        radii = np.linalg.norm(points, axis=1)  # MuJoCo moves a mesh to its center of mass
        assert radii.min() > 0.95 and radii.max() < 1.05
        assert ((points / radii[:, None]) * normals).sum(1).min() > 0.9, "normals point outward"
    for field, values in before.items():
        assert np.array_equal(getattr(model, field), values), field
