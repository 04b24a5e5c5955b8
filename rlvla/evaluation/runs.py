"""Comparison of training runs in groups that differ only in their seed, with intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.evaluation.learning_charts import SMALLEST_SPAN, metric_curve
from rlvla.evaluation.pages import COLORS, INK, LABEL_SIZE, Chart, labels, new_figure, render, svg, widen
from rlvla.evaluation.results import Rate
from rlvla.evaluation.statistics import interval_of_metrics
from rlvla.utils.cli.config_file import RUN_CONFIG_FILE
from rlvla.utils.data_files import read_json, read_yaml
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import METRICS_FILE, read_metrics

SEED = "seed"
_EVALUATED = "eval/success_at_end"
# Flags without effect on results: paths, outputs, machines, speed.
_WITHOUT_EFFECT = {
    *("save_path", "ckpt_path", "fallback_path", "load_checkpoint", "num_envs", "dry_run", "rank_timeout"),
    *("use_tensorboard", "use_wandb", "wandb_project", "wandb_group", "wandb_name", "logging_steps", "profile_steps"),
    *("save_steps", "save_hf_ckpt", "save_value_network", "max_ckpt_num", "num_videos", "dump_rollouts"),
    *("live", "live_port", "plateau_iterations", "micro_rollout_batch_size", "micro_train_batch_size", "balance_ranks"),
    *("env_python", "env_backend", "envs_per_worker", "env_max_rss_gb", "ray_address", "ray_frames", "rollout_python"),
    *("env_create_timeout", "env_reset_timeout", "env_step_timeout"),
    *("zero_stage", "adam_offload", "param_offload", "offload_during_rollout", "full_determinism"),
}
# Inputs that may be made separately for each seed.
_MADE_PER_SEED = ("pretrain", "critic_pretrain", "reward_pretrain", "rm_model_path", "ptx_demos", "demos")
_LEADING = {"algorithm", "advantage_estimator", "policy_loss", "reward", "actor_learning_rate"}  # named first
_MOST_FLAGS = 3  # in the name of a group
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Run:
    """A training run, finished or running.

    Attributes:
        folder: its folder.
        flags: the flags of its `config.yaml`.
        records: its metrics by step, see `read_metrics`.
        played: suite and tasks, e.g. "robosuite, task 0"; "" if they are unknown.
    """

    folder: str
    flags: Mapping[str, Any]
    records: Sequence[Mapping[str, float]]
    played: str = ""

    @property
    def seed(self) -> Any:
        """The seed; None if the run has none."""
        return self.flags.get(SEED)

    @property
    def evaluations(self) -> list[Mapping[str, float]]:
        """The records of its evaluations."""
        return [record for record in self.records if _EVALUATED in record]

    @property
    def _after_training(self) -> list[Mapping[str, float]]:
        """Evaluations of the trained policy: without the one before training, unless nothing is trained."""
        return [record for record in self.evaluations if record["step"] > 0 or self.flags.get("val_only")]

    @property
    def last(self) -> Rate | None:
        """Success at end in the last evaluation, with the interval over episodes; None if there is none yet."""
        return _rate(self._after_training[-1]) if self._after_training else None

    @property
    def iteration(self) -> int | None:
        """The iteration of `last`; None if there is none yet."""
        return int(self._after_training[-1]["step"]) if self._after_training else None

    @property
    def first(self) -> Rate | None:
        """Success at end before training; None if not evaluated."""
        return next((_rate(record) for record in self.evaluations if record["step"] == 0), None)

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
    def played(self) -> str:
        """See `Run`."""
        return self.runs[0].played

    @property
    def over_seeds(self) -> bool:
        """Whether there are several seeds, so that the interval of `rate` covers them."""
        return len({run.seed for run in self.runs}) > 1

    @property
    def iteration(self) -> int | None:
        """The latest evaluated iteration of any run; None if none was evaluated yet."""
        return max((run.iteration for run in self.runs if run.iteration is not None), default=None)

    @property
    def rate(self) -> Rate | None:
        """Mean success at end of the last evaluations; None if a run is not evaluated yet.

        With several seeds the interval covers the choice of seeds (`Rate.of_clusters`, one cluster per seed). With one
        seed it covers episodes only; further runs of that seed may be copies and do not make it narrower.
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
    """Read the runs in these folders; any other folder stands for the runs in it and one level below.

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
    """Expand a path into run folders; ConfigError if there is none."""
    folders = [path] if _is_run(path) else sorted(p for p in [*path.glob("*"), *path.glob("*/*")] if _is_run(p))
    if not folders:
        text = f"{path} holds no run of reinforcement learning ({RUN_FILE}, {RUN_CONFIG_FILE} and {METRICS_FILE})"
        raise ConfigError.of("runs", "missing_file", text)
    return folders


def _is_run(folder: Path) -> bool:
    """Whether this is the folder of a reinforcement learning run."""
    return all((folder / name).is_file() for name in (RUN_FILE, RUN_CONFIG_FILE, METRICS_FILE))


def _read(folder: Path) -> Run:
    flags = read_yaml(folder / RUN_CONFIG_FILE)
    if not isinstance(flags, dict):
        raise ValueError(f"{RUN_CONFIG_FILE} holds no flags")
    return Run(str(folder), flags, read_metrics(folder), _played(read_json(folder / RUN_FILE, allow_nan=True)))


def _played(run_config: Any) -> str:
    """Suite and tasks from the run configuration, which has those of the checkpoint, too."""
    env = run_config.get("env") if isinstance(run_config, dict) else None
    if not isinstance(env, dict) or not env.get("task_suite_name"):
        return ""
    tasks = _text(env.get("task_ids") or [])
    return f"{env['task_suite_name']}, " + (f"task{'s' if ' ' in tasks else ''} {tasks}" if tasks else "all tasks")


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group runs whose flags are equal except for the seed and values derived from it, in the order of the runs."""
    flags = {name for run in runs for name in run.flags} - _WITHOUT_EFFECT - {SEED}
    names = sorted(flags, key=lambda name: (name not in _LEADING, name))
    groups: list[list[Run]] = []
    for run in runs:
        matching = (members for members in groups if all(_equal(run, member, names) for member in members))
        members = next(matching, None)
        if members is None:
            groups.append([run])
        else:
            members.append(run)
    differing = [n for n in names if not all(_equal(replace(runs[0], played=run.played), run, [n]) for run in runs)]

    def name_of(members: Sequence[Run]) -> str:
        flags = _named({name: _shared(name, members) for name in differing}) if len(groups) > 1 else "all runs"
        return ": ".join(filter(None, [members[0].played, flags]))

    return [Group(name_of(members), tuple(members)) for members in groups]


