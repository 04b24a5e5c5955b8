"""Conclusions from a supervised run: gap to the expert, most promising remedies, readiness for RL.

Thresholds are relative, so that they hold for any loss and any unit of the actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlvla.evaluation.results import Rate
from rlvla.evaluation.statistics import mixed_group_share
from rlvla.trainer.supervised.validation import (
    Baselines,
    Measurement,
    best_measurement,
    compared_errors,
    percent,
    relative_error,
)
from rlvla.utils.terminal import duration

FEWEST = 4  # measurements for a trend
MOVES = 0.1  # fraction of the whole fall of a loss that as much training again must change for a trend
WORSE = 0.05  # fraction of the whole fall by which the last loss must exceed the best one to be worse
GAP = 0.2  # fraction of the fall on training rows that may be missing on held-out rows
CONSTANT = 0.95  # error relative to the median action's from which a policy is no better than a constant
FITTED = 0.5  # error relative to the median action's below which the rows are fitted
BLIND = 0.9  # error relative to that at the nearest proprioception from which images contribute little
SIGNAL, WEAK_SIGNAL = 0.25, 0.05  # fractions of groups with a signal
SATURATED = 0.9  # success of sampled attempts from which groups without a signal are expected
ROUNDING = 1e-9  # relative changes of a loss below this are rounding errors


@dataclass(frozen=True)
class Facts:
    """Measurements and settings of a supervised run.

    Attributes:
        measurements: in order.
        baselines: of the training rows and, if any, of the held-out rows.
        kept: the measurement of the exported policy, if it is not the last one.
        seconds: duration of training.
        demonstrated: (successful, all) episodes of the demonstrations; None if success is not recorded.
        image_size: side of the images in pixels.
        parameters: number of parameters of the policy.
        attempts: (successes, attempts) at each initial state, with sampled actions; () without any.
        patience: `--early_stopping`; 0: off.
    """

    measurements: tuple[Measurement, ...]
    baselines: tuple[Baselines, Baselines | None] = (Baselines(), None)
    kept: Measurement | None = None
    seconds: float = 0.0
    demonstrated: tuple[int, int] | None = (0, 0)
    image_size: int = 0
    parameters: int = 0
    attempts: tuple[tuple[int, int], ...] = ()
    patience: int = 0


@dataclass(frozen=True)
class Verdict:
    """Conclusions.

    Attributes:
        sentences: for the reader, each with its figures.
        missing: remedies, most promising first: "epochs", "data", "variety" (of demonstrations), "images"
            (larger), "model" (larger); () if unknown or nothing.
        rl: whether reinforcement learning can start: "ready", "slow" (few groups carry a signal), "no", or "saturated"
            (little is left to learn); None without attempts.
        learned: whether the policy is better than a constant.
    """

    sentences: tuple[str, ...]
    missing: tuple[str, ...] = ()
    rl: str | None = None
    learned: bool = True


def judge(facts: Facts) -> Verdict:
    """Draw the conclusions from a run; measurements with non-finite losses are left out."""

    def is_finite(m: Measurement) -> bool:
        return all(math.isfinite(side.loss) for side in (m.train, m.heldout) if side is not None)

    facts = replace(facts, measurements=tuple(filter(is_finite, facts.measurements)))
    rl, about_rl = _rl(facts.attempts)
    if not facts.measurements:
        return Verdict(tuple(about_rl), (), rl)
    final = facts.kept or facts.measurements[-1]
    successes, episodes = facts.demonstrated or (0, 0)
    expert = final.success is not None and bool(episodes) and final.success.high >= successes / episodes
    sentences = []
    if final.success is not None and episodes:
        gap = 100 * (successes / episodes - final.success.rate)
        sentences.append(
            f"Expert: {final.success} of {final.success.n} episodes from new initial states succeed, "
            f"{percent(successes / episodes)} of the {episodes} demonstrations: "
            + ("the policy reaches the level of its demonstrations." if expert else f"{gap:.0f} points are missing.")
        )
    elif final.success is not None and facts.demonstrated is None:
        sentences.append(
            f"Expert: {final.success} of {final.success.n} episodes from new initial states succeed; success of the "
            "demonstrations is not recorded."
        )
    sentences += _kept(facts)
    learned, about_fit = _fit(final, facts.baselines)
    missing, about_missing = _missing(facts, expert)
    sentences = [*sentences, *about_fit, about_missing, *about_rl]
    return Verdict(tuple(filter(None, sentences)), missing, rl, learned)


def _kept(facts: Facts) -> list[str]:
    last, best = facts.measurements[-1], best_measurement(facts.measurements)
    if facts.kept is not None:
        return [
            f"Kept: the policy after epoch {facts.kept.epoch:.1f} (step {facts.kept.step}), the best in "
            f"{_criterion(facts.kept)}; training ended after epoch {last.epoch:.1f} with {_criterion(last)}."
        ]
    if best is None or facts.patience:
        return []
    if last.success is not None and best.success is not None:
        worse = best.success.rate > last.success.high
    elif last.heldout is not None and best.heldout is not None:
        losses = [m.heldout.loss for m in facts.measurements if m.heldout]
        worse = last.heldout.loss - best.heldout.loss > WORSE * _fall(losses)
    else:
        worse = False
    text = f"Kept: the last policy ({_criterion(last)}); after epoch {best.epoch:.1f} it was better "
    return [f"{text}({_criterion(best)}), and --early_stopping 3 keeps the best."] if worse else []


def _criterion(measurement: Measurement) -> str:
    if measurement.success is not None:
        return f"success {measurement.success}"
    return f"held-out loss {measurement.heldout.loss:.3f}" if measurement.heldout else "no held-out measurement"


def _fit(final: Measurement, baselines: tuple[Baselines, Baselines | None]) -> tuple[bool, list[str]]:
    """Whether the policy is better than a constant, and sentences about its fit."""
    sides = [("training rows", final.train, baselines[0])]
    if final.heldout is not None:
        sides.insert(0, ("held-out rows", final.heldout, baselines[1] or Baselines()))
    texts = []
    for name, quality, baseline in sides:
        text = f"{name}: loss {quality.loss:.3f}, accuracy {percent(quality.accuracy)}"
        if baseline.majority_accuracy is not None:
            text += f" (most frequent tokens: {percent(baseline.majority_accuracy)})"
        errors = compared_errors(quality, baseline)
        texts.append(f"{text}, action error{errors[1:]}" if errors else text)
    sentences = [f"Fit: {'; '.join(texts)}."]
    name, quality, baseline = sides[0]
    ratio = relative_error(quality.errors, baseline.median_errors)
    if ratio is None:
        learned = baseline.majority_accuracy is None or quality.accuracy > baseline.majority_accuracy
    else:
        learned = ratio < CONSTANT
    if not learned:
        return False, [*sentences, f"Nothing useful was learned: on {name} a constant is as good."]
    pairs = enumerate(zip(quality.errors, baseline.median_errors))
    ratios = {i: error / median for i, (error, median) in pairs if median > 0}
    blind = {i: ratio for i, ratio in ratios.items() if ratio >= CONSTANT}
    if len(sides) > 1 and blind and len(blind) < len(ratios):
        sentences.append(
            f"Nothing useful was learned in action dimension {', '.join(map(str, blind))}: on held-out rows the error "
            f"is {', '.join(map(percent, blind.values()))} of the constant median action's, against "
            f"{percent(min(ratios.values()))} in the best dimension. Do the recorded cameras and proprioception show "
            "what it depends on (another camera, larger images)?"
        )
    return True, sentences


def _missing(facts: Facts, expert: bool) -> tuple[tuple[str, ...], str]:
    """`Verdict.missing` and its reason; `expert`: the policy reaches the level of its demonstrations."""
    points = facts.measurements
    if len(points) < FEWEST:
        text = f"Missing: unknown, because {len(points)} measurements show no trend; measure more often."
        return (), text if points[-1].heldout else ""
    steps, learned = [m.step for m in points], [m.learned for m in points]
    train = trend(steps, [m.train.loss for m in points], learned)
    moves = f"over the second half of training the loss {train.text} on training rows"
    if points[-1].heldout is None:
        hint = "give --heldout_share 0.1 to measure generalization to other initial states"
        if train.direction < 0 and not expert:
            return ("epochs",), f"Missing: perhaps more epochs, because the loss still falls: {moves}; {hint}."
        return (), f"Missing: unknown, because {moves}; {hint}."
    heldout = trend(steps, [m.heldout.loss for m in points if m.heldout], learned)
    gap = points[-1].heldout.loss - points[-1].train.loss
    of_fall = f" ({percent(gap / train.fall)} of the fall)" if train.fall else ""
    trends = f"{moves} and {heldout.text} on held-out rows; the gap between them is {gap:.3f}{of_fall}"
    if expert:
        return (), f"Missing: nothing that these episodes reveal ({trends})."
    reasons = {
        "epochs": f"more epochs, because the held-out loss still falls (as many more take {duration(facts.seconds)})",
        "data": "more demonstrations, because the policy generalizes poorly to held-out initial states",
    }
    missing = ["epochs"] * (heldout.direction < 0) + ["data"] * (gap > GAP * train.fall > 0)
    if missing:
        return tuple(missing), f"Missing: {'; and '.join(reasons[name] for name in missing)}: {trends}."
    final = points[-1].train
    ratio = relative_error(final.errors, facts.baselines[0].median_errors)
    neighbor = relative_error(final.errors, facts.baselines[0].neighbor_errors)
    settled = f"Missing: neither more epochs nor more of the same demonstrations ({trends})"
    if ratio is not None and ratio <= FITTED:
        return ("variety",), (
            f"{settled}: the actions are fitted (error {percent(ratio)} of the median action's). Failures happen in "
            "states that the demonstrations do not show: record an expert that errs and recovers, or continue with "
            "reinforcement learning."
        )
    images = f"larger images (now {facts.image_size} pixels)"
    model = f"a larger model (now {facts.parameters / 1e6:.2g} M parameters)"
    if neighbor is not None and neighbor >= BLIND:
        return ("images", "model"), (
            f"{settled}, but {images}, then {model}: on training rows the error is {percent(neighbor)} of that at the "
            "nearest proprioception, so the policy hardly uses its images."
        )
    fitted = "" if ratio is None else f": on training rows the error is still {percent(ratio)} of the median action's"
    return ("model", "images"), f"{settled}, but {model}, then {images}{fitted}."


@dataclass(frozen=True)
class Trend:
    """Movement of a loss in the second half of training.

    Attributes:
        change: fitted change over that half.
        fall: from the first value to the lowest one.
        share: part of the sum of all learning rates that was spent in that half.
    """

    change: float
    fall: float
    share: float = 0.5

    @property
    def direction(self) -> int:
        """-1 falling, 1 rising, 0 neither; by the change expected of as much training again, since schedules decay."""
        return int(np.sign(self.change)) if abs(self.change) > MOVES * self.fall * self.share else 0

    @property
    def text(self) -> str:
        """As in "the loss ..."."""
        verb = {-1: "fell", 0: "hardly moved", 1: "rose"}[self.direction]
        of_fall = f", {percent(abs(self.change) / self.fall)} of its whole fall" if self.fall else ""
        return f"{verb} ({self.change:+.3f}{of_fall})"


def trend(steps: Sequence[int], losses: Sequence[float], learned: Sequence[float] = ()) -> Trend:
    """Least-squares line through the losses of the second half, at least the last three.

    Args:
        steps: steps of the measurements.
        losses: at least one.
        learned: sums of the learning rates until then; by default all rates are taken as equal.
    """
    x, y = np.array(steps, dtype=float), np.array(losses, dtype=float)
    late = x >= min(x[-1] / 2, x[max(0, len(x) - 3)])
    change = float(np.polyfit(x[late], y[late], 1)[0] * (x[late][-1] - x[late][0]))
    spent = np.array(learned if len(learned) and learned[-1] else steps, dtype=float)
    share = float((spent[-1] - spent[late][0]) / spent[-1]) if spent[-1] else 0.0
    return Trend(change if abs(change) > ROUNDING * np.abs(y).max() else 0.0, _fall(losses), share)


def _fall(losses: Sequence[float]) -> float:
    return max(0.0, losses[0] - min(losses)) if losses else 0.0


def _rl(attempts: Sequence[tuple[int, int]]) -> tuple[str | None, list[str]]:
    if not attempts:
        return None, []
    group = min(n for _, n in attempts)
    reached = Rate.of([successes > 0 for successes, _ in attempts])
    rate = sum(s for s, _ in attempts) / sum(n for _, n in attempts)
    signal = mixed_group_share(attempts, group) if group > 1 else 0.0
    figures = (
        f"sampled attempts succeed in {percent(rate)}, at least one of {group} in {reached} of {len(attempts)} initial "
        f"states, and {percent(signal)} of the groups of {group} carry a signal for GRPO"
    )
    if rate >= SATURATED and signal < SIGNAL:
        return "saturated", [f"RL has little left to learn: {figures}."]
    if signal >= SIGNAL:
        return "ready", [f"RL can start from here: {figures}."]
    if signal >= WEAK_SIGNAL:
        text = f"RL can start from here, but slowly: {figures}; larger groups (--n_samples_per_prompt) carry more."
        return "slow", [text]
    return "no", [f"RL cannot start from here: {figures}; improve the supervised policy first."]
