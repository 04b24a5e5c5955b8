"""Recording of complete episodes, from an expert or from given actions, as demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypedDict

import numpy as np

from rlvla.envs.base import ChunkResult, Env, Observation
from rlvla.envs.experts.base import Expert

# Separates the expert's random stream from the simulator's, which uses the same seed.
_EXPERT_STREAM = 9176


class ExpertEpisode(TypedDict):
    """An episode of S environment steps.

    `images` and `proprio` at an index are the observation in which `actions` at that index was taken.
    """

    images: np.ndarray  # [S, N, H, W, 3] uint8, before each action
    proprio: np.ndarray | None  # [S, P] float32; None if the environment provides none
    actions: np.ndarray  # [S, D] float32 in [-1, 1], as executed
    rewards: np.ndarray  # [S] float32
    successes: np.ndarray  # [S] bool, success predicate after each action
    success_once: bool
    success_at_end: bool
    terminated: bool
    truncated: bool
    instruction: str
    events: list[list[str]]  # propositions that hold after each action, sorted; [] if the environment has none
    init_state_id: int
    seed: int


def play_expert_episode(
    env: Env, expert: Expert, init_state_id: int, seed: int, prefix: np.ndarray | None = None
) -> ExpertEpisode:
    """Record an episode of an expert, one action at a time.

    Episodes are deterministic given task, initial state, seed, expert configuration and prefix.

    Args:
        env: the environment.
        expert: the expert.
        init_state_id: the initial state.
        seed: of the environment's reset and of the expert's errors.
        prefix: actions [S, D] of another player, after which the expert takes over; the episode may end earlier.
    """
    expert.reset(np.random.default_rng([_EXPERT_STREAM, init_state_id, seed]))
    rows = iter(() if prefix is None else prefix)

    def act() -> np.ndarray:
        row = next(rows, None)
        return expert.act(env.privileged_state()) if row is None else row

    return _record(env, act, init_state_id, seed)


def step_expert(env: Env, expert: Expert, length: int) -> ChunkResult:
    """Execute at most `length` actions of an expert, one at a time, as a chunk; `step_actions` are its actions."""
    actions: list[np.ndarray] = []
    results: list[ChunkResult] = []
    while len(results) < length and not (results and (results[-1].terminated or results[-1].truncated)):
        actions.append(expert.act(env.privileged_state()))
        results.append(env.step_chunk(actions[-1][None]))

    def padded(values: Iterable[np.ndarray]) -> np.ndarray:
        executed = np.concatenate(list(values))
        return np.pad(executed, (0, length - len(executed)))

    return replace(
        results[-1],
        steps_executed=len(results),
        rewards=padded(result.rewards for result in results),
        successes=padded(result.successes for result in results),
        events=[events for result in results for events in result.events],
        components={name: padded(result.components[name] for result in results) for name in results[-1].components},
        step_actions=np.stack(actions),
    )


def play_actions(env: Env, actions: np.ndarray, init_state_id: int, seed: int) -> ExpertEpisode:
    """Record an episode with given actions [S, D].

    Raises:
        RuntimeError: the episode does not end with the last action.
    """
    rows = iter(actions)
    expected = f"the recorded episode has {len(actions)} steps, but its replay"
    try:
        episode = _record(env, lambda: next(rows), init_state_id, seed)
    except StopIteration:
        raise RuntimeError(f"{expected} continues; the simulator is not deterministic") from None
    if next(rows, None) is not None:
        raise RuntimeError(f"{expected} ends after {len(episode['actions'])}; the simulator is not deterministic")
    return episode


class EpisodeRecorder:
    """Collects the steps of an episode.

    Args:
        observation: the observation after the reset.
        init_state_id: the initial state.
        seed: of the reset.

    Attributes:
        interventions: for each step, whether a person or an expert acted instead of a policy.
    """

    def __init__(self, observation: Observation, init_state_id: int, seed: int):
        self._observations = [observation]
        self._state = init_state_id, seed
        self._actions: list[np.ndarray] = []
        self._results: list[ChunkResult] = []
        self.interventions: list[bool] = []

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._actions)

    def add(self, action: np.ndarray, result: ChunkResult, *, intervention: bool = False) -> None:
        """Add an executed action [D] and its result, that of a chunk of one action."""
        self.interventions.append(intervention)
        self._actions.append(action)
        self._results.append(result)
        self._observations.append(result.observation)

    @property
    def success_at_end(self) -> bool:
        """Whether the episode ended in success with its latest step."""
        return self._results[-1].success_at_end

    def episode(self) -> ExpertEpisode:
        """The episode so far, of at least one step."""
        observations, last = self._observations[:-1], self._results[-1]
        proprio = [o.proprio for o in observations if o.proprio is not None]
        successes = np.array([result.successes[0] for result in self._results], dtype=bool)
        init_state_id, seed = self._state
        return ExpertEpisode(
            images=np.stack([o.images for o in observations]),
            proprio=np.stack(proprio) if proprio else None,
            actions=np.stack(self._actions),
            rewards=np.array([result.rewards[0] for result in self._results], dtype=np.float32),
            successes=successes,
            success_once=bool(successes.any()),
            success_at_end=last.success_at_end,
            terminated=last.terminated,
            truncated=last.truncated,
            instruction=observations[0].instruction,
            events=[sorted(names) for result in self._results for names in result.events],
            init_state_id=init_state_id,
            seed=seed,
        )


def _record(env: Env, act: Callable[[], np.ndarray], init_state_id: int, seed: int) -> ExpertEpisode:
    recorder = EpisodeRecorder(env.reset(init_state_id, seed), init_state_id, seed)
    while True:
        action = act()
        result = env.step_chunk(action[None])
        recorder.add(action, result)
        if result.terminated or result.truncated:
            return recorder.episode()
