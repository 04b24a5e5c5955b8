"""Training checkpoints: written under a temporary name, renamed when complete, verified on loading, rotated.

    iteration_000012/
      trainer.json            iteration, ranks, format, versions, parameter shapes of the models, trainer state
      rank0.pt, rank1.pt ...  random generators and state of each rank
      tensors.pt              tensors that are equal on all ranks
      actor/, critic/         DeepSpeed's files
      manifest.json           size and SHA-256 of each file; written last

On resume, a folder with missing or changed files is reported and skipped. Checksums do not protect against malice:
`rlvla.utils.torch_files` reads every file, executes nothing, and refuses one that names code.
"""

from __future__ import annotations

import io
import json
import pickle
import platform
import random
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvla.experience import Sample
from rlvla.utils.data_files import check_types, read_json
from rlvla.utils.deepspeed.engine import Engine, classes_of_deepspeed
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, SaveError
from rlvla.utils.files import (
    MANIFEST,
    damage,
    flushed_file,
    fsync_entry,
    manifest_entry,
    put_in_place,
    recover,
    write_manifest,
)
from rlvla.utils.terminal import log
from rlvla.utils.torch_files import read_torch_file, refusal, restricted_loading
from rlvla.version import __version__

FORMAT = 3  # 3: waiting episodes hold actions, traces and prepared observations
_NAME = re.compile(r"iteration_(\d+)")
_STATE = "trainer.json"
_DAMAGED = "damaged_"
_TYPES = {"iteration": int, "world_size": int, "format": int | None, "models": dict[str, dict]}
_CLASSES_OF_RANK = (Sample,)  # episodes that wait for their group
_SUPERSEDED = "superseded_"
_MORE_ROOM = "Make room there, or name another folder"


class _Unstorable(str):
    """Reason why a state cannot be stored on any disk."""

    remedy = "See docs/security.md for the types allowed in the state of a custom learner"


class CheckpointError(SaveError):
    """A checkpoint could not be written; earlier ones are untouched."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints with all their files, oldest first; checksums are not verified."""
    return [path for path in candidates(folder) if damage(path, checksums=False) is None]


def candidates(folder: Path) -> list[Path]:
    """Folders named like checkpoints, oldest first, damaged or not."""
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
    tensors: dict[str, dict[str, Tensor]] | None = None,
    protect: Collection[int] = (),
) -> None:
    """Write everything needed to resume after `iteration` iterations; called on every rank.

    Args:
        folder: the folder with the checkpoints of the run.
        iteration: number of completed iterations.
        engines: trained models by name.
        state: JSON-serializable state of the trainer.
        strategy: used to agree with the other ranks on success or failure.
        keep: number of newest checkpoints to keep.
        rank_state: state specific to this rank, returned as `state["rank_state"]` on loading: tensors, arrays of
            numbers, plain values, `Sample`, and classes that a custom module adds with
            `torch.serialization.add_safe_globals`. Or a function that returns it and may write further files.
        tensors: name -> tensors that are equal on all ranks; returned as `state["tensors"]` on loading.
        protect: iterations whose checkpoints are kept in addition to the newest (the best by evaluation).

    Raises:
        CheckpointError: on every rank, if any rank could not write its files (disk full). Earlier checkpoints are
            untouched.
    """
    final = folder / f"iteration_{iteration:06d}"
    temporary = folder / f".tmp_{final.name}"

    def start() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()

    _agree(strategy, _on_main(strategy, start), temporary)
    problems = [engine.save(temporary, name) for name, engine in engines.items()]
    per_rank = {"generators": _generator_states(), "state": rank_state}
    shared = {
        "format": FORMAT,
        "iteration": iteration,
        "world_size": strategy.world_size,
        "versions": _versions(),
        "models": {name: engine.parameter_shapes() for name, engine in engines.items()},
        **state,
    }
    problems.append(_write(temporary, strategy, per_rank, tensors or {}, shared))
    _agree(strategy, next(filter(None, problems), None), temporary)
    entries, problem = _manifest_entries(temporary, strategy)
    _agree(strategy, problem, temporary)

    def complete() -> None:
        write_manifest(temporary, entries)
        put_in_place(temporary, final)
        _rotate(folder, keep, protect)

    _agree(strategy, _on_main(strategy, complete), temporary)


