"""Replaying recorded actions in the simulator, to render every step or to compare with the recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.pictures import TURNS
from rlvla.envs import make_env
from rlvla.envs.base import ChunkResult, Env, Observation, TaskSpec
from rlvla.envs.config import EnvConfig
from rlvla.utils.bars import progress_bar
from rlvla.utils.errors import ConfigError

# Mean difference of two images of the same scene in gray levels, at most. OpenGL drivers differ by less, different
# scenes by far more.
_SAME_PICTURE = 2.0


@dataclass
class PlayedEpisode:
    """A replayed episode, step by step.

    Attributes:
        index: its number in the dataset.
        task: the task that was played.
        init_state_id: the initial state it started from.
        seed: the seed of its reset.
        first: the observation after the reset.
        results: results of the T steps.
    """

    index: int
    task: TaskSpec
    init_state_id: int
    seed: int
    first: Observation
    results: list[ChunkResult]

    @property
    def observations(self) -> list[Observation]:
        """The T + 1 observations: after the reset and after each step."""
        return [self.first, *(result.observation for result in self.results)]


def recorded_env(demos: Demonstrations) -> EnvConfig:
    """The environment the episodes were recorded in."""
    return EnvConfig().completed(demos.env_args)


def replay_problem(where: str, demos: Demonstrations) -> str | None:
    """Reason why these episodes cannot be replayed, or None.

    Demonstrations from other sources (LIBERO's files, most LeRobot datasets) lack initial states and seeds.
    """
    if not demos.starts_recorded:
        return (
            f"{where} does not record the initial state and seed of each episode, without which none can be replayed; "
            "episodes of cli/collect_demos.py and --dump_rollouts can"
        )
    return None


def play_again(
    where: str, demos: Demonstrations, episodes: Sequence[int], *, strict: bool = True
) -> Iterator[PlayedEpisode]:
    """Replay recorded episodes, one action per call, so that every step is rendered.

    Args:
        where: the file, for messages.
        demos: the dataset.
        episodes: numbers of the episodes to replay.
        strict: refuse an episode that ends earlier or with another outcome than recorded (another version of the
            simulator).

    Raises:
        ConfigError: initial states or seeds are not recorded, the environment is not known, or see `strict`.
    """
    config = recorded_env(demos)
    problem = replay_problem(where, demos)
    if problem:
        raise ConfigError(problem)
    assert demos.seeds is not None
    config.tasks()  # ConfigError if there is no such environment
    env: Env | None = None
    try:
        for index in episodes:
            task_id, state = demos.init_states[index]
            if env is None or env.task.task_id != task_id:
                if env is not None:
                    env.close()
                env = make_env(config.suite, task_id, **config.env_kwargs())
            first, results = _play(env, demos.actions[index], state, demos.seeds[index])
            if strict and len(results) != len(demos.actions[index]):
                raise ConfigError(
                    f"{where}: demo_{index} ends after {len(results)} of its {len(demos.actions[index])} recorded "
                    "steps; record it again with this version of the simulator"
                )
            recorded = demos.outcome(index)
            if strict and recorded not in (None, results[-1].success_at_end):
                raise ConfigError(
                    f"{where}: demo_{index} does not end as recorded (success {recorded}); record it "
                    "again with this version of the simulator"
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
    """Dumped rollouts with an observation before each step instead of each decision, rendered by a replay.

    Args:
        where: the file, for messages.
        demos: the rollouts; returned as they are if they already have every step.

    Raises:
        ConfigError: see `play_again`; also if a rendered image differs from the one recorded at a decision.
    """
    if demos.decision_steps is None:
        return demos
    if demos.has_corrections:
        text = f"--render_steps: {where} holds corrections, and the steps of the policy would become training rows"
        raise ConfigError.of("render_steps", "mismatch", f"{text}; leave it out")
    images, proprio = [], []
    with progress_bar(len(demos.actions), "render every step") as bar:
        for played in play_again(where, demos, range(len(demos.actions))):
            observations = played.observations[:-1]
            images.append(np.stack([observation.images for observation in observations]))
            if demos.proprio is not None:
                proprio.append(np.stack([np.asarray(observation.proprio) for observation in observations]))
            for recorded, step in zip(demos.images[played.index], demos.decision_steps[played.index]):
                distance = np.abs(recorded.astype(np.int16) - images[-1][step]).mean()
                if distance > _SAME_PICTURE:
                    raise ConfigError(
                        f"{where}: demo_{played.index} looks different at step {step} than recorded (by {distance:.1f} "
                        "gray levels); render with the version of the simulator and the options of the recording"
                    )
            bar.update(1)
    return replace(
        demos,
        images=images,
        proprio=None if demos.proprio is None else proprio,
        decision_steps=None,
        last_images=None,
        last_proprio=None,
    )


@dataclass(frozen=True)
class Repetition:
    """Result of executing the actions of a recorded episode again.

    Attributes:
        index: its number in the dataset.
        recorded, replayed: success in the recording (None: not recorded) and in the replay.
        distance: mean difference of the first pictures in gray levels.
        turned: orientation of the recorded pictures against the environment's (`TURNS`), or None.
    """

    index: int
    recorded: bool | None
    replayed: bool
    distance: float
    turned: str | None

    @property
    def looks_alike(self) -> bool:
        """Whether the environment shows the recorded scene."""
        return self.distance <= _SAME_PICTURE


def repetitions(where: str, demos: Demonstrations, episodes: Sequence[int]) -> Iterator[Repetition]:
    """Replay episodes and compare them with the recording, first pictures included; arguments as in `play_again`."""
    for played in play_again(where, demos, episodes, strict=False):
        recorded = demos.images[played.index][0].astype(np.float32)
        first = 0 if demos.decision_steps is None else demos.decision_steps[played.index][0]
        replayed = played.observations[min(first, len(played.results))].images.astype(np.float32)
        distance = float(np.abs(recorded - replayed).mean())
        turns = {how: float(np.abs(turn(recorded) - replayed).mean()) for how, turn in TURNS.items()}
        how = min(turns, key=lambda name: turns[name])
        turned = how if distance > _SAME_PICTURE >= turns[how] else None
        success = played.results[-1].success_at_end
        yield Repetition(played.index, demos.outcome(played.index), success, distance, turned)
