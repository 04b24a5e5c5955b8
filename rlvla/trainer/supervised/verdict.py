"""What the figures of a supervised run mean: how far it is from the expert, what is missing, whether RL can start.

The rules compare measured figures with each other, and thresholds are shares, so that they hold for any loss and any
unit of the actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlvla.evaluation.results import Rate
from rlvla.evaluation.statistics import mixed_group_share
from rlvla.trainer.supervised.history import Baselines, Measurement, Quality
from rlvla.utils.terminal import duration

FEWEST = 4  # measurements from which a trend is read
MOVES = 0.1  # share of the whole fall of a loss by which as much training again must change it, to count as moving
WORSE = 0.05  # share of the whole fall by which the last loss must exceed an earlier one to be called worse
GAP = 0.2  # share of the fall on training rows that may be missing on held-out rows
CONSTANT = 0.95  # error relative to the median action's from which a policy has learned nothing of use
FITTED = 0.5  # error relative to the median action's below which the rows are well fitted
BLIND = 0.9  # error relative to that of the nearest proprioception from which images contribute little
SIGNAL, WEAK_SIGNAL = 0.25, 0.05  # shares of groups with a signal
SATURATED = 0.9  # share of successful attempts from which groups without a signal are a good sign
ROUNDING = 1e-9  # smaller changes, relative to the loss, are due to rounding
WORDS = {"epochs": "more epochs", "data": "more demonstrations", "images": "larger images", "model": "a larger model"}


@dataclass(frozen=True)
class Facts:
    """What was measured in a supervised run.

    Attributes:
        measurements: in order.
        baselines: of the training rows and, if there are any, of the held-out rows.
        kept: the measurement of the exported policy, if it is not the last one.
        seconds: duration of training.
        demonstrated: (successful, all) episodes of the demonstrations.
        image_size: side of the images in pixels.
        parameters: number of parameters of the policy.
        attempts: (successes, attempts) at each initial state, with sampled actions; () if none were made.
        patience: `--early_stopping`; 0: off.
    """

    measurements: tuple[Measurement, ...]
    baselines: tuple[Baselines, Baselines | None] = (Baselines(), None)
    kept: Measurement | None = None
    seconds: float = 0.0
    demonstrated: tuple[int, int] = (0, 0)
    image_size: int = 0
    parameters: int = 0
    attempts: tuple[tuple[int, int], ...] = ()
    patience: int = 0


@dataclass(frozen=True)
class Verdict:
    """The result.

    Attributes:
        sentences: for the reader, each with its figures.
        missing: keys of `WORDS`, or "variety" (of demonstrations), the most promising first; () if nothing is known to
            be missing.
        rl: whether reinforcement learning can start: "ready", "slow" (few groups carry a signal), "no", or "saturated"
            (there is little left to learn); None if no attempts were made.
        learned: whether the policy is better than a constant.
    """

    sentences: tuple[str, ...]
    missing: tuple[str, ...] = ()
    rl: str | None = None
    learned: bool = True


def judge(facts: Facts) -> Verdict:
    """The verdict on a run; measurements whose losses are not finite are left out."""
    facts = replace(facts, measurements=tuple(filter(_is_finite, facts.measurements)))
    missing, why = _missing(facts)
    rl, about_rl = _rl(facts.attempts)
    sentences = [*_success(facts), *_kept(facts), *_fit(facts), *why, *about_rl]
    return Verdict(tuple(sentences), missing, rl, _has_learned(facts))


def _is_finite(measurement: Measurement) -> bool:
    sides = (measurement.train, measurement.heldout)
    return all(math.isfinite(side.loss) for side in sides if side is not None)


# ------------------------------------------------------------------ success
def _success(facts: Facts) -> list[str]:
    successes, episodes = facts.demonstrated
    success = _final(facts).success if facts.measurements else None
    if success is None or not episodes:
        return []
    expert = successes / episodes
    text = (
        f"Expert: {success} of {success.n} episodes from initial states outside of the data succeed, "
        f"{percent(expert)} of the {episodes} demonstrations"
    )
    if _as_good_as_expert(facts):
        return [f"{text}: the policy is on the level of its demonstrations, as far as {success.n} episodes can tell."]
    return [f"{text}: {100 * (expert - success.rate):.0f} points are missing."]


def _as_good_as_expert(facts: Facts) -> bool:
    successes, episodes = facts.demonstrated
    success = _final(facts).success
    return success is not None and bool(episodes) and success.high >= successes / episodes


def _final(facts: Facts) -> Measurement:
    """The measurement of the exported policy."""
    return facts.kept or facts.measurements[-1]


def _kept(facts: Facts) -> list[str]:
    if facts.kept is not None and facts.measurements:
        kept, last = facts.kept, facts.measurements[-1]
        return [
            f"Kept: the policy after epoch {kept.epoch:.1f} (step {kept.step}), the best in {_criterion(kept)}; "
            f"training ended after epoch {last.epoch:.1f} (step {last.step}) with {_criterion(last)}."
        ]
    better = _better(facts.measurements)
    if better is None or facts.patience:
        return []
    return [
        f"Kept: the last policy ({_criterion(facts.measurements[-1])}); the one after epoch {better.epoch:.1f} was "
        f"better ({_criterion(better)}), and --early_stopping 3 keeps the best."
    ]


def _criterion(measurement: Measurement) -> str:
    if measurement.success is not None:
        return f"success {measurement.success}"
    return f"held-out loss {measurement.heldout.loss:.3f}" if measurement.heldout else "no held-out measurement"


def _better(measurements: Sequence[Measurement]) -> Measurement | None:
    """An earlier measurement that is clearly better than the last one: by success beyond its interval, or by loss."""
    last, earlier = measurements[-1] if measurements else None, [m for m in measurements[:-1] if m.step]
    if last is None:
        return None
    if last.success is not None:
        best = max((m for m in earlier if m.success), key=lambda m: m.success.rate, default=None)
        return best if best is not None and best.success.rate > last.success.high else None
    if last.heldout is None:
        return None
    best = min((m for m in earlier if m.heldout), key=lambda m: m.heldout.loss, default=None)
    fall = _fall([m.heldout.loss for m in measurements if m.heldout])
    return best if best is not None and last.heldout.loss - best.heldout.loss > WORSE * fall else None


# ---------------------------------------------------------------------- fit
def _fit(facts: Facts) -> list[str]:
    if not facts.measurements:
        return []
    sides = _sides(facts)
    name, quality, baselines = sides[0]
    sentences = [f"Fit: {'; '.join(_described(*side) for side in sides)}."]
    if not _is_better_than_constant(quality, baselines):
        return [*sentences, f"Nothing of use was learned: on {name} a constant is as good."]
    return sentences if len(sides) == 1 else sentences + _not_learned(quality.errors, baselines.median_errors)


def _has_learned(facts: Facts) -> bool:
    return not facts.measurements or _is_better_than_constant(*_sides(facts)[0][1:])


def _sides(facts: Facts) -> list[tuple[str, Quality, Baselines]]:
    """The exported policy on held-out rows, if there are any, and on those of training, each with its baselines."""
    final, (of_train, of_heldout) = _final(facts), facts.baselines
    train = ("training rows", final.train, of_train)
    return [train] if final.heldout is None else [("held-out rows", final.heldout, of_heldout or Baselines()), train]


def _is_better_than_constant(quality: Quality, baselines: Baselines) -> bool:
    """By the error relative to the median action's or, without errors, by the accuracy of the most frequent tokens."""
    ratio = relative_error(quality.errors, baselines.median_errors)
    if ratio is not None:
        return ratio < CONSTANT
    return baselines.majority_accuracy is None or quality.accuracy > baselines.majority_accuracy


