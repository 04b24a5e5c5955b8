"""Runs on two ranks that are broken off and continued: on two ranks to the bit, on one after a conversion, and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlvla.checkpoints.training import list_checkpoints
from rlvla.commands.run_policies import export_checkpoint
from rlvla.utils.files import read_metrics
from tests.support import resume_cases
from tests.support.equality import assert_equal_to_the_bit, differences
from tests.support.launching import launch

pytestmark = pytest.mark.slow

SCRIPT = "tests/support/resume_cases.py"


LORA, BF16, ZERO3 = resume_cases.CASES
# The nightly CI adds bfloat16, and another number of ranks with adapters.
CASES = [LORA, pytest.param(BF16, marks=pytest.mark.nightly), ZERO3]
RESHARDED = [pytest.param(LORA, marks=pytest.mark.nightly), ZERO3]


def played(config: pytest.Config) -> tuple[list[str], list[str]]:
    """The cases that run, and those of them that also continue on another number of ranks."""
    if config.getoption("--nightly"):
        return [*resume_cases.CASES], resume_cases.RESHARDED
    return [LORA, ZERO3], [ZERO3]


@pytest.fixture(scope="module")
def runs(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Of each case: `whole`, `parts` (2 ranks, then 2), `fewer` (2, then 1) and `more` (1, then 2)."""
    folder = tmp_path_factory.mktemp("exact")
    cases, resharded = played(pytestconfig)

    def entry(name: str, kind: str, *flags: str, stop_after: int | None = None, record: bool = True) -> dict:
        words = resume_cases.case(name, policy_folder, folder / name / kind, *flags)
        place = folder / name / ("before" if stop_after else "after") / kind
        return {"argv": words, "stop_after": stop_after, "record": str(place) if record else None}

    def together(plan: list[dict], name: str) -> str:
        """In one launch: starting two processes costs more than a run."""
        (folder / f"{name}.json").write_text(json.dumps(plan))
        return launch(SCRIPT, folder / f"{name}.json")

    first = []
    for name in cases:
        first += [entry(name, "whole", record=False), entry(name, "parts", stop_after=2)]
    together(first, "first")
    for name in resharded:
        shutil.copytree(folder / name / "parts", folder / name / "fewer")
        shutil.copytree(folder / name / "before" / "parts", folder / name / "before" / "fewer")
        resume_cases.run(**entry(name, "more", stop_after=2))
        resume_cases.run(**entry(name, "fewer", "--load_checkpoint"))
    second = [entry(name, "parts", "--load_checkpoint", record=False) for name in cases]
    second += [entry(name, "more", "--load_checkpoint") for name in resharded]
    (folder / "printed").write_text(together(second, "second"))
    return folder


def test_it_is_said_that_the_number_of_ranks_has_changed(runs: Path, pytestconfig: pytest.Config) -> None:
    printed, (cases, resharded) = (runs / "printed").read_text(), played(pytestconfig)
    moved = len(resharded)
    assert printed.count("1 rank(s) wrote the checkpoint and 2 continue: the task sampler") == moved
    assert printed.count("continuing after iteration 2 of 3") == len(cases) + moved


@pytest.mark.parametrize("name", CASES)
def test_stopping_and_continuing_on_two_ranks_changes_nothing(runs: Path, name: str) -> None:
    """Weights, optimizers, schedules, generators of both ranks, averages, groups that wait, state, metrics."""
    assert_equal_to_the_bit(runs / name / "parts", runs / name / "whole")
    newest = list_checkpoints(runs / name / "parts" / "checkpoints")[-1]
    assert {path.name for path in newest.glob("rank*")} == {"rank0.pt", "rank1.pt"}
    if name.startswith("grpo"):
        waiting = [torch.load(runs / name / "before" / "parts" / f"rank{rank}.pt")["waiting"] for rank in (0, 1)]
        assert any(waiting), "no group was carried over the break"


@pytest.mark.parametrize("kind", ["fewer", "more"])
@pytest.mark.parametrize("name", RESHARDED)
def test_another_number_of_ranks_goes_on_from_the_same_state(runs: Path, name: str, kind: str) -> None:
    before, after = (torch.load(runs / name / when / kind / "whole.pt") for when in ("before", "after"))
    assert before["iteration"] == 2 and not differences(before, after)
    moved = [bool(parts[1].any()) for name, parts in before["engines"]["actor"].items() if name != "learning_rate"]
    assert sum(moved) > 0.8 * len(moved), "there are moments that could get lost"
    assert bool(before["average"]) == ("ppo" in name)

    ranks = [sorted((runs / name / when / kind).glob("rank*.pt")) for when in ("before", "after")]
    assert [len(files) for files in ranks] == ([2, 1] if kind == "fewer" else [1, 2])
    written, read = ([torch.load(path) for path in files] for files in ranks)
    assert len({part["position"] for part in [*written, *read]}) == 1
    waiting, dealt = ([group for part in parts for group in part["waiting"]] for parts in (written, read))
    assert sorted(waiting) == sorted(dealt), "every group waits on exactly one rank"
    counts = [len(part["waiting"]) for part in read]
    assert max(counts) - min(counts) <= 1

    records = [r for r in read_metrics(runs / name / kind) if "actor/entropy" in r]
    assert [r["step"] for r in records] == [1, 2, 3]
    assert list_checkpoints(runs / name / kind / "checkpoints")[-1].name == "iteration_000003"


@pytest.mark.parametrize("name", CASES)
def test_the_policy_of_a_checkpoint_of_two_ranks_is_read_by_one_process(runs: Path, name: str, tmp_path: Path) -> None:
    """ZeRO stages, adapters, bf16: the same files as the run exported itself."""
    export_checkpoint(runs / name / "whole", tmp_path / "policy")
    ours, theirs = tmp_path / "policy", runs / name / "whole" / "policy"
    names = {str(path.relative_to(theirs)) for path in theirs.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file()}
    assert all((ours / path).read_bytes() == (theirs / path).read_bytes() for path in names)
