"""Gymnasium environments as suites: `gym:FetchReach-v4`, or `gym:my_module:MyEnv-v0` for a module that registers it."""

from __future__ import annotations

import functools
import os
import re
import sys
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
from rlvla.envs.pictures import NATIVE, ImageFit
from rlvla.envs.registry import Suite, is_trusted, refuse_module, register_suite
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import ConfigError, MissingExtraError

PREFIX = "gym:"
CAMERA = "render"
OBSERVATION = "observation"  # camera name if the whole observation is an image
NUM_INIT_STATES = 10_000
STEPS = 200  # limit of environments without one
SUCCESS_KEYS = ("is_success", "success")
TERMINATED = "terminated"
_PACKAGES = ("gymnasium", "gymnasium_robotics")  # whose environments a record may name


@dataclass(frozen=True)
class GymOptions(SuiteOptions):
    """Options of the suites.

    Cameras are `render` and the images of the environment's observation; `list_tasks` rejects unknown ones.

    Attributes:
        gym_success: success signal: an entry of `info`, or "terminated"; None: `is_success` or `success` of `info`.
        gym_instruction: language instruction; None: derived from the name.
    """

    known_cameras: ClassVar[tuple[str, ...]] = (CAMERA,)
    has_more_cameras: ClassVar[bool] = True
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = (CAMERA,)
    gym_success: str | None = arg(
        None,
        "success signal: an entry of the environment's `info`, or `terminated` if episodes terminate only at success "
        "(default: `is_success` or `success`)",
        metavar="KEY",
    )
    gym_instruction: str | None = arg(
        None, "language instruction (default: derived from the environment's name)", metavar="TEXT"
    )


def _gymnasium(env_id: str) -> Any:
    """Import Gymnasium, and for an unknown environment register those of gymnasium-robotics."""
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
    """Create the environment of a suite; ConfigError if that fails."""
    env_id = suite.removeprefix(PREFIX)
    if env_id == "ENV_ID":
        text = "--task_suite_name gym:ENV_ID: replace ENV_ID by an environment, e.g. gym:FetchReach-v4"
        raise ConfigError.of("task_suite_name", "malformed", text)
    gymnasium = _gymnasium(env_id)
    if module := _untrusted_import(suite, gymnasium.registry):
        refuse_module(suite, module)
    os.environ.setdefault("MUJOCO_GL", "egl")  # off-screen; MuJoCo reads it on import
    try:
        return gymnasium.make(env_id, **options)
    except Exception as error:  # from the registry or the environment
        text = f"--task_suite_name {suite}: Gymnasium cannot make it ({type(error).__name__}: {error})"
        raise ConfigError.of("task_suite_name", "unknown_name", text) from error


def _untrusted_import(suite: str, registry: Mapping[str, Any]) -> str | None:
    """A module outside Gymnasium's packages that making an environment would import, if the user did not name it."""
    if is_trusted(suite):
        return None
    name = suite.removeprefix(PREFIX).rpartition(":")[2]
    specs = [spec for key, spec in registry.items() if key == name or key.startswith(f"{name}-v")]
    entry_points = [part.entry_point for spec in specs for part in (spec, *spec.additional_wrappers)]
    modules = [point.partition(":")[0] for point in entry_points if isinstance(point, str)]
    foreign = (m for m in modules if m.partition(".")[0] not in _PACKAGES and m not in sys.modules)
    return next(foreign, None)


