"""Gymnasium environments as suites: `gym:FetchReach-v4`, or `gym:my_module:MyEnv-v0` for a module that registers it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_chunk, check_init_state_id, task_of
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.mujoco.gl import forget_current
from rlvla.envs.options import SuiteOptions
from rlvla.envs.registry import Suite, register_suite
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import ConfigError, MissingExtraError, Problem

PREFIX = "gym:"
CAMERA = "render"
OBSERVATION = "observation"  # the camera of an observation that is an image itself
NUM_INIT_STATES = 10_000
STEPS = 200  # where the environment has no limit of its own
SUCCESS_KEYS = ("is_success", "success")
TERMINATED = "terminated"


@dataclass(frozen=True)
class GymOptions(SuiteOptions):
    """Options of the suites.

    Besides `render`, the images of an environment's observation are cameras; `list_tasks` refuses unknown ones.

    Attributes:
        gym_success: what tells success: an entry of `info`, or "terminated"; None: `is_success` or `success` of `info`.
        gym_instruction: what the policy is told; None: made of the name.
    """

    known_cameras: ClassVar[tuple[str, ...]] = (CAMERA,)
    has_more_cameras: ClassVar[bool] = True
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = (CAMERA,)
    gym_success: str | None = arg(
        None,
        "what tells success: an entry of the environment's `info`, or `terminated` where an episode ends only by "
        "success (default: its `is_success` or `success`)",
        metavar="KEY",
    )
    gym_instruction: str | None = arg(
        None, "what the policy is told (default: the words of the environment's name)", metavar="TEXT"
    )


def _gymnasium(env_id: str) -> Any:
    """The package; the environments of gymnasium-robotics are registered when one is asked for that is not known."""
    try:
        import gymnasium
    except ImportError as error:
        text = "Gymnasium is not installed: pip install gymnasium, and the package of the environment"
        raise MissingExtraError(text) from error
    if ":" not in env_id and env_id not in gymnasium.registry:
        with suppress(ImportError):
            import gymnasium_robotics  # type: ignore[import-not-found]

            gymnasium.register_envs(gymnasium_robotics)
    return gymnasium


def _make(suite: str, **options: Any) -> Any:
    """The environment of a suite; ConfigError if it cannot be made."""
    env_id = suite.removeprefix(PREFIX)
    if env_id == "ENV_ID":
        text = "--task_suite_name gym:ENV_ID: name an environment in its place, e.g. gym:FetchReach-v4"
        raise ConfigError.of("task_suite_name", "malformed", text)
    gymnasium = _gymnasium(env_id)
    os.environ.setdefault("MUJOCO_GL", "egl")  # without a screen; MuJoCo reads it when it is imported
    try:
        return gymnasium.make(env_id, **options)
    except Exception as error:  # of gymnasium's registry, or whatever the environment raises
        text = f"--task_suite_name {suite}: Gymnasium cannot make it ({type(error).__name__}: {error})"
        raise ConfigError.of("task_suite_name", "unknown_name", text) from error


@dataclass(frozen=True)
class _Facts:
    """What a suite's environment is.

    Attributes:
        steps: its step limit.
        action_dim, state_dim: dimensions of its actions, and of the vectors in its observation.
        images: names of the images in its observation.
        draws: whether it has the render mode `rgb_array`.
        frequency: steps per second.
    """

    steps: int
    action_dim: int
    state_dim: int
    images: tuple[str, ...]
    draws: bool
    frequency: float


@functools.cache
def _facts(suite: str) -> _Facts:
    """Made once, without rendering; ConfigError if its spaces cannot be used."""
    env = _make(suite)
    try:
        actions, leaves = env.action_space, list(_leaves(env.observation_space.sample()))
        bounded = hasattr(actions, "low") and np.isfinite(actions.low).all() and np.isfinite(actions.high).all()
        if not bounded or len(actions.shape) != 1:
            text = f"--task_suite_name {suite}: its actions must be a bounded vector (Box), not {actions}"
            raise ConfigError.of("task_suite_name", "action_dims", text)
        dt = getattr(env.unwrapped, "dt", None)
        steps = (env.spec.max_episode_steps if env.spec is not None else None) or STEPS
        return _Facts(
            steps=steps,
            action_dim=actions.shape[0],
            state_dim=len(_state(leaves)),
            images=_image_names(suite, env.observation_space, leaves),
            draws="rgb_array" in (env.metadata.get("render_modes") or ()),
            frequency=1.0 / float(dt) if dt else 20.0,
        )
    finally:
        env.close()


_Leaf = tuple[str, np.ndarray]  # name and value of an array in an observation


def _leaves(observation: Any, name: str = "") -> Iterator[_Leaf]:
    """Name and value of each array in an observation, keys in order; names of parts are joined by dots."""
    if isinstance(observation, Mapping):
        parts = [(str(key), observation[key]) for key in sorted(observation)]
    elif isinstance(observation, (tuple, list)):
        parts = [(str(number), part) for number, part in enumerate(observation)]
    else:
        yield name or OBSERVATION, np.asarray(observation)
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}" if name else key)


def _state(leaves: Sequence[_Leaf]) -> np.ndarray:
    """[P] float32: the numbers of an observation, by name; images and texts are left out."""
    parts = [values for _, values in leaves if values.dtype.kind in "fiub" and not _is_picture(values)]
    return np.concatenate([np.zeros(0, np.float32), *(values.astype(np.float32).ravel() for values in parts)])


def _is_picture(values: np.ndarray) -> bool:
    """Whether it is an image, or several."""
    return values.dtype == np.uint8 and values.ndim >= 3


def _is_image(values: np.ndarray) -> bool:
    """Whether it is one image, [H, W, C] or [C, H, W] uint8 with 1 or 3 channels."""
    return values.dtype == np.uint8 and values.ndim == 3 and bool({values.shape[0], values.shape[2]} & {1, 3})


def _camera_of(name: str) -> str:
    """The camera that shows an image of the observation: without slashes, which files of demonstrations do not take."""
    return f"{OBSERVATION}.{name}" if name == CAMERA else re.sub(r"[/\\]", ".", name)


def _images(leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """Camera and image of those in an observation."""
    return [(_camera_of(name), values) for name, values in leaves if _is_image(values)]


def _image_names(suite: str, space: Any, leaves: Sequence[_Leaf]) -> tuple[str, ...]:
    """The cameras of an observation space with these leaves; ConfigError if they cannot be told apart."""
    cameras = [camera for camera, _ in _images(leaves)]
    twice = sorted({name for name in cameras if cameras.count(name) > 1})
    text = ""
    if _varies(space):
        text = "the number of parts of its observations varies"
    elif twice:
        text = f"several images of its observations would be the camera {', '.join(twice)}"
    if text:
        raise ConfigError.of("task_suite_name", "unavailable", f"--task_suite_name {suite}: {text} ({space})")
    return tuple(cameras)


def _varies(space: Any) -> bool:
    """Whether a space has parts that differ from sample to sample."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return any(map(_varies, space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, (spaces.Sequence, spaces.Graph, *([spaces.OneOf] if hasattr(spaces, "OneOf") else [])))