def _on_main(strategy: DeepspeedStrategy, work: Callable[[], None]) -> str | None:
    """Run `work` on the main rank; returns the message of an OSError, or None."""
    if strategy.is_main:
        try:
            work()
        except OSError as error:
            return str(error)
    return None


def _remove_leftovers(folder: Path) -> None:
    """Remove leftovers of an interrupted save, rotation or conversion."""
    recover(folder)
    for leftover in folder.glob(".tmp_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _write(
    temporary: Path,
    strategy: DeepspeedStrategy,
    per_rank: dict[str, Any],
    tensors: dict[str, dict[str, Tensor]],
    shared: dict[str, Any],
) -> str | None:
    """Write this rank's file and, on the main rank, the shared ones; returns an error message, or None."""
    try:
        if callable(per_rank["state"]):
            per_rank = per_rank | {"state": per_rank["state"]()}
        rank_file = temporary / f"rank{strategy.rank}.pt"
        with flushed_file(rank_file) as file:
            torch.save(per_rank, file)
        unreadable = refusal(rank_file, _CLASSES_OF_RANK)
        if unreadable:
            return _Unstorable(f"it could not be read again: {unreadable}")
        if strategy.is_main:
            with flushed_file(temporary / "tensors.pt") as file:
                torch.save(tensors, file)
            with flushed_file(temporary / _STATE) as file:
                file.write((json.dumps(shared, indent=2) + "\n").encode())
    except (OSError, RuntimeError) as error:
        return str(error)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        return _Unstorable(f"the state cannot be stored: {error}")
    return None


def _manifest_entries(temporary: Path, strategy: DeepspeedStrategy) -> tuple[dict[Path, dict[str, Any]], str | None]:
    """Manifest entries of all files, of which each rank hashes some; and an error message of this rank, or None."""
    entries: dict[Path, dict[str, Any]] = {}
    problem = None
    try:
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        entries = {path: manifest_entry(path) for path in files[strategy.rank :: strategy.world_size]}
    except OSError as error:
        problem = str(error)
    gathered = strategy.gather_objects(entries)
    return {path: entry for per_rank in gathered for path, entry in per_rank.items()}, problem


def _agree(strategy: DeepspeedStrategy, problem: str | None, temporary: Path) -> None:
    """Raise on all ranks if any has a problem; the incomplete checkpoint is removed to free disk space."""
    failed = [(rank, text) for rank, text in enumerate(strategy.gather_objects(problem)) if text]
    if not failed:
        return
    if strategy.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
    rank, text = failed[0]
    raise CheckpointError(
        f"rank {rank} could not write {temporary.name.removeprefix('.tmp_')} in {temporary.parent} ({text}); earlier "
        f"checkpoints are untouched. {text.remedy if isinstance(text, _Unstorable) else _MORE_ROOM}"
    )


def _rotate(folder: Path, keep: int, protect: Collection[int]) -> None:
    """Remove all complete checkpoints but the newest and the protected ones."""
    for old in list_checkpoints(folder)[:-keep]:
        if _iteration(old) not in protect:
            # Renamed first, so that an interrupted removal does not leave a partial checkpoint.
            renamed = old.with_name(f".tmp_{old.name}")
            old.rename(renamed)
            fsync_entry(folder)
            shutil.rmtree(renamed, ignore_errors=True)