def _equal(one: Run, other: Run, names: Sequence[str]) -> bool:
    """Whether these flags are equal, ignoring seed-dependent numbers in the paths of `_MADE_PER_SEED`."""
    if one.played != other.played:
        return False
    for name in names:
        a, b = _text(one.flags.get(name)), _text(other.flags.get(name))
        if a != b and not (name in _MADE_PER_SEED and _differ_by_seed(a, b, str(one.seed), str(other.seed))):
            return False
    return True


def _differ_by_seed(a: str, b: str, seed_a: str, seed_b: str) -> bool:
    """Whether two texts differ only in numbers that are the seeds, such as `sft_01/policy` and `sft_02/policy`."""

    def is_seed(text: str, seed: str) -> bool:
        return text.isdigit() and (text.lstrip("0") or "0") == seed

    ours, theirs = _NUMBER.split(a), _NUMBER.split(b)
    return len(ours) == len(theirs) and all(
        x == y or (is_seed(x, seed_a) and is_seed(y, seed_b)) for x, y in zip(ours, theirs)
    )


def _shared(name: str, runs: Sequence[Run]) -> str:
    """The value of a flag in a group, with `SEED` in place of seed-dependent numbers."""
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
    """Letter of a group in tables, by its index: A to Z, then A1 and so on."""
    rounds, place = divmod(number, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(rounds) if rounds else "")


def differences(groups: Sequence[Group]) -> list[GroupDifference]:
    """Differences of all pairs of groups that play the same tasks, the later minus the earlier one.

    Groups are independent: the interval combines those of the rates (Newcombe 1998; MOVER, Zou and Donner 2008).
    """
    pairs = []
    for (i, before), (j, after) in combinations(enumerate(groups), 2):
        a, b = after.rate, before.rate
        if a is not None and b is not None and before.played == after.played:
            difference = a.rate - b.rate
            low = difference - math.hypot(a.rate - a.low, b.high - b.rate)
            high = difference + math.hypot(a.high - a.rate, b.rate - b.low)
            over_seeds = before.over_seeds and after.over_seeds
            pairs.append(GroupDifference(letter_of(j), letter_of(i), difference, low, high, over_seeds))
    return pairs


def not_subtracted(groups: Sequence[Group]) -> str:
    """A note on groups that play different tasks, which are not subtracted from each other; "" if all play the same."""
    letters: dict[str, list[str]] = {}
    for number, group in enumerate(groups):
        letters.setdefault(group.played or "tasks unknown", []).append(letter_of(number))
    if len(letters) < 2:
        return ""
    listed = "; ".join(f"{' '.join(of_tasks)}: {played}" for played, of_tasks in letters.items())
    return f"No differences between groups that play different tasks ({listed})."


GROUP_HEADERS = ("group", "runs", "success at end [95 %]", "interval over")
RUN_HEADERS = ("run", "seed", "group", "start", "last [95 %]", "iteration", "best", "episodes")
_NOT_YET = "not evaluated yet"
DIFFERENCE_HEADERS = ("difference", "percentage points [95 %]", "interval over")


def group_rows(groups: Sequence[Group]) -> list[tuple[Any, ...]]:
    """Rows for `GROUP_HEADERS`; a run is behind if its group has an evaluation of a later iteration."""

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


def difference_rows(pairs: Sequence[GroupDifference]) -> list[tuple[str, str, str]]:
    """Rows for `DIFFERENCE_HEADERS`."""
    return [
        (
            f"{d.first} minus {d.second}",
            f"{100 * d.difference:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
            "seeds" if d.over_seeds else "episodes",
        )
        for d in pairs
    ]


# Scalar -> title and unit; scalars without values are left out.
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
        note=not_subtracted(groups),
        difference_table=(DIFFERENCE_HEADERS, difference_rows(differences(groups))),
        charts=[chart for name, axis in _CURVES.items() if (chart := _chart(name, *axis, groups)) is not None],
        percent=lambda rate: f"{100 * rate:.1f} %",
    )


def _chart(name: str, title: str, unit: str, groups: Sequence[Group]) -> Chart | None:
    """A scalar over training episodes: a thin line for each run, a thick one for the mean of each group."""
    figure, axes = new_figure("training episodes")
    drawn = False
    for number, group in enumerate(groups):
        color = COLORS[number % len(COLORS)]
        curves = [curve for run in group.runs if (curve := metric_curve(run.records, name))[0]]
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
    widen(axes, SMALLEST_SPAN.get(name, 0.0))
    axes.set_ylabel(unit, color=INK, fontsize=LABEL_SIZE)
    return Chart(title, svg(figure, axes, legend=False))


def _mean(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the interpolated curves on their common range."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(start, max(start, end), 100)
    return grid, np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
