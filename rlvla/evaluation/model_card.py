"""Model card of a policy folder: task, training and evaluation, from its records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvla.checkpoints.policy_folder import learned_states, recorded_environment
from rlvla.checkpoints.run_folder import EVALUATIONS_FILE, TOTALS_FILE
from rlvla.envs.splits import LearnedStates
from rlvla.evaluation.redact import redact_command
from rlvla.evaluation.report import SUITES_KEY, PolicyEvaluation
from rlvla.evaluation.results import EvalResult
from rlvla.models.families import type_of
from rlvla.models.vla.checkpoint_files import EVALUATION_FILE
from rlvla.utils.cli.config_file import quoted_head
from rlvla.utils.data_files import check_types, read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import count, markdown_table, markdown_text

_OF_RUNS = ("policies", "exported")  # subfolders of a run folder with a policy of each checkpoint
_LISTED = 12


@dataclass(frozen=True)
class Figures:
    """Results on a card: of a suite, or a condition of one, in one mode, with the protocol they follow."""

    condition: str
    result: EvalResult
    protocol: str


@dataclass(frozen=True)
class CardRecord:
    """Content of a model card.

    Attributes:
        kind: type of the policy in its config.json.
        environment: see `recorded_environment`.
        figures: of `cli/eval_vla.py`, else of the last evaluation in training.
        measured_with: versions of packages and simulator in these evaluations, if recorded.
        source: version and commit of rlvla in training; "" if not recorded.
        command: command line of the training, without absolute paths and addresses; "" if not recorded.
        totals: episodes and environment steps of the training, if recorded.
    """

    kind: str
    environment: Mapping[str, Any]
    figures: tuple[Figures, ...]
    measured_with: str = ""
    source: str = ""
    command: str = ""
    totals: Mapping[str, float] = field(default_factory=dict)


def read_card_record(folder: Path) -> CardRecord:
    """Read the records of a policy folder and of the run folder around it.

    Raises:
        ConfigError: not a policy folder, or a record is damaged.
    """
    run = folder.parent.parent if folder.parent.name in _OF_RUNS else folder.parent
    source, command = quoted_head(run)
    environment = recorded_environment(folder)
    evaluations = _evaluations(folder / EVALUATION_FILE)
    figures = tuple(_figures(condition, e, r) for condition, e in evaluations.items() for r in e.results)
    if not figures and source and folder.name == "policy":
        figures = _of_training(run / EVALUATIONS_FILE, str(environment.get("task_suite_name")))
    versions = {name: number for e in evaluations.values() for name, number in e.versions.items()}
    path = run / TOTALS_FILE
    totals = read_json(path, allow_nan=True) if source and path.is_file() else {}
    check_types(totals, {"episodes": float, "env_steps": float}, path)
    return CardRecord(
        kind=type_of(folder),
        environment=environment,
        figures=figures,
        measured_with=", ".join(f"{name} {number}" for name, number in versions.items()),
        source=source,
        command=redact_command(command),
        totals=totals,
    )


def _evaluations(path: Path) -> dict[str, PolicyEvaluation]:
    if not path.is_file():
        return {}
    names = read_json(path, allow_nan=True).get(SUITES_KEY)
    if names:
        return {name: PolicyEvaluation.read(path, name) for name in names}
    evaluation = PolicyEvaluation.read(path)
    return {evaluation.suite: evaluation}


def _figures(condition: str, evaluation: PolicyEvaluation, result: EvalResult) -> Figures:
    training = evaluation.trained_on or "the initial states of its training are not recorded"
    return Figures(condition, result, f"seed {evaluation.protocols[result.mode]['seed']}; {training}")


def _of_training(path: Path, suite: str) -> tuple[Figures, ...]:
    if not path.is_file():
        return ()
    try:
        last = json.loads(path.read_text(encoding="utf-8"))[-1]
        result = EvalResult.from_dict({name: value for name, value in last.items() if name != "iteration"})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not hold evaluations ({type(error).__name__}: {error}); remove it") from error
    return (Figures(suite, result, f"the evaluation after iteration {last['iteration']} of the training"),)


def model_card(record: CardRecord, repo_id: str, license: str | None = None) -> str:
    """The card as Markdown, with the metadata of the Hugging Face Hub in its head.

    Args:
        record: content of the card.
        repo_id: owner and name of the repository.
        license: identifier of the license, such as apache-2.0; None leaves a placeholder.
    """
    name = repo_id.rpartition("/")[2]
    sections = [
        f"---\n{_metadata(record, name, license)}\n---",
        f"# {markdown_text(name)}",
        f"A robot policy of the family {markdown_text(record.kind)}, trained with rlvla.",
        f"```bash\npip install rlvla\nhf download {repo_id} --local-dir {name}\nrlvla-eval-vla --pretrain {name}\n```",
        "## Task",
        _task(record),
        "## Training",
        _training(record),
        "## Evaluation",
        *_evaluation(record),
        "## License",
        f"`{license}`" if license else "No license has been chosen yet (`--license`); ask before you use this policy.",
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(record: CardRecord, name: str, license: str | None) -> str:
    from huggingface_hub import EvalResult as Entry
    from huggingface_hub import ModelCardData

    suite = record.environment.get("task_suite_name")
    entries = [
        Entry(
            task_type="robotics",
            dataset_type=shown.condition,
            dataset_name=shown.condition,
            metric_type="success_rate",
            metric_value=round(100 * shown.result.success_at_end.rate, 1),
            metric_name=f"success at end, {shown.result.mode}, % {_interval(shown.result)}",
        )
        for shown in record.figures
    ]
    data = ModelCardData(
        license=license or "unknown",
        library_name="rlvla",
        pipeline_tag="robotics",
        tags=["robotics", "reinforcement-learning", "vision-language-action", *([str(suite)] if suite else [])],
        model_name=name if entries else None,
        eval_results=entries or None,
    )
    return data.to_yaml()


def _interval(result: EvalResult) -> str:
    rate = result.success_at_end
    return f"[{100 * rate.low:.1f}, {100 * rate.high:.1f}], n = {rate.n}"


def _task(record: CardRecord) -> str:
    env = record.environment
    if not env:
        return "The environment that the policy was trained in is not recorded."
    names = dict.fromkeys(task.name for shown in record.figures for task in shown.result.tasks)
    shown = list(names) or [f"number {task_id}" for task_id in env.get("task_ids") or []]
    more = [f"{len(shown) - _LISTED} more"] if len(shown) > _LISTED else []
    rows = {
        "suite": env.get("task_suite_name"),
        "tasks": ", ".join([*shown[:_LISTED], *more]) or "all of the suite",
        "cameras": ", ".join(env.get("cameras") or ()) or "none",
        "image size": env.get("image_size"),
        "proprioception": "yes" if env.get("use_proprio") else "no",
    }
    options = ("max_steps", "success_hold_steps", "after_success", "render_quality")
    rows |= {name.replace("_", " "): env[name] for name in options if env.get(name) is not None}
    return markdown_table(("", ""), [(title, value) for title, value in rows.items() if value is not None])


def _training(record: CardRecord) -> str:
    lines = []
    for learned in _training_states(record):
        tasks = "every task" if learned.states else "tasks that are not recorded"
        task = tasks if learned.task_id is None else f"task {learned.task_id}"
        states = (
            f"initial states {learned.start} to {learned.stop - 1}" if learned.states else "unrecorded initial states"
        )
        lines.append(f"- {states} of {markdown_text(learned.suite)}, {task}")
    if len(lines) > _LISTED:
        lines = [*lines[:_LISTED], f"- and {len(lines) - _LISTED} more"]
    lines = ["Trained on", "", *lines] if lines else ["The initial states of its training are not recorded."]
    if {"episodes", "env_steps"} <= record.totals.keys():
        episodes, steps = (count(record.totals[name]) for name in ("episodes", "env_steps"))
        lines += ["", f"{episodes} episodes of reinforcement learning, {steps} environment steps."]
    if record.command:
        lines += ["", f"```bash\n{record.command}\n```"]
    return "\n".join([*lines, "", f"Code: {markdown_text(record.source or 'not recorded')}."])


def _training_states(record: CardRecord) -> list[LearnedStates]:
    """The initial states of training, without ranges inside other ranges."""
    learned = set(learned_states(dict(record.environment)) or ())

    def covered(one: LearnedStates) -> bool:
        return any(
            other != one
            and (other.suite, other.task_id, bool(other.states)) == (one.suite, one.task_id, bool(one.states))
            and other.start <= one.start
            and one.stop <= other.stop
            for other in learned
        )

    outermost = [one for one in learned if not covered(one)]
    return sorted(outermost, key=lambda s: (s.suite, -1 if s.task_id is None else s.task_id, s.start))


def _evaluation(record: CardRecord) -> list[str]:
    if not record.figures:
        return ["Not evaluated yet: `cli/eval_vla.py --pretrain FOLDER` measures the figures of this section."]
    sections = []
    for shown in record.figures:
        result = shown.result
        dropped = f" **{markdown_text(result.dropped)} episodes could not be played.**" if result.dropped else ""
        intervals = result.about_samples or f"95 % {result.kind_of_intervals}"
        about = f"Protocol {result.protocol}; {shown.protocol}; {result.success_detector}; {intervals}."
        sections += [
            f"### {markdown_text(shown.condition)}, {markdown_text(result.mode)}",
            f"{markdown_text(about)}{dropped}",
            markdown_table(result.HEADERS, result.rows()),
        ]
    measured = f"Measured with {record.measured_with}; every episode is in {EVALUATION_FILE}."
    return [*sections, *([markdown_text(measured)] if record.measured_with else [])]
