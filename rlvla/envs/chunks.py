"""Execution of action chunks, shared by all simulators: step until done, check success, observe at the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, SuccessTracker

# Range of the rewards of a simulator without its own, see `ChunkRunner.play`.
SUCCESS_REWARD = (0.0, 1.0)
# Executes an action [D]; returns the success predicate and the propositions that hold afterwards.
Advance = Callable[[np.ndarray], tuple[bool, frozenset[str]]]


class ChunkRunner:
    """Tracks steps and success of the running episode.

    Args:
        max_steps: steps after which an episode is truncated.
        hold_steps: consecutive successful steps after which it terminates.
        plays_on: play to the step limit in any case; the episode then terminates there if success holds at that step.
    """

    def __init__(self, max_steps: int, hold_steps: int, *, plays_on: bool = False):
        self._max_steps, self._plays_on = max_steps, plays_on
        self._tracker = SuccessTracker(hold_steps)
        self._steps_left = 0

    def begin(self) -> None:
        """Start an episode."""
        self._tracker.reset()
        self._steps_left = self._max_steps

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
            reward: native reward of the last step; by default 1 once success has lasted long enough.
            done: whether the rest of the chunk is left out although the episode goes on: a primitive has ended.
            ended: whether the simulator has terminated or truncated the episode. Where it terminates, success counts
                at once, however briefly it was held; otherwise the episode is truncated.
        """
        self.require_episode()
        rewards, successes = np.zeros(len(actions), dtype=np.float32), np.zeros(len(actions), dtype=bool)
        events: list[frozenset[str]] = []
        frames: list[np.ndarray] = []
        held = False
        for index, action in enumerate(actions):
            success, happened = advance(action)
            successes[index] = success
            self._steps_left -= 1
            lasted = self._tracker.update(bool(success))
            over, cut = (False, False) if ended is None else ended()
            if over or cut:
                self._steps_left = 0
            held = (lasted or (over and success)) and not (self._plays_on and self._steps_left)
            events.append(happened)
            rewards[index] = float(held) if reward is None else reward()
            if frame is not None:
                frames.append(frame())
            if held or self._steps_left == 0 or (done is not None and done()):
                break
        truncated = self._steps_left == 0 and not held
        if held:
            self._steps_left = 0
        return ChunkResult(
            observation=observe(),
            steps_executed=len(events),
            rewards=rewards,
            successes=successes,
            terminated=held,
            truncated=truncated,
            success_at_end=held,
            events=events,
            frames=np.stack(frames) if frame is not None else None,
        )
