"""Drawing machines and scoring recorded episodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from cli import draw_reward_machine, score_episodes
from tests.support.libero_files import write_demos


@pytest.mark.parametrize(
    "words", [["--machine", "stack"], ["--machine", "wipe"], ["--formula", "G(!collision) & F(a & F(b | c))"]]
)
def test_a_machine_as_picture_and_as_text(tmp_path: Path, words: list[str]) -> None:
    draw_reward_machine.main([*words, "--output", str(tmp_path / "m.png")])
    image = np.asarray(Image.open(tmp_path / "m.png"))
    assert image.shape[1] > 500 and len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 10, "nothing is drawn"
    draw_reward_machine.main([*words, "--output", str(tmp_path / "m.dot")])
    text = (tmp_path / "m.dot").read_text()
    assert text.startswith("digraph") and text.count("doublecircle") == 1
    if words[1] == "stack":
        assert '"u2" -> "u3" [label="cubes_aligned"]' in text
        assert text.count("style=dashed") == 3 and "needs cubeA_grasped, else -0.15" in text
    else:
        assert "reject" in text and "collision" in text


def test_a_compiled_machine_shows_its_smallest_letters(tmp_path: Path) -> None:
    draw_reward_machine.main(["--formula", "F(a & b | c)", "--output", str(tmp_path / "m.dot")])
    assert '"u0" -> "u1" [label="c | a & b"]' in (tmp_path / "m.dot").read_text()


def test_scores_of_recorded_episodes(demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(samples):\n    return [s.finish_step * 0.1 for s in samples]\n")
    flags = ["--demos", demos_file, "--episodes", 0, 3, "--output", tmp_path / "out", "--rm_mode", "progression"]
    flags += ["--reward", "success:2", "rm:0.5", "reward_fn:1", "--reward_fn", f"{mine}:score"]
    score_episodes.main([str(word) for word in flags])
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert [s["episode"] for s in scores] == ["demo_0", "demo_3"]
    for score in scores:
        assert score["success_at_end"] and score["totals"]["success"] == 2
        assert score["totals"]["rm"] == pytest.approx(0.5 * (1 + 2 * 0.25))
        steps = len(score["rewards"]["rm"])
        assert score["totals"]["reward_fn"] == pytest.approx(0.1 * steps)
        assert score["rewards"]["success"] == [0] * (steps - 1) + [2]
        assert list(dict.fromkeys(score["machine_states"])) == ["u0", "u1", "u2"]
        assert len(score["machine_states"]) == steps + 1
        assert np.asarray(Image.open(tmp_path / "out" / f"{score['episode']}.png")).std() > 10
    assert "demo_3" in capsys.readouterr().out


def refused(main, capsys: pytest.CaptureFixture, *flags: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in flags])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("origin", ["libero", "no seeds"])
def test_episodes_that_cannot_be_played_again(
    demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture, origin: str
) -> None:
    """Demonstrations made elsewhere tell neither initial states nor seeds: said beside whatever else is wrong."""
    path = tmp_path / "libero_object"
    if origin == "libero":
        pytest.importorskip("libero", reason="the extra libero is not installed")
        write_demos(path / "pick_up_the_alphabet_soup_and_place_it_in_the_basket_demo.hdf5")
    else:
        path = Path(shutil.copytree(demos_file.parent, path)) / "demos.hdf5"
        with h5py.File(path, "r+") as file:
            for demo in file["data"].values():
                del demo.attrs["seed"]
    flags = ("--demos", path, "--episodes", 0, 999, "--reward", "success", "rm:x", "--output", tmp_path / "o")
    err = refused(score_episodes.main, capsys, *flags)
    assert f"--demos: {path} does not record the initial state and seed" in err
    assert "--episodes 999" in err and "rm:x" in err


def test_bad_input_all_at_once(demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    err = refused(draw_reward_machine.main, capsys, "--formula", "F(a &", "--output", "m.gif")
    assert "m.gif" in err and "ends too early" in err and "\n           ^" in err
    err = refused(draw_reward_machine.main, capsys, "--output", tmp_path / "m.png")
    assert "either --machine or --formula" in err
    err = refused(
        score_episodes.main,
        capsys,
        *("--demos", demos_file, "--episodes", 999, "--reward", "rm:x", "--output", demos_file.parent),
    )
    assert "--episodes 999" in err and "rm:x" in err and "--output" in err
    flags = ("--demos", demos_file, "--reward", "rm", "--rm_formula", "F flown", "--output", tmp_path / "o")
    assert "unknown proposition flown; the environment registers: near, reached" in refused(
        score_episodes.main, capsys, *flags
    )
    assert not (tmp_path / "o").exists()