def _versions() -> dict[str, str]:
    versions = {"rlvla": __version__, "python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers", "peft", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _generator_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


# ------------------------------------------------------------------------------------------------------ reading
def load_checkpoint(
    folder: Path,
    engines: dict[str, Engine],
    strategy: DeepspeedStrategy,
    name: str | None = None,
    *,
    read_only: bool = False,
    state_damage: Callable[[list[Any]], str | None] | None = None,
) -> dict[str, Any] | None:
    """Restore engines and random generators from a checkpoint: `name`, or the newest intact one; None if there is none.

    Damaged checkpoints newer than the newest intact one are reported and renamed to `damaged_...`, so that they do not
    count as checkpoints to keep. With `read_only` nothing is renamed or removed, since a run may be writing there.
    `state_damage` returns the defect of files outside a checkpoint that the states of its ranks refer to, or None.

    Returns:
        The state of the trainer, with `rank_state` (None if the number of ranks has changed), `rank_states` (of all
        ranks that wrote the checkpoint), and `tensors`.

    Raises:
        ConfigError: the checkpoint belongs to another model, was written by a newer version of this program, has a file
            that names code, or, if given by `name`, is damaged.
    """
    chosen: Path | None = None
    wrong: str | None = None

    def defect(path: Path) -> str | None:
        problem = damage(path)
        if problem is not None or state_damage is None or _refused_file(path):  # a refusal ends the search
            return problem
        try:
            state = read_json(path / _STATE, allow_nan=True)
            if (state["format"] or 0) > FORMAT:
                return None  # `_check` refuses it
            files = [path / f"rank{rank}.pt" for rank in range(state["world_size"])]
            return state_damage([read_torch_file(file, classes=_CLASSES_OF_RANK)["state"] for file in files])
        except (KeyError, TypeError, AttributeError, OSError) as error:
            return f"the state of a rank cannot be used ({error!r})"

    if strategy.is_main:
        if not read_only:
            _remove_leftovers(folder)
        chosen = newest_intact(folder, rename=not read_only, damage=defect) if name is None else folder / name
        wrong = None if name is None else defect(folder / name)
    refused = None if chosen is None or wrong is not None else _refused_file(chosen)
    chosen, wrong, refused = strategy.gather_objects((chosen, wrong, refused))[0]
    if wrong is not None:
        raise ConfigError.of("load_checkpoint", "invalid_file", f"--load_checkpoint {name} is damaged: {wrong}")
    if chosen is None:
        return None
    if refused:
        raise ConfigError.of("load_checkpoint", "invalid_file", refused)
    state = read_json(chosen / _STATE, allow_nan=True)
    check_types(dict.fromkeys(_TYPES) | state, _TYPES, chosen / _STATE)
    _check(chosen, state, engines)
    written_by, same = state["world_size"], state["world_size"] == strategy.world_size
    for name, engine in engines.items():
        if same:
            engine.load(chosen, name)
        else:
            _load_converted(chosen, name, engine, strategy)
    per_rank = [read_torch_file(chosen / f"rank{rank}.pt", classes=_CLASSES_OF_RANK) for rank in range(written_by)]
    if same:
        generators = per_rank[strategy.rank]["generators"]
        random.setstate(generators["python"])
        np.random.set_state(generators["numpy"])
        torch.set_rng_state(generators["torch"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])
    state["rank_states"] = [saved["state"] for saved in per_rank]
    state["rank_state"] = state["rank_states"][strategy.rank] if same else None
    state["tensors"] = read_torch_file(chosen / "tensors.pt")
    strategy.barrier()
    return state


def set_aside_later(folder: Path, iteration: int) -> list[str]:
    """Rename the checkpoints after `iteration` to `superseded_...`; returns their former names.

    A run that continues from an older checkpoint diverges, and must not be resumed from the later ones.
    """
    later = [path for path in candidates(folder) if _iteration(path) > iteration]
    for path in later:
        target = path.with_name(_SUPERSEDED + path.name)
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
    return [path.name for path in later]


def newest_intact(
    folder: Path, *, rename: bool = False, since: float = 0.0, damage: Callable[[Path], str | None] = damage
) -> Path | None:
    """The newest intact checkpoint, or None; damaged newer ones are reported and, with `rename`, renamed.

    Args:
        folder: the folder with the checkpoints of a run.
        rename: rename damaged checkpoints to `damaged_...`.
        since: time of modification that the checkpoint must exceed; older ones are not examined.
        damage: the defect of a checkpoint, or None.
    """
    for path in reversed(candidates(folder)):
        manifest = path / MANIFEST
        if since and (not manifest.is_file() or manifest.stat().st_mtime <= since):
            continue
        problem = damage(path)
        if problem is None:
            return path
        outcome = ""
        if rename:
            target = path.with_name(_DAMAGED + path.name)
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)
            outcome = f". It was renamed to {target.name}"
        log.warning(f"checkpoint {path.name} is skipped: {problem}{outcome}")
    return None


