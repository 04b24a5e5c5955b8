"""Hindsight: episodes stored again as if a state that they reached had been the goal (Andrychowicz et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.experience import Sample
from rlvla.replay.schema import Episode
from rlvla.rewards.base import scores_of_progress
from rlvla.rewards.machine_source import MachineSource
from rlvla.rewards.reward_machine import SUCCESS_EVENT
from rlvla.trainer.off_policy.config import ReplayConfig

SUCCESS, MACHINE = "success", "rm"  # the reward sources that pay for the goal
GOAL = "goal"  # column of the buffer: 0 for the task itself, i for state i of its reward machine


class Hindsight:
    """Relabels episodes with an intermediate state of the reward machine as the goal.

    A relabelled copy terminates with the environment step that reaches its goal first. There `success` pays, and the
    machine pays as if the goal were its only accepting state (`MachineGraph.towards`); other rewards are kept.

    Args:
        config: number of copies, choice of goals.
        machines: the reward machines.
        tasks: tasks of the run.
        success_reward: reward of the source `success`.
    """

    def __init__(self, config: ReplayConfig, machines: MachineSource, tasks: Sequence[TaskSpec], success_reward: float):
        self._config, self._machines, self._success_reward = config, machines, success_reward
        self._tasks = {(task.suite, task.task_id): task for task in tasks}

    def copies(
        self, sample: Sample, episode: Episode, *, weights: Mapping[str, float], scale: float, rng: np.random.Generator
    ) -> list[Episode]:
        """The copies of an episode, `her_ratio` on average; none if it reached no goal.

        Args:
            sample: the episode, with the events of each step.
            episode: the episode in the buffer's format.
            weights: weights of the reward sources.
            scale: factor on rewards.
            rng: draws number, goals and first decisions.
        """
        count = int(self._config.her_ratio) + (rng.random() < self._config.her_ratio % 1)
        reached = self.reached(sample)
        if not reached:
            return []
        copies, ends = [], np.cumsum(np.asarray(episode.steps))
        states, decisions = list(reached), np.searchsorted(ends, list(reached.values()), side="right")
        for _ in range(count):
            index, first = draw_goal(self._config.her_goal, decisions, rng)
            copies.append(self._copy(sample, episode, states[index], first, weights, scale))
        return copies

    def reached(self, sample: Sample) -> dict[str, int]:
        """State that can be a goal -> environment step that first reached it, in this order.

        Empty for `her_goal` final if the machine accepts the episode.
        """
        task = self._tasks[sample.suite, sample.task_id]
        machine, graph, steps = self._machines.machine(task), self._machines.graph(task), dict[str, int]()
        for step, events in enumerate(_events(sample)):
            machine.step(events)
            for state in machine.entered:
                steps.setdefault(state, step)
            if machine.is_terminal:
                break
        if self._config.her_goal == "final" and machine.state in graph.success:
            return {}
        start = graph.states[0]
        return {
            state: step
            for state, step in steps.items()
            if state in graph.stages and np.isfinite(self._machines.graph(task, state).distances[start])
        }

    def _copy(
        self, sample: Sample, episode: Episode, goal: str, first: int, weights: Mapping[str, float], scale: float
    ) -> Episode:
        """The decisions from `first` on, with this goal."""
        task = self._tasks[sample.suite, sample.task_id]
        machine, steps = self._machines.machine(task, goal), np.asarray(episode.steps)
        kept = [grid.numpy() for name, grid in sample.reward_components.items() if name not in (SUCCESS, MACHINE)]
        rewards = sum(kept, np.zeros(sample.rewards.shape, np.float32))
        row = column = 0
        progress = [(0, machine.progress)]
        for step, events in enumerate(_events(sample), 1):
            reward, _ = machine.step(events)
            rewards[row, column] += np.float32(weights.get(MACHINE, 0.0) * reward)
            if machine.is_terminal or column + 1 == steps[row]:
                progress.append((step, machine.progress))
            if machine.is_terminal:
                break
            row, column = (row, column + 1) if column + 1 < steps[row] else (row + 1, 0)
        rewards[row, column] += np.float32(weights.get(SUCCESS, 0.0) * self._success_reward)
        scores = np.array([episode.action_score, episode.progress], dtype=np.float64)
        if self._config.replay_score_source == MACHINE:
            scores = np.array(scores_of_progress(progress)).T[1:]
        kept_rows = slice(first, row + 1)
        kept_steps = steps[kept_rows].copy()
        kept_steps[-1] = column + 1
        columns: dict[str, Any] = {}
        for name, values in episode.columns.items():
            after = len(np.asarray(values)) - len(steps)  # 1 for observations: the one after the last decision
            columns[name] = np.asarray(values)[first : row + 1 + after]
        columns[GOAL] = np.full_like(columns[GOAL], self._machines.graph(task).states.index(goal))
        judged = episode.progress is not None
        return replace(
            episode,
            columns=columns,
            rewards=rewards[kept_rows] * np.float32(scale),
            steps=kept_steps,
            terminated=True,
            truncated=False,
            action_score=scores[0][kept_rows] if judged else None,
            progress=scores[1][kept_rows] if judged else None,
        )


def draw_goal(rule: str, decisions: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Draw the goal of a copy and its first decision.

    Args:
        rule: "final": the goal reached last; "episode": any; "future": any that is reached in or after a random
            decision, with which the copy begins.
        decisions: [n] decision that reaches each goal, ascending.
        rng: draws both.

    Returns:
        Index of the goal, index of the first decision.
    """
    if rule == "final":
        return len(decisions) - 1, 0
    first = int(rng.integers(decisions[-1] + 1)) if rule == "future" else 0
    earliest = int(np.searchsorted(decisions, first))
    return int(rng.integers(earliest, len(decisions))), first


def _events(sample: Sample) -> list[frozenset[str]]:
    """Events of each executed step, as a reward machine reads them."""
    assert sample.step_events is not None
    return [events | {SUCCESS_EVENT} if success else events for events, success in sample.step_events]
