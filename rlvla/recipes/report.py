"""Results of a recipe: `report.json`, a table for the terminal, and an HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import EVALUATIONS_FILE, RUN_FILE, TOTALS_FILE
from rlvla.commands.dagger import ROUNDS_FILE
from rlvla.commands.tune_sft import TRIALS_FILE
from rlvla.evaluation.comparison import Difference
from rlvla.evaluation.report import SUITES_KEY, EvaluationReport, PolicyEvaluation, SuiteEvaluation
from rlvla.evaluation.report_page import write_report
from rlvla.evaluation.results import EvalResult
from rlvla.recipes.progress import progress_chart
from rlvla.recipes.recipe import POLICY_FOLDER, REPORT, Stage
from rlvla.recipes.state import State
from rlvla.utils.data_files import read_json
from rlvla.utils.files import write_json
from rlvla.utils.terminal import SUMMARY, duration, page_words, table

REPORT_FILE = f"{REPORT}.json"
START, END = "sft", "rl"  # keys of the report
_CHOICES = {"tune": TRIALS_FILE, "dagger": ROUNDS_FILE, "recap": ROUNDS_FILE}  # stage -> file with its summary
_SECONDS_KEYS = {"eval_sft": "eval", "eval_rl": "eval"}


@dataclass(frozen=True)
class Outcome:
    """Evaluations of a recipe, and the cost of the training.

    Attributes:
        findings: the final policy against the initial one, or one alone; None without evaluations.
        evaluated: the evaluated policies: "sft", "rl" or both, in this order.
        seconds: stage -> seconds; both evaluations together are "eval".
        totals: `totals.json` of the training, or {}.
        choices: stage -> summary of a choice by measurements.
    """

    findings: EvaluationReport | None
    evaluated: tuple[str, ...]
    seconds: Mapping[str, float]
    totals: Mapping[str, Any]
    choices: Mapping[str, str] = field(default_factory=dict)

    def results(self, name: str) -> list[Any]:
        """The results of a policy, one per mode; means over several suites."""
        if self.findings is None or name not in self.evaluated:
            return []
        position = 0 if name == self.evaluated[-1] else 1
        if self.findings.results:
            return [result for result in self.findings.results if result.position == position]
        return self.findings.first.everyone[position].results

    @property
    def difference(self) -> Difference | None:
        """End minus start in the first mode, over all tasks; None unless both were evaluated."""
        if self.findings is None or len(self.evaluated) < 2:
            return None
        comparisons = self.findings.comparisons or self.findings.first.comparisons
        return comparisons[0].overall() if comparisons else None


def outcome_of(stages: Sequence[Stage], state: State) -> Outcome:
    """Read the results of the stages.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    by_name = {stage.name: stage for stage in stages}
    evaluated: dict[str, dict[str, PolicyEvaluation]] = {}
    for name in (START, END):
        if f"eval_{name}" in by_name:
            evaluated[name] = _read(by_name[f"eval_{name}"].output)
    seconds: dict[str, float] = {}
    for stage in stages:
        record, name = state.of(stage), _SECONDS_KEYS.get(stage.name, stage.name)
        seconds[name] = seconds.get(name, 0.0) + (record.seconds if record else 0.0)
    seconds["total"] = sum(seconds.values())
    totals: dict[str, Any] = {}
    if END in by_name:
        folder = by_name[END].output
        path = folder / TOTALS_FILE
        totals = read_json(path, allow_nan=True) if path.is_file() else {}
        evaluated = evaluated or _of_training(folder)
    names = tuple(name for name in (START, END) if name in evaluated)
    choices = {
        name: str(text)
        for name, file in _CHOICES.items()
        if name in by_name
        and (path := by_name[name].output / file).is_file()
        and (text := read_json(path).get(SUMMARY))
    }
    if not names:
        return Outcome(None, (), seconds, totals, choices)
    final, baselines = evaluated[names[-1]], [evaluated[name] for name in names[:-1]]
    suites = {suite: SuiteEvaluation.of(of, [base[suite] for base in baselines]) for suite, of in final.items()}
    return Outcome(EvaluationReport.of(suites), names, seconds, totals, choices)


def _read(path: Path) -> dict[str, PolicyEvaluation]:
    """Suite, or condition of one, -> evaluation, from a file of `cli/eval_vla.py`."""
    names = read_json(path, allow_nan=True).get(SUITES_KEY)
    if names:
        return {name: PolicyEvaluation.read(path, name) for name in names}
    evaluation = PolicyEvaluation.read(path)
    return {evaluation.suite: evaluation}


def _of_training(folder: Path) -> dict[str, dict[str, PolicyEvaluation]]:
    """The first and last evaluation of the training, for the initial and the final policy."""
    path = folder / EVALUATIONS_FILE
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))
    settings = read_json(folder / RUN_FILE, allow_nan=True)
    chosen = {START: next((e for e in entries if e["iteration"] == 0), None), END: entries[-1] if entries else None}
    evaluations = {}
    for name, entry in chosen.items():
        if entry is None or (name == END and entry["iteration"] == 0):
            continue
        result = EvalResult.from_dict({key: value for key, value in entry.items() if key != "iteration"})
        suite, seed = settings["env"]["task_suite_name"], settings["run"]["seed"]
        policy = folder / POLICY_FOLDER if name == END else Path(settings["policy"]["pretrain"])
        protocol = {"suite": suite, "name": result.protocol, "seed": seed, "tasks": _tasks(result, settings["env"])}
        evaluations[name] = {suite: PolicyEvaluation(str(policy), settings["env"], {result.mode: protocol}, [result])}
    return evaluations