def _not_learned(errors: Sequence[float], medians: Sequence[float]) -> list[str]:
    """The action dimensions in which a policy is no better than the median action, while it is in others."""
    shares = {i: error / median for i, (error, median) in enumerate(zip(errors, medians)) if median > 0}
    blind = {i: share for i, share in shares.items() if share >= CONSTANT}
    if not blind or len(blind) == len(shares):
        return []
    named = ", ".join(map(str, blind))
    return [
        f"Nothing of use was learned in action dimension {named}: on held-out rows the error is "
        f"{', '.join(map(percent, blind.values()))} of that of the constant median action, at best "
        f"{percent(min(shares.values()))} in the others. Do the recorded cameras and proprioception show what it "
        "depends on (another camera, larger images)?"
    ]


def _described(name: str, quality: Quality, baselines: Baselines) -> str:
    text = f"{name}: loss {quality.loss:.3f}, accuracy {percent(quality.accuracy)}"
    if baselines.majority_accuracy is not None:
        text += f" (most frequent tokens: {percent(baselines.majority_accuracy)})"
    ratios = {
        "the median action's": relative_error(quality.errors, baselines.median_errors),
        "that of the nearest proprioception": relative_error(quality.errors, baselines.neighbor_errors),
    }
    compared = " and ".join(f"{percent(ratio)} of {what}" for what, ratio in ratios.items() if ratio is not None)
    return f"{text}, action error {compared}" if compared else text


