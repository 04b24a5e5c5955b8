"""Model-based success detection: flags, registry, and the verdicts of an episode."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlvla.options import Condition, arg

if TYPE_CHECKING:
    from rlvla.envs.base import ChunkResult, Observation, TaskSpec

SIMULATOR = "simulator"
_FACTORIES: dict[str, Callable[[Any], SuccessJudge]] = {}
_MODELS = ("vlm", "rm_model")  # registered when their modules are imported
_BY_MODEL = Condition(lambda flags: flags["success_source"] != SIMULATOR, "--success_source is {success_source}")


def success_sources() -> list[str]:
    """Values of `--success_source`."""
    return list(dict.fromkeys((SIMULATOR, *_MODELS, *_FACTORIES)))


@dataclass(frozen=True)
class SuccessConfig:
    """Success detector: the success that ends episodes and is counted by rewards and evaluations."""

    success_source: str = arg(
        SIMULATOR,
        "success detector: the simulator; vlm: --vlm_model (question 'success'); rm_model: the reward model of "
        "--rm_model_path. With a model, the simulator's success does not end episodes and is recorded for comparison",
        choices=success_sources,
    )
    success_threshold: float = arg(
        0.5,
        "vlm, rm_model: probability from which a frame counts as success",
        above=0,
        maximum=1,
        read_if=_BY_MODEL,
    )
    success_every: int = arg(
        1,
        "vlm, rm_model: decisions between judged frames; the last frame of an episode always is",
        minimum=1,
        read_if=_BY_MODEL,
    )
    success_frames: int = arg(
        1,
        "vlm, rm_model: judged frames in a row that must count as success to end an episode",
        minimum=1,
        read_if=_BY_MODEL,
    )

    def description(self, models: Any) -> str | None:
        """The detector with all settings that its verdicts depend on, for protocols; None for the simulator."""
        if self.success_source == SIMULATOR:
            return None
        model = {"vlm": "vlm_model", "rm_model": "rm_model_path"}.get(self.success_source)
        named = f" {getattr(models, model)}" if model else ""
        return (
            f"{self.success_source}{named}, from {self.success_threshold:g} in {self.success_frames} judged frame(s), "
            f"every {self.success_every} decision(s)"
        )


class SuccessJudge(Protocol):
    """Estimates whether a task is done.

    Optional members: `start`, `close`, `metrics`, `check`, `problems` and `server` as in `RewardSource`;
    `answer_waiting()`, called while episodes wait, to answer queued questions in batches; `rollout_over()`, called
    after the last episode of a rollout or when the rollout was aborted.
    """

    def ask(self, task: TaskSpec, observation: Observation) -> Future[Any]:
        """Ask about the first image of an observation; must not block."""
        ...

    def probability(self, answer: Any) -> float | None:
        """P(success) of the answer to `ask`; None if the question could not be answered."""
        ...


def register_success_source(name: str) -> Callable[[Callable[[Any], SuccessJudge]], Callable[[Any], SuccessJudge]]:
    """Decorator that registers a factory of judges under a value of `--success_source`.

    The factory is called with an object that has the fields of `VLMServerConfig`, `rm_model_path` and
    `rm_model_batch_size`; it raises a ConfigError if they are not enough.
    """

    def register(factory: Callable[[Any], SuccessJudge]) -> Callable[[Any], SuccessJudge]:
        _FACTORIES[name] = factory
        return factory

    return register


def make_success_source(config: SuccessConfig, models: Any) -> SuccessSource | None:
    """The success detector; None for the simulator.

    Args:
        config: the flags.
        models: see `register_success_source`.

    Raises:
        ConfigError: the flags of the model are missing or wrong.
    """
    if config.success_source == SIMULATOR:
        return None
    return SuccessSource(config, _FACTORIES[config.success_source](models))


class SuccessSource:
    """A success detector in all episodes of a run.

    Attributes:
        name: value of `--success_source`.
        judge: the model.
    """

    def __init__(self, config: SuccessConfig, judge: SuccessJudge):
        self.name, self.judge, self._config = config.success_source, judge, config

    @property
    def every(self) -> int:
        """Decisions between judged frames."""
        return self._config.success_every

    def begin(self, task: TaskSpec) -> EpisodeSuccess:
        """Start an episode."""
        return EpisodeSuccess(self._config, self.judge, task)


@dataclass
class SimulatorSuccess:
    """The simulator's success in an episode with a model-based success detector.

    Attributes:
        once: its predicate held at some step.
        at_end: it held after the last step.
    """

    once: bool = False
    at_end: bool = False


class EpisodeSuccess:
    """The verdicts of one episode.

    A frame is judged after every `success_every`-th decision and when the step limit is reached. Between two judged
    frames the earlier verdict holds; so it does if a question is not answered.

    Attributes:
        simulator: the simulator's success.
        unanswered: questions that could not be answered.
    """

    def __init__(self, config: SuccessConfig, judge: SuccessJudge, task: TaskSpec):
        self._config, self._judge, self._task = config, judge, task
        self._decisions = self._in_a_row = 0
        self._verdict = False
        self._asked: Future[Any] | None = None
        self.simulator = SimulatorSuccess()
        self.unanswered = 0

    def look(self, result: ChunkResult) -> list[Future[Any]]:
        """Ask about the frame after a chunk if one is due; returns the answer to wait for, if any."""
        self._decisions += 1
        due = self._decisions % self._config.success_every == 0 or result.truncated or result.terminated
        self._asked = self._judge.ask(self._task, result.observation) if due else None
        return [] if self._asked is None else [self._asked]

    def decide(self, result: ChunkResult) -> ChunkResult:
        """The chunk with the detector's success in place of the simulator's; waits for the answer.

        A failure that ends the episode in the simulator remains one, unless success has held.
        """
        steps = result.steps_executed
        simulated = result.successes[:steps]
        self.simulator.once |= bool(simulated.any())
        self.simulator.at_end = bool(simulated[-1])
        before = self._verdict
        if self._asked is not None:
            probability = self._judge.probability(self._asked.result())
            if probability is None:
                self.unanswered += 1
            else:
                self._verdict = probability >= self._config.success_threshold
                self._in_a_row = self._in_a_row + 1 if self._verdict else 0
        held = self._verdict and self._in_a_row >= self._config.success_frames
        failed = result.terminated and not result.success_at_end and not held
        successes = np.zeros_like(result.successes)
        successes[:steps] = before
        successes[steps - 1] = self._verdict and not failed
        truncated = (result.truncated or result.terminated) and not (held or failed)
        return replace(result, successes=successes, terminated=held or failed, truncated=truncated, success_at_end=held)
