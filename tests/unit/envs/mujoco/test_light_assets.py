"""Lighter copies of textured meshes and textures: appearance, choice, and creation by several processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mujoco
import numpy as np
import pytest

light_assets = pytest.importorskip("rlvla.envs.mujoco.light_assets", exc_type=ImportError)
pytest.importorskip("fast_simplification")
image = pytest.importorskip("PIL.Image")
png = pytest.importorskip("PIL.PngImagePlugin")

CENTER = np.array([0.5, 0.0, 0.0])


def uv_of(points: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Texture coordinates of points of the sphere: a chart for each half."""
    flat = 0.2 * (points - CENTER)[..., :2] + 0.25
    return flat + np.where(upper, 0.5, 0.0)[..., None]


def textured_sphere(path: Path, rings: int) -> int:
    """A sphere of radius 1 about `CENTER` as an MSH file whose halves are charts; returns its number of faces."""
    theta, phi = np.meshgrid(np.linspace(0, np.pi, rings), np.linspace(0, 2 * np.pi, 2 * rings), indexing="ij")
    points = np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], axis=-1).round(6)
    a, b, c, d = points[:-1, :-1], points[1:, :-1], points[1:, 1:], points[:-1, 1:]
    corners = np.concatenate([np.stack(t, axis=2).reshape(-1, 3, 3) for t in ((a, b, c), (a, c, d))])
    corners = corners[
        np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1) > 1e-9
    ]
    upper = np.broadcast_to(corners[..., 2].mean(axis=1, keepdims=True) > 0, corners.shape[:2])
    mesh = light_assets._Corners(corners + CENTER, corners, uv_of(corners + CENTER, upper), True)
    path.write_bytes(mesh.as_msh())
    return len(corners)


def test_a_copy_has_the_surface_normals_and_texture_of_the_original(tmp_path: Path) -> None:
    file, copy = tmp_path / "sphere.msh", tmp_path / "copy.msh"
    faces = textured_sphere(file, 40)
    copy.write_bytes(light_assets.light_mesh(file))
    mesh = light_assets._Corners.read(copy)
    assert faces > 5_000 and 700 < len(mesh.points) < 900
    assert np.abs(np.linalg.norm(mesh.points - CENTER, axis=2) - 1).max() < 0.03
    np.testing.assert_allclose(mesh.normals, mesh.points - CENTER, atol=0.15)
    upper = mesh.uv[..., 0] > 0.5
    assert (upper == upper[:, :1]).all(), "a face lies in one chart"
    assert np.abs(mesh.uv - uv_of(mesh.points, upper)).max() < 0.03
    clear = np.abs(mesh.points[..., 2].mean(axis=1)) > 0.15
    assert (upper[:, 0] == (mesh.points[..., 2].mean(axis=1) > 0))[clear].all()


def test_small_meshes_get_fewer_faces_and_light_ones_none(tmp_path: Path) -> None:
    file = tmp_path / "sphere.msh"
    textured_sphere(file, 40)
    small = light_assets.light_mesh(file, scale=0.03)
    assert 350 < np.frombuffer(small[:16], "<i4")[3] < 500
    light = tmp_path / "light.msh"  # not the same file: MuJoCo's cache compares times of modification, in seconds
    textured_sphere(light, 12)
    assert light_assets.light_mesh(light) is None


def test_thin_plates_keep_both_sides() -> None:
    plate = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0]], float)
    sides = np.stack([plate, plate[::-1] + [0, 0, 0.001], plate])
    assert len(light_assets._decimated(sides, 0.01, 100)) == 2, "not two that face the same way"


def test_textures_are_scaled_down_in_their_color_space(tmp_path: Path) -> None:
    file, small = tmp_path / "large.png", tmp_path / "small.png"
    pixels = np.zeros((300, 600, 4), np.uint8)
    pixels[:, 300:, 0] = 200
    chunks = png.PngInfo()
    chunks.add(b"sRGB", b"\0")
    image.fromarray(pixels).save(file, pnginfo=chunks)
    small.write_bytes(light_assets.light_texture(file))
    with image.open(small) as copy:
        assert copy.size == (256, 128) and copy.mode == "RGB" and copy.info["srgb"] == 0
        assert np.asarray(copy)[:, [0, -1], 0].tolist() == [[0, 200]] * 128
    assert light_assets.light_texture(small) is None


def scene(folder: Path) -> str:
    for name in ("shown", "solid"):
        textured_sphere(folder / f"{name}.msh", 40)
    for shade, name in enumerate(("wall", "cube", "grid")):
        image.fromarray(np.full((512, 512, 3), shade, np.uint8)).save(folder / f"{name}.png")
    return f"""<mujoco><asset>
      <texture name="wall" type="2d" file="{folder}/wall.png"/>
      <texture name="cube" type="cube" file="{folder}/cube.png"/>
      <texture name="grid" type="cube" gridsize="3 4" file="{folder}/grid.png"/>
      <mesh name="shown" file="{folder}/shown.msh"/><mesh name="large" file="{folder}/shown.msh" scale="9 9 9"/>
      <mesh name="solid" file="{folder}/solid.msh"/>
    </asset><worldbody>
      <geom type="mesh" mesh="shown" contype="0" conaffinity="0" group="1"/>
      <geom type="mesh" mesh="large" contype="0" conaffinity="0" group="1"/><geom type="mesh" mesh="solid" group="0"/>
    </worldbody></mujoco>"""


def test_only_visual_meshes_and_plain_textures_are_replaced(tmp_path: Path) -> None:
    xml, cache = scene(tmp_path), tmp_path / "cache"
    cache.mkdir()
    light = light_assets.lighten_assets(xml, cache)
    assert {name for name in ("shown.msh", "solid.msh", "wall.png", "cube.png", "grid.png") if name in light} == {
        "solid.msh",
        "grid.png",
    }
    assert light.count(str(cache)) == 4 and 'scale="9 9 9"' in light
    # The cube's sides of 512 pixels are valid only as one image, without `gridsize`.
    mujoco.MjModel.from_xml_string(light.replace(' gridsize="3 4"', ""))


def test_copies_are_made_once_by_one_of_several_and_again_for_changed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xml, cache, made = scene(tmp_path), tmp_path / "cache", []
    cache.mkdir()
    convert = light_assets.light_texture
    monkeypatch.setattr(light_assets, "light_texture", lambda file: (made.append(file.name), convert(file))[1])
    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(lambda _: light_assets.lighten_assets(xml, cache), range(4)))
    assert len(results) == 1 and sorted(made) == ["cube.png", "wall.png"]
    assert not list(cache.glob(".*")), "no temporary files are left"
    image.fromarray(np.full((512, 512, 3), 9, np.uint8)).save(tmp_path / "wall.png")
    assert light_assets.lighten_assets(xml, cache) not in results and made[2:] == ["wall.png"]
