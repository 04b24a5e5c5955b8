"""Replaying the batch of a skipped optimizer step to find the fields, rows and parameters that are not finite."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from rlvla.commands.run_policies import policy_folder
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.families import Checkpoint, check_checkpoint
from rlvla.models.value_models import REWARD_HEAD_FILE, Critic, FeatureCritic, SuccessPredictor
from rlvla.trainer.guards import read_batch
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import put, show, table

Network = Actor | Critic | FeatureCritic | SuccessPredictor
_SHOWN_ROWS = 20


@dataclass(frozen=True)
class BatchReport:
    """Values that are not finite.

    Attributes:
        fields: field of the batch -> rows with NaN or infinity under its mask.
        rows: row -> "output", or the first parameter whose gradient is not finite when training on this row alone.
        weights: parameters that are not finite.
    """

    fields: dict[str, list[int]]
    rows: dict[int, str]
    weights: list[str]


def run_replay(path: Path, pretrain: Path, unnorm_key: str | None = None) -> BatchReport:
    """Replay a batch, print the report and return it.

    Args:
        path: a file in bad_batches/ of a run folder.
        pretrain: checkpoint folder of the policy, critic or reward model to run the batch on.
        unnorm_key: entry of its dataset statistics; needed only if there are several.

    Raises:
        ConfigError: the file or the checkpoint cannot be used.
    """
    try:
        batch = read_batch(path)
    except (OSError, KeyError, TypeError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--batch {path} cannot be read as the batch of a skipped step ({why})") from error
    if batch.model == "critic" and batch.rows.critic_state is not None:
        raise ConfigError(f"--batch {path} is of a critic with --critic_input state, which no folder holds")
    pretrain = Path(policy_folder(str(pretrain)))
    checkpoint = check_checkpoint(pretrain, unnorm_key, overrides=batch.settings.get("overrides"))
    network = _network(batch.model, checkpoint)
    rows = batch.rows if batch.prepared else _prepared(batch.rows, network)
    report = inspect(rows, network, float(batch.settings.get("temperature", 1.0)))
    show(f"{path}: {len(rows)} rows for the {batch.model.replace('_', ' ')}")
    put(table(("not finite", "rows"), [(name, _shown(bad)) for name, bad in report.fields.items()]))
    put(table(("row alone", "first not finite"), list(report.rows.items())[:_SHOWN_ROWS]))
    if report.weights:
        show(f"weights that are not finite: {', '.join(report.weights[:_SHOWN_ROWS])}")
    if not (report.fields or report.rows or report.weights):
        show("everything is finite with this checkpoint: the step overflowed with later weights, or in lower precision")
    return report


def _network(model: str, checkpoint: Checkpoint) -> Any:
    """Load the named model; a reward model may also be initialized from a policy folder."""
    if model == "actor":
        return checkpoint.load_policy()
    if model == "critic":
        return checkpoint.load_critic()
    return checkpoint.load_reward_model(new=not (checkpoint.folder / REWARD_HEAD_FILE).exists())


def _prepared(rows: Experience, network: Any) -> Experience:
    """Replace observations of the environment by the inputs of the network."""
    images, proprio = network.prepare(rows.images.numpy(), None if rows.proprio is None else rows.proprio.numpy())
    return rows.with_fields(
        images=torch.from_numpy(images), proprio=None if proprio is None else torch.from_numpy(proprio)
    )


def _shown(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
    return ", ".join(map(str, rows[:_SHOWN_ROWS])) + more


def inspect(rows: Experience, network: Network, temperature: float) -> BatchReport:
    """Check the fields, then train on each row alone, with its outputs weighted as in the loss."""
    weights = [name for name, p in network.named_parameters() if not bool(p.isfinite().all())]
    bad_fields = {}
    every_row = torch.ones(len(rows), 1, dtype=torch.bool)
    for f in fields(Experience):
        value = getattr(rows, f.name)
        mask = rows.action_mask if f.metadata["role"] == "step" else every_row
        parts = {f"{f.name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {f.name: value}
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                wrong = (~part.flatten(1).isfinite() & mask).any(1) if part.dim() > 1 else ~part.isfinite()
                if wrong.any():
                    bad_fields[name] = wrong.nonzero().flatten().tolist()
    bad_rows = {}
    for row in range(len(rows)):
        if what := _check_row(rows.index(torch.tensor([row])), network, temperature):
            bad_rows[row] = what
    return BatchReport(bad_fields, bad_rows, weights)


def _check_row(row: Experience, network: Network, temperature: float) -> str | None:
    network.zero_grad()
    if isinstance(network, SuccessPredictor):
        output = network(**network.score(row))[:, :2]  # success and progress
        target, mask = None, torch.ones_like(output, dtype=torch.bool)
    elif isinstance(network, Critic | FeatureCritic):
        output = network(**network.score(row))
        target, mask = row.returns, row.action_mask
    else:  # a policy of any family
        output = network(**network.score(row, temperature), wants=("log_probs",))["log_probs"]
        target, mask = row.advantages, row.action_mask
    if not bool(output[mask].isfinite().all()):
        return "output"
    weight = torch.ones_like(output) if target is None else target.to(output)
    torch.where(mask, output * weight, 0.0).sum().backward()
    for name, parameter in network.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None
