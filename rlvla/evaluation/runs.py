"""Runs side by side: those that differ in their seed only are one group, and groups are compared with intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.evaluation.pages import COLORS, INK, LABEL_SIZE, Chart, labels, new_figure, render, svg
from rlvla.evaluation.results import Rate
from rlvla.evaluation.statistics import interval_of_metrics
from rlvla.utils.cli.config_file import RUN_CONFIG_FILE
from rlvla.utils.data_files import read_yaml
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import METRICS_FILE, read_metrics

SEED = "seed"
_EVALUATED = "eval/success_at_end"
# Flags that change no result: places, what is written, on which machine and how fast it goes.
_WITHOUT_EFFECT = {
    *("save_path", "ckpt_path", "fallback_path", "load_checkpoint", "num_envs", "dry_run", "rank_timeout"),
    *("use_tensorboard", "use_wandb", "wandb_project", "wandb_group", "wandb_name", "logging_steps", "profile_steps"),
    *("save_steps", "save_hf_ckpt", "save_value_network", "max_ckpt_num", "num_videos", "dump_rollouts"),
    *("live", "live_port", "plateau_iterations", "micro_rollout_batch_size", "micro_train_batch_size", "balance_ranks"),
    *("env_python", "env_backend", "envs_per_worker", "env_max_rss_gb", "ray_address", "ray_frames", "rollout_python"),
    *("env_create_timeout", "env_reset_timeout", "env_step_timeout"),
    *("zero_stage", "adam_offload", "param_offload", "offload_during_rollout", "full_determinism"),
}
# Each seed may start from files of its own, which were made alike.
_MADE_PER_SEED = ("pretrain", "critic_pretrain", "reward_pretrain", "rm_model_path", "ptx_demos", "demos")
_LEADING = {"algorithm", "advantage_estimator", "policy_loss", "reward", "actor_learning_rate"}  # named first
_MOST_FLAGS = 3  # in the name of a group
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Run:
    """A training run, finished or going on.

    Attributes:
        folder: its folder.
        flags: the flags of its `config.yaml`.
        records: its metrics by step, see `read_metrics`.
    """

    folder: str
    flags: Mapping[str, Any]
    records: Sequence[Mapping[str, float]]

    @property
    def seed(self) -> Any:
        """The seed; None if the run has none."""
        return self.flags.get(SEED)

    @property
    def evaluations(self) -> list[Mapping[str, float]]:
        """The records of its evaluations."""
        return [record for record in self.records if _EVALUATED in record]

    @property
    def last(self) -> Rate | None:
        """Success at end in the last evaluation, with the interval over episodes; None if there is none yet."""
        return _rate(self._of_result[-1]) if self._of_result else None

    @property
    def iteration(self) -> int | None:
        """The iteration after which that was; None if there is none yet."""
        return int(self._of_result[-1]["step"]) if self._of_result else None

    @property
    def _of_result(self) -> list[Mapping[str, float]]:
        """The evaluations of what was trained: the one before training is none, unless no training is meant."""
        return [record for record in self.evaluations if record["step"] > 0 or self.flags.get("val_only")]

    @property
    def first(self) -> Rate | None:
        """Success at end before training; None if that was not evaluated."""
        start = [record for record in self.evaluations if record["step"] == 0]
        return _rate(start[0]) if start else None

    @property
    def best(self) -> Rate | None:
        """Success at end in the best evaluation; None if there was none."""
        return max(map(_rate, self.evaluations), key=lambda rate: rate.rate, default=None)

    @property
    def episodes(self) -> int:
        """Training episodes so far."""
        return int(max((record.get("total/episodes", 0.0) for record in self.records), default=0.0))


def _rate(record: Mapping[str, float]) -> Rate:
    return Rate(record[_EVALUATED], round(record["eval/n"]), *interval_of_metrics(record))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only.

    Attributes:
        name: the flags in which it differs from other groups.
        runs: at least one.
    """

    name: str
    runs: tuple[Run, ...]

    @property
    def over_seeds(self) -> bool:
        """Whether there are several seeds, over which the interval then is."""
        return len({run.seed for run in self.runs}) > 1

    @property
    def iteration(self) -> int | None:
        """The furthest iteration after which a run was evaluated; None if none was yet."""
        return max((run.iteration for run in self.runs if run.iteration is not None), default=None)

    @property
    def rate(self) -> Rate | None:
        """Mean success at end of the last evaluations; None if a run is not evaluated yet.

        With several seeds the interval is over them (`Rate.of_clusters`, runs of the same seed are one cluster):
        training again gives a success in it. With one it is over the episodes of a run and says nothing about other
        seeds; runs of the same seed may be copies of each other, and do not make it narrower.
        """
        rates = [(run.seed, rate) for run in self.runs if (rate := run.last) is not None]
        if len(rates) < len(self.runs):
            return None
        if len(rates) == 1:
            return rates[0][1]
        if not self.over_seeds:
            bounds = np.array([(rate.rate, rate.low, rate.high) for _, rate in rates])
            numbers = np.array([rate.n for _, rate in rates])
            mean, low, high = (numbers @ bounds / numbers.sum()).tolist()
            return Rate(mean, int(numbers.sum()), low, high)
        clusters: dict[Any, list[bool]] = {}
        for seed, rate in rates:
            good = round(rate.rate * rate.n)
            clusters.setdefault(seed, []).extend([True] * good + [False] * (rate.n - good))
        return Rate.of_clusters(list(clusters.values()), graded=True)


