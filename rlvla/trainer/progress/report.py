"""Progress report of every iteration: signal, distance from the start, time left, plateaus, early stopping."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlvla.evaluation.results import EvalResult
from rlvla.evaluation.statistics import wilson_interval
from rlvla.trainer.config import TrainerConfig
from rlvla.trainer.guards import good_enough
from rlvla.trainer.measurements import SUCCESS_ALONE, iteration_line
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import Observer, Rollout
from rlvla.trainer.progress.curve import GrowingCurve
from rlvla.trainer.progress.plateau import Plateau, find_plateau, likely_causes, window_of
from rlvla.utils.bars import part_of_run
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import log

_COUNTS = ("rollout/success_at_end", "rollout/episodes", "rollout/states")
_CAUSE_METRICS = (
    "rollout/signal_share",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "critic/vf_explained_var",
)
_REWARD = "reward/total"
_RECENT = 20  # iterations whose mean duration predicts the next ones
_SAMPLED = 2**20  # entries of the initial weights that are kept, per rank


class RunClock:
    """Estimate of the time left of a run from the iterations and evaluations so far.

    Args:
        iterations: number of iterations of the run.
        eval_steps: iterations between two evaluations, 0 for none before the end.
        now: clock in seconds.
    """

    def __init__(self, iterations: int, eval_steps: int, now: Callable[[], float] = time.monotonic):
        self._iterations, self._eval_steps, self._now = iterations, eval_steps, now
        self._recent: deque[float] = deque(maxlen=max(_RECENT, eval_steps))
        self._evaluation = 0.0
        self._mark: float | None = None  # end of the last iteration or evaluation
        self._between = 0.0  # seconds of neither (checkpoints), since the first iteration
        self._measured = 0
        self._evaluating = self._last = False

    def iteration(self, seconds: float) -> None:
        """Record an iteration that has just ended."""
        self._note(seconds)
        if self._measured == 1 and len(self._recent) == 1:
            self._recent.clear()  # the first one includes one-time work
        self._recent.append(seconds)
        self._measured += 1

    def begin_evaluation(self, *, last: bool = False) -> None:
        """Record the start of an evaluation; `last`: the run ends with it, even before its last iteration."""
        self._evaluating, self._last = True, last

    def evaluation(self, seconds: float) -> None:
        """Record an evaluation that has just ended."""
        self._note(seconds)
        self._evaluation, self._evaluating = seconds, False

    def _note(self, seconds: float) -> None:
        now = self._now()
        if self._mark is not None and self._measured:
            self._between += max(0.0, now - self._mark - seconds)
        self._mark = now

    def left(self, done: int) -> float | None:
        """Seconds until the end of the run after `done` iterations; None before any was measured."""
        if not self._measured:
            return None
        rest, steps = self._iterations - done, self._eval_steps
        each = sum(self._recent) / len(self._recent) + self._between / self._measured
        evaluations = 1 if rest >= 0 else 0  # the last one
        if steps and rest > 0:
            evaluations += (self._iterations - 1) // steps - done // steps
        return rest * each + evaluations * self._evaluation

    def countdown(self, done: int) -> float | None:
        """As `left`, less the time since the end of the last iteration or evaluation."""
        left = self.left(done)
        if left is None or self._mark is None:
            return None
        running = self._evaluation if self._evaluating else 0.0
        return max(0.0, running + (0.0 if self._last else left) - (self._now() - self._mark))


def signal_share(scores: Sequence[tuple[str, float]], *, groups: bool) -> tuple[float, int]:
    """Fraction of groups or episodes with a learning signal, and their number.

    Args:
        scores: (uid of the group, score) of each episode.
        groups: whether advantages compare the episodes of a group: fraction of the groups whose scores differ.
            Otherwise fraction of the episodes whose score is not the most frequent one.
    """
    if not scores:
        return 0.0, 0
    if not groups:
        most_frequent = Counter(score for _, score in scores).most_common(1)[0][1]
        return 1 - most_frequent / len(scores), len(scores)
    members: dict[str, set[float]] = {}
    for uid, score in scores:
        members.setdefault(uid, set()).add(score)
    return sum(len(values) > 1 for values in members.values()) / len(members), len(members)


class StartDistance:
    """Distance of the trained weights from those at construction, relative to the norm of the latter.

    Large models are represented by an evenly spaced sample of about a million weights. Under ZeRO-3 each rank measures
    its shard.

    Args:
        module: the policy before training, or before a checkpoint is restored.
        strategy: sums over ranks.
    """

    def __init__(self, module: nn.Module, strategy: DeepspeedStrategy):
        self._module, self._strategy = module, strategy
        self._stride = max(1, math.ceil(sum(shard.numel() for shard in self._shards()) / _SAMPLED))
        self._start = self._sample()

    def _shards(self) -> list[Tensor]:
        trained = [p for p in self._module.parameters() if p.requires_grad]
        return [getattr(p, "ds_tensor", p).detach() for p in trained]  # `ds_tensor`: this rank's shard under ZeRO-3

    def _sample(self) -> list[Tensor]:
        return [shard.flatten()[:: self._stride].float().cpu().clone() for shard in self._shards()]

    def measure(self) -> float:
        """|weights - initial weights| / |initial weights|; called on every rank."""
        moved = sum(float((now - start).square().sum()) for now, start in zip(self._sample(), self._start))
        size = sum(float(start.square().sum()) for start in self._start)
        if any(hasattr(p, "ds_tensor") for p in self._module.parameters()):
            sums = self._strategy.all_reduce({"moved": moved, "size": size}, "sum")
            moved, size = sums["moved"], sums["size"]
        return math.sqrt(moved / size) if size else 0.0


def trainable_and_all(module: nn.Module) -> tuple[int, int]:
    """Numbers of trainable and of all parameters, of a sharded module too."""
    sizes = [(math.prod(getattr(p, "ds_shape", p.shape)), p.requires_grad) for p in module.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


class Progress(Observer):
    """Measures and reports the progress of a run; every rank reaches the same conclusions.

    Args:
        config: the configuration of the run.
        strategy: reduces metrics over ranks.
        folder: run folder, which receives the learning curve.
        policy: the policy before training, or before a checkpoint is restored.
        success_source: success detector.
        densities: whether the policy draws from densities, whose entropy may be negative.

    Attributes:
        clock: estimate of the time left.
    """

    def __init__(
        self,
        config: TrainerConfig,
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
        self._groups = config.compares_groups
        window = schedule.plateau_iterations
        self._window = window_of(batch.episodes_per_iteration) if window is None else window
        self._history: deque[dict[str, float]] = deque(maxlen=max(2 * self._window, schedule.early_stop_iterations))
        self._counted = 0  # iterations in which the policy was trained
        self._first_entropy: float | None = None
        self._announced = False

    # -------------------------------------------------------------- measuring
    def after_rollout(self, rollout: Rollout, metrics: Metrics) -> None:
        """Count episodes, and measure the signal."""
        scores = [(sample.uid, sample.score) for sample in rollout.samples]
        all_scores = [entry for of_rank in self._strategy.gather_objects(scores) for entry in of_rank]
        share, n = signal_share(all_scores, groups=self._groups)
        states = len({uid for uid, _ in all_scores})
        metrics.mean({"rollout/signal_share": share}, float(n > 0))
        metrics.mean({"rollout/episodes": len(all_scores), "rollout/states": states}, 1.0)

    def after_update(self, values: dict[str, float]) -> None:
        """Measure the distance from the start."""
        values["actor/start_distance"] = self._distance.measure()

    def measure(self, iteration: int, values: dict[str, float]) -> None:
        """Record the metrics of an iteration (counted from 1), and add the time left to them."""
        self.clock.iteration(values["timing_s/iteration"])
        values["timing_s/left"] = self.clock.left(iteration) or 0.0
        if iteration <= self._config.optimization.freezing_actor_steps:
            return
        self._counted += 1
        self._first_entropy = values.get("actor/entropy") if self._first_entropy is None else self._first_entropy
        names = (*_COUNTS, *_CAUSE_METRICS, _REWARD)
        self._history.append({name: values[name] for name in names if name in values})

    # --------------------------------------------------------------- reporting
    def on_bars(self, done: Callable[[], int]) -> AbstractContextManager[None]:
        """Progress bars within the block show the time left of the run after `done()` iterations."""
        return part_of_run(lambda: self.clock.countdown(done()))

    def bar(self, iteration: int) -> str:
        """The beginning of a progress bar during `iteration` (counted from 1)."""
        return f"iteration {iteration}/{self._config.batch.iterations}"

    def line(self, iteration: int, values: dict[str, float]) -> str:
        """The line printed after an iteration; see `iteration_line`."""
        total, weights = self._config.batch.iterations, self._config.reward_weights()
        return iteration_line(iteration, total, values, weights, self._success_source)

    def after_iteration(self, values: dict[str, float]) -> None:
        """Report a plateau once, tested for at the end of every window; update the learning curve."""
        window, frozen = self._window, self._config.optimization.freezing_actor_steps
        # A custom sampler may choose harder states as the policy improves.
        if window and not (self._announced or self._config.batch.favours_some or self._counted % window):
            looks = (self._config.batch.iterations - frozen) // window - 1
            plateau = find_plateau(list(map(_counts, self._history))[-2 * window :], window, looks)
            self._announced = plateau is not None
            if plateau is not None and self._strategy.is_main:
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

    def _announce(self, plateau: Plateau) -> None:
        window, history = plateau.window, list(self._history)
        metrics = _means(history[-window:])
        if self._first_entropy is not None:
            metrics["first_entropy"] = self._first_entropy
        metrics["rollout/success_at_end"] = plateau.now
        causes = likely_causes(metrics, groups=self._groups, densities=self._densities)
        lines = [str(plateau)]
        before = _means(history[-2 * window : -window])
        if self._config.reward_weights() != SUCCESS_ALONE and _REWARD in before and _REWARD in metrics:
            lines.append(f"reward per episode: {before[_REWARD]:.3g} before, {metrics[_REWARD]:.3g} now")
        lines += [("also: " if i else "likely cause: ") + text for i, text in enumerate(causes.values())]
        (log.info if "ceiling" in causes else log.warning)("\n  ".join(lines))

    # ------------------------------------------------------------- early stop
    def good_enough(self, evaluations: Sequence[tuple[int, EvalResult]], iteration: int) -> str | None:
        """Reason to end training after `iteration` iterations (0: before it begins) with --early_stopping, or None."""
        schedule = self._config.schedule
        if not schedule.early_stopping:
            return None
        evaluated = any(number == iteration for number, _ in evaluations)
        threshold, by = f"{100 * schedule.early_stop_success:g} %", schedule.early_stop_by
        if by != "sampled" and evaluated and good_enough([result for _, result in evaluations], schedule):
            number = schedule.early_stop_evaluations
            where = "the evaluation" if number == 1 else f"{number} evaluations in a row"
            return f"success at end reached {threshold} in {where}"
        if by != "evaluations" and iteration:
            latest = list(self._history)[-schedule.early_stop_iterations :]
            low = lower_bound(list(map(_counts, latest)), sum(entry.get("rollout/states", 0.0) for entry in latest))
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
        """Restore a `state_dict`; None from a checkpoint of an earlier version."""
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
        states: number of groups in them, the independent units, since the episodes of a group start alike.
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
