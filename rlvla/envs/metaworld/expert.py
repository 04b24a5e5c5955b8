"""The scripted policies of the package `metaworld`."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any

import numpy as np

from rlvla.envs.experts.base import ExpertConfig, disturb, draw_offset

_ARM = slice(0, 3)
_HAND = slice(0, 3)  # of the observation


class MetaWorldExpert:
    """A scripted policy of the package.

    The package is imported at the first action, because experts are also created outside the simulator's interpreter
    (`--env_python`).

    Args:
        env_name: the package's name of the task.
        config: deviations from the best behavior. An offset shifts the hand position that the policy observes.
    """

    def __init__(self, env_name: str, config: ExpertConfig):
        self._env_name, self.config = env_name, config
        self.reset(np.random.default_rng(0))

    @cached_property
    def _policy(self) -> Any:
        from metaworld.policies import ENV_POLICY_MAP

        policies: dict[str, Any] = ENV_POLICY_MAP
        return policies[self._env_name]()

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode and draw its offset."""
        self._rng, self._offset = rng, draw_offset(self.config, rng)

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """One action [4] float32 in [-1, 1]: displacement, fingers."""
        observation = state["observation"].copy()
        observation[_HAND][:2] -= self._offset
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about actions beyond 1, which are clipped
            action = self._policy.get_action(observation)
        return disturb(np.clip(action, -1.0, 1.0), _ARM, self.config, self._rng)
