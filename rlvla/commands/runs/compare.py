"""Comparing runs for `cli/compare_runs.py`: tables, and a page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlvla.utils.cli.flags import arg, range_problems
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.terminal import page_words, show, table

PAGE_FILE, FIGURES_FILE = "compare_runs.html", "compare_runs.json"


@dataclass(frozen=True)
class CompareConfig:
    """Which runs to compare, and where the page goes."""

    runs: tuple[str, ...] = arg(
        (), "folders of training runs, or folders that hold some (--output of a recipe)", metavar="RUN"
    )
    report: str | None = arg(
        None,
        f"folder for {PAGE_FILE}, a page with everything in it, and {FIGURES_FILE}; existing ones are overwritten",
        metavar="DIR",
        writes="folder",
    )


def run_compare(config: CompareConfig) -> None:
    """Read the runs, print the tables, write the page.

    Raises:
        ConfigError: a flag is wrong, or a folder holds no run.
    """
    from rlvla.evaluation.runs import (
        DIFFERENCE_HEADERS,
        GROUP_HEADERS,
        RUN_HEADERS,
        difference_rows,
        differences,
        group_rows,
        grouped,
        letter_of,
        not_subtracted,
        read_runs,
        run_rows,
    )
    from rlvla.evaluation.runs import render_runs_page
    from rlvla.utils.files import write_atomic, write_json

    problems: list[Problem] = range_problems(config)
    if not config.runs:
        problems.append(Problem("runs", "too_few", "no run is named: give the folders of two or more"))
    if problems:
        raise ConfigError(problems)
    groups = grouped(read_runs(config.runs))
    compared = differences(groups)
    show("\n".join(f"{letter_of(number)}: {group.name}" for number, group in enumerate(groups)))
    show(f"\n{table(RUN_HEADERS, run_rows(groups))}")
    show(f"\n{table(GROUP_HEADERS, group_rows(groups))}")
    if compared:
        show(f"\n{table(DIFFERENCE_HEADERS, difference_rows(compared))}")
    if note := not_subtracted(groups):
        show(f"\n{note}")
    if config.report is None:
        return
    folder = Path(config.report)
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {
        "groups": [
            {
                "letter": letter_of(number),
                "name": group.name,
                "runs": [
                    {"folder": run.folder, "seed": run.seed, "iteration": run.iteration, "last": _as_dict(run.last)}
                    for run in group.runs
                ],
                "success_at_end": _as_dict(group.rate),
            }
            for number, group in enumerate(groups)
        ],
        "differences": [asdict(difference) for difference in compared],
    }
    write_json(folder / FIGURES_FILE, figures)
    write_atomic(folder / PAGE_FILE, render_runs_page(groups).encode(errors="replace"))
    show(f"\n{page_words('report', folder / PAGE_FILE)}")


def _as_dict(rate: Any) -> dict[str, Any] | None:
    return None if rate is None else asdict(rate)
