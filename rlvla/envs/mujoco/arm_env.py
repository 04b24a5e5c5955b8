"""Base class for single-arm MuJoCo environments: chunks, images, observations, closing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_chunk
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.options import SuiteOptions
from rlvla.envs.perturbations import PerturbedOptions, Surface, levels

if TYPE_CHECKING:
    from rlvla.envs.mujoco.perturbation import Perturbation


class MujocoArmEnv:
    """Base of `RobosuiteEnv`, `LiberoEnv` and `MetaWorldEnv`.

    Subclasses implement `reset`, `_advance`, `_proprio` and `privileged_state`.

    Args:
        task: the task, including the step limit.
        options: validated options; without cameras, nothing is rendered and no GL is needed.
        simulator: object with MuJoCo's `model` and `data`.
        cameras: camera name -> MuJoCo's name.
        hold_steps: consecutive successful steps that end an episode.
        perturbed: if the suite can be perturbed: surface for distractors, and paraphrases of the instruction.
        drawing: options of `Renderer`.

    Raises:
        ConfigError: no working GL.
    """

    def __init__(
        self,
        task: TaskSpec,
        options: SuiteOptions,
        simulator: Any,
        cameras: Mapping[str, str],
        hold_steps: int,
        perturbed: tuple[Surface, Sequence[str]] | None = None,
        **drawing: Any,
    ):
        from rlvla.envs.mujoco.rendering import Renderer  # imports mujoco

        self.task, self.options = task, options
        self._instruction = task.instruction
        self._perturbation: Perturbation | None = None
        self._sim = simulator
        self._cameras = [simulator.model.camera(cameras[name]).id for name in options.cameras]
        self._renderer: Renderer | None = None
        if self._cameras:
            self._renderer = Renderer(simulator.model, options.image_size, options.render_quality, **drawing)
        self._reward: Callable[[], float] | None = None  # native reward of the last step
        self._runner = ChunkRunner(task.max_steps, hold_steps, plays_on=options.plays_on)
        if perturbed is not None and isinstance(options, PerturbedOptions) and options.perturb:
            self._perturb(levels(options.perturb), *perturbed)

    def _perturb(self, levels: Mapping[str, float], surface: Surface, paraphrases: Sequence[str]) -> None:
        from rlvla.envs.mujoco.perturbation import Perturbation

        self._perturbation = Perturbation(self._sim.model, levels, self._cameras, surface, self.task.name)
        if self._renderer is not None:
            self._renderer.decorate = self._perturbation.decorate
        if "instruction" in levels:
            self._instruction = paraphrases[int(levels["instruction"]) - 1]

    def _begin(self, init_state_id: int) -> Observation:
        """Start the episode after the initial state is set; returns the first observation."""
        self._runner.begin()
        if self._perturbation is not None:
            self._perturbation.begin(self._sim.data, init_state_id)
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] until done; see `Env.step_chunk`."""
        self._require_open()
        actions = check_chunk(actions, self.task)
        self._runner.require_episode()
        if record_frames and not self._cameras:
            raise ValueError("frames cannot be recorded: the environment was made without cameras")
        return self._play(actions, (lambda: self._images(self._cameras[:1])[0]) if record_frames else None)

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = self._sim = None

    def _require_open(self) -> None:
        if self._sim is None:
            raise RuntimeError("the environment has been closed")

    def _play(self, actions: np.ndarray, frame: Callable[[], np.ndarray] | None) -> ChunkResult:
        """Execute validated actions [A, D]; `frame` renders a frame of a video."""
        return self._runner.play(actions, self._advance, self._observe, frame, reward=self._reward)

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        """Execute an action [D]; returns the success predicate and the propositions that hold afterwards."""
        raise NotImplementedError

    def _proprio(self) -> np.ndarray:
        """The proprioceptive vector [P] float32."""
        raise NotImplementedError

    def _images(self, cameras: list[int]) -> np.ndarray:
        """Images [N, H, W, 3] uint8 of the cameras with these ids, flipped vertically if the task's images are."""
        if self._renderer is None:  # created without cameras
            return np.empty((0, self.options.image_size, self.options.image_size, 3), dtype=np.uint8)
        images = self._renderer.render(self._sim.data, cameras)
        return np.ascontiguousarray(images[:, ::-1]) if self.task.images_flipped_vertically else images

    def _observe(self) -> Observation:
        proprio = self._proprio() if self.options.use_proprio else None
        return Observation(self._images(self._cameras), proprio, self._instruction)
