"""Checks of demonstrations before training, for `cli/check_demos.py` and `cli/train_sft_vla.py`."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.commands.custom_modules import words_for_later_commands
from rlvla.data.demonstrations import STATISTICS_FILE, Demonstrations
from rlvla.data.lerobot import is_lerobot
from rlvla.data.libero import is_libero
from rlvla.data.options import AS_RECORDED, ReadOptions
from rlvla.data.pictures import mean_start, turned
from rlvla.data.quality import ERROR, LEVELS, NOTE, WARNING, Finding, quality, quality_of_file
from rlvla.data.reading import (
    check_options,
    computed_statistics,
    data_files,
    disagreements,
    joined,
    not_cached,
    read_demonstrations,
    task_of,
)
from rlvla.data.replayed_episodes import Repetition, repetitions, replay_problem
from rlvla.data.validation import DataError
from rlvla.envs.base import TaskSpec
from rlvla.envs.splits import train_init_states
from rlvla.evaluation.demos_page import DemosPage, render_demos_page, spread
from rlvla.evaluation.pages import NOT_RECORDED
from rlvla.utils.bars import progress_bar
from rlvla.utils.cli.flags import arg, range_problems
from rlvla.utils.errors import ConfigError, MissingExtraError, Problem
from rlvla.utils.files import write_atomic, write_json
from rlvla.utils.terminal import log, page_words, show, table

PAGE_FILE, FINDINGS_FILE = "check_demos.html", "check_demos.json"
HEADERS = ("file", "suite", "episodes", "steps", "success", "actions", "proprio", "pictures", "cameras")
_NAMED = 4  # episodes and files named on the screen
_CONVINCING = 2  # episodes that succeed again
_WARNINGS = 4  # lines in front of training


@dataclass(frozen=True)
class CheckDemosConfig(ReadOptions):
    """Demonstrations to check, and outputs."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "one or more HDF5 files or folders of them (cli/collect_demos.py, --dump_rollouts), LeRobot or LIBERO folders",
        metavar="PATH",
    )
    output: str = arg(
        "runs/check_demos",
        f"folder for {PAGE_FILE} and {FINDINGS_FILE}; existing ones are overwritten",
        metavar="DIR",
        writes="folder",
    )
    cameras: tuple[str, ...] = arg((), "cameras to look at (default: all)", metavar="NAME")
    replay: int = arg(
        4,
        "episodes whose actions are executed again, where suite and initial states are known; 0: none",
        minimum=0,
    )
    statistics: str | None = arg(
        None,
        f"folder for {STATISTICS_FILE} of all files together (default: beside each HDF5 file that has none)",
        metavar="DIR",
        writes="folder",
    )
    show_episodes: int = arg(6, "episodes whose pictures the page shows", minimum=0, maximum=100)