@dataclass(frozen=True)
class GroupDifference:
    """Success of one group minus that of another, with a 95 % interval.

    Attributes:
        first, second: letters of the groups.
        difference, low, high: of the rates.
        over_seeds: whether both intervals are over seeds.
    """

    first: str
    second: str
    difference: float
    low: float
    high: float
    over_seeds: bool


def read_runs(paths: Sequence[str]) -> list[Run]:
    """The runs in these folders; a folder that is none stands for the runs in it and one level below.

    Raises:
        ConfigError: a folder holds no run, or a file of a run is damaged.
    """
    runs: dict[Path, Run] = {}
    problems: list[Problem] = []
    for path in map(Path, paths):
        try:
            for folder in _folders(path):
                runs.setdefault(folder.resolve(), _read(folder))
        except ConfigError as error:
            problems += error.problems
        except (OSError, ValueError, KeyError) as error:
            problems.append(Problem("runs", "invalid_file", f"{path} is not the folder of a run ({error})"))
    if problems:
        raise ConfigError(problems)
    return list(runs.values())


def _folders(path: Path) -> list[Path]:
    """The folders of runs that a path stands for."""
    folders = [path] if _is_run(path) else sorted(p for p in [*path.glob("*"), *path.glob("*/*")] if _is_run(p))
    if not folders:
        text = f"{path} holds no run of reinforcement learning ({RUN_FILE}, {RUN_CONFIG_FILE} and {METRICS_FILE})"
        raise ConfigError.of("runs", "missing_file", text)
    return folders


def _is_run(folder: Path) -> bool:
    """Whether reinforcement learning was run there."""
    return all((folder / name).is_file() for name in (RUN_FILE, RUN_CONFIG_FILE, METRICS_FILE))


def _read(folder: Path) -> Run:
    flags = read_yaml(folder / RUN_CONFIG_FILE)
    if not isinstance(flags, dict):
        raise ValueError(f"{RUN_CONFIG_FILE} holds no flags")
    return Run(str(folder), flags, read_metrics(folder))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """The runs in groups of equal flags but for the seed and what follows it, in the order of the runs."""
    known = {name for run in runs for name in run.flags} - _WITHOUT_EFFECT - {SEED}
    names = sorted(known, key=lambda name: (name not in _LEADING, name))
    found: list[list[Run]] = []
    for run in runs:
        fitting = (members for members in found if all(_alike(run, member, names) for member in members))
        members = next(fitting, None)
        if members is None:
            found.append([run])
        else:
            members.append(run)
    if len(found) == 1:
        return [Group("all runs", tuple(runs))]
    telling = [name for name in names if not all(_alike(runs[0], run, [name]) for run in runs)]
    return [Group(_named({name: _shared(name, members) for name in telling}), tuple(members)) for members in found]


