"""A run folder that version 0.1.0 wrote: continued, evaluated and read, with the figures that version then got."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from cli import eval_vla, score_episodes, train_ppo_vla
from rlvla.utils.files import read_metrics

pytestmark = pytest.mark.slow

DATA = Path(__file__).resolve().parents[1] / "data" / "run_of_0_1"
EXPECTED = json.loads((DATA / "continued.json").read_text())
# Another processor or version of torch rounds differently; the same machine gives the same bits.
REL, ABS = 1e-4, 1e-6


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, fresh and current: paths in it are relative."""
    with tarfile.open(DATA / "run.tar.xz") as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        archive.extractall(tmp_path, **safely)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_continued_as_it_would_have_been(run: Path) -> None:
    """LoRA, critic, KL controller, average, normaliser and waiting groups come from the checkpoint of iteration 1."""
    started = (run / "ppo" / "metrics.jsonl").read_text()
    train_ppo_vla.main(["--config", "ppo/config.yaml", "--load_checkpoint"])
    assert (run / "ppo" / "metrics.jsonl").read_text().startswith(started), "it began anew"
    records = read_metrics(run / "ppo")
    assert len(records) == len(EXPECTED["metrics"]) == 4
    assert EXPECTED["metrics"][0]["rollout/carried_groups"] > 0, "the fixture has samples in its checkpoint"
    for ours, theirs in zip(records, EXPECTED["metrics"]):
        assert not theirs.keys() - ours.keys()
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=REL, abs=ABS)
    evaluated = json.loads((run / "ppo" / "evaluations.json").read_text())[-1]
    assert evaluated["episodes"] == EXPECTED["evaluation"]
    before, after = (load_file(run / folder / "policy" / "model.safetensors") for folder in ("sft", "ppo"))
    moved = {name: float((after[name].double() - before[name].double()).norm()) for name in before}
    assert {name: norm for name, norm in moved.items() if norm} == pytest.approx(EXPECTED["weights_moved_by"], rel=REL)


def test_its_policy_is_evaluated_and_compared_with_the_figures_it_had(run: Path) -> None:
    flags = ["--eval_episodes", "6", "--sampled", "--num_envs", "1", "--compare", "eval.json"]
    eval_vla.main(["--pretrain", "sft/policy", *flags, "--output", "again.json"])
    before, after = (json.loads((run / name).read_text()) for name in ("eval.json", "again.json"))
    assert len(before["results"]) == len(after["results"]) == 2
    for ours, theirs in zip(after["results"], before["results"]):
        assert ours["episodes"] == theirs["episodes"]
        for name in ("success_at_end", "success_once"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-12)
    for comparison in after["comparisons"]:
        assert comparison["paired"] and not comparison["protocol_differences"]
        assert [d["difference"] for d in comparison["differences"]] == [0.0, 0.0]


@pytest.mark.parametrize("file", EXPECTED["scores"])
def test_its_episodes_are_read_and_played_again(run: Path, file: str) -> None:
    flags = yaml.safe_load((run / "ppo" / "config.yaml").read_text())
    assert flags["rm_formula"] == "F(near)"
    rewards = ["--reward", *flags["reward"], "--rm_formula", flags["rm_formula"]]
    score_episodes.main(["--demos", file, "--episodes", "0", "1", "2", *rewards, "--output", "scores"])
    scored = json.loads((run / "scores" / "scores.json").read_text())
    assert len(scored) == len(EXPECTED["scores"][file]) == 3
    for ours, theirs in zip(scored, EXPECTED["scores"][file]):
        assert {key: ours[key] for key in ("episode", "success_at_end", "machine_states")} == {
            key: theirs[key] for key in ("episode", "success_at_end", "machine_states")
        }
        assert ours["totals"] == pytest.approx(theirs["totals"], rel=REL)


def test_a_checkpoint_that_was_changed_is_noticed(run: Path) -> None:
    """The manifest of that version is read, checksums included."""
    weights = run / "ppo" / "checkpoints" / "iteration_000001" / "critic" / "mp_rank_00_model_states.pt"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    shutil.rmtree(run / "ppo" / "rollouts")
    train_ppo_vla.main(["--config", "ppo/config.yaml", "--load_checkpoint", "--num_episodes", "4"])
    assert (run / "ppo" / "checkpoints" / "damaged_iteration_000001").is_dir()
