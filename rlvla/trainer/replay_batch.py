"""Looks at the batch of an optimizer step that was left out: which field, row and parameter is not finite."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from pickle import UnpicklingError

import torch

from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.value_models import REWARD_HEAD_FILE, Critic, RewardModel
from rlvla.trainer.guards import read_batch
from rlvla.trainer.setup import check_checkpoint
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import table

Network = Actor | Critic | RewardModel
_SHOWN_ROWS = 20


@dataclass(frozen=True)
class Findings:
    """What is not finite.

    Attributes:
        fields: field of the batch -> rows with NaN or infinity under its mask.
        rows: row -> "output" or the name of the first parameter whose gradient is not finite when this row alone is
            trained on.
        weights: parameters that are not finite themselves.
    """

    fields: dict[str, list[int]]
    rows: dict[int, str]
    weights: list[str]


def run_replay(path: Path, pretrain: Path, unnorm_key: str | None = None) -> Findings:
    """Look, print what was found, return it.

    Args:
        path: file below bad_batches/ of a run folder.
        pretrain: checkpoint folder of the policy (or critic, or reward model) that the batch is given to.
        unnorm_key: entry of its dataset statistics; needed only where there are several.

    Raises:
        ConfigError: the file or the checkpoint cannot be used.
    """
    try:
        rows, model, settings = read_batch(path)
    except (OSError, KeyError, TypeError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--batch {path} cannot be read as a batch of a left-out step ({why})") from error
    _, key = check_checkpoint(pretrain, unnorm_key)
    found = inspect(rows, _network(model, pretrain, key), float(settings.get("temperature", 1.0)))
    print(f"{path}: {len(rows)} rows for the {model.replace('_', ' ')}")
    print(table(("not finite", "rows"), [(name, _shown(bad)) for name, bad in found.fields.items()]))
    print(
        table(("row alone", "first not finite"), [(row, what) for row, what in list(found.rows.items())[:_SHOWN_ROWS]])
    )
    if found.weights:
        print(f"weights that are not finite: {', '.join(found.weights[:_SHOWN_ROWS])}")
    if not (found.fields or found.rows or found.weights):
        print(
            "everything is finite with this checkpoint: the step overflowed with later weights, or in lower precision"
        )
    return found


def _network(model: str, pretrain: Path, unnorm_key: str | None) -> Network:
    """The model of that name; a reward model also from the policy folder it starts from."""
    if model == "actor":
        return Actor.from_pretrained(pretrain, unnorm_key=unnorm_key)
    if model == "critic":
        return Critic.from_pretrained(pretrain, unnorm_key)
    trained = (pretrain / REWARD_HEAD_FILE).exists()
    return (RewardModel.from_pretrained if trained else RewardModel.from_policy)(pretrain, unnorm_key)


def _shown(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
    return ", ".join(map(str, rows[:_SHOWN_ROWS])) + more


def inspect(rows: Experience, network: Network, temperature: float) -> Findings:
    """Fields, then each row on its own: its outputs under the mask, weighted by what the loss weighs them with."""
    weights = [name for name, p in network.named_parameters() if not bool(p.isfinite().all())]
    bad_fields = {}
    for f in fields(Experience):
        value = getattr(rows, f.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            mask = rows.action_mask if f.metadata["role"] == "step" else torch.ones(len(value), 1, dtype=torch.bool)
            wrong = (~value.flatten(1).isfinite() & mask).any(1) if value.dim() > 1 else ~value.isfinite()
            if wrong.any():
                bad_fields[f.name] = wrong.nonzero().flatten().tolist()
    bad_rows = {}
    for row in range(len(rows)):
        what = _look_at_row(rows.index(torch.tensor([row])), network, temperature)
        if what:
            bad_rows[row] = what
    return Findings(bad_fields, bad_rows, weights)


def _look_at_row(row: Experience, network: Network, temperature: float) -> str | None:
    network.zero_grad()
    if isinstance(network, Actor):
        output = network(**network.score(row, temperature))[0]
        target, mask = row.advantages, row.action_mask
    elif isinstance(network, Critic):
        output = network(**network.score(row))
        target, mask = row.returns, row.action_mask
    else:
        output = network(**network.score(row))[:, :2]  # success and progress
        target, mask = None, torch.ones_like(output, dtype=torch.bool)
    if not bool(output[mask].isfinite().all()):
        return "output"
    weight = torch.ones_like(output) if target is None else target.to(output)
    torch.where(mask, output * weight, 0.0).sum().backward()
    for name, parameter in network.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None
