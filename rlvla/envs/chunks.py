"""Execution of action chunks, shared by all simulators: step until done, check success, observe at the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlvla.envs.base import ChunkResult, Observation

# Reward range of a simulator without a native reward, see `ChunkRunner.play`.
SUCCESS_REWARD = (0.0, 1.0)
# Executes an action [D]; returns the success predicate and the propositions that hold afterwards.
Advance = Callable[[np.ndarray], tuple[bool, frozenset[str]]]


class ChunkRunner:
    """Steps and consecutive successes of the running episode.

    Args:
        max_steps: steps after which an episode is truncated.
        hold_steps: consecutive successful steps after which it terminates.
        plays_on: always play to the step limit; the episode then terminates there if success holds at that step.
    """

    def __init__(self, max_steps: int, hold_steps: int, *, plays_on: bool = False):
        self._max_steps, self._hold_steps, self._plays_on = max_steps, hold_steps, plays_on
        self._steps_left = self._streak = 0

    def begin(self) -> None:
        """Start an episode."""
        self._steps_left, self._streak = self._max_steps, 0

    def end(self) -> None:
        """Mark that no episode is running."""
        self._steps_left = 0

    def require_episode(self) -> None:
        """RuntimeError unless an episode is running."""
        if self._steps_left == 0:
            raise RuntimeError("step_chunk was called before reset or after the end of the episode")

    def play(
        self,
        actions: np.ndarray,
        advance: Advance,
        observe: Callable[[], Observation],
        frame: Callable[[], np.ndarray] | None = None,
        reward: Callable[[], float] | None = None,
        done: Callable[[], bool] | None = None,
        ended: Callable[[], tuple[bool, bool]] | None = None,
    ) -> ChunkResult:
        """Execute validated actions [A, D] until the end of the chunk or episode.

        Args:
            actions: [A, D] action chunk.
            advance: executes one action.
            observe: called once, after the last executed action.
            frame: renders [H, W, 3] uint8 after each step; None records no frames.
            reward: native reward of the last step; by default 1 at the step that terminates with success.
            done: whether to skip the rest of the chunk although the episode continues, because a primitive has ended.
            ended: whether the simulator has (terminated, truncated) the episode. If it terminates at a successful step,
                success counts without being held; otherwise the episode terminates with failure.
        """
        self.require_episode()
        rewards, successes = np.zeros(len(actions), dtype=np.float32), np.zeros(len(actions), dtype=bool)
        events: list[frozenset[str]] = []
        frames: list[np.ndarray] = []
        held = terminated = False
        for index, action in enumerate(actions):
            success, happened = advance(action)
            successes[index] = success
            self._steps_left -= 1
            self._streak = self._streak + 1 if success else 0
            over, cut = (False, False) if ended is None else ended()
            if over or cut:
                self._steps_left = 0
            lasted = self._streak >= self._hold_steps or (over and success)
            held = lasted and not (self._plays_on and self._steps_left)
            terminated = held or over
            events.append(happened)
            rewards[index] = float(held) if reward is None else reward()
            if frame is not None:
                frames.append(frame())
            if held or self._steps_left == 0 or (done is not None and done()):
                break
        truncated = self._steps_left == 0 and not terminated
        if held:
            self._steps_left = 0
        return ChunkResult(
            observation=observe(),
            steps_executed=len(events),
            rewards=rewards,
            successes=successes,
            terminated=terminated,
            truncated=truncated,
            success_at_end=held,
            events=events,
            frames=np.stack(frames) if frame is not None else None,
        )
