"""Folders of training checkpoints: rotation, half-written and damaged ones, full disks, foreign models."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.checkpoints.training import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError
from tests.support.checkpoints import OPTIM, save, trained_engine
from tests.support.disks import needs_root, small_disk


@pytest.fixture(scope="module")
def strategy() -> DeepspeedStrategy:
    return DeepspeedStrategy(StrategyConfig())


def test_only_the_newest_are_kept(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    engine = trained_engine(strategy, 1)
    for iteration in (2, 9, 10, 100):
        save(strategy, tmp_path, iteration, engine, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["iteration_000010", "iteration_000100"]
    assert {p.name for p in tmp_path.iterdir()} == {"iteration_000010", "iteration_000100"}


def test_the_newest_is_loaded_with_weights_optimizer_and_schedule(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    save(strategy, tmp_path, 1, trained_engine(strategy, 1))
    trained = trained_engine(strategy, 3)
    save(strategy, tmp_path, 2, trained)
    fresh = trained_engine(strategy, 0, seed=5)
    state = load_checkpoint(tmp_path, {"net": fresh}, strategy)
    assert state["iteration"] == 2 and state["totals"] == {"n": 2}
    assert torch.equal(fresh.module.weight, trained.module.weight)
    assert fresh.learning_rate == trained.learning_rate < OPTIM.learning_rate
    for engine in (trained, fresh):  # one more step from equal moments gives equal weights
        engine.backward(engine(torch.ones(1, 3)).sum(), last=True)
    assert torch.equal(fresh.module.weight, trained.module.weight)


def test_generators_continue_where_they_were(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    save(strategy, tmp_path, 1)
    drawn = random.random(), np.random.random(), torch.rand(2).tolist()
    load_checkpoint(tmp_path, {"net": trained_engine(strategy, 0)}, strategy)
    assert (random.random(), np.random.random(), torch.rand(2).tolist()) == drawn


def test_half_written_checkpoints_are_ignored_and_replaced(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    save(strategy, tmp_path, 1)
    (tmp_path / ".tmp_iteration_000002").mkdir()
    (tmp_path / ".tmp_iteration_000002" / "trainer.json").write_text("{}")
    (tmp_path / "iteration_000003").mkdir()  # without the manifest, which is written last
    (tmp_path / "iteration_4x").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["iteration_000001"]
    assert load_checkpoint(tmp_path, {"net": trained_engine(strategy, 0)}, strategy)["iteration"] == 1
    save(strategy, tmp_path, 2)
    save(strategy, tmp_path, 3)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["iteration_000002", "iteration_000003"]
    assert not list(tmp_path.glob(".tmp*"))


def test_an_error_while_writing_leaves_the_last_one_usable(
    strategy: DeepspeedStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(strategy, tmp_path, 1)

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("rlvla.checkpoints.training.write_manifest", full_disk)
    with pytest.raises(CheckpointError, match="rank 0 could not write iteration_000002 .*no space left.*Make room"):
        save(strategy, tmp_path, 2)
    assert {p.name for p in tmp_path.iterdir()} == {"iteration_000001"}
    assert load_checkpoint(tmp_path, {"net": trained_engine(strategy, 0)}, strategy)["iteration"] == 1


def change_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def weights_file(checkpoint: Path) -> Path:
    (path,) = (checkpoint / "net").glob("*.pt")
    return path


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lambda c: change_a_bit(weights_file(c)), "net/mp_rank_00_model_states.pt has changed since it was written"),
        (lambda c: weights_file(c).unlink(), "net/mp_rank_00_model_states.pt is missing"),
        (lambda c: weights_file(c).write_bytes(weights_file(c).read_bytes()[:-1]), "bytes instead of"),
        (lambda c: (c / "trainer.json").write_text("{}"), "trainer.json has 2 bytes instead of"),
        (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda c: (c / "manifest.json").write_text("{"), "manifest.json cannot be used"),
    ],
    ids=["bit", "missing", "cut", "state", "no manifest", "manifest"],
)
def test_a_damaged_checkpoint_is_named_and_skipped(
    strategy: DeepspeedStrategy, tmp_path: Path, capsys: pytest.CaptureFixture, fault, named: str
) -> None:
    for iteration in (1, 2):
        save(strategy, tmp_path, iteration)
    fault(tmp_path / "iteration_000002")
    state = load_checkpoint(tmp_path, {"net": trained_engine(strategy, 0)}, strategy)
    assert state["iteration"] == 1
    printed = capsys.readouterr().err
    assert "warning: checkpoint iteration_000002 is skipped" in printed and named in printed
    for iteration in (2, 3):  # a damaged one takes no place among those kept
        save(strategy, tmp_path, iteration)
    assert {p.name for p in tmp_path.iterdir()} == {
        "damaged_iteration_000002",
        "iteration_000002",
        "iteration_000003",
    }


def test_a_checkpoint_is_replaced_without_a_gap(
    strategy: DeepspeedStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving an iteration again: a crash between the two renames leaves the old one, which comes back."""
    engine = trained_engine(strategy, 1)
    save(strategy, tmp_path, 1, engine)
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            save(strategy, tmp_path, 1, trained_engine(strategy, 5, seed=1))
    fresh = trained_engine(strategy, 0, seed=7)
    assert load_checkpoint(tmp_path, {"net": fresh}, strategy)["iteration"] == 1
    assert torch.equal(fresh.module.weight, engine.module.weight)
    save(strategy, tmp_path, 1, trained_engine(strategy, 5, seed=1))
    assert {p.name for p in tmp_path.iterdir()} == {"iteration_000001"}


