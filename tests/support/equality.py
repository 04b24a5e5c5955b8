"""Whether two checkpoints hold the same, to the bit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import torch

from rlvla.checkpoints.training import list_checkpoints
from rlvla.utils.files import read_metrics


def assert_equal_to_the_bit(ours: Path, theirs: Path) -> None:
    """The newest checkpoints (weights, optimizers, averages, generators, groups, state) and the metrics of two runs."""
    first, second = (list_checkpoints(folder / "checkpoints")[-1] for folder in (ours, theirs))
    assert first.name == second.name
    tensor_files = sorted(path.relative_to(first) for path in first.rglob("*.pt"))
    assert len(tensor_files) >= 3
    for path in tensor_files:
        contents = (torch.load(folder / path, weights_only=False, map_location="cpu") for folder in (first, second))
        different = differences(*contents)
        assert not different, f"{path}: {different[:5]}"
    states = [json.loads((folder / "trainer.json").read_text()) for folder in (first, second)]
    records = [[r for r in read_metrics(folder) if "actor/entropy" in r] for folder in (ours, theirs)]
    assert [r["step"] for r in records[0]] == [r["step"] for r in records[1]] and len(records[0]) >= 3
    for left, right in [states, *zip(*records)]:
        assert not differences(without_times(left), without_times(right))


def without_times(record: dict) -> dict:
    """Of the metrics of an iteration or the state of a trainer, what does not depend on the speed of the machine."""
    found = {
        name: value
        for name, value in record.items()
        if name != "time" and not re.search("timing|second|_s$|^perf/", name)
    }
    if "totals" in found:
        found["totals"] = without_times(found["totals"])
    return found


def differences(ours: object, theirs: object, place: str = "") -> list[str]:
    """Where two nested structures of tensors, arrays and plain values differ."""
    if dataclasses.is_dataclass(ours) and not isinstance(ours, type):
        ours, theirs = vars(ours), vars(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        return [d for key in ours for d in differences(ours[key], theirs[key], f"{place}/{key}")]
    if isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), place
        return [d for i, (a, b) in enumerate(zip(ours, theirs)) for d in differences(a, b, f"{place}/{i}")]
    if isinstance(ours, torch.Tensor):
        return [] if ours.dtype == theirs.dtype and torch.equal(ours, theirs) else [place]
    if isinstance(ours, np.ndarray):
        return [] if np.array_equal(ours, theirs) else [place]
    same = ours == theirs or (type(ours) is type(theirs) and vars_equal(ours, theirs))
    return [] if same else [f"{place}: {ours!r} != {theirs!r}"]


def vars_equal(ours: object, theirs: object) -> bool:
    """Objects without an equality of their own, by what they hold."""
    return hasattr(ours, "__dict__") and not differences(vars(ours), vars(theirs))
