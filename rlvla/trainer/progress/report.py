"""What a run says about itself in every iteration: signal, distance from the start, time left, plateaus."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from rlvla.evaluation.results import EvalResult
from rlvla.evaluation.statistics import wilson_interval
from rlvla.trainer.config import PPOConfig
from rlvla.trainer.guards import good_enough
from rlvla.trainer.measurements import SUCCESS_ALONE, iteration_line
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import Observer, Rollout
from rlvla.trainer.progress.clock import RunClock
from rlvla.trainer.progress.curve import GrowingCurve
from rlvla.trainer.progress.plateau import Plateau, find_plateau, likely_causes, window_of
from rlvla.trainer.progress.signal import StartDistance, signal_share
from rlvla.utils.bars import part_of_run
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import log

_COUNTS = ("rollout/success_at_end", "rollout/episodes", "rollout/states")
_FACTS = ("rollout/signal_share", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "critic/vf_explained_var")
_REWARD = "reward/total"


class Progress(Observer):
    """Measures and reports where the run stands; every rank reaches the same conclusions.

    Args:
        config: the configuration of the run.
        strategy: reduces metrics over ranks.
        folder: run folder, which receives the learning curve.
        policy: the policy before training, or before a checkpoint is restored.
        success_source: what tells success.
        densities: whether the policy draws from densities, whose entropy may be negative.

    Attributes:
        clock: knows the time left.
    """

    def __init__(
        self,
        config: PPOConfig,
        strategy: DeepspeedStrategy,
        folder: Path,
        policy: nn.Module,
        success_source: str,
        *,
        densities: bool = False,
    ):
        self._config, self._strategy, self._success_source = config, strategy, success_source
        batch, schedule = config.batch, config.schedule
        self.clock = RunClock(batch.iterations, schedule.eval_steps)
        self._distance = StartDistance(policy, strategy)
        self._curve = GrowingCurve(folder) if strategy.is_main else None
        self._densities = densities
        self._groups = batch.n_samples_per_prompt > 1 and "group_ids" in config.algorithm.estimator_parameters
        window = schedule.plateau_iterations
        self._window = window_of(batch.episodes_per_iteration) if window is None else window
        self._history: deque[dict[str, float]] = deque(maxlen=max(2 * self._window, schedule.early_stop_iterations))
        self._counted = 0  # iterations in which the policy was trained
        self._first_entropy: float | None = None
        self._announced = False

    # -------------------------------------------------------------- measuring
    def after_rollout(self, rollout: Rollout, metrics: Metrics) -> None:
        """Count episodes, and those with a signal."""
        scores = [(sample.uid, sample.score) for sample in rollout.samples]
        everywhere = [entry for part in self._strategy.gather_objects(scores) for entry in part]
        share, n = signal_share(everywhere, groups=self._groups)
        states = len({uid for uid, _ in everywhere})
        metrics.mean({"rollout/signal_share": share}, float(n > 0))
        metrics.mean({"rollout/episodes": len(everywhere), "rollout/states": states}, 1.0)

    def after_update(self, values: dict[str, float]) -> None:
        """Measure the distance from the start."""
        values["actor/start_distance"] = self._distance.measure()

    def measure(self, iteration: int, values: dict[str, float]) -> None:
        """Take note of the metrics of an iteration (counted from 1), and add the time left to them."""
        self.clock.iteration(values["timing_s/iteration"])
        values["timing_s/left"] = self.clock.left(iteration) or 0.0
        if iteration <= self._config.optimization.freezing_actor_steps:
            return
        self._counted += 1
        self._first_entropy = values.get("actor/entropy") if self._first_entropy is None else self._first_entropy
        names = (*_COUNTS, *_FACTS, _REWARD)
        self._history.append({name: values[name] for name in names if name in values})

    # --------------------------------------------------------------- reporting
    def on_bars(self, done: Callable[[], int]) -> AbstractContextManager[None]:
        """Inside the block progress bars show the time left of the run after `done()` iterations."""
        return part_of_run(lambda: self.clock.countdown(done()))

    def bar(self, iteration: int) -> str:
        """The beginning of a progress bar during `iteration` (counted from 1)."""
        return f"iteration {iteration}/{self._config.batch.iterations}"

    def line(self, iteration: int, values: dict[str, float]) -> str:
        """The line printed after an iteration; see `iteration_line`."""
        total, weights = self._config.batch.iterations, self._config.reward_weights()
        return iteration_line(iteration, total, values, weights, self._success_source)

    def after_iteration(self, values: dict[str, float]) -> None:
        """Say once if the run has stopped gaining; update the learning curve."""
        plateau = self._look_for_plateau()
        if not self._strategy.is_main:
            return
        if plateau is not None:
            self._announce(plateau)
        if self._curve is not None:
            self._curve.update()

    def evaluated(self, iteration: int, result: EvalResult, seconds: float) -> None:
        """Print the result of an evaluation, which took `seconds`."""
        self.clock.evaluation(seconds)
        if self._strategy.is_main:
            agreed = "" if result.agreement is None else f", {100 * result.agreement.share:.0f}% agreed"
            source = f" ({result.success_detector}{agreed})" if agreed else ""
            log.info(f"iteration {iteration}: evaluation, success at end {result.success_at_end}{source}")

    def _look_for_plateau(self) -> Plateau | None:
        """A plateau that was not announced before, looked for at the end of every window."""
        window, frozen = self._window, self._config.optimization.freezing_actor_steps
        # A sampler of one's own may make the states harder as the policy improves.
        if not window or self._announced or self._config.batch.favours_some or self._counted % window:
            return None
        looks = (self._config.batch.iterations - frozen) // window - 1
        plateau = find_plateau(list(map(_counts, self._history))[-2 * window :], window, looks)
        self._announced = plateau is not None
        return plateau

    def _announce(self, plateau: Plateau) -> None:
        window, history = plateau.window, list(self._history)
        facts = _means(history[-window:])
        if self._first_entropy is not None:
            facts["first_entropy"] = self._first_entropy
        facts["rollout/success_at_end"] = plateau.now
        causes = likely_causes(facts, groups=self._groups, densities=self._densities)
        lines = [str(plateau)]
        before = _means(history[-2 * window : -window])
        if self._config.reward_weights() != SUCCESS_ALONE and _REWARD in before and _REWARD in facts:
            lines.append(f"reward per episode: {before[_REWARD]:.3g} before, {facts[_REWARD]:.3g} now")
        lines += [("likely cause: " if i == 0 else "also: ") + cause.text for i, cause in enumerate(causes)]
        say = log.info if causes[0].name == "ceiling" else log.warning
        say("\n  ".join(lines))

    # ------------------------------------------------------------- early stop
    def good_enough(self, evaluations: Sequence[tuple[int, EvalResult]], iteration: int) -> str | None:
        """Why training may end after `iteration` iterations with --early_stopping, or None."""
        schedule = self._config.schedule
        if not schedule.early_stopping or iteration == 0:
            return None
        evaluated = any(number == iteration for number, _ in evaluations)
        threshold, by = f"{100 * schedule.early_stop_success:g} %", schedule.early_stop_by
        if by != "sampled" and evaluated and good_enough([result for _, result in evaluations], schedule):
            number = schedule.early_stop_evaluations
            where = "the evaluation" if number == 1 else f"{number} evaluations in a row"
            return f"success at end reached {threshold} in {where}"
        if by != "evaluations":
            latest = [_counts(entry) for entry in list(self._history)[-schedule.early_stop_iterations :]]
            states = sum(entry.get("rollout/states", 0.0) for entry in list(self._history)[-len(latest) :])
            low = lower_bound(latest, states)
            if len(latest) == schedule.early_stop_iterations and low >= schedule.early_stop_success:
                least = f"at least {100 * low:.1f} % (95 % bound)"
                return f"sampled success of {len(latest)} iterations is {least} and reaches {threshold}"
        return None

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        state = {"history": list(self._history), "counted": self._counted}
        return state | {"first_entropy": self._first_entropy, "announced": self._announced}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a `state_dict`; None is that of a checkpoint of an earlier version."""
        if state is not None:
            self._history.extend(state["history"])
            self._counted, self._announced = int(state["counted"]), bool(state["announced"])
            self._first_entropy = state["first_entropy"]


