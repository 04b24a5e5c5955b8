"""Chart of a recipe: success on held-out initial states over the minutes of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvla.commands.dagger import ROUNDS_FILE
from rlvla.commands.tune_sft import TRIALS_FILE
from rlvla.evaluation.pages import COLORS, Chart, new_figure, svg
from rlvla.evaluation.statistics import interval_of_metrics
from rlvla.recipes.recipe import Stage
from rlvla.recipes.state import State
from rlvla.utils.data_files import read_json
from rlvla.utils.files import read_metrics


@dataclass(frozen=True)
class Measurement:
    """Greedy success on held-out states.

    Attributes:
        minutes: since the recipe began, pauses left out.
        rate: success at end.
        low, high: 95 % interval.
    """

    minutes: float
    rate: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: float, result: Mapping[str, Any], key: str) -> Measurement:
        """From an entry with the rate under `key`, and the interval."""
        return cls(seconds / 60, result[key], result["low"], result["high"])


def measurements(
    stages: Sequence[Stage], state: State, evaluated: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Measurement]]:
    """Stage -> measurements in it.

    Args:
        stages: the stages of the recipe.
        state: their durations.
        evaluated: stage of an evaluation -> rates of its policy, see `rlvla.recipes.report.build_report`.
    """
    series: dict[str, list[Measurement]] = {}
    start = 0.0
    for stage in stages:
        record = state.of(stage)
        end = start + (0.0 if record is None else record.seconds)
        if stage.name in evaluated:
            series[stage.name] = [Measurement.of(end, evaluated[stage.name], "success_at_end")]
        elif stage.name in _READERS:
            series[stage.name] = list(_READERS[stage.name](stage, start, end))
        start = end
    return {name: points for name, points in series.items() if points}


def progress_chart(stages: Sequence[Stage], state: State, evaluated: Mapping[str, Mapping[str, Any]]) -> Chart | None:
    """Success over minutes, a series per stage; None with fewer than two measurements; arguments: `measurements`."""
    series = measurements(stages, state, evaluated)
    if sum(map(len, series.values())) < 2:
        return None
    figure, axes = new_figure("minutes")
    for color, (name, points) in zip(COLORS * len(series), series.items()):
        rates = [one.rate for one in points]
        errors = [[one.rate - one.low for one in points], [one.high - one.rate for one in points]]
        style = {"fmt": "o-", "markersize": 3.5, "capsize": 2.5, "color": color, "label": name}
        axes.errorbar([one.minutes for one in points], rates, yerr=errors, **style)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.03)
    return Chart("success at end on held-out states, 95 %, by stage", svg(figure, axes))


def _of_trials(stage: Stage, start: float, end: float) -> Iterator[Measurement]:
    """The best trial of `tune`."""
    path = stage.output / TRIALS_FILE
    if path.is_file():
        trials = read_json(path)["rounds"][-1]["trials"]
        yield Measurement.of(end, max(trials, key=lambda trial: trial["success_at_end"]), "success_at_end")


def _of_rounds(stage: Stage, start: float, end: float) -> Iterator[Measurement]:
    """The initial policy and each round of `dagger`."""
    path = stage.output / ROUNDS_FILE
    for entry in read_json(path)["rounds"] if path.is_file() else ():
        start += entry["seconds"]
        yield Measurement.of(start, entry, "rate")


def _of_training(stage: Stage, start: float, end: float) -> Iterator[Measurement]:
    """The evaluations of `rl`, which ends with an iteration or its evaluation."""
    records = read_metrics(stage.output)
    left = sum(record.get("timing_s/iteration", 0.0) for record in records)
    for record in records:
        left -= record.get("timing_s/iteration", 0.0)
        if "eval/success_at_end" in record:
            low, high = interval_of_metrics(record)
            yield Measurement((end - left) / 60, record["eval/success_at_end"], low, high)


_READERS = {"tune": _of_trials, "dagger": _of_rounds, "rl": _of_training}