@dataclass(frozen=True)
class _Facts:
    """Properties of an environment.

    Attributes:
        steps: step limit.
        action_dim, state_dim: dimensions of the action and of the numeric part of the observation.
        images: names of the images in the observation.
        draws: whether the render mode `rgb_array` is available.
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
    """Inspect an environment without rendering; ConfigError if its spaces are not supported."""
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
    """Flatten an observation: (name, array) with sorted keys; nested names are joined by dots."""
    if isinstance(observation, Mapping):
        items = [(str(key), observation[key]) for key in sorted(observation)]
    elif isinstance(observation, (tuple, list)):
        items = [(str(number), item) for number, item in enumerate(observation)]
    else:
        yield name or OBSERVATION, np.asarray(observation)
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else key)


def _state(leaves: Sequence[_Leaf]) -> np.ndarray:
    """Concatenate the numeric arrays of an observation, without images, to [P] float32."""
    vectors = [np.zeros(0, np.float32)]
    for _, values in leaves:
        if values.dtype.kind in "fiub" and not (values.dtype == np.uint8 and values.ndim >= 3):
            vectors.append(values.astype(np.float32).ravel())
    return np.concatenate(vectors)


def _images(leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """(camera, image) for each array [H, W, C] or [C, H, W] uint8 with 1 or 3 channels.

    Camera names have no slashes, which are not allowed in files of demonstrations.
    """
    return [
        (f"{OBSERVATION}.{name}" if name == CAMERA else re.sub(r"[/\\]", ".", name), values)
        for name, values in leaves
        if values.dtype == np.uint8 and values.ndim == 3 and {values.shape[0], values.shape[2]} & {1, 3}
    ]


def _image_names(suite: str, space: Any, leaves: Sequence[_Leaf]) -> tuple[str, ...]:
    """Cameras of an observation space with these leaves; ConfigError if names are ambiguous or images vary."""
    cameras = [camera for camera, _ in _images(leaves)]
    ambiguous = sorted({name for name in cameras if cameras.count(name) > 1})
    text = ""
    if _varies(space):
        text = "the number of arrays in its observations varies"
    elif ambiguous:
        text = f"several images of its observations map to camera {', '.join(ambiguous)}"
    if text:
        raise ConfigError.of("task_suite_name", "unavailable", f"--task_suite_name {suite}: {text} ({space})")
    return tuple(cameras)


def _varies(space: Any) -> bool:
    """Whether the structure of samples of a space varies."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return any(map(_varies, space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, (spaces.Sequence, spaces.Graph, *([spaces.OneOf] if hasattr(spaces, "OneOf") else [])))


def _in_color(image: np.ndarray) -> np.ndarray:
    """Convert an image from `_images` to [H, W, 3]."""
    if image.shape[2] not in (1, 3):
        image = np.moveaxis(image, 0, 2)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def list_tasks(suite: str, **kw: Any) -> list[TaskSpec]:
    """The single task of a suite; `kw` are the fields of `GymOptions`. Creates the environment without rendering."""
    options, facts = GymOptions(**kw), _facts(suite)
    available = (CAMERA, *facts.images)
    if unknown := [name for name in options.cameras if name not in available]:
        text = f"unknown camera(s) {', '.join(unknown)}; known cameras: {', '.join(available)}"
        raise ConfigError.of("cameras", "unknown_name", text)
    name = suite.removeprefix(PREFIX).rpartition(":")[2]
    title = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", re.sub(r"-v\d+$", "", name).rpartition("/")[2])
    return [
        TaskSpec(
            suite=suite,
            task_id=0,
            name=name,
            instruction=options.gym_instruction or title.replace("_", " ").replace("-", " ").lower(),
            max_steps=options.max_steps or facts.steps,
            num_init_states=NUM_INIT_STATES,
            action_dim=facts.action_dim,
            proprio_dim=facts.state_dim,
            control_freq=facts.frequency,
            propositions=("success",),
            machine="F(success)",
            dense_reward=True,  # native rewards, not an indicator of success
        )
    ]