def _tasks(result: EvalResult, env: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tasks of a protocol, from the episodes and the settings of the environment."""
    limits = {name: env.get(name) for name in ("max_steps", "control_freq")}
    states: dict[int, list[int]] = {task.task_id: [] for task in result.tasks}
    for episode in result.episodes:
        states[episode.task_id] += [episode.init_state_id] if episode.sample == 0 else []
    return [{"task_id": t.task_id, "name": t.name, **limits, "init_states": states[t.task_id]} for t in result.tasks]


def build_report(outcome: Outcome) -> dict[str, Any]:
    """The content of report.json.

    `sft` and `rl`: rates of the greedy policy before and after reinforcement learning; with `_sampled`: of sampled
    actions; `difference`: rl minus sft on the same initial states; `seconds` per stage; `env_steps` and `episodes` of
    the training; `seed` and `protocol` of the evaluations; `choices` of stages. Unmeasured values have no key.
    """
    report: dict[str, Any] = {}
    for suffix, position in (("", 0), ("_sampled", 1)):
        for name in outcome.evaluated:
            report |= {f"{name}{suffix}": _rates(result) for result in outcome.results(name)[position : position + 1]}
    d = outcome.difference
    if d is not None:
        names = ("n", "difference", "low", "high", "gained", "lost", "p_value")
        report["difference"] = {name: getattr(d, name) for name in names}
    report["seconds"] = dict(outcome.seconds)
    report |= {name: int(outcome.totals[name]) for name in ("env_steps", "episodes") if name in outcome.totals}
    if outcome.choices:
        report["choices"] = dict(outcome.choices)
    if outcome.findings is not None:
        protocol = next(iter(outcome.findings.first.own.protocols.values()))
        report |= {"seed": protocol["seed"], "protocol": protocol["name"]}
    return report


def _rates(result: Any) -> dict[str, float]:
    at_end = result.success_at_end
    return {
        "success_at_end": at_end.rate,
        "success_once": result.success_once.rate,
        "n": at_end.n,
        "low": at_end.low,
        "high": at_end.high,
    }


def describe(report: Mapping[str, Any]) -> str:
    """The closing table: start, end, their difference, the time of each stage."""
    lines, rows = [], []
    for name in (START, f"{START}_sampled", END, f"{END}_sampled"):
        if name in report:
            r = report[name]
            policy, mode = name.removesuffix("_sampled").upper(), "sampled" if name.endswith("_sampled") else "greedy"
            interval = f"{100 * r['success_at_end']:.1f}% [{100 * r['low']:.1f}, {100 * r['high']:.1f}]"
            rows.append((policy, mode, r["n"], interval, f"{100 * r['success_once']:.1f}%"))
    if rows:
        lines.append(table(("policy", "actions", "n", "success at end [95 %]", "success once"), rows))
        unseen = ": initial states that neither demonstrations nor training have seen"
        lines.append(f"protocol {report['protocol']}{unseen if report['protocol'] == 'heldout' else ''}")
    d = report.get("difference")
    if d is not None:
        paired = d["p_value"] is not None
        test = f", p = {d['p_value']:.2g} (exact McNemar)" if paired else " (protocols differ: not paired)"
        lines.append(
            f"RL minus SFT{' on the same states' if paired else ''}, greedy: {100 * d['difference']:+.1f} "
            f"[{100 * d['low']:+.1f}, {100 * d['high']:+.1f}] percentage points{test}"
            f"{'' if d['low'] > 0 else '; NO IMPROVEMENT IS SHOWN'}"
        )
    lines += [f"{stage}: {choice}" for stage, choice in report.get("choices", {}).items()]
    seconds = ", ".join(f"{name} {duration(value)}" for name, value in report["seconds"].items())
    if "episodes" in report:
        seconds = f"{report['episodes']} training episodes, {report['env_steps']} environment steps; {seconds}"
    lines.append(seconds)
    return "\n".join(lines)


def conclude(stages: Sequence[Stage], state: State) -> str:
    """Write report.json and, with evaluations, report.html; returns the closing message."""
    outcome = outcome_of(stages, state)
    report, folder = build_report(outcome), state.folder
    write_json(folder / REPORT_FILE, report)
    places, page = [str(folder / REPORT_FILE)], None
    if outcome.findings is not None:
        rows = [
            (stage.name, duration(record.seconds), outcome.choices.get(stage.name, ""), " ".join(stage.argv))
            for stage in stages
            if (record := state.of(stage))
        ]
        rates = {f"eval_{name}": report[name] for name in (START, END) if name in report}
        page = write_report(folder, outcome.findings, rows, progress_chart(stages, state, rates))
    curves = [stage.output / "learning_curve.png" for stage in stages if stage.name == END]
    places += [str(path) for path in curves if path.is_file()]
    text = f"{describe(report)}\nresults: {', '.join(places)}"
    return text if page is None else f"{text}\n{page_words('report', page)}"