def _alike(one: Run, other: Run, names: Sequence[str]) -> bool:
    """Whether these flags are equal; what each seed may have of its own is, once its seed in it is replaced."""
    for name in names:
        a, b = _text(one.flags.get(name)), _text(other.flags.get(name))
        if a != b and not (name in _MADE_PER_SEED and _follow_the_seeds(a, b, str(one.seed), str(other.seed))):
            return False
    return True


def _follow_the_seeds(a: str, b: str, seed_a: str, seed_b: str) -> bool:
    """Whether two texts differ only in numbers that are the seeds, such as `sft_01/policy` and `sft_02/policy`."""
    ours, theirs = _NUMBER.split(a), _NUMBER.split(b)
    return len(ours) == len(theirs) and all(
        x == y or (x.isdigit() and y.isdigit() and _plain(x) == seed_a and _plain(y) == seed_b)
        for x, y in zip(ours, theirs)
    )


def _plain(number: str) -> str:
    return number.lstrip("0") or "0"


def _shared(name: str, runs: Sequence[Run]) -> str:
    """The value of a flag in a group, `SEED` in place of numbers that follow the seed."""
    pieces = [_NUMBER.split(_text(run.flags.get(name))) for run in runs]
    return "".join(piece[0] if len(set(piece)) == 1 else "SEED" for piece in zip(*pieces))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _named(flags: Mapping[str, str]) -> str:
    shown = [f"{name} {value}" for name, value in list(flags.items())[:_MOST_FLAGS]]
    rest = len(flags) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def letter_of(number: int) -> str:
    """What tables call the group of this number, counted from 0: A to Z, then A1 and so on."""
    rounds, place = divmod(number, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(rounds) if rounds else "")


def differences(groups: Sequence[Group]) -> list[GroupDifference]:
    """All pairs of groups, the later one minus the earlier one.

    Groups are independent: the interval joins those of the two rates (Newcombe 1998; MOVER, Zou and Donner 2008).
    """
    found = []
    for (i, before), (j, after) in combinations(enumerate(groups), 2):
        a, b = after.rate, before.rate
        if a is not None and b is not None:
            difference = a.rate - b.rate
            low = difference - math.hypot(a.rate - a.low, b.high - b.rate)
            high = difference + math.hypot(a.high - a.rate, b.rate - b.low)
            over_seeds = before.over_seeds and after.over_seeds
            found.append(GroupDifference(letter_of(j), letter_of(i), difference, low, high, over_seeds))
    return found


GROUP_HEADERS = ("group", "runs", "success at end [95 %]", "interval over")
RUN_HEADERS = ("run", "seed", "group", "start", "last [95 %]", "iteration", "best", "episodes")
_NOT_YET = "not evaluated yet"
DIFFERENCE_HEADERS = ("difference", "percentage points [95 %]", "interval over")


def group_rows(groups: Sequence[Group]) -> list[tuple[Any, ...]]:
    """Rows for `GROUP_HEADERS`; a run is behind if its last evaluation was before the furthest of its group."""

    def over(group: Group) -> str:
        if group.over_seeds:
            return "seeds"
        return "episodes of one run" if len(group.runs) == 1 else "episodes of one seed"

    def count(group: Group) -> str:
        behind = sum(run.iteration is not None and run.iteration != group.iteration for run in group.runs)
        return f"{len(group.runs)}, {behind} behind" if behind else str(len(group.runs))

    return [(letter_of(i), count(group), group.rate or _NOT_YET, over(group)) for i, group in enumerate(groups)]


