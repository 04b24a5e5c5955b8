"""The end of every reinforcement-learning run: the summary, the next command."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import CURVE_FILE, EVALUATIONS_FILE, TOTALS_FILE
from rlvla.checkpoints.training import list_checkpoints
from rlvla.commands.custom_modules import words_for_later_commands
from rlvla.commands.runs.checks import evaluates_a_checkpoint
from rlvla.commands.runs.flags import TrainingRun
from rlvla.trainer.progress.curve import save_learning_curve
from rlvla.trainer.trainer import Trainer
from rlvla.utils.cli.command import STARTS_OVER
from rlvla.utils.files import BestEffortWriter
from rlvla.utils.files import write_json
from rlvla.utils.cli.programs import resume_command
from rlvla.utils.terminal import duration, show, suggest, table


def newest_checkpoint(flags: TrainingRun) -> str:
    """How to go on after a run that ends without saving another checkpoint."""
    if flags.schedule.val_only:
        return f"nothing was changed; evaluate again with: {resume_command(sys.argv, trains=False)}"
    checkpoints = list_checkpoints(flags.ckpt_path)
    if not checkpoints:
        return f"{flags.ckpt_path} holds no checkpoint; {STARTS_OVER}"
    return f"the newest checkpoint is {checkpoints[-1]}; continue with: {resume_command(sys.argv)}"


def conclude(trainer: Trainer, flags: TrainingRun, save_path: Path) -> None:
    """Write the summary of a run into its folder, and print it; of an evaluation, add it to the summary."""
    evaluations = [{"iteration": iteration, **result.as_dict()} for iteration, result in trainer.evaluations]
    alone = evaluates_a_checkpoint(flags)
    if alone:
        evaluations = _merged(evaluations, save_path / EVALUATIONS_FILE)

    def write() -> None:
        if not alone:
            write_json(save_path / TOTALS_FILE, trainer.totals)
        write_json(save_path / EVALUATIONS_FILE, evaluations)
        if not flags.schedule.val_only:
            save_learning_curve(save_path)

    BestEffortWriter(f"the summary in {save_path}").attempt(write)
    show(closing_words(trainer, save_path))
    if not flags.schedule.val_only:
        flags_of_report = shlex.join(["--pretrain", str(trainer.exported), "--report", str(save_path / "report")])
        suggest(f"python cli/eval_vla.py {flags_of_report}{words_for_later_commands(flags.groups['env'].env_python)}")


def _merged(evaluations: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """The evaluations in a file merged with `evaluations`, by iteration; only the last of these replaces one."""
    merged = {entry["iteration"]: entry for entry in evaluations}
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # no file, or a damaged one
        recorded = json.loads(file.read_text(encoding="utf-8"))
        merged |= {int(entry["iteration"]): entry for entry in recorded}
    merged[evaluations[-1]["iteration"]] = evaluations[-1]
    return [merged[iteration] for iteration in sorted(merged)]


def closing_words(trainer: Trainer, save_path: Path) -> str:
    """The summary of a run: all evaluations and totals."""
    rows = [
        (iteration, result.success_at_end.n, result.success_at_end, result.success_once, f"{result.mean_length:.1f}")
        for iteration, result in trainer.evaluations
    ]
    last = trainer.evaluations[-1][1]
    protocol = f"{last.protocol}; {last.success_detector}"
    totals, how = trainer.totals, _how_evaluated(trainer)
    evaluations = table(("iteration", "n", "success at end [95 %]", "success once [95 %]", "steps"), rows)
    if trainer.config.schedule.val_only:
        return f"{evaluations}\n({how}, protocol {protocol}; nothing was trained)"
    return "\n".join(
        [
            evaluations,
            f"({how}, protocol {protocol}; {totals['episodes']:.0f} episodes, {totals['env_steps']:.0f} env steps, "
            f"{duration(totals['seconds'])} of training)",
            f"curves: {save_path / CURVE_FILE}",
            *([f"more curves: tensorboard --logdir {save_path}"] if trainer.config.schedule.use_tensorboard else []),
        ]
    )


def _how_evaluated(trainer: Trainer) -> str:
    schedule, result = trainer.config.schedule, trainer.evaluations[-1][1]
    if result.greedy:
        return "greedy"
    how = f"sampled at temperature {schedule.eval_temperature:g}"
    if result.pass_at_k is None:
        return how
    return f"{how}, {result.samples} episodes per state: pass@{result.samples} {result.pass_at_k}"