def relative_error(errors: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Mean over the action dimensions of the error divided by the baseline's; None if it cannot be computed.

    Dimensions in which the baseline makes no error are left out.
    """
    if not errors or not baseline:
        return None
    mine, other = np.array(errors), np.array(baseline)
    varies = other > 0
    return float((mine[varies] / other[varies]).mean()) if varies.any() else None


# ------------------------------------------------------------------ missing
def _missing(facts: Facts) -> tuple[tuple[str, ...], list[str]]:
    """What is missing, and why."""
    points = facts.measurements
    if len(points) < FEWEST:
        text = f"Missing: unknown, because {len(points)} measurements show no trend; measure more often."
        return (), [text] if points and points[-1].heldout else []
    steps, learned = [m.step for m in points], [m.learned for m in points]
    train = trend(steps, [m.train.loss for m in points], learned)
    moves = f"over the second half of training the loss {train.words} on training rows"
    if points[-1].heldout is None:
        return _missing_of_training(facts, train, moves)
    heldout = trend(steps, [m.heldout.loss for m in points if m.heldout], learned)
    moves += f" and {heldout.words} on held-out rows"
    gap = points[-1].heldout.loss - points[-1].train.loss
    share = f", {percent(gap / train.fall)} of what was learned" if train.fall else ""
    known = f"{moves}; the gap between them is {gap:.3f}{share}"
    if _as_good_as_expert(facts):
        return (), [f"Missing: nothing that these episodes would show ({known})."]
    missing = ["epochs"] * (heldout.direction < 0) + ["data"] * (gap > GAP * train.fall > 0)
    if not missing:
        return _missing_capacity(facts, known)
    asked = " and ".join(WORDS[name] for name in missing)
    reasons = {
        "epochs": f"the held-out loss still falls (as many again take about {duration(facts.seconds)})",
        "data": "much of what was learned does not carry over to other initial states",
    }
    return tuple(missing), [f"Missing: {asked}, because {' and '.join(reasons[name] for name in missing)}: {known}."]


def _missing_of_training(facts: Facts, train: Trend, moves: str) -> tuple[tuple[str, ...], list[str]]:
    hint = "give --heldout_share 0.1 to see whether it carries over to other initial states"
    if train.direction < 0 and not (facts.measurements and _as_good_as_expert(facts)):
        return ("epochs",), [f"Missing: perhaps more epochs, because the loss still falls: {moves}; {hint}."]
    return (), [f"Missing: unknown, because {moves}; {hint}."]


def _missing_capacity(facts: Facts, known: str) -> tuple[tuple[str, ...], list[str]]:
    """What is missing if neither time nor data is."""
    (of_train, _), train = facts.baselines, facts.measurements[-1].train
    ratio = relative_error(train.errors, of_train.median_errors)
    neighbor = relative_error(train.errors, of_train.neighbor_errors)
    settled = f"neither more epochs nor more of the same demonstrations ({known})"
    if ratio is not None and ratio <= FITTED:
        text = (
            f"Missing: {settled}: the actions are fitted (error {percent(ratio)} of the median action's). What is "
            "lost, is lost in states that the demonstrations do not show: record an expert that errs and recovers, or "
            "go on with reinforcement learning."
        )
        return ("variety",), [text]
    if neighbor is not None and neighbor >= BLIND:
        text = (
            f"Missing: {settled}, but {WORDS['images']} (now {facts.image_size} pixels), then {WORDS['model']}: even "
            f"on training rows the error is {percent(neighbor)} of that of the nearest proprioception, so the images "
            "say little to the policy."
        )
        return ("images", "model"), [text]
    fitted = "" if ratio is None else f": on training rows the error is still {percent(ratio)} of the median action's"
    text = (
        f"Missing: {settled}, but {WORDS['model']} (now {facts.parameters / 1e6:.2g} M parameters), then "
        f"{WORDS['images']} (now {facts.image_size} pixels){fitted}."
    )
    return ("model", "images"), [text]


@dataclass(frozen=True)
class Trend:
    """How a loss moves in the second half of training.

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
        """-1 falling, 1 rising, 0 neither.

        A schedule that decays ends with small steps: what counts is the change expected of as much training again.
        """
        return int(np.sign(self.change)) if abs(self.change) > MOVES * self.fall * self.share else 0

    @property
    def words(self) -> str:
        """As in "the loss ..."."""
        verb = {-1: "fell", 0: "hardly moved", 1: "rose"}[self.direction]
        share = f", {percent(abs(self.change) / self.fall)} of its whole fall" if self.fall else ""
        return f"{verb} ({self.change:+.3f}{share})"


def trend(steps: Sequence[int], losses: Sequence[float], learned: Sequence[float] = ()) -> Trend:
    """The least-squares line through the losses of the second half; at least the last three.

    Args:
        steps: when the losses were measured.
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


# --------------------------------------------------------------------- RL
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


def percent(share: float) -> str:
    """A share in percent, with a decimal if it is below 10 %."""
    return f"{100 * share:.{1 if 0 < share < 0.0995 else 0}f}%"