def _in_color(image: np.ndarray) -> np.ndarray:
    """[H, W, 3] of an image as `_images` finds them."""
    if image.shape[2] not in (1, 3):
        image = np.moveaxis(image, 0, 2)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def list_tasks(suite: str, **kw: Any) -> list[TaskSpec]:
    """The one task of a suite; `kw` are the fields of `GymOptions`. The environment is made, and nothing is drawn."""
    options, facts = GymOptions(**kw), _facts(suite)
    known = (CAMERA, *facts.images)
    unknown = [name for name in options.cameras if name not in known]
    if unknown:
        text = f"unknown camera(s) {', '.join(unknown)}; known cameras: {', '.join(known)}"
        raise ConfigError.of("cameras", "unknown_name", text)
    name = suite.removeprefix(PREFIX).rpartition(":")[2]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", re.sub(r"-v\d+$", "", name).rpartition("/")[2])
    return [
        TaskSpec(
            suite=suite,
            task_id=0,
            name=name,
            instruction=options.gym_instruction or words.replace("_", " ").replace("-", " ").lower(),
            max_steps=options.max_steps or facts.steps,
            num_init_states=NUM_INIT_STATES,
            action_dim=facts.action_dim,
            proprio_dim=facts.state_dim,
            control_freq=facts.frequency,
            propositions=("success",),
            machine="F(success)",
            dense_reward=True,  # or at least not that of success
        )
    ]


