"""Where the training loop writes its checkpoints, what it removes, and what a resume forgets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rlvla.checkpoints.training import CheckpointError
from rlvla.trainer import trainer as training_loop
from rlvla.trainer.trainer import Trainer
from rlvla.utils.signals import StopRequested
from tests.support.ranks import OneRank


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A loop after two iterations, the first of which was saved; checkpoints are empty folders."""

    def save(folder: Path, iteration: int, *_: object, **__: object) -> None:
        if folder in full:
            raise CheckpointError(f"no room in {folder}")
        (folder / f"iteration_{iteration:06d}").mkdir(parents=True)

    full: list[Path] = []
    monkeypatch.setattr(training_loop, "save_checkpoint", save)
    monkeypatch.setattr(training_loop, "list_checkpoints", lambda folder: sorted(folder.glob("iteration_*")))
    monkeypatch.setattr(Trainer, "_state", Mock())
    monkeypatch.setattr(Trainer, "_export", Mock(side_effect=lambda name, *_, **__: tmp_path / name))
    loop = object.__new__(Trainer)
    schedule = SimpleNamespace(
        fallback_path=str(tmp_path / "other"), max_ckpt_num=2, save_hf_ckpt=False, save_value_network=False
    )
    schedule.val_only = False
    loop.config = SimpleNamespace(schedule=schedule, batch=SimpleNamespace(iterations=4))
    loop.algorithm, loop.logger, loop.strategy = Mock(**{"tensors.return_value": {}}), Mock(), OneRank()
    loop._save_path, loop._ckpt_path = tmp_path / "run", tmp_path / "run" / "checkpoints"
    loop.signals = SimpleNamespace(of_all_ranks=lambda all_reduce: 15)
    loop._folder_watch = loop._average = loop._best = None
    loop._saved, loop._saved_in, loop.iteration, loop.full = 1, loop._ckpt_path, 2, full
    return loop


def test_a_stopped_run_names_the_fallback_folder_only_if_its_checkpoint_is_there(loop: Trainer, tmp_path: Path) -> None:
    fallback = tmp_path / "other" / "checkpoints"
    loop.full += [loop._ckpt_path, fallback]
    with pytest.raises(StopRequested) as stopped:
        loop._stop_if_asked()
    assert stopped.value.ckpt_path is None
    loop.full.remove(fallback)
    with pytest.raises(StopRequested) as stopped:
        loop._stop_if_asked()
    assert stopped.value.ckpt_path == fallback and (fallback / "iteration_000002").is_dir()


def test_policies_stay_as_long_as_their_checkpoints_in_either_folder(loop: Trainer, tmp_path: Path) -> None:
    """The run was resumed from the fallback folder."""
    for name in ("checkpoints/iteration_000001", "policies/iteration_000001", "policies/iteration_000000"):
        (loop._save_path / name).mkdir(parents=True)
    loop._ckpt_path = tmp_path / "other" / "checkpoints"
    loop.config.schedule.save_hf_ckpt = True
    loop.save()
    assert [path.name for path in (loop._save_path / "policies").iterdir()] == ["iteration_000001"]


@pytest.mark.parametrize("val_only", [True, False])
def test_metrics_are_forgotten_only_by_a_run_that_trains(
    loop: Trainer, monkeypatch: pytest.MonkeyPatch, val_only: bool
) -> None:
    """Whether all checkpoints are damaged, or one is loaded, which an evaluation must only read."""
    loop.config.schedule.val_only = val_only
    state = {"iteration": 1, "totals": {}, "evaluations": []}
    load = Mock(side_effect=[None, state])
    monkeypatch.setattr(training_loop, "load_checkpoint", load)
    monkeypatch.setattr(Trainer, "_load_state", Mock())
    assert [loop.resume(), loop.resume()] == [False, True]
    assert loop.logger.rewind.call_count == (0 if val_only else 2)
    assert all(call.kwargs["read_only"] is val_only for call in load.call_args_list)