class GymEnv:
    """One Gymnasium environment.

    Actions [D] in [-1, 1] are scaled to the bounds of the action space. Proprio is the observation without images;
    images are rendered (`render`) or taken from the observation. The initial state id is the seed of `reset`. Rewards
    are native. `terminated` and `truncated` are those of the environment; both at once count as terminated.

    Privileged state: `observation` [P].

    Raises:
        ConfigError: it cannot be created, or does not render.
    """

    def __init__(self, spec: TaskSpec, options: GymOptions):
        self.task, self.options = spec, options
        drawing = {"render_mode": "rgb_array"} if CAMERA in options.cameras and _facts(spec.suite).draws else {}
        self._env = _make(spec.suite, max_episode_steps=spec.max_steps + 1, **drawing)
        space = self._env.action_space
        self._middle, self._half = (space.high + space.low) / 2.0, (space.high - space.low) / 2.0
        self._runner = ChunkRunner(spec.max_steps, options.success_hold_steps or 1, plays_on=options.plays_on)
        self._state: np.ndarray | None = None  # [P]
        self._has_drawn = False
        self._observed_cameras = [name for name in options.cameras if name != CAMERA]
        self._images: dict[str, np.ndarray] = {}  # of the observed cameras
        self._reward, self._ended = 0.0, (False, False)

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        if self._observed_cameras:  # reset and step may render
            self._take_context()
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
        return self._runner.play(
            actions, self._advance, self._observe, frame, reward=lambda: self._reward, ended=lambda: self._ended
        )

    def privileged_state(self) -> dict[str, np.ndarray]:
        """`observation` [P], for scripted experts."""
        self._require_open()
        if self._state is None:
            raise RuntimeError("no episode was started: call reset first")
        return {"observation": self._state.copy()}

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
        scaled = np.clip(self._middle + self._half * action, space.low, space.high).astype(space.dtype)
        if self._observed_cameras:
            self._take_context()
        observation, reward, terminated, truncated, info = self._env.step(scaled)
        self._keep(observation)
        success = self._success(bool(terminated), info)
        self._reward, self._ended = float(reward), (bool(terminated), bool(truncated))
        return success, frozenset({"success"} if success else ())

    def _success(self, terminated: bool, info: Mapping[str, Any]) -> bool:
        key = self.options.gym_success
        if key == TERMINATED:
            return terminated
        for name in (key,) if key else SUCCESS_KEYS:
            if name in info:
                return bool(info[name])
        text = (
            f"{self.task.suite} does not report success: its info has {', '.join(map(str, info)) or 'nothing'} and no "
            f"{key or ' or '.join(SUCCESS_KEYS)}; select another entry with --gym_success, or `{TERMINATED}` if an "
            "episode terminates only at success"
        )
        raise ConfigError.of("gym_success", "mismatch", text)

    def _observe(self) -> Observation:
        size, images = self.options.image_size, [self._picture(name) for name in self.options.cameras]
        if len({image.shape for image in images}) > 1:
            text = f"--image_fit {NATIVE}: the images of {', '.join(self.options.cameras)} have different shapes"
            raise ConfigError.of("image_fit", "mismatch", f"{text}; take crop, pad or stretch")
        stacked = np.stack(images) if images else np.empty((0, size, size, 3), np.uint8)
        assert self._state is not None
        return Observation(stacked, self._state.copy() if self.options.use_proprio else None, self.task.instruction)

    def _keep(self, observation: Any) -> None:
        """Copy the used arrays of an observation, which the environment may overwrite."""
        leaves = list(_leaves(observation))
        self._state = _state(leaves)
        images = dict(_images(leaves)) if self._observed_cameras else {}
        if missing := [name for name in self._observed_cameras if name not in images]:
            text = f"observations of {self.task.suite} lack the uint8 images that its space has: {', '.join(missing)}"
            raise ConfigError.of("cameras", "unavailable", text)
        self._images = {name: _in_color(images[name]).copy() for name in self._observed_cameras}

    def _take_context(self) -> None:
        """Make the GL context of Gymnasium's MuJoCo viewers current; they render into any current context otherwise."""
        viewers = getattr(getattr(self._env.unwrapped, "mujoco_renderer", None), "_viewers", {})
        for viewer in viewers.values():
            viewer.make_context_current()
        forget_current()

    def _picture(self, camera: str) -> np.ndarray:
        """Image [H, W, 3] uint8, a square of `image_size` pixels unless the camera's shape is kept."""
        size, fit = self.options.image_size, self.options.image_fit
        pixels = self._drawn() if camera == CAMERA else self._images[camera]
        if pixels.shape[:2] == (size, size) or fit == NATIVE:
            return pixels.copy()
        if fit is not None:
            return ImageFit(size, fit)(pixels)
        import cv2

        return np.asarray(cv2.resize(pixels, (size, size), interpolation=cv2.INTER_AREA), np.uint8)

    def _drawn(self) -> np.ndarray:
        """Rendered image [H, W, 3] uint8."""
        self._take_context()
        try:
            drawn = self._env.render()
        except Exception as error:  # from the environment
            if self._has_drawn:
                raise  # a temporary failure
            raise self._draws_nothing(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        pixels = np.asarray(drawn)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            result = "nothing" if drawn is None else f"{pixels.dtype} {list(pixels.shape)}"
            raise self._draws_nothing(f"{result}, not an image [H, W, 3] uint8")
        self._has_drawn = True
        return pixels

    def _draws_nothing(self, instead: str) -> ConfigError:
        images = _facts(self.task.suite).images
        hint = f"; select images of its observation with --cameras: {', '.join(images)}" if images else ""
        text = f"{self.task.suite} does not render with render_mode='rgb_array' ({instead}){hint}"
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