def run_rows(groups: Sequence[Group]) -> list[tuple[Any, ...]]:
    """Rows for `RUN_HEADERS`."""
    names = labels(run.folder for group in groups for run in group.runs)

    def rate(value: Rate | None) -> str:
        return "-" if value is None else f"{100 * value.rate:.1f}%"

    def iteration(run: Run, group: Group) -> str:
        if run.iteration is None:
            return "-"
        return str(run.iteration) if run.iteration == group.iteration else f"{run.iteration} of {group.iteration}"

    def row(run: Run, letter: str, group: Group) -> tuple[Any, ...]:
        last = (run.last or _NOT_YET, iteration(run, group))
        return (names[run.folder], run.seed, letter, rate(run.first), *last, rate(run.best), run.episodes)

    return [row(run, letter_of(number), group) for number, group in enumerate(groups) for run in group.runs]


def difference_rows(found: Sequence[GroupDifference]) -> list[tuple[str, str, str]]:
    """Rows for `DIFFERENCE_HEADERS`."""
    return [
        (
            f"{d.first} minus {d.second}",
            f"{100 * d.difference:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
            "seeds" if d.over_seeds else "episodes",
        )
        for d in found
    ]


_POINTS = 100  # of a mean curve
# Scalar -> title and unit; those that no run has are left out.
_CURVES = {
    "eval/success_at_end": ("success at end, evaluated", ""),
    "rollout/success_at_end": ("success at end, training episodes", ""),
    "reward/total": ("reward per episode", ""),
    "actor/entropy": ("entropy of the policy", "nats per action dimension"),
    "actor/ppo_kl": ("KL to the old policy", ""),
    "rollout/episode_length": ("episode length", "environment steps"),
}


def render_runs_page(groups: Sequence[Group]) -> str:
    """The page as HTML."""
    return render(
        "compare_runs.html.jinja",
        groups=groups,
        letters=[letter_of(number) for number in range(len(groups))],
        colors=[COLORS[number % len(COLORS)] for number in range(len(groups))],
        group_table=(GROUP_HEADERS, group_rows(groups)),
        run_table=(RUN_HEADERS, run_rows(groups)),
        difference_table=(DIFFERENCE_HEADERS, difference_rows(differences(groups))),
        charts=[chart for name, words in _CURVES.items() if (chart := _chart(name, *words, groups)) is not None],
        percent=lambda rate: f"{100 * rate:.1f} %",
    )


def _chart(name: str, title: str, unit: str, groups: Sequence[Group]) -> Chart | None:
    """A scalar over training episodes: a thin line for each run, a thick one for the mean of each group."""
    figure, axes = new_figure("training episodes")
    drawn = False
    for number, group in enumerate(groups):
        color = COLORS[number % len(COLORS)]
        curves = [curve for run in group.runs if len((curve := _curve(run, name))[0])]
        for x, y in curves:
            width, alpha = (0.9, 0.55) if len(curves) > 1 else (1.8, 1)
            axes.plot(x, y, color=color, linewidth=width, alpha=alpha, marker="o" if len(x) == 1 else None)
            drawn = True
        if len(curves) > 1 and len(curves) == len(group.runs) and max(len(x) for x, _ in curves) > 1:
            axes.plot(*_mean(curves), color=color, linewidth=2.2)
    if not drawn:
        return None
    if "success" in name:
        axes.set_ylim(0, 1.03)
    axes.set_ylabel(unit, color=INK, fontsize=LABEL_SIZE)
    return Chart(title, svg(figure, axes, legend=False))


def _curve(run: Run, name: str) -> tuple[list[float], list[float]]:
    records: list[Mapping[str, float]] = [r for r in run.records if name in r and "total/episodes" in r]
    return [r["total/episodes"] for r in records], [r[name] for r in records]


def _mean(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the curves, interpolated, where all of them have values."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(start, max(start, end), _POINTS)
    return grid, np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
