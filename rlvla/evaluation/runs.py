"""Runs side by side: those that differ in their seed only are one group, and groups are compared with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.evaluation.naming import labels
from rlvla.evaluation.results import Rate
from rlvla.evaluation.statistics import interval_of_metrics
from rlvla.utils.cli.config_file import RUN_CONFIG_FILE
from rlvla.utils.data_files import read_yaml
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import METRICS_FILE, read_metrics

SEED = "seed"
_EVALUATED = "eval/success_at_end"
# Flags that change no result: places, what is written, how fast it goes.
_WITHOUT_EFFECT = {
    *("save_path", "ckpt_path", "fallback_path", "load_checkpoint", "num_envs", "dry_run", "rank_timeout"),
    *("use_tensorboard", "use_wandb", "wandb_project", "wandb_group", "wandb_name", "logging_steps", "profile_steps"),
    *(
        "save_steps",
        "save_hf_ckpt",
        "save_value_network",
        "max_ckpt_num",
        "num_videos",
        "dump_rollouts",
        "live",
        "live_port",
    ),
    *("live", "live_port", "plateau_iterations", "micro_rollout_batch_size", "micro_train_batch_size", "balance_ranks"),
}
# Each seed may start from files of its own, which were made alike.
_MADE_PER_SEED = ("pretrain", "critic_pretrain", "reward_pretrain", "rm_model_path", "ptx_demos", "demos")
_LEADING = {"algorithm", "advantage_estimator", "policy_loss", "reward", "actor_learning_rate"}  # named first
_MOST_FLAGS = 3  # in the name of a group


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
        """Success at end in the last evaluation, with the interval over episodes; None if there was none."""
        return _rate(self.evaluations[-1]) if self.evaluations else None

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
    def rate(self) -> Rate | None:
        """Mean success at end of the last evaluations; None if a run was not evaluated.

        With several runs the interval is over seeds (`Rate.of_clusters`): training again gives a success in it. With
        one it is over the episodes of that run alone, and says nothing about other seeds.
        """
        rates = [run.last for run in self.runs]
        if len(rates) == 1 or None in rates:
            return rates[0] if len(rates) == 1 else None
        counts = [(round(rate.rate * rate.n), rate.n) for rate in rates if rate is not None]
        return Rate.of_clusters([[True] * good + [False] * (n - good) for good, n in counts])


@dataclass(frozen=True)
class GroupDifference:
    """Success of one group minus that of another, with a 95 % interval.

    Attributes:
        first, second: names of the groups.
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
    """The runs in groups of equal flags but for the seed, in the order of the runs."""
    known = {name for run in runs for name in run.flags} - _WITHOUT_EFFECT - {SEED}
    names = sorted(known, key=lambda name: (name not in _LEADING, name))
    per_seed = [name for name in _MADE_PER_SEED if name in names and _follows_the_seed(name, runs)]
    telling = [name for name in names if name not in per_seed and len({_text(run.flags.get(name)) for run in runs}) > 1]
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(_text(run.flags.get(name)) for name in telling), []).append(run)
    if len(found) == 1:
        return [Group("all runs", tuple(runs))]
    return [Group(_named(dict(zip(telling, values))), tuple(members)) for values, members in found.items()]


def _follows_the_seed(name: str, runs: Sequence[Run]) -> bool:
    """Whether runs with the same seed, if there are several, have the same value, and other seeds others."""
    values = {(run.seed, _text(run.flags.get(name))) for run in runs}
    return len(values) == len({seed for seed, _ in values}) > 1


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _named(flags: Mapping[str, str]) -> str:
    shown = [f"{name} {value}" for name, value in list(flags.items())[:_MOST_FLAGS]]
    rest = len(flags) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def differences(groups: Sequence[Group]) -> list[GroupDifference]:
    """All pairs of groups, the later one minus the earlier one.

    Groups are independent: the interval joins those of the two rates (Newcombe 1998; MOVER, Zou and Donner 2008).
    """
    found = []
    for before, after in combinations(groups, 2):
        a, b = after.rate, before.rate
        if a is not None and b is not None:
            difference = a.rate - b.rate
            low = difference - math.hypot(a.rate - a.low, b.high - b.rate)
            high = difference + math.hypot(a.high - a.rate, b.rate - b.low)
            several = min(len(before.runs), len(after.runs)) > 1
            found.append(GroupDifference(after.name, before.name, difference, low, high, several))
    return found


GROUP_HEADERS = ("group", "runs", "success at end [95 %]", "interval over")
RUN_HEADERS = ("run", "seed", "group", "start", "last [95 %]", "best", "episodes")
DIFFERENCE_HEADERS = ("difference", "percentage points [95 %]", "interval over")


def group_rows(groups: Sequence[Group]) -> list[tuple[Any, ...]]:
    """Rows for `GROUP_HEADERS`."""
    return [
        (group.name, len(group.runs), group.rate or "-", "seeds" if len(group.runs) > 1 else "episodes of one run")
        for group in groups
    ]


def run_rows(groups: Sequence[Group]) -> list[tuple[Any, ...]]:
    """Rows for `RUN_HEADERS`."""
    names = labels(run.folder for group in groups for run in group.runs)

    def rate(value: Rate | None) -> str:
        return "-" if value is None else f"{100 * value.rate:.1f}%"

    return [
        (names[run.folder], run.seed, group.name, rate(run.first), run.last or "-", rate(run.best), run.episodes)
        for group in groups
        for run in group.runs
    ]


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
