"""Gymnasium environments of the tests' own: a point is steered to the middle; bounds that are not [-1, 1]."""

import gymnasium
import numpy as np


class Point(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    action_space = gymnasium.spaces.Box(np.array([0.0, -2.0]), np.array([1.0, 2.0]), dtype=np.float64)
    observation_space = gymnasium.spaces.Dict(
        {
            "place": gymnasium.spaces.Box(-9, 9, (2,), np.float64),
            "pixels": gymnasium.spaces.Box(0, 255, (8, 6, 3), np.uint8),
        }
    )

    def __init__(self, render_mode=None, ends="success", tells=True):
        self.render_mode, self._ends, self._tells = render_mode, ends, tells

    def _seen(self):
        return {"place": self.place.copy(), "pixels": self._drawn(8, 6)}

    def _drawn(self, height, width):
        picture = np.full((height, width, 3), 60, np.uint8)
        last = [height - 1, width - 1]
        row, column = np.clip(((self.place + 1) / 2 * last).astype(int), 0, last)
        picture[row, column] = 255, 200, 100
        return picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1.0, 1.0, 2)
        return self._seen(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.place = self.place + 0.1 * (action - [0.5, 0.0])
        distance = float(np.linalg.norm(self.place))
        success = distance < 0.2
        ended = {"success": success, "failure": distance > 1.0, "never": False, "cut": False}[self._ends]
        return (
            self._seen(),
            -distance,
            ended,
            self._ends == "cut" and success,
            {"reached": success} | ({"success": success} if self._tells else {}),
        )

    def render(self):
        return self._drawn(30, 40)


class PointOfPixels(Point):
    """Observed as one gray image, channels first; it draws nothing else."""

    metadata = {"render_modes": []}
    observation_space = gymnasium.spaces.Box(0, 255, (1, 16, 16), np.uint8)
    render = gymnasium.Env.render

    def _seen(self):
        return self._drawn(16, 16)[..., 0][None]


class PointUnseen(Point):
    """Numbers only; it draws nothing."""

    metadata = {"render_modes": []}
    observation_space = Point.observation_space["place"]
    render = gymnasium.Env.render

    def _seen(self):
        return self.place.copy()


class PointOfViews(Point):
    """Numbers and images in parts of an observation, all in one buffer; it draws without saying so."""

    metadata = {"render_modes": []}
    _image = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    observation_space = gymnasium.spaces.Dict(
        {
            "place": gymnasium.spaces.Tuple((Point.observation_space["place"], gymnasium.spaces.Box(0, 1, (1,)))),
            "render": _image,
            "stack": gymnasium.spaces.Box(0, 255, (4, 16, 16), np.uint8),
            "views": gymnasium.spaces.Dict({"front/left": _image}),
        }
    )
    _buffer = np.zeros((16, 16, 3), np.uint8)

    def _seen(self):
        self._buffer[:] = self._drawn(16, 16)
        numbers = (self.place.astype(np.float64), np.ones(1, np.float32))
        stack = np.zeros((4, 16, 16), np.uint8)
        return {"place": numbers, "render": self._buffer, "stack": stack, "views": {"front/left": self._buffer}}

    def step(self, action):
        self._buffer[:] = 0
        return super().step(action)


gymnasium.register("rlvla/PointOfViews-v0", entry_point=PointOfViews, max_episode_steps=25)
gymnasium.register("rlvla/PointUnseen-v0", entry_point=PointUnseen, max_episode_steps=25)
gymnasium.register("rlvla/Point-v0", entry_point=Point, max_episode_steps=25)
gymnasium.register("rlvla/PointOfPixels-v0", entry_point=PointOfPixels, max_episode_steps=25)