def test_the_best_is_kept_beside_the_newest(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    engine = trained_engine(strategy, 1)
    for iteration in range(1, 6):
        save_checkpoint(tmp_path, iteration, {"net": engine}, {}, strategy, 1, protect=[2])
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["2", "5"]
    save_checkpoint(tmp_path, 6, {"net": engine}, {}, strategy, 1, protect=[5])
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["5", "6"]


def test_another_model_is_an_error(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    save(strategy, tmp_path, 1)
    other = strategy.prepare(torch.nn.Linear(4, 2), OPTIM)
    with pytest.raises(ConfigError, match=r"another model: parameter weight of the net has shape \[2, 3\] there and"):
        load_checkpoint(tmp_path, {"net": other}, strategy)
    with pytest.raises(ConfigError, match="does not hold the critic"):
        load_checkpoint(tmp_path, {"critic": other}, strategy)
    deeper = strategy.prepare(torch.nn.Sequential(torch.nn.Linear(3, 2)), OPTIM)
    with pytest.raises(ConfigError, match=r"parameter 0.bias of the net has shape none there and \[2\] here"):
        load_checkpoint(tmp_path, {"net": deeper}, strategy)
    sharing = DeepspeedStrategy(StrategyConfig(bf16=True)).prepare(torch.nn.Linear(3, 2), OPTIM)
    with pytest.raises(ConfigError, match="was written without ZeRO, but stage 2 runs here"):
        load_checkpoint(tmp_path, {"net": sharing}, strategy)
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["1"], "it is not damaged"


def test_a_newer_format_is_an_error(
    strategy: DeepspeedStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rlvla.checkpoints.training.FORMAT", 99)
        save(strategy, tmp_path, 1)
    with pytest.raises(ConfigError, match="format 99, which is newer"):
        load_checkpoint(tmp_path, {"net": trained_engine(strategy, 0)}, strategy)


def test_tensors_and_the_state_of_a_rank_come_back(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    average = {"weight": torch.rand(3)}
    save_checkpoint(tmp_path, 1, {}, {}, strategy, 1, rank_state={"groups": [torch.ones(2)]}, tensors={"ema": average})
    state = load_checkpoint(tmp_path, {}, strategy)
    assert torch.equal(state["tensors"]["ema"]["weight"], average["weight"])
    assert torch.equal(state["rank_state"]["groups"][0], torch.ones(2))
    assert state["versions"]["torch"].startswith(torch.__version__.split("+")[0])


@pytest.mark.parametrize(
    ("shared", "of_rank"), [({"n": np.int64(3)}, None), ({"n": torch.ones(1)}, None), ({}, {"f": lambda: 0})]
)
def test_a_state_that_cannot_be_stored_is_a_checkpoint_error(
    strategy: DeepspeedStrategy, tmp_path: Path, shared: dict, of_rank: dict | None
) -> None:
    with pytest.raises(CheckpointError, match="state cannot be stored") as error:
        save_checkpoint(tmp_path, 1, {}, shared, strategy, 1, rank_state=of_rank)
    assert error.match("security.md") and "room" not in str(error.value), "no disk could hold it"
    assert not list(tmp_path.iterdir())


@needs_root
def test_a_full_disk_costs_one_checkpoint_only(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "300k") as disk:
        folder, engine = disk.folder, trained_engine(strategy, 2)
        save(strategy, folder, 1, engine)
        disk.fill(left=8192)
        for iteration in (2, 3):
            with pytest.raises(CheckpointError, match="No space left on device"):
                save(strategy, folder, iteration, engine)
        assert {p.name for p in folder.iterdir()} == {"filler", "iteration_000001"}
        engine.backward(engine(torch.ones(1, 3)).sum(), last=True)  # the run goes on
        disk.make_room()
        save(strategy, folder, 4, engine)
        fresh = trained_engine(strategy, 0)
        assert load_checkpoint(folder, {"net": fresh}, strategy)["iteration"] == 4
        assert torch.equal(fresh.module.weight, engine.module.weight)


def test_what_is_read_only_is_not_changed(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    """Another run may be writing there."""
    for iteration in (1, 2):
        save(strategy, tmp_path, iteration)
    change_a_bit(weights_file(tmp_path / "iteration_000002"))
    (tmp_path / ".tmp_iteration_000003").mkdir()
    before = sorted(tmp_path.rglob("*"))
    engines = {"net": trained_engine(strategy, 0)}
    assert load_checkpoint(tmp_path, engines, strategy, read_only=True)["iteration"] == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_to_load(strategy: DeepspeedStrategy, tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "nowhere", {}, strategy) is None
