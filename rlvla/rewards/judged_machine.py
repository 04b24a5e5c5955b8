"""Reward source `rm`, with propositions of the simulator or of a vision-language model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlvla.rewards.base import EpisodeReward, EpisodeStart, StepInfo, register_reward
from rlvla.rewards.machine_source import MachineReward, MachineSource
from rlvla.rewards.reward_machine import SUCCESS_EVENT, RewardMachine
from rlvla.rewards.vlm.propositions import EpisodePropositions, VLMPropositions
from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlvla.envs.base import ChunkResult, Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig


@register_reward("rm", reads_images=False, scores_decisions=True)
def machine_source(config: RewardConfig) -> MachineSource:
    """The source of `--reward rm`."""
    if config.rm_propositions == "vlm":
        return JudgedMachineSource(config)
    return MachineSource(config)


class JudgedMachineSource(MachineSource):
    """Reward machines that follow the answers of a vision-language model.

    Attributes:
        server: the VLM server, shared with the other sources of a plan.
    """

    needs_events = False

    def __init__(self, config: RewardConfig):
        problems: list[Problem] = []
        try:
            super().__init__(config)
        except ConfigError as error:
            problems += error.problems
        if config.rm_state_input != "none":
            text = (
                f"--rm_state_input {config.rm_state_input} tells the policy the machine's state, which the simulator's "
                "propositions determine; leave it out with --rm_propositions vlm"
            )
            problems.append(Problem("rm_state_input", "contradiction", text))
        try:
            self._propositions = VLMPropositions(config)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

    @property
    def server(self) -> Any:
        """The VLM server."""
        return self._propositions.server

    @server.setter
    def server(self, server: Any) -> None:
        self._propositions.server = server

    def ends_episodes(self, tasks: Sequence[TaskSpec]) -> bool:
        """Whether a machine of these tasks can end an episode early by failing."""
        return self._config.rm_propositions_wait and super().ends_episodes(tasks)

    def _available_propositions(self, task: TaskSpec) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*task.propositions, *self._propositions.sentences)))

    def create(self, task: TaskSpec, episode: EpisodeStart) -> Any:
        """Create the machine of one episode (a `JudgedMachineReward`); its first frame is judged at once."""
        if episode.observation is None:
            raise ValueError("propositions that a VLM judges need the episode's first observation")
        graph, config = self.graph(task), self._config
        names = [name for name in graph.propositions if name != SUCCESS_EVENT]
        machine = MachineReward(RewardMachine(graph, self.settings(task)), self.truncation_ends)
        judged = self._propositions.begin(task, episode.observation, names)
        return JudgedMachineReward(machine, judged, config.rm_propositions_every, wait=config.rm_propositions_wait)


class JudgedMachineReward(EpisodeReward):
    """A machine during one episode, driven by answers of a vision-language model.

    Between two judged frames, and where a question is not answered, the earlier answers hold.

    Args:
        machine: a machine in its initial state.
        propositions: asks the questions.
        every: decisions between judged frames.
        wait: advance the machine step by step; otherwise when the episode is over.
    """

    def __init__(self, machine: MachineReward, propositions: EpisodePropositions, every: int, *, wait: bool):
        self._machine, self._propositions, self._every, self._wait = machine, propositions, every, wait
        self._decisions = 0
        self._queried = False
        self._last: Observation | None = None
        self._pending: list[tuple[int | None, StepInfo]] = []  # number of the frame after a step, if it was judged

    @property
    def states(self) -> list[str]:
        """States of the machine so far."""
        return self._machine.states

    @property
    def progress(self) -> float | None:
        """1 - distance / largest distance; None while answers are not waited for."""
        return self._machine.progress if self._wait else None

    @property
    def failed(self) -> bool:
        """Whether the goal is known to be unreachable."""
        return self._wait and self._machine.failed

    def look(self, result: ChunkResult) -> Sequence[Future[Any]]:
        """Query the frame after a chunk if it is due; returns the answers that the machine needs next."""
        self._decisions += 1
        self._last, self._queried = result.observation, False
        if self._decisions % self._every == 0 or result.terminated or result.truncated:
            self._query_last_frame()
        return self._propositions.unread if self._wait else []

    def query_final_frame(self, result: ChunkResult) -> Sequence[Future[Any]]:
        """Query the frame after a chunk with which a success detector ended the episode, unless already queried."""
        if not self._queried:
            self._query_last_frame()
        return self._propositions.unread if self._wait else []

    def _query_last_frame(self) -> None:
        assert self._last is not None
        self._propositions.ask(self._last)
        self._queried = True

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float | None:
        """The machine's reward for the step, or None while answers are not waited for."""
        judged = self._propositions.frames - 1 if observation is not None and self._queried else None
        if not self._wait:
            self._pending.append((judged, info))
            return None
        return self._advance(judged, info)

    def _advance(self, judged: int | None, info: StepInfo) -> float:
        return self._machine.step(None, self._propositions.holding(judged), info)

    def end(self, *, terminated: bool, truncated: bool) -> None:
        """Ask about the last frame if another source ended the episode."""
        if self._pending and not self._queried and self._last is not None:
            self._query_last_frame()
            self._pending[-1] = self._propositions.frames - 1, self._pending[-1][1]

    def finish(self) -> dict[str, Any]:
        """Wait for the answers; final progress, whether the goal was reached, regressions, unanswered questions."""
        rewards = [self._advance(judged, info) for judged, info in self._pending]
        content = self._machine.finish() | {"unanswered": self._propositions.unanswered}
        return content if self._wait else {**content, "rewards": rewards}
