"""The figures of an evaluation on disk: JSON with every episode, and Markdown beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rlvla.trainer.eval_comparison import Comparison
from rlvla.trainer.eval_record import SUITES_KEY
from rlvla.trainer.eval_suites import Findings
from rlvla.utils.logging import log, markdown_table
from rlvla.utils.runs import json_text, write_atomic, write_json


def write_figures(output: Path, findings: Findings) -> Path:
    """Write the JSON file and the Markdown file beside it, whose path is returned.

    Other figures that lie there are kept under the next free number: `eval.json` becomes `eval_1.json`.
    """
    content = as_json(findings)
    _keep_others(output, content)
    write_json(output, content)
    markdown = output.with_suffix(".md")
    write_atomic(markdown, as_markdown(findings).encode())
    return markdown


def _keep_others(output: Path, content: dict[str, Any]) -> None:
    """Rename figures that are not those about to be written."""
    if not output.exists() or output.read_text(encoding="utf-8") == json_text(content):
        return
    numbered = (output.with_stem(f"{output.stem}_{number}") for number in count(1))
    kept = next(path for path in numbered if not path.exists())
    for suffix in (output.suffix, ".md"):
        earlier = output.with_suffix(suffix)
        if earlier.exists():
            earlier.rename(kept.with_suffix(suffix))
    log.info("earlier figures are kept: %s", kept)


def as_json(findings: Findings) -> dict[str, Any]:
    """What the file holds.

    One suite: its policy, baselines and comparisons. Several: the same below `suites` by name, and what is over all of
    them in `mean_of_suites` and `comparisons`.
    """
    first = findings.first
    if len(findings.suites) == 1:
        return first.as_dict()
    return {
        "policy": first.own.policy,
        "mean_of_suites": [result.as_dict() for result in findings.results],
        "comparisons": [comparison.as_dict() for comparison in findings.comparisons],
        SUITES_KEY: {name: suite.as_dict() for name, suite in findings.suites.items()},
    }


def as_markdown(findings: Findings) -> str:
    """All tables, for an issue or a lab book; those over several suites first."""
    parts = []
    for over_all in findings.results:
        note = over_all.note()
        parts += [
            f"## {over_all.policy}, {over_all.mode}, all suites",
            f"{note[0].upper()}{note[1:]}.",
            markdown_table(over_all.HEADERS, over_all.rows()),
        ]
    parts += _comparisons(findings.comparisons, "")
    for name, suite in findings.suites.items():
        where = f"{name}: " if len(findings.suites) > 1 else ""
        for evaluation in suite.everyone:
            for result in evaluation.results:
                dropped = f" **{result.dropped} episodes could not be played.**" if result.dropped else ""
                parts += [
                    f"## {where}{evaluation.policy}, {result.mode}",
                    f"Protocol {result.protocol}, seed {evaluation.protocols[result.mode]['seed']}; "
                    f"{evaluation.trained_on + '; ' if evaluation.trained_on else ''}95 % Wilson intervals.{dropped}",
                    markdown_table(result.HEADERS, result.rows()),
                ]
        parts += _comparisons(suite.comparisons, where)
    versions = ", ".join(f"{name} {number}" for name, number in findings.versions.items())
    parts.append(f"Measured with {versions}.")
    return "\n\n".join(parts) + "\n"


def _comparisons(comparisons: Sequence[Comparison], where: str) -> list[str]:
    parts = []
    for comparison in comparisons:
        note = comparison.note()
        parts += [
            f"## {where}{comparison.heading()}",
            f"{note[0].upper()}{note[1:]}.",
            markdown_table(comparison.HEADERS, comparison.rows()),
        ]
    return parts
