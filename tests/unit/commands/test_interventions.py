"""Episodes of a policy with interventions: recording, reading, and the rows that are learned from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import h5py
import numpy as np
import pytest

from cli.collect_demos import main
from cli.convert_demos import main as convert
from cli.train_ppo_vla import main as train_ppo
from cli.train_sac_vla import main as train_sac
from cli.train_sft_vla import main as train_sft
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


def flagged(folder: Path, copy: Path, *flags: bool) -> Path:
    """A copy of the file whose episodes are by the expert (true) or the policy throughout."""
    file = Path(shutil.copytree(folder, copy)) / "demos.hdf5"
    with h5py.File(file, "r+") as content:
        for number, flag in enumerate(flags):
            content[f"data/demo_{number}/interventions"][:] = flag
    return file


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture) -> Refused:
    def run(command: Callable[[list[str]], object], *argv: object) -> str:
        with pytest.raises(SystemExit) as stop:
            command([str(token) for token in argv])
        assert stop.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return run


def test_episodes_in_which_only_the_policy_acted_are_refused(
    folder: Path, policy_folder: Path, tmp_path: Path, refused: Refused
) -> None:
    file, output = flagged(folder, tmp_path / "copy", False, False, False, False), ["--save_path", tmp_path / "run"]
    text = refused(train_sft, "--demos", file, "--pretrain", policy_folder, "--autonomous_weight", "1", *output)
    assert "0 demonstrated decisions cannot be shared by 1 ranks" in text
    text = refused(train_ppo, "--pretrain", policy_folder, "--ptx_coef", "0.1", "--ptx_demos", file, *output)
    assert f"--ptx_demos: in {file} the policy acted in every step" in text
    sac = ["--task_suite_name", "toy_reach", "--use_proprio", "--max_steps", "16", *output]
    assert "0 episodes with actions of a person or an expert are fewer" in refused(train_sac, *sac, "--demos", file)


def test_each_rank_of_rlpd_needs_an_episode_of_the_expert(
    folder: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = flagged(folder, tmp_path / "copy", False, True, False, False)
    assert read_demonstrations(file).demonstrated_episodes == [1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    sac = ["--task_suite_name", "toy_reach", "--use_proprio", "--max_steps", "16", "--save_path", tmp_path / "run"]
    assert "1 episodes with actions of a person or an expert are fewer than the 2" in refused(
        train_sac, *sac, "--demos", file
    )


def test_success_of_the_policy_pays_no_expert(folder: Path, tmp_path: Path, refused: Refused) -> None:
    file = flagged(folder, tmp_path / "copy", True, True, True, True)
    sac = ["--task_suite_name", "toy_reach", "--use_proprio", "--max_steps", "16", "--save_path", tmp_path / "run"]
    with h5py.File(file, "r+") as content:
        for demo in content["data"].values():
            demo.attrs["success"] = True
            demo["interventions"][-1] = False
    assert "none of the episodes ends in success by a person or an expert" in refused(train_sac, *sac, "--demos", file)


def test_held_out_episodes_without_the_expert_measure_nothing(
    folder: Path, policy_folder: Path, tmp_path: Path, refused: Refused
) -> None:
    """Whichever state is held out, one side has only steps of the policy."""
    for expert in (0, 1, 2, 3):
        file = flagged(folder, tmp_path / f"copy_{expert}", *(number == expert for number in range(4)))
        flags = [
            "--demos",
            file,
            "--pretrain",
            policy_folder,
            "--heldout_share",
            "0.25",
            "--save_path",
            tmp_path / "run",
        ]
        assert "--heldout_share 0.25 of 4 initial state(s) leaves nothing to" in refused(train_sft, *flags)


def test_a_dry_run_counts_the_rows_of_an_epoch(
    folder: Path,
    demos: Demonstrations,
    demos_file: Path,
    policy_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported = []
    monkeypatch.setattr("rlvla.commands.train_sft.sft_report", lambda *args: reported.append(args[5]))
    flags = ["--pretrain", str(policy_folder), "--autonomous_weight", "0.1", "--dry_run"]
    train_sft(["--demos", str(folder), *flags])
    assert reported == [rows_per_epoch(np.concatenate([~flags for flags in demos.interventions]), 0.1)]
    assert reported != [sum(rows_per_epoch(~flags, 0.1) for flags in demos.interventions)], "rounded once"
    assert "--autonomous_weight" not in caplog.text
    train_sft(["--demos", str(demos_file), *flags])
    assert "--autonomous_weight has no effect" in caplog.text
