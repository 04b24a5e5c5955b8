"""Training checkpoints: written beside their place, checked, renamed when complete, old ones rotated.

    iteration_000012/
      trainer.json            iteration, ranks, format, versions, the models' parameters, state of the trainer
      rank0.pt, rank1.pt ...  generators and state of each rank
      actor/, critic/         DeepSpeed's own files
      manifest.json           size and SHA-256 of every file; written last

A folder that lacks a listed file, or whose files have changed, is named and skipped when a run is continued.
"""

from __future__ import annotations

import json
import platform
import random
import re
import shutil
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvla.utils.durable_files import checked_file, damage, fsync_entry, put_in_place, recover, write_manifest
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import log
from rlvla.utils.strategy import DeepspeedStrategy, Engine
from rlvla.version import __version__

FORMAT = 2
_NAME = re.compile(r"iteration_(\d+)")
_STATE = "trainer.json"
_DAMAGED = "damaged_"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those written before are untouched."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints whose files are all there, oldest first; their checksums are not looked at."""
    found = [path for path in _candidates(folder) if damage(path, checksums=False) is None]
    return sorted(found, key=_iteration)


def _candidates(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("iteration_*") if _NAME.fullmatch(p.name) and p.is_dir()), key=_iteration)


def _iteration(path: Path) -> int:
    return int(path.name.split("_")[1])


# ------------------------------------------------------------------------------------------------------ writing
def save_checkpoint(
    folder: Path,
    iteration: int,
    engines: dict[str, Engine],
    state: dict[str, Any],
    strategy: DeepspeedStrategy,
    keep: int,
    rank_state: Any = None,
    *,
    tensors: dict[str, dict[str, torch.Tensor]] | None = None,
    protect: Collection[int] = (),
) -> None:
    """Write everything needed to go on after `iteration` iterations; called on every rank.

    Args:
        folder: holds the checkpoints of the run.
        iteration: iterations completed.
        engines: name -> engine.
        state: JSON-able state of the trainer.
        strategy: collectives.
        keep: newest checkpoints kept.
        rank_state: state of the trainer that belongs to this rank alone; handed back as `state["rank_state"]`.
        tensors: name -> tensors that are equal on all ranks; handed back as `state["tensors"]`.
        protect: iterations whose checkpoints are kept beside the newest (the best by evaluation).

    Raises:
        CheckpointError: on every rank, where the files of any rank could not be written (disk full). Checkpoints
            written before are untouched.
    """
    final = folder / f"iteration_{iteration:06d}"
    temporary = folder / f".tmp_{final.name}"
    _agree(strategy, _on_main(strategy, lambda: _start(folder, temporary)), temporary)
    entries: dict[Path, dict[str, Any]] = {}
    problems = [engine.save(temporary, name, entries) for name, engine in engines.items()]
    own = {"generators": _generator_states(), "state": rank_state}
    shared = _header(iteration, engines, strategy) | state
    problems.append(_write(temporary, strategy, own, tensors or {}, shared, entries))
    _agree(strategy, next(filter(None, problems), None), temporary)
    gathered = strategy.gather_objects(entries)

    def complete() -> None:
        write_manifest(temporary, {path: entry for part in gathered for path, entry in part.items()})
        put_in_place(temporary, final)
        _rotate(folder, keep, protect)

    _agree(strategy, _on_main(strategy, complete), temporary)


def _on_main(strategy: DeepspeedStrategy, work: Callable[[], None]) -> str | None:
    """Do it on the main rank; what the file system had against it, or None."""
    if strategy.is_main:
        try:
            work()
        except OSError as error:
            return str(error)
    return None


def _start(folder: Path, temporary: Path) -> None:
    """An empty folder to write to; what earlier attempts have left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    recover(folder)
    for left in folder.glob(".tmp_*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()


def _write(
    temporary: Path,
    strategy: DeepspeedStrategy,
    own: dict[str, Any],
    tensors: dict[str, dict[str, torch.Tensor]],
    shared: dict[str, Any],
    entries: dict[Path, dict[str, Any]],
) -> str | None:
    """All files but the engines': those of this rank and, on the main one, those of all; the problem, or None."""
    try:
        with checked_file(temporary / f"rank{strategy.rank}.pt", entries) as file:
            torch.save(own, file)
        if strategy.is_main:
            with checked_file(temporary / "tensors.pt", entries) as file:
                torch.save(tensors, file)
            with checked_file(temporary / _STATE, entries) as file:
                file.write((json.dumps(shared, indent=2) + "\n").encode())
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _agree(strategy: DeepspeedStrategy, problem: str | None, temporary: Path) -> None:
    """Raise on all ranks if any has a problem; what is half written is removed, which gives a full disk room again."""
    found = [(rank, text) for rank, text in enumerate(strategy.gather_objects(problem)) if text]
    if not found:
        return
    if strategy.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
    rank, text = found[0]
    raise CheckpointError(
        f"rank {rank} could not write {temporary.name.removeprefix('.tmp_')} in {temporary.parent} ({text}); earlier "
        "checkpoints are untouched. Make room there, or name another folder with --ckpt_path"
    )


