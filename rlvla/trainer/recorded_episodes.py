"""Recorded episodes played again: the actions are known, so everything that was not kept can be seen once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlvla.envs import make_env
from rlvla.envs.base import ChunkResult, Env, Observation, TaskSpec
from rlvla.envs.config import EnvConfig
from rlvla.trainer.demonstrations import UNKNOWN_STATE, Demonstrations
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import progress_bar

# Mean difference of two pictures in grey levels that another OpenGL driver may make; another scene makes far more.
_SAME_PICTURE = 2.0


@dataclass
class PlayedEpisode:
    """A recorded episode, step by step.

    Attributes:
        index: its number in the data set.
        task: what was played.
        init_state_id, seed: where it started.
        first: the first observation.
        results: of each step, T of them.
    """

    index: int
    task: TaskSpec
    init_state_id: int
    seed: int
    first: Observation
    results: list[ChunkResult]

    @property
    def observations(self) -> list[Observation]:
        """Before the first and after each step, T + 1."""
        return [self.first, *(result.observation for result in self.results)]


def recorded_env(demos: Demonstrations) -> EnvConfig:
    """The environment the episodes were recorded in."""
    return EnvConfig().completed(demos.env_args)


def replay_problem(where: str, demos: Demonstrations) -> str | None:
    """Why these episodes cannot be played again at all; None where they can.

    Demonstrations made elsewhere (LIBERO's files, most LeRobot folders) have actions and pictures only.
    """
    if demos.seeds is None or not demos.init_states or UNKNOWN_STATE in demos.init_states:
        return (
            f"{where} does not tell from which initial state and seed each episode started, so that none can be played "
            "again; those of cli/collect_demos.py and --dump_rollouts can"
        )
    return None


def play_again(where: str, demos: Demonstrations, episodes: Sequence[int]) -> Iterator[PlayedEpisode]:
    """Play recorded episodes again, one action per call, so that every step is rendered.

    Args:
        where: the file, for messages.
        demos: the data set.
        episodes: their numbers.

    Raises:
        ConfigError: it is not recorded where an episode started, or one does not go as it was recorded or ends earlier
            (another version of the simulator).
    """
    config = recorded_env(demos)
    problem = replay_problem(where, demos)
    if problem:
        raise ConfigError(problem)
    assert demos.seeds is not None
    env: Env | None = None
    try:
        for index in episodes:
            task_id, state = demos.init_states[index]
            if env is None or env.task.task_id != task_id:
                if env is not None:
                    env.close()
                env = make_env(config.suite, task_id, **config.env_kwargs())
            first, results = _play(env, demos.actions[index], state, demos.seeds[index])
            if len(results) != len(demos.actions[index]):
                raise ConfigError(
                    f"{where}: demo_{index} ends after {len(results)} of its {len(demos.actions[index])} recorded "
                    "steps; record it anew with this version of the simulator"
                )
            if results[-1].success_at_end != demos.success[index]:
                raise ConfigError(
                    f"{where}: demo_{index} does not go as it was recorded (success {demos.success[index]}); record it "
                    "anew with this version of the simulator"
                )
            yield PlayedEpisode(index, env.task, state, demos.seeds[index], first, results)
    finally:
        if env is not None:
            env.close()


def _play(env: Env, actions: np.ndarray, state: int, seed: int) -> tuple[Observation, list[ChunkResult]]:
    first = env.reset(state, seed)
    results: list[ChunkResult] = []
    for action in actions:
        results.append(env.step_chunk(action[None]))
        if results[-1].terminated or results[-1].truncated:
            break
    return first, results


def with_every_step(where: str, demos: Demonstrations) -> Demonstrations:
    """Dumped rollouts with the observation before each step, not before each decision only.

    Args:
        where: the file, for messages.
        demos: with `decision_steps`; others already have every step.

    Raises:
        ConfigError: as `play_again`, or what is seen at a decision is not what was recorded there.
    """
    if demos.decision_steps is None:
        return demos
    images, proprio = [], []
    with progress_bar(len(demos.actions), "render every step") as bar:
        for played in play_again(where, demos, range(len(demos.actions))):
            seen = played.observations[:-1]
            images.append(np.stack([observation.images for observation in seen]))
            proprio.append([observation.proprio for observation in seen])
            _check_decisions(where, demos, played.index, images[-1])
            bar.update(1)
    return replace(
        demos,
        images=images,
        proprio=None if demos.proprio is None else [np.stack(values) for values in proprio],
        decision_steps=None,
        last_images=None,
        last_proprio=None,
    )


def _check_decisions(where: str, demos: Demonstrations, index: int, images: np.ndarray) -> None:
    assert demos.decision_steps is not None
    for recorded, step in zip(demos.images[index], demos.decision_steps[index]):
        distance = np.abs(recorded.astype(np.int16) - images[step]).mean()
        if distance > _SAME_PICTURE:
            raise ConfigError(
                f"{where}: demo_{index} looks different at step {step} than recorded (by {distance:.1f} grey levels); "
                "render with the version of the simulator and the options that it was recorded with"
            )
