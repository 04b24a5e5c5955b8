"""Complete episodes, of an expert or of given actions, with the data of a demonstration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import numpy as np

from rlvla.envs.base import Env, Observation
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
    init_state_id: int
    seed: int


def play_expert_episode(env: Env, expert: Expert, init_state_id: int, seed: int) -> ExpertEpisode:
    """Play until the episode ends, one action at a time, recording each observation.

    Episodes are deterministic given task, initial state, seed and expert configuration.
    """
    expert.reset(np.random.default_rng([_EXPERT_STREAM, init_state_id, seed]))
    return _record(env, lambda: expert.act(env.privileged_state()), init_state_id, seed)


def play_actions(env: Env, actions: np.ndarray, init_state_id: int, seed: int) -> ExpertEpisode:
    """The same of an episode whose actions [S, D] are known.

    Raises:
        RuntimeError: the episode does not end with the last of them.
    """
    rows = iter(actions)
    unlike = f"the actions were those of an episode of {len(actions)} steps, and now it"
    try:
        episode = _record(env, lambda: next(rows), init_state_id, seed)
    except StopIteration:
        raise RuntimeError(f"{unlike} goes on; the simulator does not repeat itself") from None
    if next(rows, None) is not None:
        raise RuntimeError(f"{unlike} ends after {len(episode['actions'])}; the simulator does not repeat itself")
    return episode


def _record(env: Env, act: Callable[[], np.ndarray], init_state_id: int, seed: int) -> ExpertEpisode:
    observation = env.reset(init_state_id, seed)
    instruction = observation.instruction
    seen: list[Observation] = []
    actions, rewards, successes = [], [], []
    while True:
        seen.append(observation)
        action = act()
        result = env.step_chunk(action[None])
        actions.append(action)
        rewards.append(result.rewards[0])
        successes.append(result.successes[0])
        observation = result.observation
        if result.terminated or result.truncated:
            break
    return ExpertEpisode(
        images=np.stack([o.images for o in seen]),
        proprio=None if seen[0].proprio is None else np.stack([o.proprio for o in seen if o.proprio is not None]),
        actions=np.stack(actions),
        rewards=np.array(rewards, dtype=np.float32),
        successes=np.array(successes, dtype=bool),
        success_once=bool(np.any(successes)),
        success_at_end=result.success_at_end,
        terminated=result.terminated,
        truncated=result.truncated,
        instruction=instruction,
        init_state_id=init_state_id,
        seed=seed,
    )