def start_evaluation(evaluations: Sequence[tuple[int, EvalResult]]) -> tuple[float, int] | None:
    """Success at end of the initial policy and number of episodes, if it was evaluated.

    Args:
        evaluations: (iteration, result) in order.
    """
    if not evaluations or evaluations[0][0] != 0:
        return None
    success = evaluations[0][1].success_at_end
    return success.rate, success.n


def lower_bound(counts: Sequence[tuple[float, float]], states: float) -> float:
    """Lower 95 % bound of the pooled success of several iterations; 0 without episodes.

    Args:
        counts: (successes, episodes) of each iteration.
        states: number of groups in them, which is what counts as independent: the episodes of a group start alike.
    """
    total = sum(n for _, n in counts)
    if not total or states < 1:
        return 0.0
    rate, n = sum(successes for successes, _ in counts) / total, round(min(states, total))
    return wilson_interval(int(rate * n + 1e-9), n)[0]


def _counts(entry: Mapping[str, float]) -> tuple[float, float]:
    n = entry.get("rollout/episodes", 0.0)
    return round(entry.get("rollout/success_at_end", 0.0) * n), n


def _means(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the iterations that have it."""
    names = {name for entry in entries for name in entry}
    values = {name: [entry[name] for entry in entries if name in entry] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
