"""View frustum culling."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

pytest.importorskip("robosuite")

from rlvla.envs.mujoco.rendering import Renderer, in_view
from rlvla.envs.robosuite.env import CAMERAS, make

BALL = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="down" pos="0 0 2" xyaxes="1 0 0 0 1 0" fovy="60"/>
    <geom name="ball" type="sphere" size="0.1" pos="{x} {y} {z}" group="1"/>
    <geom name="ground" type="plane" size="1 1 .1" pos="50 50 0" group="1"/>
  </worldbody>
</mujoco>
"""


def ball_at(x: float, y: float, z: float) -> tuple[mujoco.MjModel, mujoco.MjData]:
    model = mujoco.MjModel.from_xml_string(BALL.format(x=x, y=y, z=z))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


@pytest.mark.parametrize(
    ("place", "visible"),
    [
        ((0, 0, 0), True),
        # Two metres below the camera the image ends 2 tan(30 degrees) = 1.155 m from its middle, and the sphere
        # touches the border's plane 0.1 / cos(30 degrees) = 0.115 m farther.
        ((1.26, 0, 0), True),
        ((1.28, 0, 0), False),
        ((0, -1.26, 0), True),
        ((0, -1.28, 0), False),
        ((0, 0, 3), False),  # behind the camera
        ((0, 0, 2.05), True),  # around it
    ],
)
def test_a_ball_is_in_view_until_it_is_beyond_the_border(place: tuple[float, float, float], visible: bool) -> None:
    model, data = ball_at(*place)
    assert in_view(model, data, 0).tolist() == [visible, True]  # a plane has no end


@pytest.mark.parametrize("task", ["Lift", "NutAssemblyRound"])
def test_images_are_what_they_would_be_with_everything_drawn(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cameras = tuple(name for name in CAMERAS if not (task == "NutAssemblyRound" and name == "closeup"))
    task_id = {"Lift": 0, "NutAssemblyRound": 4}[task]
    env = make(task_id, cameras=cameras, image_size=64)
    drawn = []

    def all_in_view(model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> np.ndarray:
        drawn.append(in_view(model, data, camera).mean())
        return np.ones(model.ngeom, bool)

    try:
        groups = env._sim.model.geom_group.copy()
        env.reset(0, 0)
        rng = np.random.default_rng(0)
        for _ in range(6):
            images = env.step_chunk(rng.uniform(-1, 1, (5, 7)).astype(np.float32)).observation.images
            assert (env._sim.model.geom_group == groups).all()
            with monkeypatch.context() as patch:
                patch.setattr("rlvla.envs.mujoco.rendering.in_view", all_in_view)
                everything = env._images(env._cameras)
            np.testing.assert_array_equal(images, everything)
        assert min(drawn) < 0.5  # otherwise nothing was tested
    finally:
        env.close()


def test_full_quality_draws_everything() -> None:
    """A shadow may fall into the image from outside of it."""
    model, data = ball_at(0, 0, 3)
    for quality, drawn in (("full", 2), ("fast", 1)):
        renderer = Renderer(model, 32, quality)
        renderer.render(data, [0])
        assert renderer._scene.ngeom == drawn
        renderer.close()
