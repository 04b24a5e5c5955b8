"""The check of demonstrations: what it finds in damaged files, plays again, writes, and says in front of training."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from cli.check_demos import build_parser, main
from cli.train_sft_vla import main as sft
from rlvla.commands.check_demos import warn_of
from rlvla.data.demonstrations import STATISTICS_FILE
from rlvla.data.reading import read_demonstrations
from rlvla.data.robomimic import DemonstrationWriter
from rlvla.envs import make_env
from rlvla.envs.toy_reach.env import STEP_SIZE

Damage = Callable[[h5py.File], object]


def checked(tmp_path: Path, *words: object, status: int = 0, page: bool = False) -> dict:
    """The findings file of a check that ends with this status; the page is drawn on request only."""
    ended = 0
    with pytest.MonkeyPatch.context() as patch:
        if not page:
            patch.setattr("rlvla.commands.check_demos.render_demos_page", lambda *_: "")
        try:
            main([*map(str, words), "--output", str(tmp_path / "out")])
        except SystemExit as stop:
            ended = stop.code if isinstance(stop.code, int) else 1
    assert ended == status
    return json.loads((tmp_path / "out" / "check_demos.json").read_text())


def kinds(content: dict, *levels: str) -> list[str]:
    return [one["kind"] for one in content["findings"] if one["level"] in (levels or ("error", "warning"))]


@pytest.fixture
def copy(demos_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """A damaged copy of good demonstrations."""

    def make(damage: Damage, name: str = "copy") -> Path:
        path = Path(shutil.copytree(demos_file.parent, tmp_path / name)) / "demos.hdf5"
        with h5py.File(path, "r+") as file:
            damage(file)
        return path

    return make


def each(change: Callable[[h5py.Group], object]) -> Damage:
    return lambda file: [change(file["data"][name]) for name in file["data"]]


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    def change_one(demo: h5py.Group) -> None:
        demo[name][...] = change(demo[name][:])

    return each(change_one)


def test_good_demonstrations(demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    content = checked(tmp_path, demos_file, "--show_episodes", 3, page=True)
    assert content["findings"] == [] and content["episodes"] == content["success"] == 20
    assert [one["replayed"] for one in content["replayed"]] == [True] * 4 and content["statistics"] == []
    page = (tmp_path / "out" / "check_demos.html").read_text()
    of_episodes = re.findall(r'alt="(demo_\d+), step \d+" src="data:image/png;base64,', page)
    assert len(set(of_episodes)) == 3 and len(of_episodes) > 9, "a picture for each shown step, which may wrap"
    assert len(re.findall(r"data:image/png;base64,", page)) == len(of_episodes) + 1, "and the mean start"
    assert page.count("<svg") == 2 + 1 + 1 and 'src="http' not in page
    assert "4 of 4" in page and "4 of 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "kind", "status"),
    [
        (each(lambda demo: demo.attrs.modify("success", False)), "never_successful", 1),
        (replaced("actions", lambda a: np.roll(a, 1, axis=0)), "shifted_actions", 0),
        (replaced("actions", lambda a: np.roll(a, -1, axis=0)), "shifted_actions", 0),
        (replaced("actions", lambda a: 0.2 * a), "replay_fails", 0),
        (replaced("actions", lambda a: a.clip(-0.4, 0.4)), "clipped_action", 0),
        (replaced("actions", lambda a: a * [1, 0]), "constant_action", 0),
        (replaced("obs/top_image", np.zeros_like), "blank_pictures", 1),
        (replaced("obs/top_image", lambda seen: seen[:, ::-1]), "other_pictures", 0),
    ],
    ids=["never", "late", "early", "small", "clipped", "constant", "black", "upside down"],
)
def test_damaged_demonstrations(
    copy: Callable, tmp_path: Path, capsys: pytest.CaptureFixture, damage: Damage, kind: str, status: int
) -> None:
    content = checked(tmp_path, copy(damage), "--replay", 2, status=status)
    assert kind in kinds(content)
    assert ("succeed when played again" in capsys.readouterr().out) == (kind != "never_successful")
    assert {one["turned"] for one in content["replayed"]} == {"upside down" if kind == "other_pictures" else None}


def slow_expert(path: Path) -> None:
    """Episodes of an expert that never moves faster than 0.4."""
    record = {"task_suite_name": "toy_reach", "cameras": ["top"], "use_proprio": True, "max_steps": 40}
    env = make_env("toy_reach", 0, use_proprio=True, max_steps=40)
    writer = DemonstrationWriter(path, record, ["top"])
    for state in range(20):
        seen, actions, result = [env.reset(state, 0)], [], None
        while result is None or not (result.terminated or result.truncated):
            now = env.privileged_state()
            actions.append(np.clip((now["target"] - now["effector"]) / STEP_SIZE, -0.4, 0.4).astype(np.float32))
            result = env.step_chunk(actions[-1][None])
            seen.append(result.observation)
        episode = {
            "images": np.stack([observation.images for observation in seen[:-1]]),
            "proprio": np.stack([observation.proprio for observation in seen[:-1]]),
            "actions": np.stack(actions),
            "rewards": np.zeros(len(actions), np.float32),
            "instruction": seen[0].instruction,
            "init_state_id": state,
            "seed": 0,
            "success_at_end": result.success_at_end,
        }
        writer.add(episode, 0)
    writer.close()


def test_actions_that_lead_to_success_again_are_excused(tmp_path: Path) -> None:
    slow_expert(tmp_path / "slow" / "demos.hdf5")
    content = checked(tmp_path, tmp_path / "slow")
    assert kinds(content) == [] and "clipped_action" in kinds(content, "note")
    unplayed = checked(tmp_path, tmp_path / "slow", "--replay", 0)
    assert set(kinds(unplayed)) == {"clipped_action"}


def test_a_problem_of_many_episodes_is_said_once_with_their_names(
    copy: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def damage(file: h5py.File) -> None:
        for name in list(file["data"])[::2]:
            del file["data"][name].attrs["instruction"]
        for index in (0, 1, 2):
            file[f"data/demo_{index}/actions"][-1] = np.nan
        del file["data/demo_5/obs/top_image"]

    found = checked(tmp_path, copy(damage), status=1, page=True)["findings"]
    assert {one["level"] for one in found} == {"error"} and len(found) == 5
    assert sorted(len(one["episodes"]) for one in found) == [1, 1, 1, 1, 10]
    assert capsys.readouterr().out.count("error: ") == 5
    page = (tmp_path / "out" / "check_demos.html").read_text()
    assert "demo_18" in page and "data:image" not in page, "nothing could be read, everything is named"


def test_files_that_do_not_belong_together(demos_file: Path, copy: Callable, tmp_path: Path) -> None:
    def other_suite(file: h5py.File) -> None:
        record = json.loads(file["data"].attrs["env_args"])
        file["data"].attrs["env_args"] = json.dumps(record | {"task_suite_name": "elsewhere"})

    def wider(demo: h5py.Group) -> None:
        actions = demo["actions"][:]
        del demo["actions"]
        demo["actions"] = np.concatenate([actions, actions[:, :1]], axis=1)

    mixed = checked(tmp_path, demos_file, copy(other_suite, "suite"), "--replay", 0)
    assert "mixed_suites" in kinds(mixed, "warning")
    (tmp_path / "wide").mkdir()
    wide = copy(each(wider), "wider")
    (wide.parent / STATISTICS_FILE).unlink()
    assert "mixed_files" in kinds(checked(tmp_path, demos_file, wide, "--replay", 0, status=1), "error")


def test_a_file_among_others(demos_file: Path, copy: Callable, tmp_path: Path) -> None:
    """What is wrong with one file of two is attributed to it; episodes that both hold are repetitions."""
    turned = copy(replaced("obs/top_image", lambda seen: seen[:, ::-1]), "turned")
    found = checked(tmp_path, demos_file, turned, "--replay", 0)["findings"]
    assert ("turned_pictures", str(turned)) in [(one["kind"], one["where"]) for one in found]
    constant = copy(replaced("actions", lambda a: a * [0, 1] + [0.25, 0]), "constant")
    found = checked(tmp_path, demos_file, constant, "--replay", 0)["findings"]
    assert ("constant_action", str(constant)) in [(one["kind"], one["where"]) for one in found]
    whole = checked(tmp_path, demos_file, copy(lambda file: None, "same"), "--replay", 0)["findings"]
    (again,) = [one for one in whole if one["kind"] == "repeated_episodes"]
    assert len(again["episodes"]) == 20 and str(tmp_path / "same") in again["episodes"][0]


def test_missing_statistics_are_written(copy: Callable, tmp_path: Path) -> None:
    path = copy(lambda file: None)
    recorded = json.loads((path.parent / STATISTICS_FILE).read_text())
    (path.parent / STATISTICS_FILE).unlink()
    flags = ("--replay", 0)
    content = checked(tmp_path, path.parent, "--statistics", tmp_path / "else" / "where", *flags)
    assert content["statistics"] == [str(tmp_path / "else" / "where" / STATISTICS_FILE)]
    assert not (path.parent / STATISTICS_FILE).exists()
    for selection in (("--episodes", "0"), ("--stride", "2")):
        content = checked(tmp_path, path.parent, *selection, *flags)
        assert content["statistics"] == [] and "statistics_not_written" in kinds(content, "note")
    assert not (path.parent / STATISTICS_FILE).exists(), "later runs would take a part for the whole"
    assert checked(tmp_path, path.parent, *flags)["statistics"] == [str(path.parent / STATISTICS_FILE)]
    assert json.loads((path.parent / STATISTICS_FILE).read_text()) == recorded
    assert checked(tmp_path, path, *flags)["statistics"] == []


def test_a_suite_that_is_not_known_here(copy: Callable, tmp_path: Path) -> None:
    def unknown(file: h5py.File) -> None:
        record = json.loads(file["data"].attrs["env_args"])
        file["data"].attrs["env_args"] = json.dumps(record | {"task_suite_name": "somebodys_own"})

    content = checked(tmp_path, copy(unknown))
    assert content["replayed"] == [] and kinds(content) == []
    assert kinds(content, "note") == ["not_replayed"]


def test_paths_with_and_without_the_flag() -> None:
    for words in (
        ["a", "b", "--output", "x"],
        ["--demos", "a", "b"],
        ["a", "--output", "x", "b"],
        ["--replay", "1", "a", "b"],
    ):
        assert list(build_parser().parse_args(words).demos) == ["a", "b"], words
    assert build_parser().parse_args([]).demos == ("runs/demos/demos.hdf5",)


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("--demos ") == 2 and not (tmp_path / "out").exists()


def test_training_says_the_quick_part_first(
    demos_file: Path, copy: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert warn_of(read_demonstrations(demos_file), [str(demos_file)]) == []
    assert capsys.readouterr().err == ""
    hopeless = copy(each(lambda demo: demo.attrs.modify("success", False)))
    size = ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1"]
    sft(["--demos", str(hopeless.parent), "--dry_run", "--save_path", str(tmp_path / "sft"), *size])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: demonstrations:")]
    assert len(lines) == 2 and "none of the 20 episodes" in lines[0]
    assert f"cli/check_demos.py {hopeless.parent}" in lines[1]


def test_the_names_are_those_in_the_file(copy: Callable) -> None:
    def without_some(file: h5py.File) -> None:
        for index in (0, 3):
            del file[f"data/demo_{index}"]
        del file["mask"]

    assert read_demonstrations(copy(without_some)).names[:3] == ["demo_1", "demo_2", "demo_4"]
