"""Writes the results of an evaluation: JSON with all episodes, and Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rlvla.evaluation.comparison import Comparison
from rlvla.evaluation.findings import SUITES_KEY, EvaluationReport
from rlvla.evaluation.protocol import named_given
from rlvla.evaluation.results import EvalResult
from rlvla.utils.files import json_text, write_atomic, write_json
from rlvla.utils.terminal import log, markdown_table, markdown_text


def write_figures(output: Path, findings: EvaluationReport) -> Path:
    """Write the JSON file and a Markdown file next to it; returns the path of the latter.

    Existing results are kept under the next free number: `eval.json` becomes `eval_1.json`.
    """
    content = as_json(findings)
    _keep_others(output, content)
    write_json(output, content)
    markdown = output.with_suffix(".md")
    write_atomic(markdown, as_markdown(findings).encode())
    return markdown


def _keep_others(output: Path, content: dict[str, Any]) -> None:
    """Rename existing results that differ from those about to be written."""
    if not output.exists() or output.read_text(encoding="utf-8") == json_text(content):
        return
    numbered = (output.with_stem(f"{output.stem}_{number}") for number in count(1))
    kept = next(path for path in numbered if not path.exists())
    for suffix in (output.suffix, ".md"):
        earlier = output.with_suffix(suffix)
        if earlier.exists():
            earlier.rename(kept.with_suffix(suffix))
    log.info("earlier results are kept: %s", kept)


def as_json(findings: EvaluationReport) -> dict[str, Any]:
    """The content of the JSON file.

    For one suite its policy, baselines and comparisons; for several suites the same per suite under `suites`, and
    results over all suites under `mean_of_suites` and `comparisons`.
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


def as_markdown(findings: EvaluationReport) -> str:
    """All tables as Markdown; those over all suites come first."""
    parts = []
    for over_all in findings.results:
        note = over_all.note()
        parts += [
            f"## {markdown_text(over_all.policy)}, {over_all.mode}, all suites",
            f"{markdown_text(note[0].upper() + note[1:])}.",
            markdown_table(over_all.HEADERS, over_all.rows()),
        ]
    if findings.conditions:
        parts += ["## Success at end by condition", markdown_table(findings.conditions[0], findings.conditions[1:])]
    if findings.categories:
        title = "## Success at end by category, 95 % intervals over tasks"
        parts += [title, markdown_table(findings.categories[0], findings.categories[1:])]
    parts += _comparisons(findings.comparisons, "")
    for name, suite in findings.suites.items():
        where = f"{name}: " if len(findings.suites) > 1 else ""
        for evaluation in suite.everyone:
            for result in evaluation.results:
                protocol = evaluation.protocols[result.mode]
                given = "".join(f"{name}; " for name in named_given(protocol))
                trained_on = markdown_text(evaluation.trained_on) + "; " if evaluation.trained_on else ""
                intervals = result.about_samples or f"95 % {result.kind_of_intervals}"
                dropped = f" **{result.dropped} episodes could not be played.**" if result.dropped else ""
                parts += [
                    f"## {markdown_text(where + evaluation.policy)}, {result.mode}",
                    f"Protocol {markdown_text(result.protocol)}, seed {protocol['seed']}; {given}"
                    f"{trained_on}{result.told_by}; {intervals}.{dropped}",
                    markdown_table(result.HEADERS, result.rows()),
                    *_agreement(result),
                ]
        parts += _comparisons(suite.comparisons, where)
    versions = ", ".join(f"{name} {number}" for name, number in findings.versions.items())
    parts.append(f"Measured with {markdown_text(versions)}.")
    return "\n\n".join(parts) + "\n"


def _agreement(result: EvalResult) -> list[str]:
    agreement = result.agreement
    return [] if agreement is None else [agreement.as_markdown(result.success_source)]


def _comparisons(comparisons: Sequence[Comparison], where: str) -> list[str]:
    parts = []
    for comparison in comparisons:
        note = comparison.note()
        parts += [
            f"## {markdown_text(where + comparison.heading())}",
            f"{markdown_text(note[0].upper() + note[1:])}.",
            markdown_table(comparison.HEADERS, comparison.rows()),
        ]
    return parts
