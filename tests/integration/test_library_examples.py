"""The scripts of docs/library.md run, and the page and the notebooks show just these scripts."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.collect_demos import main as collect_demos
from rlvla.checkpoints.policy_folder import learned_states, recorded_environment
from rlvla.rewards import base
from rlvla.utils.video import read_video
from tests.support.documentation import ROOT, blocks

SCRIPTS = sorted((ROOT / "examples/library").glob("*.py"))


def run_script(name: str, **settings: object) -> None:
    """Execute a script with other values of its settings."""
    source = (ROOT / "examples/library" / f"{name}.py").read_text(encoding="utf-8")
    for names, value in settings.items():
        source, changed = re.subn(
            rf"^({names.replace('__', ', ')}) = .*$", rf"\1 = {value}", source, flags=re.MULTILINE
        )
        assert changed == 1, names
    exec(compile(source, f"{name}.py", "exec"), {"__name__": "__main__"})


@pytest.fixture
def folder(tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a policy lies as examples/scripts/toy_reach.sh leaves it; the working directory."""
    for stage in ("sft", "ppo"):
        shutil.copytree(policy_folder, tmp_path / "runs/toy" / stage / "policy")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_play_and_film(folder: Path, capsys: pytest.CaptureFixture) -> None:
    run_script("play_and_film")
    said = re.findall(r"(runs/films/state\d\.mp4): reach the \w+ disc, (\d+) steps", capsys.readouterr().out)
    assert [name for name, _ in said] == [f"runs/films/state{state}.mp4" for state in range(4)]
    assert all(len(read_video(folder / name)) == int(steps) + 1 for name, steps in said)


def test_grpo_by_hand(folder: Path, capsys: pytest.CaptureFixture) -> None:
    run_script("grpo_by_hand", ITERATIONS__GROUPS__GROUP_SIZE__EPOCHS__BATCH_ROWS=(1, 4, 8, 1, 64))
    assert "iteration 1: success " in capsys.readouterr().out
    made, start = folder / "runs/grpo_by_hand/policy", folder / "runs/toy/sft/policy"
    before, after = (load_file(place / "model.safetensors") for place in (start, made))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    (learned,) = learned_states(recorded_environment(made))
    assert (learned.suite, learned.start, learned.stop) == ("toy_reach", 0, 8000)


def test_reward_offline(folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.REWARDS, "_entries", dict(base.REWARDS._entries))
    flags = ["--task_suite_name", "toy_reach", "--num_demos", "16", "--keep", "all", "--output", "runs/toy/demos"]
    collect_demos([*flags, "--offset_bias", "0", "-0.2", "--noise_std", "0.05", "--action_quantum", "0.25"])
    capsys.readouterr()
    run_script("reward_offline")
    found = re.match(
        r"(\d+) successes are paid 0\.\d\d, (\d+) failures 0\.\d\d; .* (\d+) % of", capsys.readouterr().out
    )
    assert found and int(found[1]) + int(found[2]) == 16 and 0 <= int(found[3]) <= 100


def test_evaluate_any_policy(folder: Path, capsys: pytest.CaptureFixture) -> None:
    run_script("evaluate_any_policy", EPISODES=8)
    said = capsys.readouterr().out
    assert re.search(r"^reach +8 +100\.0% \[67\.6, 100\.0\]", said, re.MULTILINE) and "protocol heldout" in said


def test_stable_baselines(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("stable_baselines3")
    run_script("stable_baselines", STEPS__EPISODES=(512, 4))
    assert re.search(r"^[0-4] of 4 held-out episodes succeed", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_described(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 50
    assert f"def test_{path.stem}(" in Path(__file__).read_text(encoding="utf-8"), "it is run above"


def test_page_and_notebooks_are_those_of_the_scripts() -> None:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "examples/scripts/notebooks.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    expected = tool.outputs()
    stale = [str(path) for path, content in expected.items() if path.read_text(encoding="utf-8") != content]
    assert not stale, f"python examples/scripts/notebooks.py was not run: {stale}"
    assert {path.name for path in (ROOT / "examples/notebooks").iterdir()} == {f"{p.stem}.ipynb" for p in SCRIPTS}
    shown = blocks((ROOT / "docs/library.md").read_text(encoding="utf-8"), "python")
    for path in SCRIPTS:
        script = path.read_text(encoding="utf-8")
        assert f"# examples/library/{path.name}\n{script}" in shown
        cells = json.loads((ROOT / "examples/notebooks" / f"{path.stem}.ipynb").read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"][1:]
        kept = re.sub(r'^(# %%.*|""".*""")\n', "", script, flags=re.MULTILINE)
        assert "".join("\n".join(code).split()) == "".join(kept.split()), "all of the code, and in order"
