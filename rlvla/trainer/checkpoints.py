"""Training checkpoints: written beside their place, renamed when complete, old ones rotated."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvla.utils.errors import ConfigError
from rlvla.utils.runs import fsync_folder, write_json
from rlvla.utils.strategy import DeepspeedStrategy, Engine

_NAME = re.compile(r"iteration_(\d+)")
_STATE = "trainer.json"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob("iteration_*") if _NAME.fullmatch(path.name) and (path / _STATE).exists()]
    return sorted(found, key=lambda path: int(path.name.split("_")[1]))


def save_checkpoint(
    folder: Path,
    iteration: int,
    engines: dict[str, Engine],
    state: dict[str, Any],
    strategy: DeepspeedStrategy,
    keep: int,
) -> None:
    """Write everything needed to go on after `iteration` iterations; called on every rank.

    Args:
        folder: holds the checkpoints of the run.
        iteration: iterations completed.
        engines: name -> engine.
        state: JSON-able state of the trainer.
        strategy: collectives.
        keep: newest checkpoints kept.
    """
    final = folder / f"iteration_{iteration:06d}"
    temporary = folder / f".tmp_{final.name}"
    if strategy.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    strategy.barrier()
    for name, engine in engines.items():
        engine.save(temporary, name)
    torch.save(_rng_states(), temporary / f"rng_rank{strategy.rank}.pt")
    strategy.barrier()
    if strategy.is_main:
        write_json(temporary / _STATE, {"iteration": iteration, "world_size": strategy.world_size, **state})
        fsync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        fsync_folder_entry(folder)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    strategy.barrier()


def fsync_folder_entry(folder: Path) -> None:
    """Flush the folder's own entries (a rename) to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_checkpoint(folder: Path, engines: dict[str, Engine], strategy: DeepspeedStrategy) -> dict[str, Any] | None:
    """Restore the newest checkpoint into the engines and the generators; None if there is none.

    Raises:
        ConfigError: the checkpoint was written by another number of ranks.
    """
    found = list_checkpoints(folder)
    if not found:
        return None
    newest = found[-1]
    state = json.loads((newest / _STATE).read_text(encoding="utf-8"))
    if state["world_size"] != strategy.world_size:
        raise ConfigError(
            f"{newest} was written by {state['world_size']} ranks and this run has {strategy.world_size}; "
            f"launch with --num_accelerators {state['world_size']}"
        )
    for name, engine in engines.items():
        engine.load(newest, name)
    _restore_rng(torch.load(newest / f"rng_rank{strategy.rank}.pt", weights_only=False))
    return state


def _rng_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _restore_rng(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