class GymEnv:
    """One Gymnasium environment.

    Actions [D] in [-1, 1] are scaled to the bounds of its action space. Proprio is its observation, without images; its
    images are what it renders (`render`), or those of its observation. The initial state of a number is that of
    `reset(seed=number)`. Rewards are its own. An episode that it ends without success is truncated.

    Privileged state: `observation` [P].

    Args:
        spec: the task, including the step limit.
        options: validated options.

    Raises:
        ConfigError: it cannot be made, or cannot draw.
    """

    def __init__(self, spec: TaskSpec, options: GymOptions):
        self.task, self.options = spec, options
        drawing = {"render_mode": "rgb_array"} if CAMERA in options.cameras and _facts(spec.suite).draws else {}
        self._env = _make(spec.suite, max_episode_steps=spec.max_steps + 1, **drawing)
        space = self._env.action_space
        self._middle, self._half = (space.high + space.low) / 2.0, (space.high - space.low) / 2.0
        self._runner = ChunkRunner(spec.max_steps, options.success_hold_steps or 1, plays_on=options.plays_on)
        self._seen: np.ndarray | None = None
        self._has_drawn = False
        self._from_observation = [name for name in options.cameras if name != CAMERA]
        self._shown: dict[str, np.ndarray] = {}  # the images of these cameras
        self._reward, self._ended = 0.0, (False, False)

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        self._before_it_observes()
        observation, _ = self._env.reset(seed=init_state_id)
        self._keep(observation)
        self._ended = (False, False)
        self._runner.begin()
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] until done; see `Env.step_chunk`."""
        self._require_open()
        actions = check_chunk(actions, self.task)
        if record_frames and not self.options.cameras:
            raise ValueError("frames cannot be recorded: the environment was made without cameras")
        frame = (lambda: self._picture(self.options.cameras[0])) if record_frames else None
        parts = (self._advance, self._observe, frame)
        return self._runner.play(actions, *parts, reward=lambda: self._reward, ended=lambda: self._ended)

    def privileged_state(self) -> dict[str, np.ndarray]:
        """`observation` [P], for scripted experts."""
        self._require_open()
        if self._seen is None:
            raise RuntimeError("no episode was started: call reset first")
        return {"observation": self._seen.copy()}

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        if self._env is not None:
            self._env.close()
        self._env = None

    def _require_open(self) -> None:
        if self._env is None:
            raise RuntimeError("the environment has been closed")

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        space = self._env.action_space
        played = np.clip(self._middle + self._half * action, space.low, space.high).astype(space.dtype)
        self._before_it_observes()
        observation, reward, terminated, truncated, info = self._env.step(played)
        self._keep(observation)
        success = self._success(bool(terminated), info)
        self._reward, self._ended = float(reward), (bool(terminated), bool(truncated))
        return success, frozenset({"success"} if success else ())

    def _success(self, terminated: bool, info: Mapping[str, Any]) -> bool:
        asked = self.options.gym_success
        if asked == TERMINATED:
            return terminated
        found = [key for key in ((asked,) if asked else SUCCESS_KEYS) if key in info]
        if not found:
            wanted = asked or " or ".join(SUCCESS_KEYS)
            has = ", ".join(map(str, info)) or "nothing"
            text = (
                f"{self.task.suite} does not tell success: its info has {has} and no {wanted}; name another entry with "
                f"--gym_success, or `{TERMINATED}` if an episode ends only by success"
            )
            raise ConfigError([Problem("gym_success", "mismatch", text)])
        return bool(info[found[0]])

    def _observe(self) -> Observation:
        size, images = self.options.image_size, [self._picture(name) for name in self.options.cameras]
        stacked = np.stack(images) if images else np.empty((0, size, size, 3), np.uint8)
        assert self._seen is not None
        return Observation(stacked, self._seen.copy() if self.options.use_proprio else None, self.task.instruction)

    def _before_it_observes(self) -> None:
        if self._from_observation:  # it may draw them
            self._take_context()

    def _keep(self, observation: Any) -> None:
        """Copy what is used of an observation, whose arrays the environment may use again."""
        leaves = list(_leaves(observation))
        self._seen = _state(leaves)
        images = dict(_images(leaves)) if self._from_observation else {}
        if missing := [name for name in self._from_observation if name not in images]:
            text = f"observations of {self.task.suite} lack the uint8 images that its space has: {', '.join(missing)}"
            raise ConfigError.of("cameras", "unavailable", text)
        self._shown = {name: _in_color(images[name]).copy() for name in self._from_observation}

    def _take_context(self) -> None:
        """Gymnasium's MuJoCo viewers draw into whatever GL context is current: with two of them, black frames."""
        viewers = getattr(getattr(self._env.unwrapped, "mujoco_renderer", None), "_viewers", {})
        for viewer in viewers.values():
            viewer.make_context_current()
        forget_current()

    def _picture(self, camera: str) -> np.ndarray:
        """[H, W, 3] uint8, scaled to a square of `image_size` pixels."""
        size = self.options.image_size
        pixels = self._drawn() if camera == CAMERA else self._shown[camera]
        if pixels.shape[:2] == (size, size):
            return pixels.copy()
        import cv2

        return np.asarray(cv2.resize(pixels, (size, size), interpolation=cv2.INTER_AREA), np.uint8)

    def _drawn(self) -> np.ndarray:
        """[H, W, 3] uint8, what the environment renders."""
        self._take_context()
        try:
            drawn = self._env.render()
        except Exception as error:  # of the environment
            if self._has_drawn:
                raise  # the attempt has failed, and may be repeated
            raise self._draws_nothing(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        pixels = np.asarray(drawn)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            what = "nothing" if drawn is None else f"{pixels.dtype} {list(pixels.shape)}"
            raise self._draws_nothing(f"{what}, not an image [H, W, 3] uint8")
        self._has_drawn = True
        return pixels

    def _draws_nothing(self, instead: str) -> ConfigError:
        images = _facts(self.task.suite).images
        see = f"; choose from the images of its observation with --cameras: {', '.join(images)}" if images else ""
        text = f"{self.task.suite} does not draw with render_mode='rgb_array' ({instead}){see}"
        return ConfigError.of("cameras", "unavailable", text)


def make(suite: str, task_id: int, **kw: Any) -> GymEnv:
    """Create the environment of a suite; `kw` are the fields of `GymOptions`."""
    return GymEnv(task_of(suite, list_tasks(suite, **kw), task_id), GymOptions(**kw))


def register_environment(suite: str) -> None:
    """Register a suite `gym:ENV_ID`."""
    register_suite(
        suite,
        Suite(
            list_tasks=partial(list_tasks, suite),
            make=partial(make, suite),
            cameras=(CAMERA,),
            options=GymOptions,
            requires=("gymnasium",),
        ),
    )