def _rotate(folder: Path, keep: int, protect: Collection[int]) -> None:
    """Remove all but the newest complete checkpoints and the protected ones; what is not complete is left alone."""
    for old in list_checkpoints(folder)[:-keep]:
        if _iteration(old) not in protect:
            # Under this name a removal that is cut short never looks like a checkpoint.
            doomed = old.with_name(f".tmp_{old.name}")
            old.rename(doomed)
            fsync_entry(folder)
            shutil.rmtree(doomed, ignore_errors=True)


def _header(iteration: int, engines: dict[str, Engine], strategy: DeepspeedStrategy) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "iteration": iteration,
        "world_size": strategy.world_size,
        "versions": _versions(),
        "models": {name: engine.parameter_shapes() for name, engine in engines.items()},
    }


def _versions() -> dict[str, str]:
    found = {"rlvla": __version__, "python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers", "peft", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _generator_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


# ------------------------------------------------------------------------------------------------------ reading
def load_checkpoint(folder: Path, engines: dict[str, Engine], strategy: DeepspeedStrategy) -> dict[str, Any] | None:
    """Restore the newest intact checkpoint into the engines and the generators; None if there is none.

    Damaged ones are named, and renamed to `damaged_...`, so that they take no place among the checkpoints kept.

    Returns:
        The state of the trainer, with `rank_state` (None where the number of ranks has changed), `rank_states` (of
        all ranks that wrote it), and `tensors`.

    Raises:
        ConfigError: the checkpoint belongs to another model or to a newer version of this program.
    """
    chosen: Path | None = None
    if strategy.is_main:
        recover(folder)
        chosen = _newest_intact(folder)
    chosen = strategy.gather_objects(chosen)[0]
    if chosen is None:
        return None
    state = json.loads((chosen / _STATE).read_text(encoding="utf-8"))
    _check(chosen, state, engines)
    written_by, same = state["world_size"], state["world_size"] == strategy.world_size
    for name, engine in engines.items():
        if same:
            engine.load(chosen, name)
        else:
            _load_converted(chosen, name, engine, strategy)
    parts = [torch.load(chosen / f"rank{rank}.pt", weights_only=False) for rank in range(written_by)]
    if same:
        _restore_generators(parts[strategy.rank]["generators"])
    state["rank_states"] = [part["state"] for part in parts]
    state["rank_state"] = state["rank_states"][strategy.rank] if same else None
    state["tensors"] = torch.load(chosen / "tensors.pt", map_location="cpu", weights_only=True)
    strategy.barrier()
    return state


def _newest_intact(folder: Path) -> Path | None:
    for path in reversed(_candidates(folder)):
        problem = damage(path)
        if problem is None:
            return path
        target = path.with_name(_DAMAGED + path.name)
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
        log.warning(f"checkpoint {path.name} is skipped: {problem}. It is now called {target.name}")
    return None


def _check(path: Path, state: dict[str, Any], engines: dict[str, Engine]) -> None:
    if state.get("format", 0) > FORMAT:
        raise ConfigError(
            f"{path} has format {state['format']}, which is newer than the {FORMAT} of this program; update it"
        )
    for name, engine in engines.items():
        stored, ours = state["models"].get(name), engine.parameter_shapes()
        if stored is None:
            raise ConfigError(f"{path} holds no {name}; it belongs to another run: name another --save_path")
        if engine.config.engine_stage and not any((path / name).glob("*_optim_states.pt")):
            raise ConfigError(
                f"{path} was written without ZeRO, but stage {engine.config.engine_stage} runs here (with --bf16 at "
                "least 2); name another --save_path"
            )
        for parameter in sorted(stored.keys() ^ ours.keys()) or [p for p in ours if stored[p] != ours[p]]:
            raise ConfigError(
                f"{path} belongs to another model: parameter {parameter} of the {name} has shape "
                f"{stored.get(parameter, 'none')} there and {ours.get(parameter, 'none')} here; give the flags it was "
                "written with, or name another --save_path"
            )


def _load_converted(path: Path, name: str, engine: Engine, strategy: DeepspeedStrategy) -> None:
    """Load what another number of ranks has written, by way of DeepSpeed's universal format."""
    converted = path.parent / f".tmp_universal_{path.name}"
    if strategy.is_main:
        shutil.rmtree(converted, ignore_errors=True)
        converted.mkdir()
        engine.convert(path / name, converted / name)
    strategy.barrier()
    engine.load(converted, name, universal=True)
    strategy.barrier()
    if strategy.is_main:
        shutil.rmtree(converted, ignore_errors=True)


def _restore_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
