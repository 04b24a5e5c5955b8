"""What a person sees at the end of a run: a table, the next command, the learning curve as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.trainer.custom_modules import words_for_later_commands
from rlvla.utils.logging import duration, read_metrics, table
from rlvla.utils.runs import write_atomic
from rlvla.utils.statistics import wilson_interval

if TYPE_CHECKING:
    from rlvla.trainer.ppo_trainer import PPOTrainer

CURVE_FILE = "learning_curve.png"


def closing_words(trainer: PPOTrainer, save_path: Path) -> str:
    """The table of all evaluations, totals, and what to do next."""
    rows = [
        (iteration, result.success_at_end.n, result.success_at_end, result.success_once, f"{result.mean_length:.1f}")
        for iteration, result in trainer.evaluations
    ]
    protocol = trainer.evaluations[-1][1].protocol
    totals = trainer.totals
    evaluations = table(("iteration", "n", "success at end [95 %]", "success once [95 %]", "steps"), rows)
    if trainer.config.schedule.val_only:
        return f"{evaluations}\n(greedy, protocol {protocol}; nothing was trained)"
    return "\n".join(
        [
            evaluations,
            f"(greedy, protocol {protocol}; {totals['episodes']:.0f} episodes, {totals['env_steps']:.0f} env steps, "
            f"{duration(totals['seconds'])} of training)",
            f"curves: tensorboard --logdir {save_path} (picture: {save_path / CURVE_FILE})",
            f"next: python cli/eval_vla.py --pretrain {save_path / 'policy'} --report {save_path / 'report'}"
            + words_for_later_commands(),
        ]
    )


def save_learning_curve(folder: Path) -> Path | None:
    """Draw success (rollout, evaluation with 95 % interval) and entropy over episodes; None without metrics."""
    records = read_metrics(folder)
    if not records:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, sharex=True, figsize=(11, 4), constrained_layout=True)
    played = [r for r in records if "rollout/success_at_end" in r]
    if played:
        x = [r["total/episodes"] for r in played]
        left.plot(x, [r["rollout/success_at_end"] for r in played], color="tab:blue", label="rollout (sampled)")
    updated = [r for r in played if "actor/entropy" in r]  # not while only the critic is trained
    if updated:
        right.plot([r["total/episodes"] for r in updated], [r["actor/entropy"] for r in updated], color="tab:green")
    evaluated = [r for r in records if "eval/success_at_end" in r]
    if evaluated:
        x = [r["total/episodes"] for r in evaluated]
        y = [r["eval/success_at_end"] for r in evaluated]
        bounds = [wilson_interval(round(r["eval/success_at_end"] * r["eval/n"]), round(r["eval/n"])) for r in evaluated]
        errors = [[v - low for v, (low, _) in zip(y, bounds)], [high - v for v, (_, high) in zip(y, bounds)]]
        left.errorbar(x, y, yerr=errors, fmt="o-", capsize=3, color="tab:red", label="evaluation (greedy), 95 %")
    left.set(xlabel="training episodes", ylabel="success at end", ylim=(0, 1.02), title="success")
    left.grid(alpha=0.3)
    left.legend(loc="best")
    right.set(xlabel="training episodes", ylabel="nats per token", title="entropy of the policy")
    right.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    write_atomic(folder / CURVE_FILE, buffer.getvalue())
    return folder / CURVE_FILE
