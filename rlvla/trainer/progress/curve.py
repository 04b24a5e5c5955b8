"""Plot of success and entropy over a run, updated during the run."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import CURVE_FILE
from rlvla.evaluation.learning_charts import SMALLEST_SPAN
from rlvla.evaluation.pages import run_name, widen
from rlvla.evaluation.statistics import interval_of_metrics, wilson_interval
from rlvla.utils.files import BestEffortWriter, read_metrics, write_atomic

_SECONDS = 30.0  # minimum interval
_TIME_FRACTION = 0.02  # maximum fraction of the run time


class GrowingCurve:
    """Redraws the learning curve at intervals that keep its cost negligible.

    Args:
        folder: the run folder.
        draw: writes the plot.
        now: clock in seconds.
    """

    def __init__(
        self,
        folder: Path,
        draw: Callable[[Path], object] | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self._folder, self._draw, self._now = folder, draw or save_learning_curve, now
        self._best_effort = BestEffortWriter(str(folder / CURVE_FILE))
        self._next = now() + _SECONDS

    def update(self) -> bool:
        """Redraw if due; returns whether it was."""
        start = self._now()
        if start < self._next:
            return False
        self._best_effort.attempt(lambda: self._draw(self._folder))
        end = self._now()
        self._next = end + max(_SECONDS, (end - start) / _TIME_FRACTION)
        return True


def save_learning_curve(folder: Path) -> Path | None:
    """Plot success (rollout, and evaluation with 95 % interval) and entropy over episodes; None without metrics.

    The success of a rollout belongs to the policy before the update: the curve begins with the initial policy at 0
    episodes.
    """
    records = read_metrics(folder)
    if not records:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, sharex=True, figsize=(11, 4))
    figure.subplots_adjust(left=0.06, right=0.985, bottom=0.13, top=0.86, wspace=0.24)  # a layout engine draws twice
    try:
        played = [r for r in records if "rollout/success_at_end" in r]
        if played:
            x = trained_before(played)
            left.plot(x, [r["rollout/success_at_end"] for r in played], color="tab:blue", label="rollout (sampled)")
        updated = [r for r in played if "actor/entropy" in r]  # missing while only the critic is trained
        if updated:
            x = [r["total/episodes"] for r in updated]
            right.plot(x, [r["actor/entropy"] for r in updated], color="tab:green")
            widen(right, SMALLEST_SPAN["actor/entropy"])
        evaluated = [r for r in records if "eval/success_at_end" in r]
        if evaluated:
            x = [r["total/episodes"] for r in evaluated]
            y = [r["eval/success_at_end"] for r in evaluated]
            bounds = [interval_of_metrics(record) for record in evaluated]
            errors = [[v - low for v, (low, _) in zip(y, bounds)], [high - v for v, (_, high) in zip(y, bounds)]]
            left.errorbar(x, y, yerr=errors, fmt="o-", capsize=3, color="tab:red", label="evaluation, 95 %")
        start = start_of(records)
        if start is not None:
            rate, low, high, how = start
            left.axhline(rate, linestyle=":", color="gray", label=f"start: {100 * rate:.1f} % ({how})")
            left.axhspan(low, high, color="gray", alpha=0.12, linewidth=0)
        left.set(xlabel="training episodes", ylabel="success at end", ylim=(0, 1.02), title="success")
        left.grid(alpha=0.3)
        left.legend(loc="best")
        right.set(xlabel="training episodes", ylabel="nats per action dimension", title="entropy of the policy")
        right.grid(alpha=0.3)
        figure.suptitle(run_name(str(folder.absolute())), fontweight="bold", parse_math=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    finally:
        plt.close(figure)
    write_atomic(folder / CURVE_FILE, buffer.getvalue())
    return folder / CURVE_FILE


def trained_before(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Number of episodes that the policy of each rollout was trained on, from the records of the iterations."""
    before, trained = (0, 0.0), []
    for record in records:
        step, total = record["step"], record["total/episodes"]
        # Iterations that were not logged are assumed to have had as many episodes as this one.
        trained.append(total - (total - before[1]) / (step - before[0]))
        before = (step, total)
    return trained


def start_of(records: Sequence[Mapping[str, Any]]) -> tuple[float, float, float, str] | None:
    """Success of the initial policy, its 95 % interval and kind of measurement; None without one.

    Measured by the evaluation before training, else by the sampled success of the first iteration.
    """
    for record in records:
        if record["step"] == 0 and "eval/success_at_end" in record:
            return (record["eval/success_at_end"], *interval_of_metrics(record), "evaluation")
    first = records[0] if records else {}
    if first.get("step") == 1 and "rollout/episodes" in first:
        rate, n = first["rollout/success_at_end"], round(first["rollout/episodes"])
        return (rate, *wilson_interval(round(rate * n), n), "sampled") if n else None
    return None