def _refused_file(checkpoint: Path) -> str | None:
    """Reason to refuse a file of a checkpoint, or None; checked before anything is loaded."""
    for path in sorted(checkpoint.rglob("*.pt")):
        reason = refusal(path, _CLASSES_OF_RANK if path.parent == checkpoint else classes_of_deepspeed())
        if reason:
            return reason
    return None


def _check(path: Path, state: dict[str, Any], engines: dict[str, Engine]) -> None:
    if (state.get("format") or 0) > FORMAT:
        raise ConfigError(
            f"{path} has format {state['format']}, which is newer than the {FORMAT} of this program; update it"
        )
    if not 1 <= state["world_size"] <= len(list(path.glob("rank*.pt"))):
        raise ConfigError(f"{path / _STATE}: {state['world_size']} ranks wrote it, but the rank*.pt files differ")
    for name, engine in engines.items():
        stored, ours = state["models"].get(name), engine.parameter_shapes()
        if stored is None:
            raise ConfigError(f"{path} does not hold the {name}; it belongs to another run: name another --save_path")
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
    """Load a checkpoint written by a different number of ranks, via DeepSpeed's universal format."""
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


def chosen_checkpoint(folder: Path, name: str | None = None, *, since: float = 0.0) -> Path | None:
    """The checkpoint `name` of a folder, or the newest intact one; None without one. Nothing is changed.

    Args:
        folder: the folder with the checkpoints of a run.
        name: the one to choose.
        since: see `newest_intact`.

    Raises:
        ConfigError: there is no checkpoint of this name, or it is damaged.
    """
    if name is None:
        return newest_intact(folder, since=since)
    names = [path.name for path in list_checkpoints(folder)]
    if name not in names:
        text = f"--load_checkpoint {name}: {folder} holds {', '.join(names) or 'no checkpoint'}"
        raise ConfigError.of("load_checkpoint", "unknown_name", text)
    problem = damage(folder / name)
    if problem is not None:
        raise ConfigError.of("load_checkpoint", "invalid_file", f"--load_checkpoint {name} is damaged: {problem}")
    return folder / name


def whole_weights(checkpoint: Path, model: str = "actor") -> dict[str, Tensor]:
    """Read the weights of a model on the host, from a checkpoint of any ZeRO stage and number of ranks.

    With ZeRO-3, parameters are assembled from the float32 master weights of all ranks; otherwise they are those of the
    network.

    Returns:
        Name -> parameter or buffer.

    Raises:
        ConfigError: the checkpoint does not hold the model, or has a file that names code, which is not executed.
    """
    files = sorted((checkpoint / model).glob("*model_states.pt"))
    if not files:
        raise ConfigError(f"{checkpoint} does not hold the {model}")
    classes = classes_of_deepspeed()
    if not any(path.name.startswith("zero_pp_rank_") for path in files):
        return dict(read_torch_file(files[0], classes=classes, mmap=True)["module"])
    for path in sorted((checkpoint / model).glob("*.pt")):
        reason = refusal(path, classes)
        if reason:
            raise ConfigError.of(None, "invalid_file", reason)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), restricted_loading(classes):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=model))
