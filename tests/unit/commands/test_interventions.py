"""Episodes of a policy with interventions: recording, reading, and the rows that are learned from."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from cli.collect_demos import main
from cli.convert_demos import main as convert
from cli.view_data import main as view
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import read_demonstrations, read_several
from rlvla.data.replayed_episodes import play_again
from rlvla.data.rows import DemonstrationRows, rows_per_epoch
from rlvla.models.actor import Actor

INTERVENTIONS = ["--intervene", "expert", "--intervene_patience", "4", "--intervene_reserve", "4", "--max_steps", "16"]


@pytest.fixture(scope="module")
def folder(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output, printed = tmp_path_factory.mktemp("interventions") / "demos", StringIO()
    with redirect_stdout(printed):
        main(
            ["--policy", str(policy_folder), *INTERVENTIONS, "--num_demos", "4", "--keep", "all"]
            + ["--output", str(output)]
        )
    (output / "printed").write_text(printed.getvalue())
    return output


@pytest.fixture(scope="module")
def demos(folder: Path) -> Demonstrations:
    return read_demonstrations(folder / "demos.hdf5")


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder).eval()


def test_each_step_says_who_acted(demos: Demonstrations) -> None:
    assert [len(flags) for flags in demos.interventions] == [len(actions) for actions in demos.actions]
    for flags in demos.interventions:
        assert flags.dtype == bool and not flags[:4].any() and flags.any()
    assert len(list(play_again("interventions", demos, range(4)))) == 4, "the actions reproduce the episodes"


def test_the_experts_share_is_that_of_the_steps(folder: Path, demos: Demonstrations) -> None:
    share = np.concatenate(demos.interventions).mean()
    text = f"{share:.0%} of the recorded steps are the expert's; 0 of 4 episodes have none"
    assert text in " ".join((folder / "printed").read_text().split())


def test_the_time_line_shows_who_acted(folder: Path, tmp_path: Path) -> None:
    view([str(folder), "--episodes", "0", "--output", str(tmp_path)])
    assert re.findall(r'aria-label="when (\w+)"', (tmp_path / "view_data.html").read_text()) == ["intervention"]


def test_lerobot_and_back(folder: Path, demos: Demonstrations, tmp_path: Path) -> None:
    convert(["--demos", str(folder), "--output", str(tmp_path / "lerobot")])
    convert(["--demos", str(tmp_path / "lerobot"), "--format", "hdf5", "--output", str(tmp_path / "hdf5")])
    for other in (read_demonstrations(tmp_path / "lerobot"), read_demonstrations(tmp_path / "hdf5" / "demos.hdf5")):
        for flags, expected in zip(other.interventions, demos.interventions, strict=True):
            np.testing.assert_array_equal(flags, expected)


def test_an_expert_plays_the_demonstrations_beside_them(folder: Path, demos: Demonstrations, demos_file: Path) -> None:
    both = read_several([str(demos_file), str(folder)])
    assert all(flags.all() for flags in both.interventions[:-4])
    assert both.demonstrated(0) == [(0, len(both.actions[0]))]
    assert both.interventions[-1].tolist() == demos.interventions[-1].tolist()


def with_flags(demos: Demonstrations, *letters: str) -> Demonstrations:
    """The first episodes with these steps of the policy (.) and the expert (E)."""
    kept = {"actions": demos.actions, "images": demos.images, "proprio": demos.proprio}
    cut = {
        name: [np.resize(values[0], (len(text), *values[0].shape[1:])) for text in letters]
        for name, values in kept.items()
    }
    flags = [np.array([letter == "E" for letter in text]) for text in letters]
    count = len(letters)
    return replace(demos, **cut, interventions=flags, instructions=demos.instructions[:count], success=[True] * count)


def test_chunks_of_the_expert_end_where_the_policy_acts_again(demos: Demonstrations, actor: Actor) -> None:
    """Chunks of four actions."""
    demos = with_flags(demos, "..EEE..E", "EEEEEE")
    assert demos.demonstrated(0) == [(2, 5), (7, 8)] and demos.demonstrated(1) == [(0, 6)]
    rows = DemonstrationRows(demos, actor)
    _, mask = rows.actions_of(np.arange(len(rows)))
    assert mask.sum(1).tolist() == [4, 4, 3, 2, 1, 3, 2, 1] + [4, 4, 4, 3, 2, 1]
    _, columns = rows.labels_of(np.arange(len(rows)))
    np.testing.assert_array_equal(columns.reshape(len(rows), 4, -1).all(-1), mask)
    assert rows.by_policy.tolist() == [letter == "." for letter in "..EEE..EEEEEEE"]


@pytest.mark.parametrize(("weight", "drawn"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_an_epoch_holds_a_share_of_the_policys_rows(
    demos: Demonstrations, actor: Actor, weight: float, drawn: int
) -> None:
    """All rows of the expert, and others of the policy in each epoch; the ranks share them."""
    demos = with_flags(demos, "..EEE..E")
    demos.proprio = [np.arange(8, dtype=np.float32)[:, None].repeat(actor.spec.proprio_dim, 1) / 100]
    rows = DemonstrationRows(demos, actor)
    order = rows.take(np.arange(8)).proprio[:, 0].tolist()
    assert rows_per_epoch(rows.by_policy, weight) == 4 + drawn

    def epochs(ranks: int) -> list[list[int]]:
        shares = [rows.batches(100, 6, 3, rank, ranks, autonomous_weight=weight) for rank in range(ranks)]
        steps = [[value for batch in step for value in batch.proprio[:, 0].tolist()] for step in zip(*shares)]
        return [sorted(order.index(value) for value in step) for step in steps]

    for epoch in epochs(1):
        assert {2, 3, 4, 7} <= set(epoch) and len(set(epoch)) == len(epoch) == 4 + drawn
    assert epochs(1) == epochs(2)
    if weight == 0.5:
        assert len({tuple(epoch) for epoch in epochs(1)}) > 1, "others in each epoch"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task_suite_name", "toy_reach", "--intervene", "expert"], "--intervene expert: there is no --policy"),
        (["--policy", "{policy}", "--intervene", "expert", "--corrections"], "with --intervene, leave it out"),
        (["--policy", "{policy}", "--intervene_patience", "3"], "it belongs to --intervene expert"),
        (["--policy", "{policy}", "--intervene_reserve", "3", "--offset_prob", "0.1"], "--offset_prob"),
    ],
)
def test_flags_that_nothing_reads(
    flags: list[str], words: str, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = [flag.format(policy=policy_folder) for flag in flags]
    with pytest.raises(SystemExit):
        main([*flags, "--output", str(tmp_path / "demos")])
    assert words in capsys.readouterr().err
    assert not (tmp_path / "demos").exists()