@dataclass
class Check:
    """Result of the check.

    Attributes:
        paths: the files that could be read.
        parts: their episodes.
        findings: errors first.
        replayed: episodes whose actions were executed again.
        demos: all episodes as one dataset; the first file's if the files do not agree; None if none can be read.
        written: new `dataset_statistics.json` files.
    """

    paths: list[str] = field(default_factory=list)
    parts: list[Demonstrations] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    replayed: list[Repetition] = field(default_factory=list)
    demos: Demonstrations | None = None
    written: list[Path] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether an error makes the data unusable."""
        return any(finding.level == ERROR for finding in self.findings)

    @property
    def names(self) -> list[str]:
        """Names of the episodes of `demos`, with their file if there are several."""
        if len(self.parts) > 1 and self.demos is not self.parts[0]:
            return [f"{path}: {name}" for path, part in zip(self.paths, self.parts) for name in _names(part)]
        return _names(self.parts[0])


def _names(demos: Demonstrations) -> list[str]:
    return demos.names or [f"demo_{i}" for i in range(len(demos.actions))]


def run_check_demos(config: CheckDemosConfig) -> Check:
    """Check the files, write page, findings and missing statistics, print the summary.

    Raises:
        ConfigError: a flag is wrong, or a file does not exist.
    """
    problems: list[Problem] = range_problems(config)
    problems += [
        Problem("demos", "missing_file", f"--demos {path}: there is no such file or folder{not_cached(path)}")
        for path in config.demos
        if not Path(path).exists() and not is_lerobot(path)
    ]
    if not config.demos:
        problems.append(Problem("demos", "too_few", "--demos names no file"))
    if problems:
        raise ConfigError(problems)
    paths = data_files(list(dict.fromkeys(config.demos)))
    check_options(config, paths)
    check = _read(paths, config.cameras, config)
    if check.parts:
        _look(check)
        check.findings += _replay(check, config.replay)
        check.findings = _excused(check)
        check.written = _write_statistics(check, config.statistics, config.selects or len(check.parts) < len(paths))
    check.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    page = render_demos_page(_page(check, config), config.show_episodes)
    write_atomic(output / PAGE_FILE, page.encode(errors="replace"))
    write_json(output / FINDINGS_FILE, _as_dict(check))
    _print(check)
    show(page_words("page", output / PAGE_FILE))
    return check


def _read(paths: Sequence[str], cameras: Sequence[str], options: ReadOptions) -> Check:
    check = Check()
    with progress_bar(len(paths), "reading") as bar:
        for path in paths:
            try:
                check.parts.append(read_demonstrations(path, cameras or None, options))
                check.paths.append(path)
            except DataError as error:
                check.findings += _grouped(path, error)
            except (ConfigError, MissingExtraError) as error:
                texts = error.problems if isinstance(error, ConfigError) else [error]
                check.findings += [Finding("unreadable", ERROR, str(text), where=path) for text in texts]
            bar.update(1)
    return check


def _grouped(path: str, error: DataError) -> list[Finding]:
    """The problems of a file; one that several episodes share is listed once, with their names."""
    episodes: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in error.every:
        episodes[text] += [name] if name else []
    where = path if error.where == path else error.where
    return [Finding("invalid_data", ERROR, text, tuple(names), where) for text, names in episodes.items()]


def _look(check: Check) -> None:
    """Find problems of the episodes that could be read."""
    parts, paths = check.parts, check.paths
    differences = disagreements(paths, parts, ("cameras",)) if len(parts) > 1 else []
    check.findings += [Finding("mixed_files", ERROR, str(problem)) for problem in differences]
    if differences:
        check.demos = parts[0]
        for path, part in zip(paths, parts):
            check.findings += _named(quality(part, task_of(part)), _names(part), path)
        return
    check.demos = joined(parts)
    findings = _named(quality(check.demos, task_of(check.demos)), check.names)
    if len(parts) > 1:
        common = {finding.kind for finding in findings}
        for path, part in zip(paths, parts):
            of_file = [f for f in quality_of_file(part, task_of(part)) if f.kind not in common and f.level != NOTE]
            findings += _named(of_file, _names(part), path)
        findings += _turned_files(check)
    check.findings += findings


def _named(findings: Sequence[Finding], names: Sequence[str], where: str = "") -> list[Finding]:
    """The findings with names instead of numbers of episodes."""
    return [replace(f, episodes=tuple(names[i] for i in f.episodes), where=where) for f in findings]  # type: ignore


def _turned_files(check: Check) -> list[Finding]:
    findings = []
    for index, camera in enumerate(check.parts[0].env_args["cameras"]):
        for how, rows in turned(np.stack([mean_start(part.images, index) for part in check.parts])).items():
            for row in rows:
                text = f"pictures of camera {camera} are {how} compared with the other files"
                findings.append(Finding("turned_pictures", WARNING, text, where=check.paths[row]))
    return findings


def _replay(check: Check, count: int) -> list[Finding]:
    """Execute the actions of some episodes again; fills `check.replayed`."""
    if not count:
        return []
    findings: list[Finding] = []
    chosen = _spread_over_files(check.parts, count)
    with progress_bar(sum(map(len, chosen)), "playing again") as bar:
        for path, part, episodes in zip(check.paths, check.parts, chosen):
            if task_of(part) is not None:
                why = replay_problem("it", part)
            else:
                suite = part.env_args.get("task_suite_name")
                why = f"suite {suite!r} with the recorded options is unknown (--custom_module FILE.py names your own)"
            if why is not None:
                findings.append(Finding("not_replayed", NOTE, f"not played again: {why}", where=path))
                continue
            played: list[Repetition] = []
            try:
                for repetition in repetitions(path, part, episodes):
                    played.append(repetition)
                    bar.update(1)
            except Exception as error:  # of a simulator, or of somebody's suite
                text = f"cannot be played again ({type(error).__name__}: {error})"
                findings.append(Finding("not_replayed", WARNING, text, where=path))
            findings += _replay_findings(path, _names(part), played)
            check.replayed += played
    same = {finding.text for finding in findings if finding.kind == "not_replayed" and finding.level == NOTE}
    return findings if len(same) != 1 or len(findings) < 2 else [replace(findings[0], where="")]


def _spread_over_files(parts: Sequence[Demonstrations], count: int) -> list[list[int]]:
    """Numbers of the episodes to replay, by file: those that succeeded, or any if none did."""
    every = [(i, j) for i, part in enumerate(parts) for j, success in enumerate(part.success) if success]
    every = every or [(i, j) for i, part in enumerate(parts) for j in range(len(part.success))]
    chosen = spread(every, count)
    return [[j for file, j in chosen if file == i] for i in range(len(parts))]


def _replay_findings(path: str, names: Sequence[str], played: Sequence[Repetition]) -> list[Finding]:
    findings = []
    lost = [one for one in played if one.recorded and not one.replayed]
    if lost:
        good = sum(one.recorded is True for one in played)
        text = (
            f"only {good - len(lost)} of {good} successful episodes succeed when their actions are executed again: "
            "actions, initial states, or options of the environment are not those of the recording"
        )
        findings.append(Finding("replay_fails", WARNING, text, tuple(names[one.index] for one in lost), path))
    others = [one for one in played if not one.looks_alike]
    if others:
        distance, turns = others[0].distance, Counter(one.turned for one in others if one.turned)
        text = f"the environment shows other first pictures than were recorded (by {distance:.0f} gray levels)"
        text += f"; the recorded ones are {turns.most_common(1)[0][0]}" if turns else ""
        findings.append(Finding("other_pictures", WARNING, text, tuple(names[one.index] for one in others), path))
    return findings


def _excused(check: Check) -> list[Finding]:
    """The findings, with unusual actions demoted to a note if they succeed in replay."""
    good = [one for one in check.replayed if one.recorded]
    if len(good) < _CONVINCING or not all(one.replayed for one in good):
        return check.findings
    return [
        replace(one, level=NOTE, text=f"{one.text} (episodes succeed when played again, so it may be meant)")
        if one.level == WARNING and one.kind in ("clipped_action", "constant_action")
        else one
        for one in check.findings
    ]


def _write_statistics(check: Check, folder: str | None, partial: bool) -> list[Path]:
    """Write the statistics that are missing; returns the new files.

    Args:
        check: the data.
        folder: for the statistics of all; None: beside the files.
        partial: only a part of the data was read, so that nothing is written beside the files.
    """
    targets: dict[Path, list[Demonstrations]] = {} if folder is None else {Path(folder): check.parts}
    if folder is None:
        for path, part in zip(map(Path, check.paths), check.parts):
            computed = path.is_dir() or is_lerobot(path) or is_libero(path)  # whenever they are read
            if not computed and not (path.parent / STATISTICS_FILE).exists():
                targets.setdefault(path.parent, []).append(part)
    if targets and folder is None and partial:
        text = (
            f"{STATISTICS_FILE} is not written beside data of which only a part was read; --statistics names a folder"
        )
        check.findings.append(Finding("statistics_not_written", NOTE, text))
        return []
    written = []
    for target, parts in targets.items():
        try:
            target.mkdir(parents=True, exist_ok=True)
            write_json(target / STATISTICS_FILE, computed_statistics(parts))
            written.append(target / STATISTICS_FILE)
        except OSError as error:
            text = f"{target / STATISTICS_FILE} cannot be written ({error.strerror}); name a folder with --statistics"
            check.findings.append(Finding("statistics_not_written", WARNING, text))
    return written


def _page(check: Check, config: CheckDemosConfig) -> DemosPage:
    task = None if check.demos is None else task_of(check.demos)
    return DemosPage(
        title=" ".join(config.demos),
        findings=check.findings,
        headers=HEADERS,
        rows=_rows(check),
        replayed=_replay_summary(check),
        demos=check.demos,
        names=check.names if check.parts else [],
        flipped=task is not None and task.images_flipped_vertically,
        training_states=None if task is None else _training_states(task),
    )


def _training_states(task: TaskSpec) -> tuple[int, int] | None:
    try:
        return len(train_init_states(task)), task.num_init_states
    except ConfigError:
        return None


def _rows(check: Check) -> list[tuple[Any, ...]]:
    return [
        (
            path,
            part.env_args.get("task_suite_name"),
            len(part.actions),
            part.num_steps,
            f"{100 * float(np.mean(part.success)):.0f} %" if part.success_recorded else NOT_RECORDED,
            part.actions[0].shape[1],
            "-" if part.proprio is None else part.proprio[0].shape[1],
            "x".join(map(str, part.images[0].shape[2:4])),
            " ".join(part.env_args["cameras"]),
        )
        for path, part in zip(check.paths, check.parts)
    ]


def _replay_summary(check: Check) -> str:
    good = [one for one in check.replayed if one.recorded]
    if not good:
        return ""
    return f"{sum(one.replayed for one in good)} of {len(good)} successful episodes succeed when played again"


def _as_dict(check: Check) -> dict[str, Any]:
    rows = [dict(zip(HEADERS, row)) for row in _rows(check)]
    return {
        "files": rows,
        "findings": [asdict(finding) for finding in check.findings],
        "episodes": sum(len(part.actions) for part in check.parts),
        "success": sum(sum(part.success) for part in check.parts)
        if all(part.success_recorded for part in check.parts)
        else None,
        "replayed": [asdict(one) for one in check.replayed],
        "statistics": [str(path) for path in check.written],
    }


def _print(check: Check) -> None:
    rows = _rows(check)
    if rows:
        more = [("...", "", f"and {len(rows) - 20} more files", *[""] * 6)] if len(rows) > 20 else []
        show(table(HEADERS, [*rows[:20], *more]))
    for line in _lines(check.findings):
        show(line)
    if _replay_summary(check):
        show(_replay_summary(check))
    for path in check.written:
        show(f"statistics: {path}")
    counts = Counter(finding.level for finding in check.findings)
    if not counts[ERROR] + counts[WARNING]:
        show("no problems found")


def _lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding; one that several files share is listed once."""
    files: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        files.setdefault((finding.kind, finding.text), []).append(finding)
    lines = []
    for same in files.values():
        places = [f.where for f in same if f.where]
        where = _some(places, "files") + ": " if places else ""
        episodes = [str(name) for f in same for name in f.episodes]
        lines.append(f"{same[0].level}: {where}{same[0].text}{f' ({_some(episodes)})' if episodes else ''}")
    return lines


def _some(names: Sequence[str], what: str = "") -> str:
    more = f" and {len(names) - _NAMED:,} more {what}".rstrip() if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def warn_of(demos: Demonstrations, paths: Sequence[str], options: ReadOptions = AS_RECORDED) -> list[Finding]:
    """The quick part of the check, before training: a few lines of warnings."""
    findings = [f for f in quality(demos, task_of(demos), every_picture=False) if f.level != NOTE]
    for finding in findings[:_WARNINGS]:
        log.warning("demonstrations: %s", finding.text)
    if findings:
        more = f"{len(findings) - _WARNINGS} more; " if len(findings) > _WARNINGS else ""
        arguments = " ".join(map(shlex.quote, [*paths, *options.words()])) + words_for_later_commands()
        log.warning("demonstrations: %ssee python cli/check_demos.py %s", more, arguments)
    return findings
